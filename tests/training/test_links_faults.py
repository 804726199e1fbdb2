"""What goes wrong in training links is named, and nothing is gone on from that is not the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvrag.errors import ParameterError
from kvrag.fusion.links import FILE_NAME, LinkTokens
from kvrag.models.kv_model import KVModel
from kvrag.testing.bench_top import TEXTS
from kvrag_train.links.batch import Packer
from kvrag_train.links.data import FileSource
from kvrag_train.links.options import LinkTrainingOptions
from kvrag_train.links.student import training_mode
from kvrag_train.links.trainer import CHECKPOINT, LinkTrainer
from tests.support.models import make_model, make_tokenizer
from tests.training.test_links import header_of, make_trainer, one_thread, options, questions

__all__ = ["one_thread"]

FROZEN: dict[str, Any] = {"mode": "frozen", "way": "adapter"}


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


def test_data_changed_under_its_name_is_noticed(tmp_path: Path) -> None:
    trained_on(tmp_path, questions(12))._save_checkpoint()
    with pytest.raises(ParameterError, match="of another run: data_digest"):
        trained_on(tmp_path, questions(11))


def test_the_order_of_documents_is_part_of_a_run(tmp_path: Path) -> None:
    make_trainer(tmp_path, keep_order=True)._save_checkpoint()
    with pytest.raises(ParameterError, match="of another run: keep_order True, asked for False"):
        make_trainer(tmp_path)


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


def test_a_file_in_the_folders_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ParameterError, match="no folder can be made"):
        make_trainer(tmp_path / "file")


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


def test_questions_over_documents_too_short_to_be_found_are_left_out() -> None:
    short = [replace(one, texts=("a b",)) for one in questions()]
    with pytest.raises(ParameterError, match=r"found 0 of 12 with a document of at least 8"):
        FileSource(short, make_tokenizer())
    mixed = FileSource([*short, *questions()], make_tokenizer())
    items = mixed.held_out(99)
    assert items
    assert all(one.texts != ("a b",) for one in items)


def test_a_step_without_links_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **FROZEN)
    items = [replace(one, texts=("a b",)) for one in trainer.source.held_out(3)]
    trainer.source.draw = lambda *_: items  # type: ignore[method-assign]
    with (
        training_mode(trainer.model, False),
        pytest.raises(ParameterError, match="step 0 has nothing to learn from"),
    ):
        trainer.advance()


def test_plain_prompts_alone_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"plain_share 0.99 of 2 rows a step leaves none"):
        LinkTrainingOptions(Path(), rows=2, plain_share=0.99)
    # Frozen models have no plain rows.
    LinkTrainingOptions(Path(), rows=2, plain_share=0.99, **FROZEN)


# -- questions that quote ------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["{0} Is that true, {1}?", "{1} said: {0} Is that true?"])
def test_questions_may_quote_their_documents(tmp_path: Path, question: str) -> None:
    asked = [
        replace(one, texts=TEXTS, question=question.format(TEXTS[number % 2], number))
        for number, one in enumerate(questions())
    ]
    trainer = trained_on(tmp_path, asked, **FROZEN)
    packer = Packer(trainer.model, header_of(trainer.options, trainer.model))
    (item,) = trainer.source.draw(Random(0), 1, 7)
    assert len(item.prompts) == 7
    batch = packer.pack([item], linked=True)
    # The documents are stored once each; what the questions quote is computed.
    assert len(batch.chunk_ids) == len(TEXTS)
    trainer.run()
    assert LinkTokens.load(tmp_path / FILE_NAME).header.num_links == 2
