"""What an index needs to read and make records: files named by their hash, in a separate folder.

They are codec profiles, and the writer: an adapter that acts only while chunks are encoded after
other text. It is trained (`kvrag train writer`) so that a prompt's question reads from placed KV
what it reads after full prefill. Source of the adapter: LoRA (arXiv 2106.09685) §4.1; of the use:
SemPIC (2607.28069). What is encoded after the prompt's head alone is exact, and gets none.
"""

from __future__ import annotations

import re
import threading
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvrag import arguments
from kvrag.errors import IndexFormatError, ParameterError, ProfileError
from kvrag.ingest.config import write_atomically
from kvrag.ingest.contexts import FILLER, SIMILAR, Context
from kvrag.regularfile import read_regular
from kvrag.store.file import store_errors

if TYPE_CHECKING:
    from kvrag.codec.profile import Profile
    from kvrag.models.adapter import RowAdapter
    from kvrag.models.kv_model import KVModel

FOLDER_NAME = "profiles"

_SUFFIX = ".safetensors"
_NAME = re.compile(r"([0-9a-f]{40})\.safetensors")
WRITER_NAME = "writer.safetensors"
"""The file that training of a writer writes."""

_REMEDY = "copy the file that the index was made with (--writer) there, or ingest into a new folder"


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
        content = read_regular(path, MAX_PROFILE_BYTES)
    except OSError as error:
        raise ProfileError(
            f"cannot read the codec profile {path}: {error.strerror or error}; put it back, or "
            "recode the index with 'kvrag recode'"
        ) from error
    try:
        return Profile.from_bytes(content, expected_hash)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def read_writer(path: str | Path) -> tuple[bytes, str]:
    """Return a file's content, and the fingerprint that an index records. Raises ParameterError."""
    place = arguments.path(path, "writer")
    try:
        content = read_regular(place)
    except OSError as error:
        raise ParameterError(
            f"writer {arguments.shown(str(path))} cannot be read ({error.strerror or error}): "
            "expected a file that 'kvrag train writer' wrote; leave it out for an index that is "
            "there, which keeps a copy"
        ) from error
    return content, _fingerprint(content)


def check_use(context: Context) -> None:
    """Raise ParameterError unless a writer has something to do with a context."""
    if not context.is_shared:
        raise ParameterError(
            f"writer: with context {context} it would do nothing, or harm records that are exact; "
            f"choose {SIMILAR} or {FILLER}, or leave it out"
        )


def adapter_of(content: bytes, place: Path, model: KVModel) -> RowAdapter:
    """Return a file's adapter on a model's device. Raises LinksError."""
    from kvrag.fusion.links import LinkTokens

    adapter = LinkTokens.from_bytes(content, place, is_writer=True).on(model).adapter
    return cast("RowAdapter", adapter)


def kept_in(folder: Path, fingerprint: str) -> Path:
    """Return where an index keeps its writer: beside its profiles, which a shared index copies."""
    return folder / FOLDER_NAME / f"{fingerprint}{_SUFFIX}"


def read_kept(folder: Path, fingerprint: str) -> bytes:
    """Return the content of an index's writer.

    Raises
    ------
    IndexFormatError
        When it is missing or damaged.
    """
    path = kept_in(folder, fingerprint)
    try:
        content = read_regular(path)
    except OSError as error:
        raise IndexFormatError(
            f"{path}, the writer of this index, cannot be read ({error.strerror or error}); "
            f"{_REMEDY}"
        ) from error
    if (found := _fingerprint(content)) != fingerprint:
        raise IndexFormatError(
            f"{path}, the writer of this index, is damaged: expected fingerprint {fingerprint}, "
            f"found {found}; {_REMEDY}"
        )
    return content


def _fingerprint(content: bytes) -> str:
    return blake2b(content, digest_size=20).hexdigest()
