"""An index whose model computes prompts as wholes: answers are full prefill's, beginnings kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrag.chunk import Document
from kvrag.cli.upkeep import stats
from kvrag.engine.asking import Asking
from kvrag.engine.engine import KVEngine
from kvrag.engine.verify import to_verify, verify
from kvrag.errors import (
    EngineError,
    ParameterError,
    PromptTooLongError,
    UnsupportedModelError,
)
from kvrag.fusion.whole import Beginnings
from kvrag.ingest.index import Index
from kvrag.llms.vllm.options import check_engine, engine_options
from kvrag.llms.vllm.settings import ConnectorSettings
from kvrag.models.families import WHOLE
from kvrag.models.kv_model import State
from kvrag.models.tokens import num_equal
from kvrag.pml.engine import PMLEngine
from kvrag.server.service import about
from kvrag.tune.calibrate import calibrate
from kvrag.tune.stores import PriceTable, measure_and_choose
from kvrag_testing.bench_top import TEXTS
from tests.support.rag import save_model

DOCUMENTS = [Document(f"doc-{number}", text) for number, text in enumerate(TEXTS)]
QUESTION = "Who keeps the tower, and since when?"
MAX_TOKENS = 6


@pytest.fixture(scope="module", params=["lfm2", "qwen3_next", "granitemoehybrid", "gemma4_text"])
def index(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Index]:
    folder = tmp_path_factory.mktemp("whole")
    save_model(folder / "model", request.param)
    made = Index.create(
        folder / "index", model=folder / "model", embedding="hashing", chunk_tokens=64
    )
    report = made.add(DOCUMENTS)
    assert (report.num_records, report.size_bytes, report.failed) == (0, 0, ())
    assert report.note.startswith("chunks are stored without KV")
    with made:
        yield made


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    folder = tmp_path_factory.mktemp("lfm2")
    save_model(folder / "model", "lfm2", max_position_embeddings=600)
    with Index.create(folder / "index", model=folder / "model", embedding="hashing") as made:
        made.add(DOCUMENTS[:4])
        yield made


def plainly(index: Index, prompt: str, **options: Any) -> list[int]:
    """Return the tokens that Transformers writes from nothing but the prompt's ids."""
    model: Any = index.model
    ids = torch.tensor([index.tokenizer(prompt, add_special_tokens=True).input_ids])
    assert ids[0].tolist() == list(KVEngine(index).prompt_ids(prompt))
    with model.lock, torch.no_grad():
        found = model.hf.generate(
            ids, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=2, **options
        )
    return [int(one) for one in found[0, ids.shape[1] :]]


def test_answers_are_transformers_whatever_was_kept(index: Index) -> None:
    engine = KVEngine(index, max_tokens=MAX_TOKENS)
    head = "Answer from these pages alone, and say which page it was that told you.\n\n"
    texts = [index.get_chunks([hit.chunk.chunk_id])[0].text for hit in index.search(QUESTION, k=4)]
    kept = []
    for pair in itertools.permutations(texts[:3], 2):
        prompt = head + "\n\n".join(pair) + "\n\n" + QUESTION
        answer = engine.generate(prompt, logprobs=0)
        assert [one.token_id for one in answer.logprobs] == plainly(index, prompt)[
            : len(answer.logprobs)
        ]
        assert answer.usage.cached_tokens == answer.report.num_kept
        assert {one.text for one in answer.sources} == set(pair)
        kept.append(answer.report.num_kept)
    # The text before the documents is kept at once. Two prompts show where they differ, and the
    # next one begins there: after the head, or after the first document too.
    num_head = len(index.tokenizer(head).input_ids) - 2
    assert kept[0] == 0
    assert min(kept[1:]) >= num_head
    again = engine.generate(prompt)
    assert again.report.num_kept == again.report.num_tokens - 1


def test_a_conversation_goes_on_from_its_last_answer(index: Index) -> None:
    engine = KVEngine(index, max_tokens=MAX_TOKENS)
    request = engine.question(QUESTION, k=2)
    first = engine.generate(request)
    said = {"role": "assistant", "content": first.text}
    going_on = [*request.prompt, said, {"role": "user", "content": "And then?"}]
    second = engine.generate(going_on)
    fresh = KVEngine(index, max_tokens=MAX_TOKENS, session_bytes=0).generate(going_on)
    assert second.text == fresh.text
    assert fresh.report.num_kept == 0
    least = first.report.num_tokens - 1
    assert second.report.num_kept >= least
    report = second.report
    assert report.num_kept + report.num_fresh == report.num_tokens
    assert report.work_share == report.num_fresh / report.num_tokens
    kind = index.model.decoder.config.model_type
    assert report.fresh_reasons == {f"{kind}: {WHOLE[kind]}": report.num_fresh}
    assert WHOLE[kind] in report.one_line()
    # Others' conversations are not taken.
    assert engine.generate(going_on, session="other").report.num_kept == 0
    assert engine.generate(going_on, reuse=False).report.num_kept == 0


def test_a_conversation_without_its_passages_goes_on_from_the_last_history(index: Index) -> None:
    """As over the server: the client knows questions and answers alone."""
    engine = KVEngine(index, max_tokens=MAX_TOKENS)
    turns = [{"role": "system", "content": "Say what the pages tell, and be brief about it."}]
    before: tuple[int, ...] = ()
    for number, question in enumerate((QUESTION, "What did she write?", "And then?")):
        turns.append({"role": "user", "content": question})
        request = Asking(k=2).request(index, turns)
        answer = engine.generate(request)
        ids = engine.prompt_ids(request.prompt, hints=request.hints)
        if number:
            # A token or two after the history may be alike by chance.
            assert answer.report.num_kept >= num_equal(before, ids) - 3 > 16
        before = ids
        turns.append({"role": "assistant", "content": answer.text})


