"""The codec profiles of an index: files named by their hash, in a folder of their own."""

from __future__ import annotations

import threading
from pathlib import Path

from kvrag.codec.profile import MAX_PROFILE_BYTES, Profile
from kvrag.errors import ProfileError, StoreError
from kvrag.ingest.config import write_atomically

FOLDER_NAME = "profiles"
_SUFFIX = ".safetensors"


class ProfileFolder:
    """Profiles on disk, read once each.

    Parameters
    ----------
    folder
        Made when the first profile is added.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, Profile] = {}
        self._lock = threading.Lock()

    def add(self, profile: Profile) -> None:
        """Write a profile; one that is there already stays. Raises StoreError."""
        path = self._path(profile.hash)
        if not path.exists():
            try:
                self._folder.mkdir(exist_ok=True)
            except OSError as error:
                raise StoreError(
                    f"cannot make the folder {self._folder}: {error.strerror or error}"
                ) from error
            write_atomically(path, profile.content)
        with self._lock:
            self._read[profile.hash] = profile

    def get(self, profile_hash: str) -> Profile:
        """Return the profile of that hash.

        Raises
        ------
        ProfileError
            When it is missing, unreadable, or not what its name says.
        """
        with self._lock:
            profile = self._read.get(profile_hash)
            if profile is None:
                profile = read_profile(self._path(profile_hash), profile_hash)
                self._read[profile_hash] = profile
            return profile

    def _path(self, profile_hash: str) -> Path:
        return self._folder / f"{profile_hash}{_SUFFIX}"


def read_profile(path: Path, expected_hash: str | None = None) -> Profile:
    """Read a profile's file.

    Raises
    ------
    ProfileError
        When it cannot be read, is none, or is another one than expected.
    """
    try:
        size = path.stat().st_size
        if size > MAX_PROFILE_BYTES:
            raise ProfileError(
                f"{path}: a codec profile has at most {MAX_PROFILE_BYTES} bytes, found {size}"
            )
        content = path.read_bytes()
    except OSError as error:
        raise ProfileError(
            f"cannot read the codec profile {path}: {error.strerror or error}; put it back, or "
            "code the index anew with 'kvrag recode'"
        ) from error
    try:
        return Profile.from_bytes(content, expected_hash)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
