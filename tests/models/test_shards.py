"""Ranks that share a model by heads compute the KV that one process computes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from kvrag.chunk import ChunkKey
from kvrag.codec.base import EncodedChunk
from kvrag.codec.raw import HeadRange
from kvrag.codec.registry import get_codec
from kvrag.errors import ParameterError, RecordError, UnsupportedModelError
from kvrag.fusion.controller import make_choice
from kvrag.fusion.fuser import FusedPrompt, fuse
from kvrag.fusion.layout import Layout, ReusedSpan
from kvrag.fusion.plan import Loading
from kvrag.fusion.slices import MISS_DAMAGED
from kvrag.kvcache import FusedKV
from kvrag.loading.streaming import StreamEstimates, Streaming
from kvrag.models.kv_model import KVModel, Ranks
from kvrag.models.shards import check_shards, keep_part
from kvrag.store.memory import MemoryStore
from tests.support.models import make_model, make_tokenizer
from tests.support.properties import every

NUM_RANKS = 2
CHUNKS = {"a": range(20, 50), "b": range(60, 100), "c": range(110, 131)}
HEAD, QUESTION = (0,), tuple(range(140, 150))


class Threads:
    """Ranks in the threads of one process: every call waits for the others."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(NUM_RANKS, timeout=60)
        self.given: dict[int, torch.Tensor] = {}
        self.num_calls = [0] * NUM_RANKS

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.num_calls[rank] += 1
        self.given[rank] = tensor
        self.barrier.wait()
        found = [self.given[other].clone() for other in range(NUM_RANKS)]
        self.barrier.wait()
        return found


class ThreadRanks(Ranks):
    size = NUM_RANKS

    def __init__(self, rank: int, threads: Threads) -> None:
        self.rank = rank
        self._threads = threads

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._threads.exchange(self.rank, part)).sum(0)

    def most(self, numbers: Sequence[int]) -> list[int]:
        found = torch.stack(self._threads.exchange(self.rank, torch.tensor(numbers)))
        return [int(number) for number in found.amax(0)]


def shard(whole: KVModel, ranks: Ranks) -> KVModel:
    hf: Any = copy.deepcopy(whole.hf)
    for name in keep_part(hf, ranks):
        hf.get_submodule(name).register_forward_hook(lambda _, __, output: ranks.sum(output))
    model = KVModel(hf, make_tokenizer())
    model.ranks = ranks
    return model


def stored(model: KVModel, codec_name: str = "raw") -> Callable[..., EncodedChunk]:
    """Return what opens the chunks' records, whole."""
    codec, store = get_codec(codec_name), MemoryStore()
    keys = {}
    for number, (name, ids) in enumerate(CHUNKS.items()):
        (kv,) = model.prefill(HEAD, [list(ids)])
        keys[name] = ChunkKey(f"{number:040x}")
        store.put(keys[name], codec.encode(keys[name], kv))

    def open_kv(chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk:
        del context_ids
        record = store.open(keys[chunk_id])
        return codec.open(keys[chunk_id], record, model.spec)

    return open_kv


def make_layout() -> Layout:
    token_ids, spans = list(HEAD), []
    for name, ids in CHUNKS.items():
        spans.append(ReusedSpan(name, len(token_ids), 0, len(ids)))
        token_ids += [*ids, 135]
    return Layout((*token_ids, *QUESTION), tuple(spans), len(HEAD), True)


def fused_by(model: KVModel, open_kv: Any, policy: str) -> FusedPrompt:
    layout = make_layout()
    buffer = FusedKV(model.spec, len(layout.token_ids), len(layout.token_ids))
    return fuse(model, layout, open_kv, make_choice(policy), buffer, None, Loading(num_threads=0))


def test_what_ranks_cannot_share_is_refused() -> None:
    whole = KVModel(make_model(), make_tokenizer())
    open_kv = stored(whole)
    whole.ranks = ThreadRanks(0, Threads())
    layout = make_layout()
    buffer = FusedKV(whole.spec, len(layout.token_ids), len(layout.token_ids))
    loading = Loading(0, streaming=Streaming(1.0, 0.0, StreamEstimates()))
    with pytest.raises(ParameterError, match=r"2 processes compute the model together.*ttft"):
        fuse(whole, layout, open_kv, make_choice("none"), buffer, None, loading)


def in_ranks(work: Callable[[Ranks], Any]) -> tuple[list[Any], Threads]:
    threads, results = Threads(), [None] * NUM_RANKS
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, threads))
        except BaseException as error:
            errors.append(error)
            threads.barrier.abort()

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    real = [one for one in errors if not isinstance(one, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results, threads


def of_rank(open_kv: Any, ranks: Ranks, num_heads: int) -> Any:
    each = num_heads // ranks.size
    heads = slice(ranks.rank * each, (ranks.rank + 1) * each)
    return lambda *record_id: HeadRange(open_kv(*record_id), heads)


@pytest.mark.parametrize(
    ("family", "policy"),
    every(
        3,
        product(
            ("llama", "mistral-sliding", "qwen2", "qwen3", "gemma2", "gemma3"),
            ("none", "two_stage", "deviation", "gradual"),
        ),
    ),
)
def test_fused_kv_is_that_of_one_process(family: str, policy: str) -> None:
    whole = KVModel(make_model(family), make_tokenizer())
    open_kv = stored(whole)
    wanted = fused_by(whole, open_kv, policy)

    def work(ranks: Ranks) -> FusedPrompt:
        mine = of_rank(open_kv, ranks, whole.spec.num_kv_heads)
        return fused_by(shard(whole, ranks), mine, policy)

    results, threads = in_ranks(work)
    for found in results:
        assert [one.tolist() for one in found.picks] == [one.tolist() for one in wanted.picks]
        assert (found.logits - wanted.logits).abs().max() < 1e-4
    for layer in range(whole.spec.num_layers):
        for part in ("keys", "values"):
            parts = [getattr(found.kv, part)[layer] for found in results]
            far = torch.cat(parts, 1) - getattr(wanted.kv, part)[layer]
            assert far.abs().max() < 1e-4
    assert threads.num_calls[0] == threads.num_calls[1] > 0


def test_what_one_rank_loses_all_compute() -> None:
    whole = KVModel(make_model("llama"), make_tokenizer())
    open_kv = stored(whole)

    class Damaged(HeadRange):
        def place_layer(self, layer_index: int, *into: Any) -> None:
            if layer_index == 2:
                raise RecordError("damaged")
            super().place_layer(layer_index, *into)

    def work(ranks: Ranks) -> FusedPrompt:
        mine = of_rank(open_kv, ranks, whole.spec.num_kv_heads)

        def opened(chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk:
            if ranks.rank == 1 and chunk_id == "b":
                return Damaged(open_kv(chunk_id, context_ids), slice(1, 2))
            found: EncodedChunk = mine(chunk_id, context_ids)
            return found

        return fused_by(shard(whole, ranks), opened, "boundary")

    results, _ = in_ranks(work)
    for found in results:
        assert found.report.misses == {MISS_DAMAGED: 1}
        assert found.report.num_fresh == results[0].report.num_fresh > len(CHUNKS["b"])


def test_heads_that_cannot_be_shared_are_refused() -> None:
    config = make_model("llama").config
    with pytest.raises(UnsupportedModelError, match="tensor_parallel_size=3: the model has 2 key"):
        check_shards(config, 3)
    with pytest.raises(UnsupportedModelError, match="models of type phi3"):
        check_shards(make_model("phi3").config, 2)
