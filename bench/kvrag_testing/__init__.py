"""Test suites to subclass: what every store, codec, policy and model must do. They need pytest.

Imports `fusion` and everything below it. `baselines.py` has policies to compare with; it needs no
pytest.
Begin with `store_contract.py`::

    class TestLakeStore(StoreContract):
        @pytest.fixture
        def store(self):
            return LakeStore("lake://test")
"""

import sys

if pytest := sys.modules.get("pytest"):  # Their assertions then show the compared values.
    pytest.register_assert_rewrite(
        *(f"kvrag_testing.{one}_contract" for one in ("store", "codec", "policy", "model"))
    )
