"""Reading to a card: any order that events allow, any damage, prompts that are given up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.codec.base import EncodedChunk
from kvrag.codec.raw import RawCodec
from kvrag.errors import StoreError
from kvrag.fusion import card
from kvrag.fusion.layout import RecordId, ReusedSpan
from kvrag.fusion.loader import SpanLoader
from kvrag.fusion.loss import MISS_DAMAGED, MISS_UNREADABLE, LostError, without_lost
from kvrag.fusion.made import MadeChunk
from kvrag.fusion.slices import Slices, in_one_slice, whole
from kvrag.kvcache import ChunkKV, FusedKV, KVSpec
from kvrag.positions.rotary import RotaryTable
from kvrag.testing.codec_contract import KEY, BytesSource, random_kv
from tests.support.properties import examples
from tests.support.queues import QueueDevice, use


class _Source(BytesSource):
    """A record's bytes; one of them may be flipped, or reading may fail behind a place."""

    fails_from: int | None = None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self.fails_from is not None and offset + len(buffer) > self.fails_from:
            raise StoreError("gone")
        super().read_into(offset, buffer)


@dataclass(frozen=True, repr=False)
class _Prompt:
    """Stored records, the spans of a prompt, and the layers that each needs."""

    spec: KVSpec
    records: Mapping[RecordId, ChunkKV]
    made: frozenset[RecordId]
    damage: Mapping[RecordId, tuple[int, bool]]
    spans: tuple[ReusedSpan, ...]
    first_layers: Mapping[ReusedSpan, int]
    tables: Sequence[RotaryTable]
    num_rows: int

    def __repr__(self) -> str:
        return f"{self.spec}, {self.spans}, damage {self.damage}"

    def open_kv(self, chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk:
        one = chunk_id, context_ids
        kv = self.records[one]
        if one in self.made:
            return MadeChunk(kv, None)
        content = bytearray(RawCodec().encode(KEY, kv))
        source = _Source(bytes(content))
        chunk = RawCodec().open(KEY, source, self.spec)
        if one in self.damage:
            layer, is_flipped = self.damage[one]
            begin = chunk._reader.header.blocks[layer].offset
            content[begin] ^= 1
            source._record, source.fails_from = bytes(content), None if is_flipped else begin
        return chunk

    def buffer(self) -> FusedKV:
        buffer = FusedKV(self.spec, self.num_rows, self.num_rows + 3)
        buffer.storage.fill_(-1)
        return buffer


@st.composite
def _prompts(draw: st.DrawFn, with_damage: bool = False) -> _Prompt:
    num_layers = draw(st.integers(1, 11))
    head_dim = draw(st.sampled_from([8, 24]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    spec = KVSpec(num_layers, draw(st.integers(1, 2)), head_dim, dtype)
    records, spans, first_layers, row = {}, [], {}, 0
    made, damage = set(), {}
    whole_layers = draw(st.integers(0, num_layers))
    for number in range(draw(st.integers(1, 5))):
        one = f"chunk-{number}", ()
        num_tokens = draw(st.integers(1, 9))
        records[one] = random_kv(spec, num_tokens, seed=number)
        if draw(st.booleans()):
            made.add(one)
        elif with_damage and draw(st.booleans()):
            damage[one] = draw(st.integers(0, num_layers - 1)), draw(st.booleans())
        for _ in range(draw(st.integers(1, 2))):
            first = draw(st.integers(0, num_tokens - 1))
            row += draw(st.integers(0, 2))
            span = ReusedSpan(one[0], row, first, draw(st.integers(1, num_tokens - first)))
            if draw(st.booleans()):
                first_layers[span] = whole_layers
            spans.append(span)
            row = span.prompt_end
    random = torch.Generator().manual_seed(row)
    kinds = [
        RotaryTable(*torch.randn(2, row, head_dim // 2, generator=random).repeat(1, 1, 2))
        for _ in range(2)
    ]
    period = draw(st.integers(1, 4))
    tables = [kinds[layer % period == 0] for layer in range(num_layers)]
    return _Prompt(spec, records, frozenset(made), damage, tuple(spans), first_layers, tables, row)


def _loaded(
    prompt: _Prompt, loader: SpanLoader, queue: QueueDevice | None
) -> tuple[FusedKV, list[torch.Tensor], dict[RecordId, str | None]]:
    """Return the buffer, what each layer's computation saw in it, and what was lost."""
    lost: dict[RecordId, str | None] = {}
    buffer = prompt.buffer()

    def attempt(spans: tuple[ReusedSpan, ...]) -> Slices[list[torch.Tensor]]:
        return in_one_slice(lambda: _layers(prompt, spans, loader, buffer, queue))

    def without(spans: tuple[ReusedSpan, ...], error: LostError) -> tuple[ReusedSpan, ...]:
        lost.update(error.lost)
        _scribble(buffer, queue)
        return tuple(span for span in spans if span.record_id not in error.lost)

    seen = whole(without_lost(prompt.spans, attempt, without))
    loader.end()
    if queue is not None:
        queue.finish()
    return buffer, seen, lost


def _scribble(buffer: FusedKV, queue: QueueDevice | None) -> None:
    """Write over the buffer, as its next user does, after everything on the stream before."""
    if queue is None:
        buffer.storage.fill_(-1)
    else:
        queue.queue(lambda: buffer.storage.fill_(-1))


def _layers(
    prompt: _Prompt,
    spans: tuple[ReusedSpan, ...],
    loader: SpanLoader,
    buffer: FusedKV,
    queue: QueueDevice | None,
) -> list[torch.Tensor]:
    loader.open(spans)
    loader.begin(buffer, prompt.tables, prompt.first_layers)
    seen = []
    for layer_index in range(prompt.spec.num_layers):
        loader.has_layer(layer_index)
        loader.load_layer(layer_index)
        needed = torch.zeros(buffer.capacity, dtype=torch.bool)
        for span in spans:
            if prompt.first_layers.get(span, 0) <= layer_index:
                needed[span.prompt_start : span.prompt_end] = True
        out = torch.full_like(buffer.layers[:, layer_index], -1)
        seen.append(out)

        def compute(
            out: torch.Tensor = out, layer_index: int = layer_index, needed: torch.Tensor = needed
        ) -> None:
            out[:, :, needed] = buffer.layers[:, layer_index][:, :, needed]

        if queue is None:
            compute()
        else:
            queue.queue(compute)
    return seen


def _assert_same(prompt: _Prompt, found: Sequence[torch.Tensor]) -> None:
    expected = _loaded(prompt, SpanLoader(prompt.open_kv), None)[1]
    # One rounding: a product and a sum may be computed in one step, or in two.
    most = 1e-5 if prompt.spec.dtype == torch.float32 else 4e-2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=most)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "GROUP_LAYERS", 2)
    monkeypatch.setattr(card, "_READ_BYTES", 4096)
    monkeypatch.setenv("KVRAG_GPU_KERNELS", "off")


@settings(max_examples=examples(400))
@given(prompt=_prompts(), seed=st.integers(0, 1 << 32))
def test_no_order_changes_what_layers_see(prompt: _Prompt, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        queue = QueueDevice(seed)
        use(queue, patch)
        found = _loaded(prompt, SpanLoader(prompt.open_kv, num_threads=2), queue)
    assert not found[2]
    _assert_same(prompt, found[1])


@settings(max_examples=examples(400))
@given(prompt=_prompts(with_damage=True), seed=st.integers(0, 1 << 32))
def test_damage_in_any_group_is_planned_again(prompt: _Prompt, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        queue = QueueDevice(seed)
        use(queue, patch)
        found = _loaded(prompt, SpanLoader(prompt.open_kv, num_threads=2), queue)
    lost = _loaded(prompt, SpanLoader(prompt.open_kv), None)[2]
    # Damage of layers that nobody needs may be found, or not.
    assert lost.keys() <= found[2].keys() <= prompt.damage.keys()
    for one, reason in found[2].items():
        assert reason == (MISS_DAMAGED if prompt.damage[one][1] else MISS_UNREADABLE)
    left = tuple(span for span in prompt.spans if span.record_id not in found[2])
    _assert_same(replace(prompt, spans=left), found[1])


@settings(max_examples=examples(400))
@given(
    first=_prompts(),
    second=_prompts(),
    given_up_at=st.integers(0, 11),
    seed=st.integers(0, 1 << 32),
)
def test_a_prompt_that_is_given_up_leaves_memory_to_the_next(
    first: _Prompt, second: _Prompt, given_up_at: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        queue = QueueDevice(seed)
        use(queue, patch)
        loader = SpanLoader(first.open_kv, num_threads=2)
        buffer = first.buffer()
        loader.open(first.spans)
        loader.begin(buffer, first.tables, first.first_layers)
        reading = loader._reading
        assert isinstance(reading, card.CardReading)
        for layer_index in range(min(given_up_at, first.spec.num_layers)):
            loader.load_layer(layer_index)
        loader.end()
        # Whoever gets the memory next on the stream writes there.
        _scribble(buffer, queue)
        queue.queue(lambda: reading._slots.fill_(7))
        found = _loaded(second, SpanLoader(second.open_kv, num_threads=2), queue)
        queue.finish()
    assert bool((buffer.storage == -1).all())
    assert bool((reading._slots == 7).all())
    _assert_same(second, found[1])
