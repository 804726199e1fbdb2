"""Models whose prompts are computed as wholes: a kept beginning, continued, is full prefill."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrag.errors import UnsupportedModelError
from kvrag.models import proof
from kvrag.models.families import WHOLE
from kvrag.models.kv_model import KVModel, State, WholeModel
from tests.support.models import VOCAB_SIZE, WHOLE_FAMILIES, make_model, make_tokenizer
from tests.support.properties import every

NUM_TOKENS, NUM_MORE = 600, 12
"""More than the states' own blocks have, and past the windows."""


@functools.cache
def model_of(family: str) -> WholeModel:
    model = KVModel.load(make_model(family), tokenizer=make_tokenizer())
    assert isinstance(model, WholeModel)
    return model


def test_every_family_is_tested() -> None:
    assert WHOLE_FAMILIES.keys() == WHOLE.keys()


@pytest.mark.parametrize("family", every(2, WHOLE_FAMILIES))
@torch.no_grad()
def test_a_continued_beginning_equals_transformers_full_prefill(family: str) -> None:
    model = model_of(family)
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB_SIZE, (1, NUM_TOKENS + NUM_MORE), generator=drawn)
    tokens = ids[0].tolist()
    kept = State()
    model.read(kept, tokens[:300])
    before = kept.size_bytes
    state = kept.copy()
    logits = [model.read(state, tokens[300:NUM_TOKENS])]
    logits += [model.read(state, [one]) for one in tokens[NUM_TOKENS:-1]]
    plain: Any = model.hf
    expected = plain(input_ids=ids).logits[0]
    spread = float(expected.std())
    for found, row in zip(logits, range(NUM_TOKENS - 1, len(tokens) - 1), strict=True):
        assert float((found - expected[row]).abs().max()) < 1e-4 * spread
        assert int(found.argmax()) == int(expected[row].argmax())
    # What was kept is as it was, and may be continued otherwise.
    assert (len(kept.token_ids), kept.size_bytes) == (300, before)
    other = model.read(kept, tokens[NUM_TOKENS:])
    assert float((other - expected[-1]).abs().max()) > 1e-2 * spread
    joined = torch.cat([ids[:, :300], ids[:, NUM_TOKENS:]], 1)
    assert float((other - plain(input_ids=joined).logits[0, -1]).abs().max()) < 1e-4 * spread


def test_what_needs_the_kv_of_chunks_is_refused_by_name() -> None:
    model = model_of("lfm2")
    for use in (lambda: model.spec, lambda: KVModel(model.hf, make_tokenizer())):
        with pytest.raises(UnsupportedModelError, match="'lfm2' has no KV of chunks: layers of it"):
            use()


def test_a_model_that_does_not_continue_exactly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("lfm2").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)

    def forgets(self: State) -> State:
        return State(None, self.token_ids)

    monkeypatch.setattr(State, "copy", forgets)
    monkeypatch.setattr(proof, "_is_known", lambda _: False)
    with pytest.raises(UnsupportedModelError, match=r"'lfm2' is not supported.*beginning is off"):
        KVModel.load(tmp_path)


def test_rounding_of_answers_is_nothing_that_a_proof_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("lfm2").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(proof, "_remember", lambda *_: None)
    for compute in ("int4", "bfloat16"):
        loaded = KVModel.load(tmp_path / "model", compute=compute)
        assert loaded.compute == compute
        (found,), _ = loaded.prove()
        assert found.figure < found.bound == 1e-4


def test_a_state_counts_the_memory_of_its_tensors() -> None:
    rows = torch.zeros(6, 4)
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=rows[:2], states={0: rows[2:], 1: None})])
    assert State(cache).size_bytes == rows.nbytes


def test_what_was_proven_counts_for_its_device_and_kernels_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hf, runs = SimpleNamespace(config=SimpleNamespace(model_type="lfm2")), []

    def require(device: str) -> int:
        model: Any = SimpleNamespace(hf=hf, device=torch.device(device))
        good = [proof.Check("loaded", "all", 0.0, 1.0)], ""
        proof.require(model, "weights", lambda: runs.append(device) or good)
        return len(runs)

    assert [require("cpu"), require("cpu"), require("cuda"), require("cuda")] == [1, 1, 2, 2]
    of = proof._version
    monkeypatch.setattr(proof, "_version", lambda name: "1.4" if "conv1d" in name else of(name))
    assert [require("cuda"), require("cuda")] == [3, 3]
