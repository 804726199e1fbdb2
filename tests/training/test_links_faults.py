"""What goes wrong in training links is named, and nothing is gone on from that is not the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvrag.errors import ParameterError
from kvrag.fusion.links import FILE_NAME
from kvrag.models.kv_model import KVModel
from kvrag_train.links.data import FileSource
from kvrag_train.links.student import training_mode
from kvrag_train.links.trainer import CHECKPOINT, LOG, LinkTrainer
from tests.support.models import make_model, make_tokenizer
from tests.training.test_links import make_trainer, options, questions

FROZEN: dict[str, Any] = {"mode": "frozen", "way": "adapter"}
OF_WRITER: dict[str, Any] = {"way": "writer", "loss": "distill"}


def trained_on(out: Path, asked: list[Any], seed: int = 0, **changed: Any) -> LinkTrainer:
    model = KVModel(make_model(num_hidden_layers=2, seed=seed), make_tokenizer())
    return LinkTrainer(options(out, **changed), model, FileSource(asked, model.tokenizer))


# -- another run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [{}, FROZEN])
def test_weights_changed_at_their_place_are_noticed(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    trained_on(tmp_path, questions(), **changed).run()
    with pytest.raises(ParameterError, match="of another run: model_fingerprint"):
        trained_on(tmp_path, questions(), seed=1, **changed)


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ({"context": "filler:8"}, {}, "of another run: num_filler 8, asked for None"),
        ({}, {"context": "filler:8"}, "of another run: num_filler None, asked for 8"),
        ({"steps": 2}, {"steps": 1}, "has 2 steps, asked for 1"),
        ({"steps": 1}, {"rank": 10**6}, "rank 1,000,000: expected at most"),
        ({"steps": 1}, {"context": "filler:4000"}, "context filler:4000 and chunk_tokens=16 toge"),
        ({"steps": 1}, OF_WRITER | {"context": "similar:4000"}, "context similar:4000 and chunk_t"),
    ],
)
def test_a_run_is_not_continued_as_another(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], what: str
) -> None:
    trained_on(tmp_path, questions(), **FROZEN, **before).run()
    with pytest.raises(ParameterError, match=what):
        trained_on(tmp_path, questions(), **FROZEN | after)


def test_steps_that_a_killed_run_lost_are_logged_once(tmp_path: Path) -> None:
    trained_on(tmp_path, questions(), **FROZEN, steps=2).run()
    log = tmp_path / LOG
    whole = log.read_text()
    lost = [json.dumps({"step": step, "rate": 0.5}) for step in (2, 3)]
    log.write_text(whole + "\n".join([*lost, '{"step": 4, "ra']))
    trained_on(tmp_path, questions(), **FROZEN, steps=3).run()
    assert log.read_text().startswith(whole)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["step"] for one in records] == [0, 1, 2]
    assert records[-1]["rate"] != 0.5


def test_training_leaves_the_fingerprint_of_a_model_given_to_be_found(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.run()
    assert trainer.model.fingerprint == KVModel.load(tmp_path).fingerprint


# -- damage --------------------------------------------------------------------------------------


def forged(path: Path, **metadata: str) -> None:
    tensors = load_file(path)
    save_file(tensors, str(path), metadata=metadata or None)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    make_trainer(tmp_path)._save_checkpoint()
    path = tmp_path / CHECKPOINT
    whole = path.read_bytes()
    run = json.dumps(make_trainer(tmp_path)._run)

    def refused(match: str = "no checkpoint that can be read") -> None:
        with pytest.raises(ParameterError, match=f"{CHECKPOINT}: {match}"):
            make_trainer(tmp_path)
        path.write_bytes(whole)

    for size in (0, 7, len(whole) // 2):
        path.write_bytes(whole[:size])
        refused()
    forged(path)
    refused()
    forged(path, run="[" * 100_000, step="1")
    refused()
    forged(path, run=run, step="one")
    refused()
    tensors = load_file(path)
    tensors["weight/links/embeddings"] = tensors["weight/links/embeddings"][1:].contiguous()
    save_file(tensors, str(path), metadata={"run": run, "step": "1"})
    refused(r"weight/links/embeddings of shape \[11, 64\], expected .* \[12, 64\]")
    del tensors["weight/links/embeddings"]
    save_file(tensors, str(path), metadata={"run": run, "step": "1"})
    refused()
    assert make_trainer(tmp_path).step == 0


# -- nothing to learn from -----------------------------------------------------------------------


@pytest.mark.parametrize("changed", [{}, FROZEN])
def test_a_training_that_diverges_writes_nothing(tmp_path: Path, changed: dict[str, Any]) -> None:
    rates = {"learning_rate": 1e30, "link_learning_rate": 1e30, "warmup_steps": 0}
    trainer = make_trainer(tmp_path, **changed, **rates)
    remedy = "diverged; start a new run with a lower learning rate"
    with pytest.raises(ParameterError, match=remedy):
        trainer.run()
    assert not (tmp_path / FILE_NAME).exists()


def test_weights_beyond_all_numbers_are_not_kept(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    weight = trainer._trained["links/embeddings"]
    weight.data[0, 0] = float("inf")
    with pytest.raises(ParameterError, match="links/embeddings is no longer finite"):
        trainer._save_checkpoint()
    assert not (tmp_path / CHECKPOINT).exists()


def test_a_step_without_links_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **FROZEN)
    items = [replace(one, texts=("a b",)) for one in trainer.source.held_out(3)]
    trainer.source.draw = lambda *_: items  # type: ignore[method-assign]
    with (
        training_mode(trainer.model, False),
        pytest.raises(ParameterError, match="step 0 has nothing to learn from"),
    ):
        trainer.advance()


# -- questions that quote ------------------------------------------------------------------------
