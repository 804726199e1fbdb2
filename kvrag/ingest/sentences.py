"""Models of sentence-transformers, whose own Python code is never run; turns at a model."""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from kvrag import arguments, plugins
from kvrag.errors import ModelLoadError, ParameterError
from kvrag.regularfile import read_regular, require_regular_files
from kvrag.weights.cache import HUB_SECONDS

_OWN = "sentence_transformers."
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def load_sentences(kind: str, reference: str, place: str, **options: Any) -> Any:
    """Load a folder, or a hub name: from the hub's cache, or else by the network.

    Parameters
    ----------
    kind
        The class: "SentenceTransformer" or "CrossEncoder".
    reference
        The folder or the hub name.
    place
        The caller's argument, for messages.

    Raises
    ------
    ParameterError
        If it cannot be loaded, for whatever reason.
    """
    folder = arguments.path(reference, place)
    if not folder.is_dir() and not _HUB_NAME.fullmatch(reference):
        raise ParameterError(
            f"{place} {arguments.shown(reference)}: there is no such folder; expected the folder "
            f"or hub name of a {kind} of sentence-transformers"
        )
    try:
        import sentence_transformers
    except ImportError as error:
        raise ParameterError(
            f"{place} {arguments.shown(reference)} needs sentence-transformers: "
            "pip install 'kvrag[embed]'"
        ) from error
    load = getattr(sentence_transformers, kind)
    options["trust_remote_code"] = False
    reference = str(folder) if folder.is_dir() else reference
    with loading(kind, reference, place):
        try:
            return load(reference, local_files_only=True, **options)
        except (OSError, ValueError):
            if folder.is_dir():
                raise
            _ask_hub(reference)
            return load(reference, **options)


def _ask_hub(name: str) -> None:
    """Raise an error if the hub does not answer one request: loaders would ask for 20 seconds."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with suppress(HfHubHTTPError):  # it answers, and the loader knows better what is wrong
        HfApi().model_info(name, timeout=HUB_SECONDS)


@contextmanager
def loading(kind: str, reference: str, place: str) -> Iterator[None]:
    """Load a model in the block: without progress bars, and with the error for a wrong one."""
    from transformers import AutoConfig
    from transformers.utils import logging

    from kvrag.models.pretrained import from_pretrained
    from kvrag.models.weightfiles import check_sizes

    # Loading takes well under a second, and a progress bar would disturb the caller's output.
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        if Path(reference).exists():
            require_regular_files(reference)
            _require_known(Path(reference))
            if (Path(reference) / "model.safetensors").is_file():
                config = from_pretrained(AutoConfig, reference)
                check_sizes(reference, config, is_decoder=False)
        yield
    except BaseException as error:
        why = str(error) if isinstance(error, ModelLoadError) else plugins.reason(error)
        raise ParameterError(
            f"{place} {arguments.shown(reference)}: no {kind} that can be loaded ({why}); "
            f"expected the folder or hub name of a {kind} of sentence-transformers, without its "
            "own Python code"
        ) from error
    finally:
        if shows_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _require_known(folder: Path) -> None:
    """Raise ValueError if a folder names its own classes: older libraries import them unasked."""
    named = []
    if (folder / "modules.json").is_file():
        modules = json.loads(read_regular(folder / "modules.json"))
        named = [str(module["type"]) for module in modules]
    for path in (*folder.glob("router_config.json"), *folder.glob("*/router_config.json")):
        named += [str(one) for one in json.loads(read_regular(path))["types"].values()]
    if foreign_types := [one for one in named if not one.startswith(_OWN)]:
        raise ValueError(
            f"it names the class {arguments.shown(foreign_types[0])}, which is its own code, "
            "and kvrag never runs that"
        )


before_turn: ContextVar[Callable[[], object]] = ContextVar("before_turn", default=lambda: None)
"""Called before each batch of the work in this context; an error that it raises ends the work."""


class Turns:
    """A lock whose holders come in the order in which they asked."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: deque[object] = deque()  # the first one holds the lock

    def __enter__(self) -> None:
        before_turn.get()()
        mine = object()
        with self._changed:
            self._asked.append(mine)
            try:
                self._changed.wait_for(lambda: self._asked[0] is mine)
            except BaseException:  # an interrupt
                self._asked.remove(mine)
                self._changed.notify_all()
                raise

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._asked.popleft()
            self._changed.notify_all()
