"""The models that this machine knows by a name: which are here, and which a misspelt name means."""

from __future__ import annotations

import difflib
from pathlib import Path

from kvrag import arguments, similar
from kvrag.errors import ModelLoadError
from kvrag.weights.cache import converted_models
from kvrag.weights.named import EMBEDDED_MODEL, NAMED_MODELS
from kvrag.weights.sources import LLAMA_CPP, OLLAMA, find_gguf, llama_cpp_names, ollama_names

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
    return similar.suggestion(list(dict.fromkeys(spellings[one] for one in found)))


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
