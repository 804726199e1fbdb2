"""Reading to a card: any order that events allow, any damage, prompts that are given up."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag import process
from kvrag.codec.bands import Bands
from kvrag.codec.base import EncodedChunk
from kvrag.codec.config import LayerGroups, PipelineConfig, RateDistortion
from kvrag.codec.pca import PCA
from kvrag.codec.pipeline import PipelineCodec
from kvrag.codec.raw import HeadRange, RawCodec
from kvrag.codec.registry import codec_of
from kvrag.codec.tables import Exact, PerChannel, Uniform
from kvrag.codec.transforms import NoTransform
from kvrag.errors import StoreError
from kvrag.fusion import card, staging
from kvrag.fusion.layout import RecordId, ReusedSpan
from kvrag.fusion.loader import MadeChunk, SpanLoader
from kvrag.fusion.slices import (
    MISS_DAMAGED,
    MISS_UNREADABLE,
    Clock,
    LostError,
    Slices,
    in_one_slice,
    whole,
    without_lost,
)
from kvrag.fusion.staging import EarlyRecords, HotRecords
from kvrag.ingest.search import WatchedChunk
from kvrag.kvcache import ChunkKV, FusedKV, KVSpec
from kvrag.loading.hot import HotTier
from kvrag.positions.rotary import RotaryTable
from kvrag.store.memory import MemoryStore
from kvrag_bench.codec.cutting import cut_record
from kvrag_testing.codec_contract import KEY, BytesSource, random_kv
from tests.codec import forge
from tests.support.codecs import fit, smooth_kv
from tests.support.properties import examples
from tests.support.queues import QueueDevice, use


class _Source(BytesSource):
    """A record's bytes; one of them may be flipped, or reading may fail behind a place."""

    fails_from: int | None = None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self.fails_from is not None and offset + len(buffer) > self.fails_from:
            raise StoreError("gone")
        super().read_into(offset, buffer)


_CONFIGS = {
    "transform": PipelineConfig(PCA(2), RateDistortion((4.0,)), Uniform(refinements=2)),
    "apart": PipelineConfig(PCA(3, joint=False), RateDistortion((3.0, 1.0)), Uniform(0.0)),
    "channels": PipelineConfig(NoTransform(), LayerGroups(), PerChannel(0.0)),
    "lossless": PipelineConfig(NoTransform(), LayerGroups((1.0,), (1.0,)), Exact()),
    "packed": PipelineConfig(Bands(), LayerGroups((1.0,), (1.0,)), Uniform(0.0)),
}
_ON_HOST = "lossless"
"""What the host decodes for a card."""
_NOT_STREAMS = ("raw", "packed", _ON_HOST)
"""The last bytes of their records are parts of numbers: any are valid."""


@functools.cache
def _codecs(name: str, spec: KVSpec) -> list[Any]:
    """Return a codec for each of its levels."""
    if name == "raw":
        return [RawCodec()]
    profile = fit(_CONFIGS[name], spec, num_chunks=7)
    if name in _NOT_STREAMS:
        return [codec_of(profile)]
    return [PipelineCodec(profile, name, level.name) for level in profile.levels]


