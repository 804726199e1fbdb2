"""The engine answers as plain Transformers does, from stored KV, and says what it did."""

import copy
import gc
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import kvrag
from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Message
from kvrag.errors import IndexFormatError, ParameterError, PromptTooLongError
from kvrag.fusion.controller import Calibration, Cost, LoadingController, Measured
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import TEXTS
from tests.support.models import make_model, make_tokenizer
from tests.support.rag import text_index

PROMPT = "Context:\n\n" + "\n\n".join(TEXTS) + "\n\nQuestion: who keeps it?\nAnswer:"
MESSAGES: list[Message] = [
    {"role": "system", "content": "Use this:\n\n" + "\n\n".join(TEXTS[:2])},
    {"role": "user", "content": "Who keeps the ledger?"},
]


@pytest.fixture(scope="module")
def engine(index: Index) -> KVEngine:
    return KVEngine(index, max_tokens=12)


def plain_answer(model: KVModel, ids: tuple[int, ...], max_tokens: int) -> str:
    """Return what Transformers generates greedily."""
    given = torch.tensor([ids])
    output = model.hf.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=2,
    )
    return str(model.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))


@pytest.mark.parametrize("prompt", [PROMPT, MESSAGES], ids=["string", "messages"])
def test_ratio_one_answers_as_transformers_does(
    engine: KVEngine, prompt: str | list[Message]
) -> None:
    answer = engine.generate(prompt, ratio=1.0)
    assert answer.text == plain_answer(engine.index.model, engine.prompt_ids(prompt), 12)
    assert answer.report.num_recomputed > 0
    assert answer.report.num_reused == 0


@pytest.mark.parametrize("prompt", [PROMPT, MESSAGES], ids=["string", "messages"])
def test_prompt_ids_are_those_of_the_plain_pipeline(
    engine: KVEngine, prompt: str | list[Message]
) -> None:
    tokenizer = engine.index.tokenizer
    if isinstance(prompt, str):
        expected = tokenizer(prompt)["input_ids"]
    else:
        expected = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True
        )["input_ids"]
    assert engine.prompt_ids(prompt) == tuple(expected)
    fused = engine.fuse(prompt)
    assert fused.report.num_tokens == len(expected)


def test_sources_are_in_the_order_of_hints_then_of_the_prompt(engine: KVEngine) -> None:
    in_prompt = [one.chunk_id for one in engine.generate(PROMPT, max_tokens=1).sources]
    assert len(in_prompt) > 2
    hints = in_prompt[:0:-1]
    found = engine.generate(PROMPT, max_tokens=1, hints=[*hints, "of no chunk"]).sources
    assert [one.chunk_id for one in found] == [*hints, in_prompt[0]]


def test_answer_names_its_sources_and_counts_its_tokens(index: Index) -> None:
    engine = KVEngine(index, max_tokens=12)
    answer = engine.generate(PROMPT, policy="none")
    assert [source.source for source in answer.sources] == [f"text-{i}" for i in range(4)]
    assert answer.usage.prompt_tokens == len(engine.prompt_ids(PROMPT))
    assert answer.usage.cached_tokens == answer.report.num_reused > 0
    assert 0 < answer.ttft_seconds <= answer.total_seconds
    assert json.loads(json.dumps(answer.to_dict()))["report"]["policy"] == "none"


def test_what_a_caller_does_to_a_source_changes_no_later_answer(
    model: KVModel, tmp_path: Path
) -> None:
    text = "Ines keeps the harbour ledger of Varn."
    with Index.create(tmp_path / "index", model=model, embedding="hashing") as index:
        index.add([Document("a", text, {"tags": ["one"], "of": {"n": 1}})])
        engine = KVEngine(index, max_tokens=1)
        for _ in range(2):
            (source,) = engine.generate(text).sources
            assert source.metadata["tags"] == ["one"]
            assert source.metadata["of"] == {"n": 1}
            source.metadata["tags"].append("two")
            source.metadata["of"]["n"] = 2


def test_stop_strings_end_the_answer_across_tokens(engine: KVEngine) -> None:
    whole = engine.generate(PROMPT, max_tokens=12).text
    stop = whole[4:7]
    answer = engine.generate(PROMPT, stop=[stop])
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    pieces = "".join(delta.text for delta in engine.stream(PROMPT, stop=[stop]))
    assert pieces == answer.text


