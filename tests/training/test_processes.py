"""Training in several processes is training in one, whether each holds the model or a part of it.

Two processes train all cases on the CPU, one after another; what they come to is compared with
what one comes to here.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvrag.errors import ParameterError
from kvrag.fusion.links import find_links
from kvrag.models.kv_model import KVModel
from kvrag_train.links.processes import launched
from tests.support.models import make_model, make_tokenizer
from tests.support.servers import free_port
from tests.training.shared_run import ANSWERS, train
from tests.training.test_links import questions

ROOT = Path(__file__).parents[2]

# Of 3 rows a step one is a plain prompt when the model learns: one process has none of its own.
CASES: dict[str, dict[str, Any]] = {
    "tuned": {},
    "tied": {"tied": True, "gradient_checkpointing": True, "rows": 5},
    "kept": {"frees_layers": False},
    "distilled": {"loss": "distill", "teacher_answers": True, "answer_tokens": 5},
    "adapter": {"mode": "frozen", "way": "adapter", "loss": "distill"},
    "embeddings": {"mode": "frozen", "way": "embeddings", "gradient_checkpointing": True},
}
WAYS = ("whole", "sharded")
STOPPED = 1


def environment(rank: int, port: int, **more: str) -> dict[str, str]:
    """Return what a launcher tells one of two processes."""
    own = {
        **{"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "ACCELERATE_USE_CPU": "true"},
    }
    return {**os.environ, **own, **more}


def run_two(arguments: list[str], **more: str) -> list[tuple[int, str, str]]:
    """Run a command in two processes and return their exit codes and what they wrote."""
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environment(rank, port, **more),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        written = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, *text) for p, text in zip(started, written, strict=True)]


@dataclass(frozen=True)
class Runs:
    """Folders of what one and two processes came to, and how the two ended."""

    alone: Path
    together: Path
    ends: list[tuple[int, str, str]]

    def told(self, name: str) -> list[dict[str, Any]]:
        return [json.loads((self.together / f"{name}-{i}.json").read_text()) for i in range(2)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    alone, together = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("together")
    plan: dict[str, Any] = {}
    for name, case in CASES.items():
        train(alone / name, case)
        for way in WAYS:
            plan[f"{name}-{way}"] = {**case, "sharded": way == "sharded"}
    # Begun by one process and gone on with by two, and the other way round.
    train(alone / "begun", {"stop": STOPPED})
    for way in WAYS:
        shutil.copytree(alone / "begun", together / f"resumed-{way}")
        plan[f"resumed-{way}"] = {"sharded": way == "sharded"}
    plan["begun-sharded"] = {"sharded": True, "stop": STOPPED}
    plan["bfloat16"] = {"sharded": True, "precision": "bfloat16"}
    plan["unlike"] = {"differs": True}
    plan["left"] = {"sharded": True, "leave": 1}
    path = together / "plan.json"
    path.write_text(json.dumps(plan))
    ends = run_two(["-m", "tests.training.shared_run", str(path)])
    assert all((together / f"bfloat16-{i}.json").exists() for i in range(2)), ends
    return Runs(alone, together, ends)


def log_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def assert_alike(found: Path, expected: Path, *, log: bool = True) -> None:
    """Compare logs, weights and moments; what comes out is named alike, and written once."""
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    if log:
        for record, other in zip(log_of(found), log_of(expected), strict=True):
            del record["seconds"], other["seconds"]
            assert record == pytest.approx(other, rel=1e-4, abs=2e-5)
    for name in (name for name in names if name.endswith(".safetensors")):
        tensors, others = load_file(found / name), load_file(expected / name)
        assert tensors.keys() == others.keys()
        for key, tensor in tensors.items():
            other = others[key]
            # A step moves a weight by up to its rate, 1e-3 and more.
            tolerance = 1e-3 * float(other.abs().max()) if key.startswith("exp") else 5e-5
            assert torch.allclose(tensor, other, rtol=0.0, atol=tolerance), key


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_come_to_what_one_comes_to(runs: Runs, case: str, way: str) -> None:
    assert_alike(runs.together / f"{case}-{way}", runs.alone / case)
    first, second = runs.told(f"{case}-{way}")
    assert first["scores"] == second["scores"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tuned", "adapter"])
def test_a_shared_model_is_held_in_parts(runs: Runs, case: str) -> None:
    told = runs.told(f"{case}-sharded")
    assert sum(one["held_weights"] for one in told) == told[0]["weights"]
    assert max(one["held_weights"] for one in told) < 0.6 * told[0]["weights"]
    is_tuned = case == "tuned"
    assert sum(one["held_moments"] for one in told) == is_tuned * told[0]["weights"]
    assert all(one["held_weights"] == one["weights"] for one in runs.told(f"{case}-whole"))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_one_process_is_gone_on_with_by_two(runs: Runs, way: str) -> None:
    assert [one["first"] for one in runs.told(f"resumed-{way}")] == [STOPPED, STOPPED]
    assert_alike(runs.together / f"resumed-{way}", runs.alone / "tuned", log=False)


@pytest.mark.slow
def test_a_run_of_two_processes_is_gone_on_with_by_one(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs.together / "begun-sharded", tmp_path / "run")
    assert train(tmp_path / "run", {})["first"] == STOPPED
    assert_alike(tmp_path / "run", runs.alone / "tuned", log=False)


@pytest.mark.slow
def test_a_shared_model_learns_in_bfloat16(runs: Runs) -> None:
    folder = runs.together / "bfloat16"
    for record, other in zip(log_of(folder), log_of(runs.alone / "tuned"), strict=True):
        assert record["loss/linked"] == pytest.approx(other["loss/linked"], rel=0.05)
        assert record["loss/linked"] != other["loss/linked"]
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {
        torch.float32
    }


@pytest.mark.slow
def test_processes_that_do_not_agree_are_told_so(runs: Runs) -> None:
    first, second = (one["refused"] for one in runs.told("unlike"))
    assert "do not agree (another one says in what)" in first
    assert "do not agree (seed 1, there 0)" in second


@pytest.mark.slow
def test_a_process_that_dies_ends_the_other(runs: Runs) -> None:
    (code, _, said), (left, _, _) = runs.ends
    assert left == 3
    assert code == 1
    assert "process 0 of 2 has lost another one" in said
    assert not (runs.together / "left" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_command_line_trains_in_two_processes(tmp_path: Path) -> None:
    """Launched with FSDP, one process loads the weights and one document is printed."""
    make_model(num_hidden_layers=2, tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    data = tmp_path / "questions.json"
    records = [
        {"question": one.question, "answers": one.answers, "ctxs": [{"text": t} for t in one.texts]}
        for one in questions(answers=ANSWERS)
    ]
    data.write_text(json.dumps(records))
    small = ["--steps", "2", "--rows", "3", "--questions", "2", "--links", "1"]
    ends = run_two(
        [
            *("-m", "kvrag", "train", "links", "--model", str(tmp_path / "model"), *small),
            *("--data", str(data), "--out", str(tmp_path / "out"), "--json"),
        ],
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_CPU_RAM_EFFICIENT_LOADING="true",
    )
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert json.loads(ends[0][1])["steps"] == 2
    assert ends[1][1] == ""
    written = KVModel.load(tmp_path / "out")
    assert written.hf.get_input_embeddings().weight is written.hf.get_output_embeddings().weight
    links = find_links(tmp_path / "out")
    links.check(written)


# -- launches that cannot be served --------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "found one: launch several"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP 1, not served here: add --fsdp_version 2"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed, .* use --use_fsdp --fsdp_version 2"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "--mixed_precision fp16.* --precision bfloat16"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
            "--fsdp_offload_params",
        ),
        ({"WORLD_SIZE": "2"}, "--device cuda:0 with 2 processes: .* leave --device out"),
    ],
)
def test_a_launch_that_cannot_be_served_is_refused(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], message: str
) -> None:
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ParameterError, match=message), launched("cuda:0"):
        pass


def test_without_accelerate_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with (
        pytest.raises(ParameterError, match=r"2 processes need accelerate: pip install 'kvrag\["),
        launched(None),
    ):
        pass
