"""Fused rows in vLLM's cache: places, layouts, and buffers that are used again (without vLLM)."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrag.engine.prompt_fuser import BufferPool
from kvrag.errors import EngineError
from kvrag.kvcache import FusedKV, KVSpec
from kvrag.llms.vllm import pages, weights
from kvrag.llms.vllm.pages import Brought, Pages
from kvrag.llms.vllm.weights import Part
from tests.support.queues import QueueDevice

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)
BLOCK, NUM_BLOCKS = 4, 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Load:
    """As `kvrag.llms.vllm.plan.Load`, without a plan."""

    block_ids: tuple[int, ...]
    start: int
    end: int


class _Backend:
    """Writes rows as vLLM's do, by slots, to keys and values that its layout separates."""

    def __init__(self, name: str) -> None:
        self.attn_backend = SimpleNamespace(get_name=lambda: name)
        self.impl = self
        self.num_written = 0

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        assert layer is self
        assert key.is_contiguous()
        assert value.is_contiguous()
        self.num_written += 1
        # The packed layout of FlashAttention and FlashInfer in 0.32 and 0.33.
        keys, values = kv_cache.transpose(1, 2).split(key.shape[-1], dim=-1)
        for row, slot in enumerate(slot_mapping.tolist()):
            keys[slot // BLOCK, slot % BLOCK] = key[row]
            values[slot // BLOCK, slot % BLOCK] = value[row]


def _pages(backend: str, *, tokens_first: bool = False) -> tuple[Pages, list[torch.Tensor], Any]:
    """Return pages, their caches ``[blocks, H, block, 2 D]``, and what writes to unknown ones."""
    shape = (NUM_BLOCKS, SPEC.num_kv_heads, BLOCK, 2 * SPEC.head_dim)
    caches = []
    for _ in range(SPEC.num_layers):
        if tokens_first:  # NHD in memory, seen as HND
            made = torch.zeros(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
        else:
            made = torch.zeros(shape)
        caches.append(made)
    layer = _Backend(backend)
    names = [f"model.layers.{number}.attn" for number in range(SPEC.num_layers)]
    return (
        Pages(dict.fromkeys(names, layer), dict(zip(names, caches, strict=True)), BLOCK),
        caches,
        layer,
    )


def _rows(seed: int, num_rows: int) -> torch.Tensor:
    """Return keys and values ``[2, L, H, n, D]``."""
    shape = (2, SPEC.num_layers, SPEC.num_kv_heads, num_rows, SPEC.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _read(cache: torch.Tensor, load: _Load) -> torch.Tensor:
    """Return a request's rows ``[2, H, n, D]`` as attention would find them."""
    whole = torch.cat([cache[one] for one in load.block_ids], dim=1)[:, load.start : load.end]
    return torch.stack(whole.split(SPEC.head_dim, dim=-1))


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "CPU_ATTN"])
def test_rows_come_to_their_places(backend: str, tokens_first: bool) -> None:
    written, caches, layer = _pages(backend, tokens_first=tokens_first)
    rows = _rows(1, 11)
    load = _Load((7, 2, 9), 3, 11)
    freed: list[object] = []
    brought = Brought(list(rows[0]), list(rows[1]), None, freed.append)
    assert len(list(written.write(load, brought))) == SPEC.num_layers - 1
    for index, cache in enumerate(caches):
        assert torch.equal(_read(cache, load), rows[:, index, :, load.start : load.end])
        # Nothing else is written: rows before the first, after the last, and other blocks.
        assert int(cache.count_nonzero()) == 2 * SPEC.num_kv_heads * 8 * SPEC.head_dim
    assert layer.num_written == (SPEC.num_layers if backend == "CPU_ATTN" else 0)
    brought.release()
    assert freed == [None]


def test_layers_that_are_missing() -> None:
    names = ["model.layers.0.attn", "model.layers.2.attn"]
    with pytest.raises(EngineError, match="2 caches for the layers 0 to 2"):
        Pages(dict.fromkeys(names), dict.fromkeys(names, torch.zeros(1)), BLOCK)
    with pytest.raises(EngineError, match="expected one number"):
        Pages({"layer": None}, {"layer": torch.zeros(1)}, BLOCK)


def _serve(seed: int, monkeypatch: pytest.MonkeyPatch, *, gives_up: int | None = None) -> None:
    """Fuse and write prompts one after another, in two queues, and look at all pages at the end.

    The fusing thread takes a buffer and starts to fill it, then waits until it is full, as
    `WorkerSide` does. The engine's thread only starts its copies, and gives the buffer back.
    """
    device = QueueDevice(seed)
    fusing, engine = device.stream(), device.stream()
    monkeypatch.setattr(pages, "_after_started", lambda _: device.current().record_event())
    pool = BufferPool()
    written, caches, _ = _pages("FLASHINFER")
    loads, wanted = [], []
    for number in range(5):
        num_rows = 3 + 2 * (number % 3)
        load = _Load((2 * number, 2 * number + 1), 0, num_rows)
        rows = _rows(number, num_rows)
        buffer: FusedKV = pool.take(SPEC, num_rows, num_rows, CPU)
        with device.starting(fusing):
            for index in range(SPEC.num_layers):
                buffer.keys[index].copy_(rows[0, index, None])
                buffer.values[index].copy_(rows[1, index, None])
        fusing.record_event().synchronize()
        brought = Brought(
            [one[0] for one in buffer.keys],
            [one[0] for one in buffer.values],
            None,
            lambda after, buffer=buffer: pool.give_back(buffer, after),
        )
        writing = written.write(load, brought)
        with device.starting(engine):
            for layer, _ in enumerate(writing):
                if number == gives_up and layer == 1:
                    writing.close()
            brought.release()
        if number != gives_up:
            loads.append(load)
            wanted.append(rows)
        device.wander()
    device.finish()
    for load, rows in zip(loads, wanted, strict=True):
        for index, cache in enumerate(caches):
            assert torch.equal(_read(cache, load), rows[:, index])


@given(st.integers(0, 10**6), st.sampled_from([None, 1, 3]))
def test_no_buffer_is_used_again_while_it_is_copied(seed: int, gives_up: int | None) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _serve(seed, monkeypatch, gives_up=gives_up)


@pytest.mark.parametrize("is_among_others", [False, True])
def test_memory_is_taken_before_the_engine_sizes_its_cache(
    monkeypatch: pytest.MonkeyPatch, is_among_others: bool
) -> None:
    """A device that is no CPU; its own model fuses, and a prompt's buffer exists by then."""
    model = SimpleNamespace(device=torch.device("meta"), spec=SPEC)
    asked: list[object] = []

    def made(config: Any, index_config: object, engine_model: object) -> weights.Fusing:
        asked.append(engine_model)
        return weights.Fusing(cast(Any, model), Part(), None)

    monkeypatch.setattr(weights, "_fusing", made)
    monkeypatch.setattr(weights, "check_engine", lambda *_: None)
    monkeypatch.setattr(weights, "require_tested", lambda **_: "0.32.0")
    extra: dict[str, Any] = {"index": "i"}
    name = "KVRagConnector"
    if is_among_others:
        ours = {"kv_connector": name, "kv_connector_extra_config": extra}
        name, extra = "MultiConnector", {"connectors": [{"kv_connector": "Other"}, ours]}
    transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(max_model_len=100),
        instance_id="one",
    )
    weights.prepare(config, cast(Any, "the engine's model"))
    found = weights.fusing(config, cast(Any, None))
    assert found.memory.capacity == 101
    assert asked == ["the engine's model"]
    # Another engine, without kvrag's worker: it shares nothing.
    assert weights.fusing(config, cast(Any, None)).memory is None
    assert asked == ["the engine's model", None]
    for other in (None, SimpleNamespace(kv_connector="Other", kv_connector_extra_config={})):
        config.kv_transfer_config = other
        weights.prepare(config, cast(Any, None))
    assert len(asked) == 2


@pytest.mark.parametrize("change", ["dtype", "heads", "width"])
def test_a_cache_of_another_kind_is_the_backends(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    written, caches, layer = _pages("FLASH_ATTN")
    shape = {"heads": (NUM_BLOCKS, 3, BLOCK, 8), "width": (NUM_BLOCKS, 2, BLOCK, 9)}
    other = caches[0].half() if change == "dtype" else torch.zeros(shape[change])
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(layer, "do_kv_cache_update", lambda *given: seen.append(given[3]))
    written._caches = dict.fromkeys(written._caches, (layer, other))
    rows = _rows(1, 4)
    brought = Brought(list(rows[0]), list(rows[1]), None, lambda _: None)
    list(written.write(_Load((0,), 0, 4), brought))
    assert [one.data_ptr() for one in seen] == [other.data_ptr()] * SPEC.num_layers
    assert int(other.count_nonzero()) == 0


def test_a_buffer_that_is_not_kept_stays_until_its_copies_have_run() -> None:
    device = QueueDevice(0, haste=0.0)
    pool = BufferPool()
    large, small = (FusedKV(SPEC, size, size) for size in (8, 4))
    pool.give_back(large)
    pool.give_back(small, device.stream().record_event())
    assert len(pool._leaving) == 1
    device.finish()
    taken = pool.take(SPEC, 2, 2, CPU)
    assert taken.storage.data_ptr() == large.storage.data_ptr()
    assert not pool._leaving
