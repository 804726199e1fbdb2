"""Contracts for stores, codecs, policies and models: pytest suites to subclass.

- `kvrag.testing.store_contract.StoreContract`
- `kvrag.testing.codec_contract.CodecContract`
- `kvrag.testing.policy_contract.PolicyContract`
- `kvrag.testing.model_contract.ModelContract`

They need pytest, which kvrag itself does not need::

    from kvrag.testing.store_contract import StoreContract

    class TestLakeStore(StoreContract):
        @pytest.fixture
        def store(self):
            return LakeStore("lake://test")
"""

import sys

if pytest := sys.modules.get("pytest"):  # Their assertions then show the compared values.
    pytest.register_assert_rewrite(
        *(f"kvrag.testing.{one}_contract" for one in ("store", "codec", "policy", "model"))
    )
