"""The writer of an index: an adapter that acts only while chunks are encoded after other text.

It is trained (`kvrag train writer`) so that a prompt's question reads from placed KV what it reads
after full prefill. Source of the adapter: LoRA (arXiv 2106.09685) §4.1; of the use: SemPIC
(2607.28069). What is encoded after the prompt's head alone is exact as it is, and gets none.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag import arguments
from kvrag.errors import IndexFormatError, ParameterError
from kvrag.ingest.contexts import FILLER, SIMILAR, Context
from kvrag.ingest.profiles import FOLDER_NAME
from kvrag.regularfile import read_regular

if TYPE_CHECKING:
    from kvrag.models.adapter import RowAdapter
    from kvrag.models.kv_model import KVModel

NAME = "writer.safetensors"
"""The file that training writes."""

_SUFFIX = ".safetensors"


def read_writer(path: str | Path) -> tuple[bytes, str]:
    """Return a file's content, and the fingerprint that an index records. Raises ParameterError."""
    place = arguments.path(path, "writer")
    try:
        content = read_regular(place)
    except OSError as error:
        raise ParameterError(
            f"writer {arguments.shown(str(path))} cannot be read ({error.strerror or error}): "
            "expected a file that 'kvrag train writer' wrote"
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

    adapter: Any = LinkTokens.from_bytes(content, place, is_writer=True).on(model).adapter
    found: RowAdapter = adapter
    return found


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


_REMEDY = "copy the file that the index was made with (--writer) there, or ingest into a new folder"


def _fingerprint(content: bytes) -> str:
    return blake2b(content, digest_size=20).hexdigest()