@dataclass(frozen=True, repr=False)
class _Prompt:
    """Stored records, the spans of a prompt, and the layers that each needs."""

    spec: KVSpec
    records: Mapping[RecordId, ChunkKV]
    made: frozenset[RecordId]
    damage: Mapping[RecordId, tuple[int, str]]
    codecs: Mapping[RecordId, tuple[str, int]]
    spans: tuple[ReusedSpan, ...]
    first_layers: Mapping[ReusedSpan, int]
    tables: Sequence[RotaryTable]
    num_rows: int
    noted: list[RecordId] = field(default_factory=list)
    heads: slice | None = None
    """Those of `spec`, which has no others; None: all."""

    def __repr__(self) -> str:
        return f"{self.spec}, {self.spans}, damage {self.damage}, codecs {self.codecs}"

    def open_kv(self, chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk:
        opened = self._open(chunk_id, context_ids)
        return opened if self.heads is None else HeadRange(opened, self.heads)

    def _open(self, chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk:
        one = chunk_id, context_ids
        kv = self.records[one]
        spec = replace(self.spec, num_kv_heads=kv.keys.shape[1])
        if one in self.made:
            return MadeChunk(kv, None)
        name, number = self.codecs.get(one, ("raw", 0))
        codecs = _codecs(name, spec)
        codec = codecs[number % len(codecs)]
        record = codec.encode(KEY, kv)
        if name == "transform":
            record = cut_record(record, 1 + number % 3, len(codec.profile.transform.plans))
        source, kind = _Source(record), ""
        if one in self.damage:
            layer, kind = self.damage[one]
            blocks = codec.open(KEY, source, spec)._reader.header.blocks
            block, content = blocks[layer % len(blocks)], bytearray(record)
            content[block.offset + (block.size_bytes - 3 if kind == "forged" else 0)] ^= 1
            if kind == "forged":
                forge.reseal_blocks(content)
                content = bytearray(forge.reseal(content, blocks[0].offset))
            source = _Source(bytes(content))
        chunk = codec.open(KEY, source, spec)
        if kind == "gone":
            source.fails_from = block.offset
        watched: Any = WatchedChunk(chunk, lambda: self.noted.append(one))
        return cast("EncodedChunk", watched)

    def buffer(self) -> FusedKV:
        buffer = FusedKV(self.spec, self.num_rows, self.num_rows + 3)
        buffer.storage.fill_(-1)
        return buffer


@st.composite
def _prompts(
    draw: st.DrawFn, with_damage: bool = False, makes: bool = True, coded: bool = False
) -> _Prompt:
    num_layers = draw(st.sampled_from([2, 7]) if coded else st.integers(1, 11))
    head_dim = 8 if coded else draw(st.sampled_from([8, 24]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    codecs: dict[RecordId, tuple[str, int]] = {}
    spec = KVSpec(num_layers, draw(st.integers(1, 3)), head_dim, dtype)
    records: dict[RecordId, ChunkKV] = {}
    spans, first_layers, row = [], {}, 0
    made: set[RecordId] = set()
    damage: dict[RecordId, tuple[int, str]] = {}
    whole_layers = draw(st.integers(0, num_layers))
    for number in range(draw(st.integers(1, 5))):
        one = f"chunk-{number}", ()
        num_tokens = draw(st.integers(1, 9))
        records[one] = random_kv(spec, num_tokens, seed=number)
        kinds = ["flipped", "gone"]
        if coded:
            records[one] = smooth_kv(spec, num_tokens, seed=number)
            records[one].keys[:, :, draw(st.integers(0, num_tokens - 1))] *= 40  # kept raw
            codecs[one] = draw(st.sampled_from(["raw", *_CONFIGS])), draw(st.integers(0, 5))
            kinds += ["forged"] * (codecs[one][0] not in _NOT_STREAMS)
        if makes and draw(st.booleans()):
            made.add(one)
        elif with_damage and draw(st.booleans()):
            damage[one] = draw(st.integers(0, num_layers - 1)), draw(st.sampled_from(kinds))
        for _ in range(draw(st.integers(1, 2))):
            first = draw(st.integers(0, num_tokens - 1))
            row += draw(st.integers(0, 2))
            span = ReusedSpan(one[0], row, first, draw(st.integers(1, num_tokens - first)))
            if draw(st.booleans()):
                first_layers[span] = whole_layers
            spans.append(span)
            row = span.prompt_end
    random = torch.Generator().manual_seed(row)
    turned = [
        RotaryTable(*torch.randn(2, row, head_dim // 2, generator=random).repeat(1, 1, 2))
        for _ in range(2)
    ]
    period = draw(st.integers(1, 4))
    tables = [turned[layer % period == 0] for layer in range(num_layers)]
    prompt = _Prompt(
        spec, records, frozenset(made), damage, codecs, tuple(spans), first_layers, tables, row
    )
    if draw(st.booleans()):
        return prompt
    # What a worker has that shares the heads with others.
    first = draw(st.integers(0, spec.num_kv_heads - 1))
    heads = slice(first, draw(st.integers(first + 1, spec.num_kv_heads)))
    return replace(prompt, spec=replace(spec, num_kv_heads=heads.stop - heads.start), heads=heads)


def _loaded(
    prompt: _Prompt,
    loader: SpanLoader,
    queue: QueueDevice | None,
    between: Callable[[int], None] = lambda _: None,
    finishes: bool = True,
) -> tuple[FusedKV, list[torch.Tensor], dict[RecordId, str | None]]:
    """Return the buffer, what each layer's computation saw in it, and what was lost."""
    lost: dict[RecordId, str | None] = {}
    buffer = prompt.buffer()

    def attempt(spans: tuple[ReusedSpan, ...]) -> Slices[list[torch.Tensor]]:
        return in_one_slice(lambda: _layers(prompt, spans, loader, buffer, queue, between))

    def without(spans: tuple[ReusedSpan, ...], error: LostError) -> tuple[ReusedSpan, ...]:
        lost.update(error.lost)
        _scribble(buffer, queue)
        return tuple(span for span in spans if span.record_id not in error.lost)

    seen = whole(without_lost(prompt.spans, attempt, without))
    loader.end()
    if queue is not None and finishes:
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
    between: Callable[[int], None] = lambda _: None,
) -> list[torch.Tensor]:
    loader.open(spans)
    loader.begin(buffer, prompt.tables, prompt.first_layers)
    seen = []
    for layer_index in range(prompt.spec.num_layers):
        between(layer_index)
        whole(loader.bring(range(layer_index, layer_index + 1), Clock()))
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
    loader.is_sound()
    loader.check()
    return seen


def _assert_same(prompt: _Prompt, found: Sequence[torch.Tensor]) -> None:
    expected = _loaded(prompt, SpanLoader(prompt.open_kv), None)[1]
    # One rounding: a product and a sum may be computed in one step, or in two.
    most, share = (1e-5 if prompt.spec.dtype == torch.float32 else 4e-2), 0.0
    if prompt.codecs:
        # Sums of products, in another order: one bfloat16 of up to 32 is rounded otherwise, and
        # turned by numbers of up to 4. What float32 finds is exact enough for both.
        most, share = (3e-4, 1e-5) if most < 1e-3 else (1.0, 2e-2)
    for one, other in zip(found, expected, strict=True):
        # Turning takes large numbers from each other: what is left has their rounding.
        bound = most + share * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=bound)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (card, staging):
        monkeypatch.setattr(module, "GROUP_LAYERS", 2)
    monkeypatch.setattr(staging, "_READ_BYTES", 4096)
    monkeypatch.setenv("KVRAG_GPU_KERNELS", "off")


@settings(max_examples=examples(400))
@given(prompt=_prompts() | _prompts(coded=True), seed=st.integers(0, 1 << 32))
def test_no_order_changes_what_layers_see(prompt: _Prompt, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        queue = QueueDevice(seed)
        use(queue, patch)
        loader = SpanLoader(prompt.open_kv, num_threads=2)
        found = _loaded(prompt, loader, queue)
    assert not found[2]
    by_host = {one for one, (name, _) in prompt.codecs.items() if name == _ON_HOST} - prompt.made
    assert loader.num_decoded_by_host == len(by_host)
    _assert_same(prompt, found[1])


@settings(max_examples=examples(400))
@given(
    prompt=_prompts(with_damage=True) | _prompts(with_damage=True, coded=True),
    seed=st.integers(0, 1 << 32),
)
def test_damage_in_any_group_is_planned_again(prompt: _Prompt, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        queue = QueueDevice(seed)
        use(queue, patch)
        found = _loaded(prompt, SpanLoader(prompt.open_kv, num_threads=2), queue)
    lost = _loaded(prompt, SpanLoader(prompt.open_kv), None)[2]
    # Damage of layers that nobody needs may be found, or not.
    assert lost.keys() <= found[2].keys() <= prompt.damage.keys()
    for one, reason in found[2].items():
        is_gone = prompt.damage[one][1] == "gone"
        assert reason == (MISS_UNREADABLE if is_gone else MISS_DAMAGED)
        assert is_gone or one in prompt.noted
    left = tuple(span for span in prompt.spans if span.record_id not in found[2])
    _assert_same(replace(prompt, spans=left), found[1])


@settings(max_examples=examples(400))
@given(
    first=_prompts() | _prompts(coded=True),
    second=_prompts() | _prompts(coded=True),
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
        for layer_index in range(min(given_up_at, first.spec.num_layers)):
            loader.load_layer(layer_index)
        loader.end()
        # Whoever gets the memory next on the stream writes there.
        _scribble(buffer, queue)
        queue.queue(lambda: reading._slots.fill_(7))
        queue.queue(lambda: reading._payloads.fill_(7))
        found = _loaded(second, SpanLoader(second.open_kv, num_threads=2), queue)
        queue.finish()
    assert bool((buffer.storage == -1).all())
    assert bool((reading._slots == 7).all())
    assert bool((reading._payloads == 7).all())
    _assert_same(second, found[1])


class _Memory:
    """Writes over memory that a tier has let go: what still used it sees garbage."""

    def __init__(self, limit_bytes: int, queue: QueueDevice | None) -> None:
        self.tier = HotTier("test", limit_bytes, self._allocate)
        self._queue = queue
        self._blocks: list[torch.Tensor] = []

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        tier = self.tier
        used = {
            id(one.memory) for one in (*tier._kept.values(), *tier._coming.values(), *tier._leaving)
        }
        for block in self._blocks:
            if id(block) not in used:
                block.fill_(255)
        self._blocks = [one for one in self._blocks if id(one) in used]
        assert sum(one.numel() for one in self._blocks) + num_bytes <= tier.limit_bytes
        memory = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self._blocks.append(memory)
        if self._queue is not None:
            # As PyTorch's: on the stream that asked, whoever had it before may still write.
            self._queue.queue(lambda: memory.fill_(255))
        return memory


@dataclass(frozen=True)
class _Use:
    """How one of several prompts goes."""

    spans: tuple[int, ...]
    replaced: frozenset[int]
    given_up_at: int | None
    meanwhile_at: int | None


_uses = st.builds(
    _Use,
    st.lists(st.integers(0, 9), unique=True, max_size=10).map(tuple),
    st.frozensets(st.integers(0, 4), max_size=1),
    st.none() | st.integers(0, 6),
    st.none() | st.integers(0, 6),
)


class _GivenUpError(Exception):
    pass


@settings(max_examples=examples(400))
@given(
    prompt=st.tuples(st.booleans(), st.booleans()).flatmap(
        lambda kind: _prompts(kind[0], makes=False, coded=kind[1])
    ),
    uses=st.lists(_uses, min_size=2, max_size=5),
    limits=st.tuples(*[st.sampled_from([0, 4_000, 30_000, 10_000_000])] * 2),
    seed=st.integers(0, 1 << 32),
)
def test_chunks_that_stay_are_those_of_their_records(
    prompt: _Prompt, uses: Sequence[_Use], limits: tuple[int, int], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        queue = QueueDevice(seed)
        use(queue, patch)
        card_memory, pinned = _Memory(limits[0], queue), _Memory(limits[1], None)
        device = torch.device("cpu")
        versions = dict(prompt.records)

        def run(number: int) -> None:
            one = uses[number]
            for changed in one.replaced:
                if (record_id := (f"chunk-{changed}", ())) in versions:
                    before = versions[record_id]
                    whole_spec = replace(prompt.spec, num_kv_heads=before.keys.shape[1])
                    versions[record_id] = random_kv(whole_spec, before.num_tokens, 100 + number)
            spans = tuple(prompt.spans[n] for n in sorted(one.spans) if n < len(prompt.spans))
            mine = replace(prompt, spans=spans, records=dict(versions))
            hot = HotRecords(card_memory.tier, pinned.tier, device)

            def between(layer_index: int) -> None:
                if layer_index == one.given_up_at:
                    raise _GivenUpError
                if layer_index == one.meanwhile_at and number + 1 < len(uses) and not started:
                    started.append(number)
                    run(number + 1)

            started: list[int] = []
            loader = SpanLoader(mine.open_kv, num_threads=2, hot=hot)
            try:
                _, seen, lost = _loaded(mine, loader, queue, between, finishes=False)
            except _GivenUpError:
                pass
            else:
                assert lost.keys() <= mine.damage.keys()
                left = tuple(span for span in spans if span.record_id not in lost)
                # What is forged may also be valid: other numbers of a token that is kept raw.
                forged = {one: how for one, how in mine.damage.items() if how[1] == "forged"}
                results.append((replace(mine, spans=left, damage=forged), seen))
            finally:
                loader.end()
                hot.close()
            if not started and number + 1 < len(uses):
                run(number + 1)

        results: list[tuple[_Prompt, list[torch.Tensor]]] = []
        run(0)
        queue.finish()
        for memory, limit in zip((card_memory, pinned), limits, strict=True):
            assert memory.tier.size_bytes <= limit
            assert not any(one._num_holders for one in memory.tier._kept.values())
            assert not memory.tier._coming
    for mine, seen in results:
        _assert_same(mine, seen)


def _plain(num_chunks: int) -> _Prompt:
    """Return a prompt of chunks of 6 tokens and 5 layers, in float32."""
    spec = KVSpec(5, 2, 8, torch.float32)
    records: dict[RecordId, ChunkKV] = {
        (f"chunk-{n}", ()): random_kv(spec, 6, seed=n) for n in range(num_chunks)
    }
    spans = tuple(ReusedSpan(f"chunk-{n}", 7 * n, 0, 6) for n in range(num_chunks))
    made, num_rows = torch.Generator().manual_seed(0), 7 * num_chunks
    turned = torch.randn(2, num_rows, 4, generator=made).repeat(1, 1, 2)
    tables = [RotaryTable(*turned)] * 5
    return _Prompt(spec, records, frozenset(), {}, {}, spans, {}, tables, num_rows)


def _loaded_hot(
    prompt: _Prompt, memories: Sequence[_Memory], queue: QueueDevice
) -> tuple[HotRecords, SpanLoader, list[torch.Tensor], dict[RecordId, str | None]]:
    """Load a prompt over hot records, of the card and page-locked, that are closed then."""
    hot = HotRecords(memories[0].tier, memories[1].tier, torch.device("cpu"))
    loader = SpanLoader(prompt.open_kv, num_threads=2, hot=hot)
    try:
        _, seen, lost = _loaded(prompt, loader, queue)
    finally:
        loader.end()
        hot.close()
    queue.finish()
    return hot, loader, seen, lost


def _coded(name: str, num_chunks: int = 3) -> _Prompt:
    """Return such a prompt whose records a codec wrote."""
    plain = _plain(num_chunks)
    kvs = {one: smooth_kv(plain.spec, 6, seed=n) for n, one in enumerate(plain.records)}
    return replace(plain, records=kvs, codecs=dict.fromkeys(kvs, (name, 0)))


@pytest.mark.parametrize("codec", ["raw", "packed", "transform"])
def test_a_hot_chunk_is_not_read(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = _plain(3) if codec == "raw" else _coded(codec)
    queue = QueueDevice(0, haste=0.5)
    use(queue, monkeypatch)
    size = 3 * 5 * prompt.spec.layer_bytes_per_token * 6
    # The second prompt's chunks come from the card, those of the third from page-locked memory:
    # there, compressed ones take what is stored of them.
    stored = (
        size
        if codec == "raw"
        else sum(
            prompt.open_kv(*one).coded_bytes(range(5))
            for one in prompt.records  # type: ignore
        )
    )
    assert (stored < size) is (codec != "raw")
    kinds = {"card": (size, 0), "pinned": (0, stored)}
    for name, limits in kinds.items():
        memories = [_Memory(limit, None) for limit in limits]
        for number in range(2):
            hot, loader, seen, lost = _loaded_hot(prompt, memories, queue)
            is_hot = number == 1
            assert not lost
            _assert_same(prompt, seen)
            assert hot.num_found[name] == 3 * is_hot
            assert hot.bytes_found[name] == max(limits) * is_hot
            headers = sum(prompt.open_kv(*one).bytes_read for one in prompt.records)
            assert (loader.bytes_loaded == headers) is is_hot
        assert sum(one.tier.size_bytes for one in memories) == max(limits)


@pytest.mark.parametrize(
    ("codec", "kind"), [("packed", "flipped"), ("transform", "flipped"), ("transform", "forged")]
)
def test_what_is_damaged_never_enters_page_locked_memory(
    codec: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = replace(_coded(codec), damage={("chunk-1", ()): (4, kind)})
    queue = QueueDevice(0)
    use(queue, monkeypatch)
    memories = _Memory(0, queue), _Memory(10_000_000, None)
    for number in range(2):
        hot, _, seen, lost = _loaded_hot(prompt, memories, queue)
        assert lost == {("chunk-1", ()): MISS_DAMAGED}
        left = replace(prompt, spans=(prompt.spans[0], prompt.spans[2]), damage={})
        _assert_same(left, seen)
        assert hot.num_found["pinned"] == 2 * number
    assert len(memories[1].tier._kept) == 2
    assert memories[1].tier.counts().bytes_written == memories[1].tier.size_bytes


@pytest.mark.parametrize("is_given_up", [True, False])
def test_records_are_open_and_on_the_card_before_the_layout(
    is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = replace(_plain(4), damage={("chunk-2", ()): (3, True)})
    queue = QueueDevice(1)
    use(queue, monkeypatch)
    memory = _Memory(10_000_000, queue)
    opened: list[RecordId] = []

    def open_kv(*record_id: Any) -> EncodedChunk | None:
        opened.append(record_id)
        if record_id == ("chunk-3", ()):
            raise StoreError("gone")
        return prompt.open_kv(*record_id)

    hot = HotRecords(memory.tier, HotTier("none", 0, lambda _: None), torch.device("cpu"))
    early = EarlyRecords(open_kv, hot, prompt.spec, num_threads=2)
    # The last one is not in the layout.
    early.begin([(f"chunk-{n}", ()) for n in (1, 0, 2, 3)])
    assert len(opened) == 4
    size = 5 * prompt.spec.layer_bytes_per_token * 6
    assert memory.tier.counts().bytes_written == 2 * size
    if not is_given_up:
        mine = replace(prompt, spans=prompt.spans[1:3])
        loader = SpanLoader(early.open_kv, num_threads=2, hot=hot)
        _, seen, lost = _loaded(mine, loader, queue, finishes=False)
        assert lost == {("chunk-2", ()): MISS_DAMAGED}
        queue.finish()
        _assert_same(replace(mine, spans=prompt.spans[1:2], damage={}), seen)
        assert len(opened) == 4
        with pytest.raises(StoreError, match="gone"):
            early.open_kv("chunk-3", ())
    early.close()
    queue.finish()
    assert memory.tier.size_bytes == 3 * size
    assert memory.tier.make("other", 1) is not None  # what never became whole has left by now
    assert memory.tier.size_bytes == 2 * size + 1
    assert not any(one._num_holders for one in memory.tier._kept.values())


def test_what_a_card_no_longer_decodes_is_not_taken_as_it_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels may be switched off between two prompts."""
    prompt = _coded("packed")
    queue = QueueDevice(0)
    use(queue, monkeypatch)
    memories = _Memory(0, queue), _Memory(10_000_000, None)
    for decodes in (True, False):
        monkeypatch.setattr(staging, "can_decode", lambda *_, decodes=decodes: decodes)
        hot, loader, seen, lost = _loaded_hot(prompt, memories, queue)
        assert not lost
        assert loader.num_decoded_by_host == (0 if decodes else 3)
        _assert_same(prompt, seen)
        assert hot.num_found["pinned"] == 0


def test_copies_before_a_damaged_piece_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = replace(_plain(1), damage={("chunk-0", ()): (1, True)})
    queue = QueueDevice(0, haste=0.0)
    use(queue, monkeypatch)
    monkeypatch.setattr(staging, "_READ_BYTES", prompt.spec.layer_bytes_per_token * 6)
    loader = SpanLoader(prompt.open_kv, num_threads=2)
    loader.open(prompt.spans)
    loader.begin(prompt.buffer(), prompt.tables)
    reading = loader._reading
    with pytest.raises(LostError):
        loader.load_layer(0)
    # The next that gets the slots' memory on the prompt's stream.
    queue.queue(lambda: reading._slots.fill_(7))
    queue.current().hurry()
    queue.finish()
    assert bool((reading._slots == 7).all())


def test_a_model_that_moved_gets_memory_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "free_bytes", lambda _: (1 << 30, 1 << 30))
    tiers, store = staging.HotTiers(1000, 1000), MemoryStore()
    found = [tiers.of_prompt(torch.device("cuda", number), store) for number in (0, 0, 1)]
    first, again, other = (None if one is None else one._card for one in found)
    assert first is again
    assert None is not other is not first


@pytest.mark.parametrize("told", ["8000000\n", "max\n", None])
def test_page_locked_memory_is_a_share_of_what_a_container_has(
    told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    if told is not None:
        limit.write_text(told)
    monkeypatch.setattr(process, "_MEMORY_LIMITS", (limit,))
    _, pinned = staging.HotTiers(0, None)._make(torch.device("cuda"))
    all_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert pinned.limit_bytes == (1_000_000 if told == "8000000\n" else all_bytes // 8)
