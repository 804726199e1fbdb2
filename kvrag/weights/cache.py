"""The cache of converted models; starts the process that converts one (`convert.py`)."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvrag import arguments
from kvrag.errors import ModelLoadError
from kvrag.regularfile import open_regular, read_regular
from kvrag.weights.named import EMBEDDED_MODEL, NAMED_MODELS
from kvrag.weights.sources import (
    LLAMA_CPP,
    OLLAMA,
    GgufSource,
    find_gguf,
    llama_cpp_names,
    ollama_names,
)

VERSION = 2
"""The version of the layout of matrices that keep their bits, which is that of
`kvrag.native.GroupedWeight.of`, and of what ``config.json`` says of them."""

_MANIFEST = "kvrag-model.json"
_BEGUN, _GONE = ".converting-", ".removing-"
_LOCK = ".lock"
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class ConvertedModel:
    """A folder of the cache.

    Attributes
    ----------
    folder
        Loads like any model's folder.
    name
        What the model was called when it was converted.
    source
        The GGUF file that it was made from, in words.
    files
        SHA-256 in hexadecimal by file name.
    num_bytes
        Of all files together.
    """

    folder: Path
    name: str
    source: str
    files: dict[str, str]
    num_bytes: int


def cache_folder() -> Path:
    """Return the folder of converted models: `KVRAG_MODELS`, or one in the user's cache."""
    if named := os.environ.get("KVRAG_MODELS"):
        return arguments.path(named, "KVRAG_MODELS")
    return arguments.user_cache() / "kvrag" / "models"


def converted(source: GgufSource, *, is_small: bool = False) -> ConvertedModel | None:
    """Return the conversion of a GGUF file, or None where there is none, or it is incomplete."""
    return _read(_folder_of(source, is_small))


def convert(
    source: GgufSource,
    say: Callable[[str], None] = lambda _: None,
    *,
    is_small: bool | None = False,
) -> ConvertedModel:
    """Return the conversion of a GGUF file; make it first where there is none.

    The folder appears whole or not at all. A second process that converts the same file waits for
    the first. What killed ones left is deleted, and conversions of what the file was before.

    Parameters
    ----------
    source
        The file.
    say
        Called with a line before and after the work.
    is_small
        Whether matrices keep their bits, for the CPU, where their types are known. None takes any
        conversion that there is, and makes such a one.

    Raises
    ------
    ModelLoadError
        When the file is absent, is not the one that was published, or cannot be converted, or
        there is no room.
    """
    if found := converted(source, is_small=is_small is not False):
        return found
    if (is_small is None or not source.files) and (found := converted(source)):
        return found
    if not source.files:
        raise ModelLoadError(source.absence)
    is_small = is_small is not False
    target = _folder_of(source, is_small)
    say(f"converting {source.name} ({source.num_bytes / 1e6:,.0f} MB) once, into {target.parent}")
    try:
        with _alone(say) as scratch:
            if found := converted(source, is_small=is_small):
                return found
            folder = scratch / "model"
            folder.mkdir(mode=0o755)
            _run(_whole(source, scratch), folder, source, is_small)
            files = {path.name: _sha256([path]) for path in sorted(folder.iterdir())}
            size = sum(path.stat().st_size for path in folder.iterdir())
            made = ConvertedModel(target, source.name, _told(source), files, size)
            entry = asdict(made) | {"folder": None}
            (folder / _MANIFEST).write_text(json.dumps(entry, indent=1))
            shutil.rmtree(target, ignore_errors=True)  # left by something that broke it
            folder.rename(target)
    except OSError as error:
        raise ModelLoadError(
            f"cannot convert {source.name} into {target.parent}: {error.strerror or error}. It "
            "takes about 2 bytes for each weight; KVRAG_MODELS names another folder"
        ) from error
    found = converted(source, is_small=is_small)
    if found is None:
        raise ModelLoadError(f"{target} vanished while {source.name} was converted; try again")
    _tidy(found, source)
    kept = is_small and '"quantization_config"' in (target / "config.json").read_text()
    why = (
        "; no matrix of it can stay in its bits, so all are in 16" if is_small and not kept else ""
    )
    say(f"converted {source.name}: {found.num_bytes / 1e6:,.0f} MB{why}")
    return found