def test_verifying_finds_full_prefill(lfm2: Index) -> None:
    engine = KVEngine(lfm2, max_tokens=8)
    request = to_verify(engine.question(QUESTION, max_tokens=8))
    verdict = verify(engine, request, engine.generate(request))
    assert verdict.is_same
    assert verdict.kl < 1e-6


def test_what_concerns_the_kv_of_chunks_is_refused(lfm2: Index, tmp_path: Path) -> None:
    engine = KVEngine(lfm2)
    for options in ({"policy": "boundary"}, {"ratio": 0.3}, {"ttft": 1.0}):
        with pytest.raises(ParameterError, match="computes each prompt as a whole"):
            engine.generate(QUESTION, **options)
    assert engine.generate(QUESTION, policy="none", max_tokens=2).report.policy == "full prefill"
    with pytest.raises(UnsupportedModelError, match="'lfm2' has no KV of chunks"):
        engine.generate(QUESTION, eviction="streaming")
    with pytest.raises(ParameterError, match="links and session_store_bytes"):
        KVEngine(lfm2, session_store_bytes=1)
    with pytest.raises(ParameterError, match=f"stores no KV.*{WHOLE['lfm2'][:20]}"):
        PMLEngine(engine)
    with pytest.raises(PromptTooLongError, match="the model holds 600"):
        engine.generate("word " * 700)
    with pytest.raises(ParameterError, match="cannot be given to Transformers' generate"):
        engine.fuse(QUESTION).to_generate()
    with pytest.raises(ParameterError, match="chunks have no KV with this model"):
        Index.create(tmp_path / "new", model=lfm2.model, embedding="hashing", context="document")


def test_what_measures_or_writes_kv_is_refused_at_the_start(
    lfm2: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = f"stores no KV, because its model computes each prompt as a whole.*{WHOLE['lfm2'][:20]}"
    with pytest.raises(ParameterError, match=why):
        calibrate(lfm2)
    with pytest.raises(ParameterError, match=why):
        measure_and_choose(lfm2, [f"file://{tmp_path}"], PriceTable({}, "prices.toml"))
    for codec in ("lossless", "packed"):
        with pytest.raises(ParameterError, match=r"no codec can be fitted: .* stores no KV"):
            lfm2.upkeep.recode(codec)
    settings = ConnectorSettings(str(lfm2.path))
    with pytest.raises(EngineError, match="stores no KV"):
        engine_options(settings)
    of = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=lfm2.model.decoder.config))
    with pytest.raises(EngineError, match=why):
        check_engine(of, None, settings)  # type: ignore[arg-type]  # all that is looked at
    stats(lfm2.path)
    told = capsys.readouterr().out
    assert "no KV is stored: the model computes each prompt as a whole" in told
    assert lfm2.stats().bytes_per_token == 0


def test_upkeep_misses_no_record(lfm2: Index) -> None:
    report = lfm2.upkeep.verify(repair=True)
    assert not report.problems
    assert not report.catalog_problems
    assert not report.num_repaired
    assert lfm2.upkeep.gc().num_records == 0
    assert lfm2.delete(sources=["doc-3"]) > 0
    assert lfm2.add(DOCUMENTS[:4]).added == ("doc-3",)
    path = lfm2.path
    with Index.open(path) as opened:
        assert opened.stats().num_records == 0
        assert opened.config.compression == "text"


def test_the_least_recently_used_beginning_is_dropped_first() -> None:
    def state(*ids: int) -> State:
        return State([torch.zeros(25)], ids)

    kept = Beginnings(250)
    for ids in ((1, 2), (1, 2, 3), (7, 8)):
        kept.keep(None, state(*ids))
    assert kept.size_bytes == 200
    found, alike = kept.find(None, (1, 2, 3, 4))
    assert found.token_ids == [1, 2, 3]
    assert alike == 3
    kept.keep(None, state(9))
    assert kept.find(None, (7, 8, 1)) == (None, 0)
    # One token has to be computed, and a state cannot be cut.
    assert kept.find(None, (1, 2, 3)) == (None, 2)
    assert kept.find("named", (1, 2, 3, 4)) == (None, 0)
    kept.keep(None, state(1, 2, 3))
    assert kept.size_bytes == 200
    # What is larger than all the room is refused, and throws out nobody.
    kept.keep(None, State([torch.zeros(100)], (5, 6)))
    assert kept.size_bytes == 200
    # What led to an answer goes once the answer is continued, and no sooner.
    kept, led, ended = Beginnings(250), state(1, 2), state(1, 2, 3)
    kept.keep(None, led)
    kept.keep(None, ended, led)
    assert kept.num_kept(None, (1, 2, 9)) == 2
    assert kept.find(None, (1, 2, 3, 4)) == (ended, 3)
    assert kept.size_bytes == 100


def test_only_policies_that_are_taken_are_offered(lfm2: Index) -> None:
    engine = KVEngine(lfm2)
    allowed = {"keeps_history": False, "can_upload": False}
    offered = about(engine, "lfm2", "rag:index", 4, **allowed).policies
    for policy in offered:
        engine.generate(QUESTION, policy=policy, max_tokens=1)
    assert sorted(offered) == ["none", "two_stage"]
