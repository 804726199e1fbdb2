"""What every store, codec, policy and model has to do: suites for pytest, to subclass.

- `kvrag.testing.store_contract.StoreContract`
- `kvrag.testing.codec_contract.CodecContract`
- `kvrag.testing.policy_contract.PolicyContract`
- `kvrag.testing.model_contract.ModelContract`

They need pytest, which kvrag itself does not::

    from kvrag.testing.store_contract import StoreContract

    class TestLakeStore(StoreContract):
        @pytest.fixture
        def store(self):
            return LakeStore("lake://test")
"""

import sys

if pytest := sys.modules.get("pytest"):  # Their assertions then say what they compared.
    pytest.register_assert_rewrite(
        *(f"kvrag.testing.{one}_contract" for one in ("store", "codec", "policy", "model"))
    )
