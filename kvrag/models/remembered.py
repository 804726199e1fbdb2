"""What Transformers makes of a model's small files, kept for later processes.

To read a configuration and a tokenizer as Transformers does takes its code, which takes seconds to
import. So that is done once for each model: what came of it is a JSON file in the user's cache,
found by what all the small files hold and by the versions of the libraries.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import xxhash

from kvrag import arguments
from kvrag.regularfile import read_regular, replace_file, require_regular_files
from kvrag.weights.cache import VERSION

_FORMAT = 5
_SMALL = (".json", ".jinja", ".txt", ".model")
_TEMPLATES = "additional_chat_templates"
_LIBRARIES = ("kvrag", "transformers", "tokenizers", "torch")


class Config(SimpleNamespace):
    """A model's configuration, as Transformers completes it."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return dict(vars(self))

    def get_text_config(self, decoder: bool = True) -> Config:  # noqa: ARG002
        """Return itself: it is of the part that reads text."""
        return self


@dataclass(frozen=True)
class Remembered:
    """A model's small files.

    Attributes
    ----------
    config
        Its configuration, completed.
    generation
        How it is meant to generate.
    layers
        How its layers are put together (`kvrag.models.decoders`); None: not as kvrag knows it.
    tokenizer
        What a `Tokenizer` needs; None: it takes Transformers' own.
    definition
        The definition of what tokenises, if that is not ``tokenizer.json``.
    """

    config: dict[str, Any]
    generation: dict[str, Any]
    layers: dict[str, Any] | None
    tokenizer: dict[str, Any] | None
    definition: str | None


def remembered(folder: str, describe: Callable[[str], Remembered | None]) -> Remembered | None:
    """Return what is known of the model in a folder; None if Transformers has to load it.

    `describe` finds it out, if no process has before.
    """
    if not Path(folder).is_absolute():
        return None
    try:
        require_regular_files(folder)
        return _remembered(folder, _digest(Path(folder)), describe)
    except Exception:  # whatever the files lead the libraries to; loading says it
        return None


_version = lru_cache(version)  # which reads the whole description of a distribution


def _digest(folder: Path) -> str:
    """Return a digest of all that a model's configuration and tokenizer depend on."""
    digest = xxhash.xxh3_128(json.dumps([_FORMAT, VERSION, *map(_version, _LIBRARIES)]).encode())
    for path in sorted([*folder.iterdir(), *(folder / _TEMPLATES).glob("*.jinja")]):
        if path.suffix in _SMALL and path.is_file():
            data = read_regular(path)
            digest.update(f"{path.relative_to(folder)} {len(data)} ".encode())
            digest.update(data)
    return digest.hexdigest()


@lru_cache(maxsize=4)
def _remembered(
    folder: str, digest: str, describe: Callable[[str], Remembered | None]
) -> Remembered | None:
    path = arguments.user_cache() / "kvrag" / "read" / f"{digest}.json"
    with suppress(OSError, ValueError, TypeError):
        checksum, text = path.read_bytes().split(b"\n", 1)
        if checksum.decode() == xxhash.xxh3_128_hexdigest(text):
            return Remembered(**json.loads(text))
    made = describe(folder)
    if made is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asdict(made)).encode()
            replace_file(path, xxhash.xxh3_128_hexdigest(text).encode(), b"\n", text)
    return made