def converted_models() -> list[ConvertedModel]:
    """Return all conversions, by name."""
    folder = cache_folder()
    found = (_read(path) for path in sorted(folder.iterdir())) if folder.is_dir() else iter(())
    return sorted((one for one in found if one is not None), key=lambda one: one.name)


def damaged_files(model: ConvertedModel) -> list[str]:
    """Return the names of files that are not as they were written. Reads all of them."""
    folder = model.folder
    return [name for name, digest in model.files.items() if _sha256([folder / name]) != digest]


def remove(model: ConvertedModel) -> None:
    """Delete a conversion. The GGUF file that it was made from stays."""
    # Renamed first, so that nobody finds half of it. What has such a name, anybody deletes.
    model.folder.rename(model.folder.with_name(f"{_GONE}{uuid.uuid4().hex}"))
    sweep()


def sweep() -> None:
    """Delete what killed processes left: half of a conversion, or of a deletion."""
    for left in cache_folder().glob(f"{_GONE}*"):
        shutil.rmtree(left, ignore_errors=True)
    with contextlib.suppress(OSError), (cache_folder() / _LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or another process converts
        _delete_begun()


def _delete_begun() -> None:
    for left in cache_folder().glob(f"{_BEGUN}*"):
        shutil.rmtree(left, ignore_errors=True)


def _folder_of(source: GgufSource, is_small: bool) -> Path:
    slug = re.sub(r"[^a-z0-9.]+", "-", source.name.lower()).strip("-.")[:60] or "model"
    return cache_folder() / f"{slug}-{source.identity}{f'-small{VERSION}' if is_small else ''}"


def _read(folder: Path) -> ConvertedModel | None:
    try:
        entry = json.loads(read_regular(folder / _MANIFEST))
        model = ConvertedModel(
            folder,
            str(entry["name"]),
            str(entry["source"]),
            dict(entry["files"]),
            int(entry["num_bytes"]),
        )
        size = sum((folder / name).stat().st_size for name in model.files)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return model if size == model.num_bytes else None


@contextlib.contextmanager
def _alone(say: Callable[[str], None]) -> Iterator[Path]:
    """Give an empty folder in the cache, where a single process converts at a time."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process converts a model: waiting for {lock.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        _delete_begun()
        try:
            yield Path(tempfile.mkdtemp(prefix=_BEGUN, dir=folder))
        finally:
            _delete_begun()


def _tidy(made: ConvertedModel, source: GgufSource) -> None:
    """Delete what the same file was converted to before it changed, and what nobody finishes."""
    for other in converted_models():
        is_same = (other.name, other.source) == (made.name, made.source)
        if is_same and source.identity not in other.folder.name:
            with contextlib.suppress(OSError):
                remove(other)
    sweep()


def _whole(source: GgufSource, scratch: Path) -> Path:
    """Return the file in one piece, as it was published."""
    if source.sha256 is not None and _sha256(source.files) != source.sha256:
        raise ModelLoadError(
            f"the GGUF file of {source.name} ({_told(source)}) is not the one that was published: "
            f"expected SHA-256 {source.sha256}; install its package again"
        )
    if len(source.files) == 1:
        # A file without the usual name, such as a blob of Ollama, is read under one.
        only = scratch / "model.gguf"
        only.symlink_to(source.files[0].resolve())
        return only
    joined = scratch / "joined.gguf"
    with joined.open("wb") as file:
        for block in _blocks(source.files):
            file.write(block)
    return joined


def _run(path: Path, folder: Path, source: GgufSource, is_small: bool) -> None:
    # -P: imports nothing from the working directory.
    command = [sys.executable, "-P", "-m", "kvrag.weights.convert", str(path), str(folder)]
    done = subprocess.run(
        [*command, "small"] if is_small else command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=os.environ | {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        if done.returncode < 0:
            reason = f"the process ended with signal {-done.returncode}; is memory short?"
        raise ModelLoadError(
            f"cannot convert {source.name}: {reason.replace(str(path), _told(source))}"
        )


def _told(source: GgufSource) -> str:
    first = str(source.files[0])
    return first if len(source.files) == 1 else f"{first} and {len(source.files) - 1} more"


def _sha256(files: tuple[Path, ...] | list[Path]) -> str:
    digest = hashlib.sha256()
    for block in _blocks(files):
        digest.update(block)
    return digest.hexdigest()


def _blocks(files: tuple[Path, ...] | list[Path]) -> Iterator[bytes]:
    for path in files:
        with open_regular(path) as file:
            while block := file.read(_BLOCK_BYTES):
                yield block


EXPECTED_MODEL = (
    "Expected a name that `kvrag models` lists, a folder with config.json, tokenizer.json and "
    "*.safetensors, a GGUF file, ollama:NAME, llama.cpp:NAME, or a hub name such as 'org/name'"
)
HUB_SECONDS = 10.0
"""Time for the hub to say whether it has a model."""


def ready_models() -> list[str]:
    """Return the named models that are installed, then others that were converted, by name."""
    made = [one.name for one in converted_models()]
    named = [one.name for one in NAMED_MODELS if one.is_installed or one.name in made]
    # A file's name alone does not find it again.
    others = (name for name in made if name.startswith((OLLAMA, LLAMA_CPP)))
    return [*named, *dict.fromkeys(others)]


def like(name: str) -> str:
    """Return " (is it ...?)" with the most similar known names, or "" if there are none."""
    known = [EMBEDDED_MODEL, *(one.name for one in NAMED_MODELS), *ollama_names()]
    known += [one for one in llama_cpp_names() if one not in known]
    words = [one.removeprefix(OLLAMA).removeprefix(LLAMA_CPP) for one in known]
    spelt = [*known, *words, *(word.partition(":")[0] for word in words)]
    spellings: dict[str, str] = {}
    for spelling, one in zip(spelt, known * 3, strict=True):
        spellings.setdefault(spelling.lower(), one)
    found = difflib.get_close_matches(name.lower(), spellings, n=5)
    return arguments.suggestion(list(dict.fromkeys(spellings[one] for one in found)))


def check_model(reference: str) -> None:
    """Raise ModelLoadError, before slow imports, if a name is neither here nor at the hub."""
    is_here = reference == EMBEDDED_MODEL or find_gguf(reference) is not None
    path = arguments.path(reference, "model")
    if not (is_here or path.exists() or path.is_absolute() or reference.startswith((".", "~"))):
        check_hub(reference)


def check_hub(reference: str) -> None:
    """Raise ModelLoadError if a hub name is nowhere: not here, or no answer to one request.

    The loaders ask for each file several times, with pauses, before they give up.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if isinstance(try_to_load_from_cache(reference, "config.json"), str | Path):
            return
        found = "/" not in reference and like(reference)
        if not found:
            HfApi().model_info(reference, timeout=HUB_SECONDS)
            return
        why = ""
    except HfHubHTTPError as error:
        # It answers: for a model that it has, the loader knows better what is wrong.
        if error.response is None or error.response.status_code != 404:
            return
        found, why = like(reference), " and at the hub"
    except HFValidationError:  # no hub has such a name: llama3:8b
        found, why = like(reference), ""
    except Exception as error:  # whatever the library for HTTP raises
        found, why = like(reference), f", and the hub cannot be asked ({error})"
    raise ModelLoadError(
        f"there is no model {arguments.shown(reference)} here{why}{found}. {EXPECTED_MODEL}"
    )