def test_max_tokens_and_timeout_end_the_answer(engine: KVEngine) -> None:
    short = engine.generate(PROMPT, max_tokens=2)
    assert short.usage.completion_tokens == 2
    assert short.finish_reason == "length"
    late = engine.generate(PROMPT, max_tokens=12, timeout_seconds=1e-9)
    assert late.finish_reason == "timeout"
    assert late.usage.completion_tokens == 1


def test_seeds_repeat_draws_and_leave_the_global_generator_alone(engine: KVEngine) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3).tolist()
    torch.manual_seed(7)
    first = engine.generate(PROMPT, temperature=1.5, seed=3).text
    assert torch.rand(3).tolist() == expected
    assert engine.generate(PROMPT, temperature=1.5, seed=3).text == first
    drawn = {engine.generate(PROMPT, temperature=1.5, seed=seed).text for seed in range(4)}
    assert len(drawn) > 1


@pytest.mark.parametrize(
    ("frequency", "presence"), [(1.5, 0.0), (0.0, 2.0), (0.3, 0.4), (-2.0, 0.0)]
)
def test_counted_penalties_are_openais(engine: KVEngine, frequency: float, presence: float) -> None:
    """Each time that the answer has a token costs it `frequency`, and the first one `presence`."""
    model, ids = engine.index.model, list(engine.prompt_ids(PROMPT))
    num_prompt = len(ids)
    for _ in range(24):
        with torch.no_grad():
            logits = model.hf(torch.tensor([ids])).logits[0, -1].float()
        own = Counter(ids[num_prompt:])
        for token, count in own.items():
            logits[token] -= frequency * count + presence
        ids.append(int(logits.argmax()))
    expected = model.tokenizer.decode(ids[num_prompt:], skip_special_tokens=True)
    options: dict[str, Any] = {"ratio": 1.0, "max_tokens": 24}
    answer = engine.generate(
        PROMPT, frequency_penalty=frequency, presence_penalty=presence, **options
    )
    assert answer.text == expected
    assert engine.generate(PROMPT, **options).text != expected


def test_the_fused_cache_continues_in_transformers(engine: KVEngine) -> None:
    ids = engine.prompt_ids(PROMPT)
    fused = engine.fuse(PROMPT, ratio=1.0, max_tokens=12)
    given = fused.to_generate()
    assert given["input_ids"].tolist() == [list(ids)]
    # The prompt's first token pads: that must not hide it.
    output = engine.index.model.hf.generate(
        **given, max_new_tokens=12, do_sample=False, pad_token_id=ids[0]
    )
    text = engine.index.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    assert text == engine.generate(PROMPT, ratio=1.0).text


def test_a_policy_object_finds_the_calibration(tmp_path: Path, model: KVModel) -> None:
    with text_index(tmp_path / "i", model, TEXTS[:1]) as index:
        engine = KVEngine(index)
        with pytest.raises(ParameterError, match="kvrag calibrate"):
            engine.fuse(PROMPT, policy=LoadingController(ttft=1.0))
        measured = Measured("seam", 0.5, 0.25, 0.2, 0.3)
        index.upkeep.keep_calibration(
            Calibration(model.fingerprint, "d", "agreement", 1, (measured,), Cost(0.0, 1.0, 0.0))
        )
        report = engine.fuse("Of Varn:\n\n" + TEXTS[0], policy=LoadingController(ttft=1.0)).report
        assert (report.policy, report.expected_loss) == ("seam(ratio=0.5)", 0.25)
        # And so does one that is wrapped.
        report = engine.fuse("Of Varn:\n\n" + TEXTS[0], policy="auto:shift=0.5").report
        assert report.policy.startswith("seam(ratio=0.5, shift=0.5")


def test_an_altered_calibration_is_not_used(tmp_path: Path, model: KVModel) -> None:
    with text_index(tmp_path / "i", model, TEXTS[:1]) as index:
        policies = Measured("none", None, 0.9, 0.8, 1.0), Measured("seam", 0.5, 0.25, 0.2, 0.3)
        index.upkeep.keep_calibration(
            Calibration(model.fingerprint, "d", "agreement", 1, policies, Cost(0.0, 1.0, 0.0))
        )
        assert index.upkeep.verify().ok
        path = tmp_path / "i" / "calibration.json"
        path.write_text(path.read_text().replace('"loss": 0.9', '"loss": 0.0'))
        engine = KVEngine(index)
        with pytest.raises(
            IndexFormatError, match=r"altered or damaged .* 'kvrag calibrate' again"
        ):
            engine.fuse(PROMPT, policy="auto")
        assert engine.fuse(PROMPT).report.num_fresh
        (problem,) = index.upkeep.verify().catalog_problems
        assert "calibration.json was altered" in problem
        mended = index.upkeep.verify(repair=True)
        assert not mended.ok
        assert "run 'kvrag calibrate' again" in mended.not_healed[0]
        assert index.upkeep.verify().ok
        assert index.calibration is None


