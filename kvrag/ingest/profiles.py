"""The codec profiles of an index: files named by their hash, in a separate folder."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag.errors import ProfileError
from kvrag.ingest.config import write_atomically
from kvrag.regularfile import open_regular
from kvrag.store.file import store_errors

if TYPE_CHECKING:
    from kvrag.codec.profile import Profile

FOLDER_NAME = "profiles"

_SUFFIX = ".safetensors"
_NAME = re.compile(r"([0-9a-f]{40})\.safetensors")


class ProfileFolder:
    """Profiles on disk, each read once.

    Parameters
    ----------
    folder
        The folder of the files; created with the first profile.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, Profile] = {}
        self._lock = threading.Lock()

    def add(self, profile: Profile) -> None:
        """Write a profile, unless a sound copy is there. Raises StoreError."""
        from kvrag.codec.profile import MAX_PROFILE_BYTES

        path = self._path(profile.hash)
        if len(profile.content) > MAX_PROFILE_BYTES:
            raise ProfileError(
                f"a codec profile has at most {MAX_PROFILE_BYTES} bytes, this one has "
                f"{len(profile.content)}; use codec cachegen for a model of this width"
            )
        with store_errors("make the folder", self.folder):
            self.folder.mkdir(exist_ok=True)
        try:
            read_profile(path, profile.hash)
        except ProfileError:  # missing or damaged
            write_atomically(path, profile.content)
        with self._lock:
            self._read[profile.hash] = profile

    def get(self, profile_hash: str) -> Profile:
        """Return the profile with a given hash.

        Raises
        ------
        ProfileError
            When it is missing, unreadable, or does not match its hash.
        """
        with self._lock:
            profile = self._read.get(profile_hash)
            if profile is None:
                profile = read_profile(self._path(profile_hash), profile_hash)
                self._read[profile_hash] = profile
            return profile

    def hashes(self) -> list[str]:
        """Return the hashes in the files' names, sorted."""
        if not self.folder.is_dir():
            return []
        names = sorted(path.name for path in self.folder.iterdir())
        return [match[1] for match in map(_NAME.fullmatch, names) if match]

    def delete(self, profile_hash: str) -> None:
        """Remove a profile's file, if there is one."""
        with self._lock:
            self._read.pop(profile_hash, None)
        self._path(profile_hash).unlink(missing_ok=True)

    def _path(self, profile_hash: str) -> Path:
        return self.folder / f"{profile_hash}{_SUFFIX}"


def read_profile(path: Path, expected_hash: str | None = None) -> Profile:
    """Read a profile's file.

    Raises
    ------
    ProfileError
        When it cannot be read, is not a profile, or has another hash than expected.
    """
    from kvrag.codec.profile import MAX_PROFILE_BYTES, Profile

    try:
        size = path.stat().st_size
        if size > MAX_PROFILE_BYTES:
            raise ProfileError(
                f"{path}: a codec profile has at most {MAX_PROFILE_BYTES} bytes, found {size}"
            )
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise ProfileError(
            f"cannot read the codec profile {path}: {error.strerror or error}; put it back, or "
            "recode the index with 'kvrag recode'"
        ) from error
    try:
        return Profile.from_bytes(content, expected_hash)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
