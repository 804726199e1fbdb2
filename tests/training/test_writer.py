"""Training of a writer: what it computes is what an index stores, and a run does what it says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrag.errors import ParameterError
from kvrag.fusion.fuser import fuse
from kvrag.fusion.links import WRITER, LinkTokens
from kvrag.fusion.policies.base import NonePolicy
from kvrag.ingest.profiles import WRITER_NAME
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag_bench.quality.retrieved import similar_to
from kvrag_testing.bench_top import TEXTS, Bench, relative_difference
from kvrag_train.batches import IGNORED
from kvrag_train.links.batch import Packer
from kvrag_train.links.parameters import LinkParameters
from kvrag_train.links.student import KV, Student, distance, training_mode
from tests.support.models import make_model, make_tokenizer
from tests.training.test_links import encode_after_filler, header_of, item, make_trainer, options

OF_WRITER = {
    **{"mode": "frozen", "way": WRITER, "loss": "distill", "context": "filler:24"},
    **{"learning_rate": 5e-3, "rank": 4},
}


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3"])
def test_training_computes_what_an_index_stores(family: str) -> None:
    model = KVModel(make_model(family), make_tokenizer())
    bench = Bench(model, head=model.default_prefix_ids())
    header = replace(header_of(options(Path(), **OF_WRITER), model), num_links=0)
    parameters = LinkParameters(model, header, 4, 0)
    assert parameters.embeddings is None
    with torch.no_grad():
        for up in parameters.up.values():
            up.normal_(0.0, 0.1)
    packer = Packer(model, header, num_filler=21)
    batch = packer.pack([item()], linked=True)
    student = Student(model, parameters, False)
    kept: list[KV] = []
    full: list[KV] = []
    with torch.no_grad():
        logits, unwritten = student.logits(batch, kept), student.logits(batch, writes=False)
        student.logits(packer.pack([item()], linked=False), full)
    assert relative_difference(logits, unwritten) > 1e-3
    assert batch.is_written.all()
    encode_after_filler(bench, 21, parameters.adapter())
    ids = batch.question_ids[batch.targets != IGNORED]
    for number, prompt in enumerate(item().prompts):
        layout = bench.lay_out(prompt.text)
        buffer = FusedKV(model.spec, len(layout.token_ids), len(layout.token_ids) + 8)
        fused = fuse(model, layout, bench.open_kv, NonePolicy(), buffer)
        assert relative_difference(logits[ids == number][:1], fused.logits[None]) < 1e-4
    # Full prefill is no distance from itself.
    places = batch.stored_positions
    own = [tuple(kv[:, :, places[0]] for kv in layer) for layer in full]
    assert float(distance(own, full, batch)) < 1e-10 < float(distance(kept, full, batch))


def test_a_few_steps_bring_answers_closer_to_full_prefill(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **OF_WRITER, steps=16, evaluate_every=16)
    weights = [weight.detach().clone() for weight in trainer.model.hf.parameters()]
    before = trainer.evaluate()
    assert before["KL/written"] == pytest.approx(before["KL/plain"], rel=1e-4)
    trainer.run()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert records[-1]["apart"] < records[0]["apart"]
    assert records[-1]["KL/written"] < 0.9 * before["KL/plain"]
    assert records[-1]["KL/plain"] == pytest.approx(before["KL/plain"], rel=1e-3)
    assert all(map(torch.equal, weights, trainer.model.hf.parameters()))
    written = LinkTokens.load(tmp_path / WRITER_NAME, is_writer=True)
    written.check(trainer.model)


def test_a_resumed_run_writes_the_same_bytes(tmp_path: Path) -> None:
    make_trainer(tmp_path / "whole", **OF_WRITER).run()
    stopped = make_trainer(tmp_path / "stopped", **OF_WRITER)
    with training_mode(stopped.model, trains_model=False):
        stopped.advance()
        stopped.advance()
    stopped._save_checkpoint()
    resumed = make_trainer(tmp_path / "stopped", **OF_WRITER)
    assert resumed.step == 2
    resumed.run()
    whole, parts = (tmp_path / name / WRITER_NAME for name in ("whole", "stopped"))
    assert whole.read_bytes() == parts.read_bytes()


def test_documents_are_encoded_after_their_nearest(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **{**OF_WRITER, "context": "similar:32"}, teacher_answers=True)
    near = similar_to(TEXTS, trainer.model.tokenizer, 32)
    assert set(near) == set(TEXTS)
    assert any(near.values())
    batch = trainer.packer.pack([item()], linked=True)
    for row, start in zip(batch.chunk_ids.tolist(), batch.num_before, strict=True):
        prefix = trainer.model.default_prefix_ids()
        assert tuple(row[len(prefix) : start]) in {(), *near.values()}
    assert batch.is_written.any()
    with training_mode(trainer.model, trains_model=False):
        assert trainer.advance()["apart"] > 0


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"context": "none"}, "it would do nothing"),
        ({"loss": "labels"}, "a writer's is 'distill'"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
    ],
)
def test_what_does_not_go_with_a_writer_is_refused(
    tmp_path: Path, changed: dict[str, object], what: str
) -> None:
    with pytest.raises(ParameterError, match=what):
        options(tmp_path, **{**OF_WRITER, **changed})
