"""Compressed chunks: what is stored, under which name, and how a prompt is answered with it."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from kvrag.chunk import Chunk, Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import IndexFormatError, ParameterError
from kvrag.fusion.repair import make_repair
from kvrag.ingest.coding import read_all
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag_testing.bench_top import relative_difference
from tests.ingest.conftest import MakeIndex, stored_bytes

PARTS = [
    "Ines keeps the harbour ledger of Varn, by the old river bank near the northern light.",
    "She wrote the book at the end of the tall clock, and the keeper of it is the brown fox.",
    "Tomas repairs it, and she said that the lazy dog jumps over the ledger of the harbour.",
]
DOCUMENTS = [Document(f"part {i}", part) for i, part in enumerate(PARTS)]
QUESTION = "Question: who wrote the book?\nAnswer:"


@pytest.fixture
def dropped(make_index: MakeIndex) -> Index:
    index = make_index(compression="drop:0.5")
    index.add(DOCUMENTS)
    return index


def chunk_of(index: Index, number: int) -> Chunk:
    (chunk,) = index.get_chunks(index.catalog.chunk_ids_of(f"part {number}"))
    return chunk


def prompt_of(*texts: str) -> str:
    return "\n\n".join([*texts, QUESTION])


def test_the_tokens_that_say_most_are_kept(dropped: Index, model: KVModel) -> None:
    for number in range(3):
        chunk = chunk_of(dropped, number)
        ids = torch.tensor([*dropped.prefix_ids, *chunk.token_ids])
        with torch.no_grad():
            log_probs = model.hf(ids[None]).logits[0].log_softmax(-1)
        first = len(dropped.prefix_ids)
        said = [-float(log_probs[i - 1, ids[i]]) for i in range(first, len(ids))]
        count = -(-len(said) // 2)
        kept = sorted(sorted(range(len(said)), key=lambda i: -said[i])[:count])
        (whole,) = model.prefill(dropped.prefix_ids, [chunk.token_ids])
        record = dropped.open_kv(chunk.chunk_id)
        assert record.num_tokens == count
        found = read_all(record, dropped.config.spec)
        assert relative_difference(found.keys, whole.keys[:, :, kept]) < 1e-4
        assert relative_difference(found.values, whole.values[:, :, kept]) < 1e-4


@torch.no_grad()
def reference(index: Index, model: KVModel, order: tuple[int, ...]) -> torch.Tensor:
    """Return the first logits over kept rows side by side, by a forward written out here."""
    tokens: list[int] = []  # what is computed, in order, and at which positions
    where: list[int] = []
    held: list[tuple[int, Chunk]] = []  # what is stored, and from which position on
    ids = index.tokenizer(prompt_of(*(PARTS[i] for i in order)))["input_ids"]
    place = position = 0
    while place < len(ids):
        chunk = next(
            (
                one
                for one in (chunk_of(index, i) for i in order)
                if tuple(ids[place : place + len(one.token_ids)]) == one.token_ids
            ),
            None,
        )
        if chunk is None:
            tokens.append(ids[place])
            where.append(position)
            position += 1
            place += 1
        else:
            held.append((position, chunk))
            position += index.num_rows(len(chunk.token_ids))
            place += len(chunk.token_ids)
    tables = model.tables(position)
    spec = model.spec
    hidden = model.hf.model.embed_tokens(torch.tensor(tokens))
    at = torch.tensor(where)
    for layer_index, layer in enumerate(model.hf.model.layers):
        keys = torch.zeros(spec.num_kv_heads, position, spec.head_dim)
        values = torch.zeros_like(keys)
        for start, chunk in held:
            record = index.open_kv(chunk.chunk_id)
            assert record is not None
            kv = read_all(record, spec)
            rows = slice(start, start + kv.num_tokens)
            tables[layer_index].place(kv.keys[layer_index], rows, keys[:, rows])
            values[:, rows] = kv.values[layer_index]
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        query, key, value = (
            projection(normed).view(len(at), -1, spec.head_dim).transpose(0, 1)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        placed = torch.empty_like(query)
        tables[layer_index].place(query.contiguous(), at, placed)
        own = torch.empty_like(key)
        tables[layer_index].place(key.contiguous(), at, own)
        keys[:, at], values[:, at] = own, value
        groups = len(placed) // spec.num_kv_heads
        scores = placed @ keys.repeat_interleave(groups, 0).transpose(1, 2) * spec.head_dim**-0.5
        scores = scores.masked_fill(torch.arange(position) > at[:, None], float("-inf"))
        seen = scores.softmax(-1) @ values.repeat_interleave(groups, 0)
        hidden = hidden + attention.o_proj(seen.transpose(0, 1).reshape(len(at), -1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.hf.lm_head(model.hf.model.norm(hidden))[-1]


@pytest.mark.parametrize("order", [(0,), (1, 0, 2), (2, 2)])
def test_stored_rows_stand_side_by_side(
    dropped: Index, model: KVModel, order: tuple[int, ...]
) -> None:
    engine = KVEngine(dropped)
    prompt = prompt_of(*(PARTS[i] for i in order))
    fused = engine.fuse(prompt)
    report = fused.report
    assert relative_difference(fused.logits, reference(dropped, model, order)) < 1e-4
    lengths = [len(chunk_of(dropped, i).token_ids) for i in order]
    num_rows = sum(-(-length // 2) for length in lengths)
    assert report.num_tokens == len(engine.prompt_ids(prompt))
    assert report.num_exact == report.num_recomputed == 0
    assert report.num_reused == report.num_compressed == sum(lengths)
    assert report.num_compressed_rows == num_rows
    assert report.num_fresh == report.num_tokens - sum(lengths)
    assert set(report.rows_by_layer) == {report.num_fresh}
    assert fused.kv.num_tokens == report.num_fresh + num_rows
    assert fused.layout.plain_token_ids == engine.prompt_ids(prompt)
    assert f"{sum(lengths)} of them compressed to {num_rows} rows" in report.one_line()


def test_generation_goes_on_from_the_compacted_buffer(dropped: Index, model: KVModel) -> None:
    engine = KVEngine(dropped)
    prompt = prompt_of(PARTS[1], PARTS[0])
    answer = engine.generate(prompt, max_tokens=6)
    assert answer.usage.prompt_tokens == len(engine.prompt_ids(prompt))
    fused = engine.fuse(prompt, max_tokens=6)
    given = fused.to_generate()
    with torch.no_grad():
        logits = model.hf(
            input_ids=given["input_ids"][:, -1:],
            **{CACHE_ARGUMENT: given[CACHE_ARGUMENT]},
            use_cache=True,
        ).logits
    assert relative_difference(logits[0, -1], fused.logits) < 1e-4
    # There are fewer rows than the prompt has tokens.
    output = model.hf.generate(
        **engine.fuse(prompt).to_generate(), max_new_tokens=6, do_sample=False, pad_token_id=2
    )
    said = model.tokenizer.decode(output[0, fused.kv.num_tokens :], skip_special_tokens=True)
    assert said == answer.text


def test_a_part_of_a_chunk_is_computed(dropped: Index) -> None:
    engine = KVEngine(dropped)
    cut = PARTS[0][: PARTS[0].index(" northern")]
    prompt = prompt_of(cut, PARTS[1])
    report = engine.fuse(prompt).report
    assert report.misses == {"only a part of a compressed chunk": 1}
    assert report.num_chunks == 1
    assert report.num_compressed == len(chunk_of(dropped, 1).token_ids)


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_lost_records_are_computed_from_the_tokens(
    dropped: Index, lost: tuple[int, ...], how: str
) -> None:
    engine = KVEngine(dropped)
    prompt = prompt_of(*PARTS)
    for number in lost:
        key = dropped.key_of(chunk_of(dropped, number))
        record = dropped.store.open(key)
        content = bytearray(record.size_bytes)
        record.read_into(0, memoryview(content))
        dropped.store.delete(key)
        if how == "cut":
            dropped.store.put(key, bytes(content[:-64]))
        elif how == "flipped":
            content[-70] ^= 1  # in the last layer's block: noticed half-way
            dropped.store.put(key, bytes(content))
    fused = engine.fuse(prompt)
    assert sum(fused.report.misses.values()) == len(lost)
    assert fused.report.num_chunks == 3 - len(lost)
    assert fused.report.num_tokens == len(engine.prompt_ids(prompt))
    if len(lost) == 3:
        ids = torch.tensor([engine.prompt_ids(prompt)])
        with torch.no_grad():
            expected = dropped.model.hf(ids).logits[0, -1]
        assert relative_difference(fused.logits, expected) < 1e-4
    assert engine.generate(prompt, max_tokens=3).text is not None


def test_nothing_is_computed_again_beside_compressed_chunks(dropped: Index) -> None:
    assert KVEngine(dropped).fuse(prompt_of(*PARTS)).report.policy == "none"
    assert KVEngine(dropped, policy="none").fuse(prompt_of(*PARTS)).report.policy == "none"
    for given in ({"policy": "deviation"}, {"ratio": 0.2}, {"policy": "two_stage:ratio=0.2"}):
        with pytest.raises(ParameterError, match=r"stores chunks as drop:0\.5"):
            KVEngine(dropped, **given)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="Use policy 'none'"):
        KVEngine(dropped).fuse(prompt_of(*PARTS), policy=make_repair("query"))


def test_kv_of_different_compressions_never_mix(make_index: MakeIndex) -> None:
    indexes = [
        make_index(name, compression=name)
        for name in ("none", "drop:0.5", "drop:0.75", "drop:0.25")
    ]
    for index in indexes:
        index.add(DOCUMENTS)
    for one, other in itertools.combinations(indexes, 2):
        assert not set(stored_bytes(one)) & set(stored_bytes(other))
    sizes = [index.stats().size_bytes for index in indexes]
    assert sizes[0] > sizes[3] > sizes[1] > sizes[2]


def test_upkeep_knows_how_many_rows_there_should_be(dropped: Index) -> None:
    assert dropped.upkeep.verify().ok
    stats = dropped.stats()
    assert stats.compression == "drop:0.5"
    assert 0.5 < stats.stored_bytes_per_token / stats.bytes_per_token < 0.75
    before = stored_bytes(dropped)
    key = dropped.key_of(chunk_of(dropped, 1))
    dropped.store.delete(key)
    assert not dropped.upkeep.verify().ok
    assert dropped.upkeep.verify(repair=True).ok
    assert stored_bytes(dropped) == before
    report = dropped.upkeep.recode("raw")
    assert (report.num_recoded, report.num_computed) == (0, 0)


def test_an_index_of_an_older_kvzip_answers_and_takes_no_more(
    model: KVModel, make_index: MakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ParameterError, match=r"kvzip:0\.5 is gone: .* codec transform:4"):
        make_index("new", compression="kvzip:0.5")
    with monkeypatch.context() as patch:  # half of the rows, under that name
        patch.setattr("kvrag.fusion.compression.anchors.KVZIP", "")
        made = make_index(compression="kvzip:0.5")
        made.add(DOCUMENTS)
    with Index.open(made.path, model=model) as index:
        report = KVEngine(index).fuse(prompt_of(*PARTS)).report
        lengths = [len(chunk_of(index, number).token_ids) for number in range(3)]
        assert (report.num_compressed, report.misses) == (sum(lengths), {})
        with pytest.raises(ParameterError, match=r"kvzip:0\.5 is gone"):
            index.add(Document("more", QUESTION * 3))
        assert index.upkeep.verify(repair=True).ok
        index.store.delete(next(iter(index.store.keys())))
        report = index.upkeep.verify(repair=True)
        assert (report.ok, len(report.problems), report.num_repaired) == (False, 1, 0)
        assert "kvzip:0.5 is gone" in report.not_healed[0]
        assert KVEngine(index).fuse(prompt_of(*PARTS)).report.misses == {"KV not in the store": 1}


@pytest.mark.parametrize(
    "text",
    ["drop", "drop:", "drop:0", "drop:1", "drop:.9999999", "drop:nan", "drop:2", "squeeze:.5", ""],
)
def test_unknown_compression_is_refused(make_index: MakeIndex, text: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="expected none, or one of drop, anchors"):
        make_index(compression=text)
    index = make_index("sound")
    path = index.path / "index.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "compression": text}))
    with pytest.raises(IndexFormatError, match="compression"):
        Index.open(index.path)
