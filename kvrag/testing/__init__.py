"""The suites for other people's stores, codecs, policies and models are `kvrag_testing` now.

That package is in the distribution kvrag-bench. Imports by the old name work, with a warning.
Imports no package.
Begin with `bench/kvrag_testing/store_contract.py`.
"""

from importlib import import_module
from warnings import warn

try:
    __path__ = list(import_module("kvrag_testing").__path__)
except ModuleNotFoundError as error:
    raise ImportError(
        "kvrag.testing is kvrag_testing now: pip install 'kvrag[bench]', and import that"
    ) from error
warn(
    "kvrag.testing is kvrag_testing since 0.3: import that; the old name goes in 0.4",
    DeprecationWarning,
    stacklevel=2,
)
