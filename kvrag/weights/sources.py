"""From what a user writes after `--model` to a GGUF file on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvrag import arguments
from kvrag.errors import ModelLoadError
from kvrag.regularfile import open_regular, read_regular
from kvrag.weights.named import named_model

OLLAMA = "ollama:"
LLAMA_CPP = "llama.cpp:"
# Files are converted again where this changes: before 2, scaled frequencies were left out; before
# 3, text was often cut into other words than the model's; before 4, scales that are no numbers were
# taken.
_READING = "4"
# Packages of named models may be gone: only those that were read otherwise are converted again.
_READ_ANEW = {"smollm2-135m": "-3"}
_MAGIC = b"GGUF"
_PIECE = re.compile(r"-\d{5}-of-\d{5}$")
# What a name without them means.
_OLLAMA_PARTS = ["registry.ollama.ai", "library"]
_MODEL_LAYER = "application/vnd.ollama.image.model"


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file, in one piece or several. It is only ever read.

    Attributes
    ----------
    name
        What the user calls it.
    files
        Its pieces, in order.
    sha256
        Of the whole, in hexadecimal; None where nobody published one.
    absence
        Why there are no files, with the remedy; a conversion may be left from when there were.
    """

    name: str
    files: tuple[Path, ...]
    sha256: str | None = None
    absence: str = ""

    @property
    def identity(self) -> str:
        """A name for the file's content: its published digest, or path, size and time."""
        if self.sha256 is not None:
            return self.sha256[:16] + _READ_ANEW.get(self.name, "")
        told = [
            f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
            for path in self.files
        ]
        text = "\n".join([_READING, *told])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def num_bytes(self) -> int:
        """The size of the whole in bytes."""
        return sum(path.stat().st_size for path in self.files)


def find_gguf(reference: str | Path) -> GgufSource | None:
    """Return the GGUF file that a reference means, or None when it means none.

    Parameters
    ----------
    reference
        A name of `NAMED_MODELS`, a GGUF file, a folder with one GGUF file and no ``config.json``,
        ``ollama:NAME[:TAG]`` or ``llama.cpp:NAME``.

    Raises
    ------
    ModelLoadError
        When it means one that is not there, or is ambiguous, or no GGUF file.
    """
    text = str(reference)
    if isinstance(reference, str):
        if named := named_model(text):
            if not named.is_installed:
                return GgufSource(named.name, (), named.sha256, named.absence)
            return GgufSource(named.name, named.files(), named.sha256)
        if text.startswith(OLLAMA):
            return _from_ollama(text)
        if text.startswith(LLAMA_CPP):
            return _from_llama_cpp(text)
    path = arguments.path(text, "model")
    try:
        is_folder = path.is_dir()
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    if is_folder:
        if (path / "config.json").exists() or not (inside := sorted(path.glob("*.gguf"))):
            return None
        if len(inside) > 1:
            raise ModelLoadError(
                f"{path} has {len(inside)} GGUF files; name one: "
                f"{', '.join(one.name for one in inside[:5])}"
            )
        path = inside[0]
    elif path.suffix.lower() != ".gguf":
        return None
    return _checked(GgufSource(path.stem, (path,)))


def _checked(source: GgufSource) -> GgufSource:
    path = source.files[0]
    if _PIECE.search(path.stem):
        raise ModelLoadError(
            f"{path} is one piece of a split GGUF file; join the pieces first: "
            f"llama-gguf-split --merge {path.name} JOINED.gguf"
        )
    try:
        with open_regular(path) as file:
            head = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    if head != _MAGIC:
        raise ModelLoadError(f"{path} is no GGUF file: it begins with {head!r}, not {_MAGIC!r}")
    return source


# -- Ollama ---------------------------------------------------------------------------------------


