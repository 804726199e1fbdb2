"""Link tokens in the engine: found, used, counted, left out where they cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrag.engine.engine import KVEngine
from kvrag.errors import LinksError, ParameterError
from kvrag.fusion.links import FILE_NAME
from kvrag.ingest.index import Index
from kvrag.models.caches import FusedCache
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag_testing.bench_top import TEXTS
from tests.fusion.test_links import make_links
from tests.support.models import make_model, make_tokenizer
from tests.support.rag import save_model, text_index

PROMPT = "Context:\n\n" + "\n\n".join(TEXTS) + "\n\nQuestion: who keeps it?\nAnswer:"


@pytest.mark.parametrize("way", ["embeddings", "adapter"])
def test_answers_go_on_behind_the_linked_prompt(index: Index, tmp_path: Path, way: str) -> None:
    make_links(index.model, way).save(tmp_path / FILE_NAME)
    engine = KVEngine(index, policy="none", max_tokens=10, links=tmp_path / FILE_NAME)
    answer = engine.generate(PROMPT)
    num_tokens = len(engine.prompt_ids(PROMPT))
    assert answer.report.num_links == 4 * 3 + 2
    assert answer.report.num_tokens == answer.usage.prompt_tokens == num_tokens
    assert answer.report.to_dict()["num_links"] == 14
    json.dumps(answer.to_dict())

    # The same by Transformers.
    fused = engine.fuse(PROMPT)
    with fused.answering(index.model):
        output = index.model.hf.generate(
            **fused.to_generate(), max_new_tokens=10, do_sample=False, pad_token_id=0
        )
    generated = output[0, fused.kv.num_tokens :]
    assert index.model.tokenizer.decode(generated, skip_special_tokens=True) == answer.text


def test_the_prompts_ids_are_refused_behind_links(index: Index) -> None:
    engine = KVEngine(index, links=make_links(index.model))
    fused = engine.fuse(PROMPT)
    cache = FusedCache(fused.kv, fused.kv.num_tokens - 1)
    ids = torch.tensor([engine.prompt_ids(PROMPT)])
    with pytest.raises(ParameterError, match=r"1 rows are left .* generate\(\*\*fused.to_generate"):
        index.model.hf.generate(ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=2)


def test_links_change_nothing_where_nothing_is_reused(index: Index) -> None:
    links = make_links(index.model, "adapter")
    engine = KVEngine(index, links=links, max_tokens=8)
    without = KVEngine(index, max_tokens=8)
    for prompt in (PROMPT, "Nothing of the index stands here."):
        plain = engine.generate(prompt, reuse=False)
        assert plain.report.num_links == 0
        assert plain.text == without.generate(prompt, reuse=False).text
    assert engine.generate(PROMPT).report.num_links == 14
    # An engine without links over the same model is as it was.
    assert without.generate(PROMPT).report.num_links == 0


def test_a_models_folder_brings_its_links(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(folder)
    make_links(KVModel.load(folder)).save(folder / FILE_NAME)
    with text_index(tmp_path / "index", folder, TEXTS[:1]) as index:
        prompt = f"{TEXTS[0]}\n\nQuestion: who?"
        assert KVEngine(index, max_tokens=2).generate(prompt).report.num_links == 5
        off = KVEngine(index, max_tokens=2, links="off").generate(prompt)
        assert off.report.num_links == 0


def test_links_that_cannot_be_used_are_named(index: Index, tmp_path: Path) -> None:
    with pytest.raises(LinksError, match="no links at"):
        KVEngine(index, links=tmp_path / "absent")
    other = KVModel(make_model(seed=1), make_tokenizer())
    engine = KVEngine(index, links=make_links(other))
    with pytest.raises(LinksError, match="links of another model"):
        engine.generate(PROMPT)


@pytest.mark.parametrize("damage", ["stale", "torn", "another type"])
def test_a_folders_links_that_cannot_be_used_are_left_out(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    save_model(folder)
    other = KVModel(make_model(seed=1), make_tokenizer())
    make_links(other if damage == "stale" else KVModel.load(folder)).save(folder / FILE_NAME)
    if damage == "torn":
        content = (folder / FILE_NAME).read_bytes()
        (folder / FILE_NAME).write_bytes(content[: len(content) // 2])
    dtype = "bfloat16" if damage == "another type" else None
    with text_index(tmp_path / "index", folder, TEXTS[:1], dtype=dtype) as index:
        engine = KVEngine(index, max_tokens=2, policy="none", session_bytes=0)
        off = KVEngine(index, max_tokens=2, policy="none", links="off")
        for prompt in ("Nothing of it.", f"{TEXTS[0]}\n\nQuestion: who?", TEXTS[0] + " So?"):
            report, plain = engine.generate(prompt).report, off.generate(prompt)
            assert (report.num_links, report.num_unlinked) == (0, report.num_chunks)
            assert engine.generate(prompt).text == plain.text
            assert plain.report.num_unlinked == 0
        assert caplog.text.count("the links in the model's folder are not used") == 1
        with pytest.raises(LinksError):
            KVEngine(index, links=folder / FILE_NAME).generate(TEXTS[0])


@pytest.mark.parametrize(("free", "max_tokens"), [(2, 2), (16, 40), (16, 3), (17, 3)])
def test_links_take_no_room_from_the_answer(
    index: Index, monkeypatch: pytest.MonkeyPatch, free: int, max_tokens: int
) -> None:
    engine = KVEngine(index, links=make_links(index.model), max_tokens=max_tokens)
    num_tokens = len(engine.prompt_ids(PROMPT))
    monkeypatch.setattr(index.model, "max_positions", num_tokens + free)
    answer = engine.generate(PROMPT, seed=3, temperature=1.0)
    report = answer.report
    # 14 links and the answer fit only where so much is free.
    fits = free >= 14 + max_tokens
    assert (report.num_links, report.num_unlinked) == ((14, 0) if fits else (0, 4))
    assert ("4 chunks without link tokens" in report.one_line()) == (not fits)
    if answer.finish_reason == "length":
        assert answer.usage.completion_tokens == min(free, max_tokens)


def test_an_adapter_around_it_changes_nothing_that_kvrag_computes(index: Index) -> None:
    """Indexing, fusing and answering are the same inside `answering` as outside."""
    model = index.model
    adapter = make_links(model, "adapter")
    token_ids = [[5, 6, 7, 8]]
    (outside,) = model.prefill((0,), token_ids)
    engines = [KVEngine(index, max_tokens=6, links=links) for links in (adapter, "off")]
    wanted = [(one.fuse(PROMPT).logits, one.generate(PROMPT).text) for one in engines]
    feed = torch.tensor([[1, 2, 3]])
    with torch.no_grad(), adapter.on(model).answering(model):
        adapted = model.hf(feed).logits
        (inside,) = model.prefill((0,), token_ids)
        found = [(one.fuse(PROMPT).logits, one.generate(PROMPT).text) for one in engines]
        with make_links(model).answering(model):
            bare = model.hf(feed).logits
        # What was around it acts again behind it.
        torch.testing.assert_close(model.hf(feed).logits, adapted, rtol=0, atol=0)
        plain = engines[0].generate(PROMPT, reuse=False).text
    assert torch.equal(inside.keys, outside.keys)
    assert torch.equal(inside.values, outside.values)
    for (logits, text), (wanted_logits, wanted_text) in zip(found, wanted, strict=True):
        # Layers with hooks are computed by the model's modules, others by kernels.
        torch.testing.assert_close(logits, wanted_logits, rtol=0, atol=1e-5)
        assert text == wanted_text
    assert plain == engines[0].generate(PROMPT, reuse=False).text
    with torch.no_grad():
        assert torch.equal(model.hf(feed).logits, bare)
        assert not torch.equal(bare, adapted)


def test_positions_left_out_are_nothing_for_transformers(index: Index) -> None:
    fused = KVEngine(index).fuse(PROMPT)
    positions = tuple(range(7, 7 + fused.kv.num_tokens))
    gapped = replace(fused, layout=replace(fused.layout, positions=positions))
    with pytest.raises(ParameterError, match="positions have gaps"):
        gapped.to_generate()
