"""A second connector for vLLM's `MultiConnector`: notes by which names it would keep blocks."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

NAMES: dict[str, list[bytes]] = {}
"""For each finished request, the engine's names of its full blocks."""


class NotingConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Offers nothing, and saves nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        NAMES[request.request_id] = list(request.block_hashes)
        return False, None