def _from_ollama(reference: str) -> GgufSource:
    name, _, tag = reference.removeprefix(OLLAMA).partition(":")
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in [*parts, tag or "latest"]):
        raise ModelLoadError(
            f"model {arguments.shown(reference)}: expected {OLLAMA}NAME or {OLLAMA}NAME:TAG, as "
            "`ollama list` "
            "shows them"
        )
    parts = [*_OLLAMA_PARTS[: max(0, 3 - len(parts))], *parts]
    searched = _ollama_folders()
    for folder in searched:
        manifest = folder.joinpath("manifests", *parts, tag or "latest")
        if manifest.is_file():
            return _checked(GgufSource(reference, (_ollama_blob(folder, manifest),)))
    name = reference.removeprefix(OLLAMA)
    near = arguments.like(reference, ollama_names())
    raise ModelLoadError(
        f"Ollama has no model {arguments.shown(name)} in {', '.join(map(str, searched))}{near}: "
        f"see `ollama list`, or fetch it with `ollama pull {name}`. OLLAMA_MODELS names another "
        "folder"
    )


def ollama_names() -> list[str]:
    """Return what `--model` takes for each of Ollama's models here."""
    found = []
    for folder in _ollama_folders():
        for manifest in sorted(folder.glob("manifests/*/*/*/*")):
            host, user, name, tag = manifest.parts[-4:]
            parts = [host, user, name]
            if parts[0] == _OLLAMA_PARTS[0]:
                parts = parts[2:] if parts[:2] == _OLLAMA_PARTS else parts[1:]
            found.append(OLLAMA + "/".join(parts) + ("" if tag == "latest" else f":{tag}"))
    return list(dict.fromkeys(found))


def _ollama_folders() -> list[Path]:
    if named := os.environ.get("OLLAMA_MODELS"):
        return [arguments.path(named, "OLLAMA_MODELS")]
    # The second is where the service on Linux keeps them.
    service = Path("/usr/share/ollama/.ollama/models")
    return [arguments.path("~/.ollama/models", "Ollama's folder"), service]


def _ollama_blob(folder: Path, manifest: Path) -> Path:
    try:
        layers = json.loads(read_regular(manifest))["layers"]
        digest: str
        (digest,) = (one["digest"] for one in layers if one["mediaType"] == _MODEL_LAYER)
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise ValueError(f"digest {arguments.shown(digest)}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelLoadError(
            f"{manifest} is not a manifest of Ollama with one model in it: {error}"
        ) from error
    return folder / "blobs" / digest.replace(":", "-")


# -- llama.cpp ------------------------------------------------------------------------------------


def _from_llama_cpp(reference: str) -> GgufSource:
    name = reference.removeprefix(LLAMA_CPP)
    found = sorted(set(_llama_cpp_files()))
    if not name:
        raise ModelLoadError(
            f"model {arguments.shown(reference)}: expected {LLAMA_CPP}NAME. {_files_told(found)}"
        )
    wanted = name.lower().removesuffix(".gguf")
    matches = [path for path in found if path.stem.lower() == wanted] or [
        path for path in found if wanted in path.stem.lower()
    ]
    if not matches:
        raise ModelLoadError(
            f"llama.cpp has no model {arguments.shown(name)} in its cache. {_files_told(found)} "
            "LLAMA_CACHE names another folder"
        )
    if len(matches) > 1:
        raise ModelLoadError(
            f"model {arguments.shown(reference)} is ambiguous. {_files_told(matches)}"
        )
    return _checked(GgufSource(reference, (matches[0],)))


def llama_cpp_names() -> list[str]:
    """Return what `--model` takes for each GGUF file in llama.cpp's cache."""
    return [LLAMA_CPP + path.stem for path in sorted(set(_llama_cpp_files()))]


def _llama_cpp_files() -> Iterator[Path]:
    if named := os.environ.get("LLAMA_CACHE"):
        folders = [arguments.path(named, "LLAMA_CACHE")]
    else:
        cache = arguments.user_cache()
        # Newer versions share Hugging Face's cache.
        hub = os.environ.get("HF_HUB_CACHE") or cache / "huggingface" / "hub"
        mac = arguments.path("~/Library/Caches/llama.cpp", "llama.cpp's folder")
        folders = [cache / "llama.cpp", mac, Path(hub)]
    for folder in folders:
        yield from folder.glob("*.gguf")
        yield from folder.glob("models--*/snapshots/*/*.gguf")


def _files_told(paths: list[Path]) -> str:
    if not paths:
        return "There is no GGUF file in it."
    names = ", ".join(path.stem for path in paths[:8])
    return f"It has {names}{' and others' if len(paths) > 8 else ''}."
