"""Schemas in the ordinary store, and prompts answered from them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import IndexFormatError, ParameterError, PMLError, PromptTooLongError
from kvrag.fusion.slices import MISS_ABSENT
from kvrag.ingest.maintenance import KEPT_FOLDER
from kvrag.models.kv_model import KVModel
from kvrag.pml.engine import Passage, PMLEngine
from kvrag_testing.bench_top import TEXTS, relative_difference
from tests.support.rag import text_index

MODULES = "".join(f"<module name='m{n}'>{text}</module>\n" for n, text in enumerate(TEXTS))
WHOLE = f"<schema name='s'>{MODULES}</schema>"
IMPORTS = "".join(f"<m{n}/>" for n in range(len(TEXTS)))
ASKED = f"<prompt schema='s'>{IMPORTS} Question: who?</prompt>"
GAPPED = "<prompt schema='s'><m0/><m2/> Question: who?</prompt>"


def plain(
    model: KVModel, ids: Sequence[int], positions: Sequence[int], num_tokens: int
) -> list[int]:
    """Decode greedily with a whole forward for every token, by position ids."""
    ids, positions, new = list(ids), list(positions), []
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model.hf(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                position_ids=torch.tensor([positions]),
            ).logits[0, -1]
        new.append(int(logits.argmax()))
        ids.append(new[-1])
        positions.append(positions[-1] + 1)
    return new


def test_ratio_one_without_gaps_equals_plain_prefill(pml: PMLEngine) -> None:
    pml.encode(WHOLE)
    placed = pml.place(ASKED)
    assert placed.layout.positions is None
    fused = pml.engine.fuse(placed, policy="deviation", ratio=1.0)
    ids = torch.tensor([placed.layout.token_ids])
    with torch.no_grad():
        expected = pml.engine.index.model.hf(ids).logits[0, -1]
    assert relative_difference(fused.logits, expected) < 1e-4
    assert fused.report.num_fresh < 20
    assert not fused.report.misses


def test_a_schema_is_stored_once(pml: PMLEngine) -> None:
    first = pml.encode(WHOLE)
    # Line feeds between modules are one record, wherever KV holds at any position.
    is_bound = pml.engine.index.model.is_position_bound
    assert first.num_passages == 2 * len(TEXTS) - 1
    assert first.num_records == (first.num_passages if is_bound else len(TEXTS) + 1)
    again = pml.encode(WHOLE)
    assert (again.num_records, again.num_tokens_computed, again.size_bytes) == (0, 0, 0)


@pytest.mark.parametrize("chunks_first", [True, False])
def test_a_module_that_is_also_a_chunk_is_stored_once(pml: PMLEngine, chunks_first: bool) -> None:
    index = pml.engine.index
    if index.model.is_position_bound:
        pytest.skip("a chunk's KV holds behind the prefix alone")
    # Chunks are encoded after the beginning of the user's turn, and so is what it holds.
    schema = f"<schema name='s'><user>{MODULES}</user></schema>"
    documents = [Document(f"text-{n}", text) for n, text in enumerate(TEXTS)]
    if chunks_first:
        index.add(documents)
        assert pml.encode(schema).num_records == 1  # the line feed
    else:
        pml.encode(schema)
        assert index.add(documents).num_records == 0


@pytest.mark.parametrize("family", ["llama", "falcon-rope", "gpt2"])
def test_answers_behind_gaps_equal_plain_decoding(family: str, tmp_path) -> None:
    with text_index(tmp_path / "index", family, ()) as index:
        pml, model = PMLEngine(KVEngine(index)), index.model
        pml.encode(WHOLE)
        placed = pml.place(GAPPED)
        positions = placed.layout.positions
        assert positions is not None
        answer = pml.generate(GAPPED, policy="deviation", ratio=1.0, max_tokens=12)
        expected = plain(model, placed.layout.token_ids, positions, 12)
        assert answer.text == model.tokenizer.decode(expected)
        assert answer.usage.cached_tokens + answer.report.num_recomputed > 30


def test_unrepaired_answers_come_from_the_store(pml: PMLEngine) -> None:
    pml.encode(WHOLE)
    report = pml.generate(GAPPED, policy="none", max_tokens=4).report
    encoding = pml.engine.index.tokenizer([TEXTS[0], TEXTS[2]], add_special_tokens=False)
    # Three line feeds between modules are the schema's own, whatever is imported.
    assert report.num_cached == sum(map(len, encoding["input_ids"])) + 3
    assert report.bytes_loaded > 0


def test_a_record_that_is_gone_is_computed_and_counted(pml: PMLEngine) -> None:
    pml.add(WHOLE)
    fused = pml.engine.fuse(pml.place(ASKED), policy="none")
    assert fused.report.misses == {MISS_ABSENT: 2 * len(TEXTS) - 1}
    assert fused.report.num_fresh == fused.report.num_tokens


def test_gc_keeps_what_a_schema_needs_until_it_is_forgotten(pml: PMLEngine) -> None:
    index = pml.engine.index
    report = pml.encode(WHOLE)
    assert index.upkeep.gc().num_records == 0
    assert pml.encode(WHOLE).num_records == 0
    assert pml.passages.forget("pml-s")
    assert not pml.passages.forget("pml-s")
    assert index.upkeep.gc().num_records == report.num_records


@pytest.mark.parametrize("content", [b"", b"[]", b'{"version":1,"keys":{"x":1}}', b"[" * 10**6])
def test_gc_trusts_no_damaged_list(pml: PMLEngine, content: bytes) -> None:
    pml.encode(WHOLE)
    (pml.engine.index.path / KEPT_FOLDER / "pml-s.json").write_bytes(content)
    with pytest.raises(IndexFormatError, match="not a list of kept records"):
        pml.engine.index.upkeep.gc()
    pml.encode(WHOLE)
    assert pml.engine.index.upkeep.gc().num_records == 0


def test_a_scaffold_is_used_when_all_of_it_is_imported(pml: PMLEngine) -> None:
    if pml.engine.index.model.is_position_bound:
        pytest.skip("no scaffolds where positions are learned")
    modules = "".join(f"<module name='m{n}'>{TEXTS[n]}</module>" for n in range(3))
    pml.encode(f"<schema name='s'>{modules}<scaffold modules='m0 m1'/></schema>")
    both = pml.place("<prompt schema='s'><m0/><m1/>Who?</prompt>")
    fused = pml.engine.fuse(both, policy="none")
    assert fused.report.num_in_context > 10
    assert fused.report.num_reused == 0
    ids = torch.tensor([both.layout.token_ids])
    with torch.no_grad():
        expected = pml.engine.index.model.hf(ids).logits[0, -1]
    # Encoded together, so nothing is lost though nothing is computed again.
    assert relative_difference(fused.logits, expected) < 1e-4
    one = pml.engine.fuse(pml.place("<prompt schema='s'><m1/>Who?</prompt>"), policy="none")
    assert one.report.num_in_context == 0


@pytest.mark.parametrize(
    ("markup", "line", "words"),
    [
        ("x\n<module name='m'>\n<parameter name='p' length='2100'/></module>", 2, "module 'm'"),
        ("<parameter name='p' length='2100'/>", 1, "text of the schema takes 2,100 positions"),
        (
            "".join(f"<module name='m{n}'><param name='p' len='700'/></module>" for n in range(3))
            + "end",
            1,
            "every prompt of this schema reaches position 2,1",
        ),
        (
            "".join(f"<module name='m{n}'><param name='p' len='700'/></module>" for n in range(3))
            + "\n<scaffold modules='m0 m1 m2'/>",
            2,
            "a scaffold of 2,100 tokens",
        ),
    ],
)
def test_schemas_without_room_are_refused_with_their_place(
    tmp_path: Path, markup: str, line: int, words: str
) -> None:
    path = tmp_path / "s.xml"
    path.write_text(f"<schema name='s'>{markup}</schema>")
    with text_index(tmp_path / "index", "llama", ()) as index:
        with pytest.raises(PMLError, match=f"{words}.*holds 2,048") as raised:
            PMLEngine(KVEngine(index)).encode(path)
        assert str(raised.value).startswith(f"{path}:{line}:")
        assert index.stats().num_records == 0


def test_what_cannot_be_served_is_refused(pml: PMLEngine) -> None:
    with pytest.raises(ParameterError, match="schema 's' was not added; known: none"):
        pml.place(ASKED)
    pml.add("<schema name='s'>x<parameter name='p' length='2100'/>y</schema>")
    with pytest.raises(PromptTooLongError, match="2106 positions"):
        pml.generate("<prompt schema='s' p='a'>Who?</prompt>")
    with pytest.raises(ParameterError, match=r"name '\.\./x'"):
        pml.passages.keep("../x", [Passage((0,), (1, 2))])