def test_a_prompt_beyond_the_context_window_is_refused(tmp_path: Path) -> None:
    model = KVModel(make_model(max_position_embeddings=128), make_tokenizer())
    with Index.create(tmp_path / "i", model=model, embedding="hashing", chunk_tokens=64) as index:
        engine = KVEngine(index)
        with pytest.raises(PromptTooLongError, match=r"the prompt has .* but .* holds 128"):
            engine.generate("word " * 200)
        nearly = "a " * 60
        answer = engine.generate(nearly, max_tokens=500)
        assert answer.usage.prompt_tokens + answer.usage.completion_tokens <= 128
        assert answer.finish_reason == "length"


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = None
    model = KVModel(make_model(), tokenizer)
    with Index.create(tmp_path / "i", model=model, embedding="hashing") as index:
        engine = KVEngine(index)
        with pytest.raises(ParameterError, match="has no chat template: pass the prompt as one"):
            engine.generate(MESSAGES)
        index.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(ParameterError, match="refuses these messages: roles must alternate"):
            engine.generate(MESSAGES)


def test_an_empty_prompt_is_refused_where_no_token_remains(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    model = KVModel(make_model(), tokenizer)
    with (
        Index.create(tmp_path / "i", model=model, embedding="hashing") as index,
        pytest.raises(ParameterError, match="the prompt is empty"),
    ):
        KVEngine(index).generate([{"role": "user", "content": ""}])


def test_retrieval_that_never_reaches_a_prompt_is_said_once(
    tmp_path: Path, model: KVModel, caplog: pytest.LogCaptureFixture
) -> None:
    with text_index(tmp_path / "i", model, TEXTS[:1]) as index:
        engine = KVEngine(index, max_tokens=1)
        with caplog.at_level(logging.WARNING, logger="kvrag"):
            engine.generate("no retrieval, no chunk, no warning")
            assert not caplog.records
            index.search("ledger", k=1)
            engine.generate("Rephrase this question: who keeps it?")
            assert not caplog.records, "a prompt without documents"
            engine.generate("[Document(page_content='" + TEXTS[0].replace(" ", "&nbsp;") + "')]")
            engine.generate("nothing here either")
        assert len(caplog.records) == 1
        assert "mustache" in caplog.records[0].message


def test_inference_mode_around_one_call_does_not_spoil_the_next(index: Index) -> None:
    engine = KVEngine(index, max_tokens=3)
    with torch.inference_mode():
        first = engine.generate(PROMPT).text
    assert engine.generate(PROMPT).text == first


def test_many_chunks_repeats_and_one_token_chunks(tmp_path: Path, model: KVModel) -> None:
    texts = [f"Entry {i}: the keeper of gate {i} wrote it down." for i in range(50)]
    with text_index(tmp_path / "i", model, [*texts, "ox"]) as index:
        engine = KVEngine(index, max_tokens=4)
        prompt = "\n\n".join([*texts[:20], "ox", texts[3], texts[3], "Question: who?\nAnswer:"])
        answer = engine.generate(prompt, ratio=1.0)
        assert answer.text == plain_answer(model, engine.prompt_ids(prompt), 4)
        assert answer.report.num_chunks == 20
        assert len(answer.sources) == 20


def test_the_public_names_are_all_there() -> None:
    for name in kvrag.__all__:
        assert getattr(kvrag, name).__name__ == name


def test_an_answer_leaves_no_tensors(index: Index) -> None:
    engine = KVEngine(index, max_tokens=2, session_bytes=0)

    def num_tensors() -> int:
        gc.collect()
        return sum(type(one) is torch.Tensor for one in gc.get_objects())

    engine.generate(PROMPT)
    before = num_tensors()
    for _ in range(3):
        engine.generate(PROMPT)
    assert num_tensors() <= before
