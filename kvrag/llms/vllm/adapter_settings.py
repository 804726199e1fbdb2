"""Settings of the framework classes over vLLM, and the engines that these classes share."""

from __future__ import annotations

import json
import threading
from typing import Any, Self

from pydantic import Field, model_validator

from kvrag.engine.base import Engine
from kvrag.engine.request import Recompute
from kvrag.engine.shared import place_of, shared_index
from kvrag.errors import ParameterError
from kvrag.eviction.registry import make_eviction
from kvrag.llms.settings import OF_ENGINES, EngineSettings
from kvrag.llms.vllm.engine import VLLMEngine
from kvrag.llms.vllm.options import engine_options
from kvrag.llms.vllm.settings import ConnectorSettings, require_tested
from kvrag.llms.vllm.transports import HTTPServer, InProcess, Transport

_REFUSED = ("schemas", "device", *OF_ENGINES)
_started: dict[str, InProcess] = {}
_starting = threading.Lock()


class VLLMSettings(EngineSettings):
    """Parameters of a language model that answers through vLLM.

    Attributes
    ----------
    base_url
        Address of a server that ``kvrag serve --engine vllm`` has started, such as
        ``http://127.0.0.1:8000/v1``; None starts vLLM in this process at the first call, once for
        all objects with the same index and arguments.
    engine_args
        Further arguments of ``vllm.LLM`` if it is started in this process.
    any_version
        Whether to accept an untested version of a vLLM started in this process.

    Notes
    -----
    ``links``, ``schemas``, ``device``, ``ttft``, ``eviction``, ``session_bytes``,
    ``session_store_bytes``, ``store_patience`` and ``never_slower`` are refused: vLLM has one row
    per token, supports no gaps between positions, chooses its own device, loads records whole,
    keeps all keys, has its own cache, and takes what is stored.
    """

    base_url: str | None = None
    engine_args: dict[str, Any] = Field(default_factory=dict)
    any_version: bool = False

    @model_validator(mode="after")
    def _as_vllm_takes_them(self) -> Self:
        Recompute(self.policy, self.ratio, self.boundary_tokens).choice()
        usual = type(self).model_fields
        is_given = make_eviction(self.eviction) is not None or any(
            getattr(self, name) != usual[name].get_default(call_default_factory=True)
            for name in _REFUSED
            if name not in ("eviction", "links")
        )
        if self.links not in (None, "off") or is_given:
            raise ParameterError(f"vLLM takes no {', '.join(_REFUSED)}; leave them out")
        if self.base_url is not None and self.engine_args:
            raise ParameterError(
                "engine_args are for a vLLM started in this process: leave out base_url"
            )
        return self

    def engine(self, model: str | None = None) -> Engine:
        """Return the engine that answers; it starts or contacts vLLM at the first prompt."""
        index = shared_index(self.index)
        name = model or self.model
        engine = self._engines.get(name)
        if engine is None or engine.index is not index:
            engine = self._engines[name] = VLLMEngine(index, lambda: self._connect(name))
        return engine

    def _connect(self, model: str | None) -> Transport:
        if self.base_url is not None:
            return HTTPServer(self.base_url, model=model)
        settings = ConnectorSettings(
            place_of(shared_index(self.index)), any_version=self.any_version
        )
        return start_engine(settings, {"model": model, **self.engine_args})


def start_engine(settings: ConnectorSettings, engine_args: dict[str, Any]) -> InProcess:
    """Return the process's engine for these settings, and start it if there is none.

    Parameters
    ----------
    settings
        The connector's settings.
    engine_args
        Arguments of ``vllm.LLM``; None values are left out.

    Raises
    ------
    EngineVersionError
        If vLLM is not installed, or its version was not tested.
    """
    require_tested(any_version=settings.any_version)
    given = {name: value for name, value in engine_args.items() if value is not None}
    options = {**engine_options(settings), **given}
    key = json.dumps(options, sort_keys=True, default=str)
    with _starting:
        if key not in _started:
            from vllm import LLM

            _started[key] = InProcess(LLM(**options))
        return _started[key]
