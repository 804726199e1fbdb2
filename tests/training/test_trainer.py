"""The training script: reproducible, and a run that stops goes on as if it had not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrag_train.checkpoint import save_checkpoint
from kvrag_train.curriculum import STAGES
from kvrag_train.growth import grow
from kvrag_train.tiny import Trainer, TrainingOptions


def small_run(folder: Path) -> Trainer:
    options = TrainingOptions(
        folder, rows=2, questions=3, copying_rows=2, hidden_size=32, num_layers=1, steps=8, twins=""
    )
    return Trainer(options)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, stage: int) -> None:
    first = small_run(tmp_path)
    first.progress.copying_done, first.progress.stage = 0, stage
    first.advance()
    save_checkpoint(first.checkpoint, first.model, first.optimizer, first.progress)
    first.advance()
    second = small_run(tmp_path)
    assert second.progress.step == 1
    second.advance()
    assert torch.equal(weights(first), weights(second))


def test_a_new_run_goes_on_from_trained_weights(tmp_path: Path) -> None:
    first = small_run(tmp_path / "first")
    first.model.save_pretrained(tmp_path / "weights")
    options = replace(first.options, out=tmp_path / "second", seed=1)
    second = Trainer(replace(options, start=str(tmp_path / "weights")))
    assert torch.equal(weights(first), weights(second))
    assert second.progress.stage == len(STAGES) - 1
    assert not torch.equal(weights(first), weights(Trainer(options)))


def test_the_first_part_leaves_out_the_last_stage(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    first = Trainer(replace(run.options.first_part(), rows=2, questions=3))
    assert first.options.out.parent == tmp_path
    first.progress.copying_done, first.progress.stage = 0, len(STAGES) - 2
    for _ in range(200):
        first._note(copying=False, accuracy=1.5)
    assert first.progress.stage == len(STAGES) - 2


def test_a_part_goes_on_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    first = small_run(tmp_path / "first")
    save_checkpoint(first.checkpoint, first.model, first.optimizer, first.progress)
    second = Trainer(replace(first.options, out=tmp_path, seed=1, start=str(tmp_path / "first")))
    assert torch.equal(weights(first), weights(second))


def test_a_grown_model_computes_what_it_did(tmp_path: Path) -> None:
    options = TrainingOptions(tmp_path, hidden_size=32, num_layers=3)
    small = Trainer(options).model
    large = Trainer(replace(options, num_layers=5)).model
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    ids = torch.arange(40).reshape(2, 20)
    for place, new in ((None, (3, 4)), (2, (2, 3))):
        large.load_state_dict(grow(small.state_dict(), [1, 2], place))
        assert torch.equal(small(ids).logits, large(ids).logits)
        for layer, twin in zip(new, (1, 2), strict=True):
            theirs = small.model.layers[twin].self_attn.q_proj.weight
            assert torch.equal(large.model.layers[layer].self_attn.q_proj.weight, theirs)
