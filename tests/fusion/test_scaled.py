"""Temperature and scale of reused keys: against attention written out, fusing and decoding."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.fusion.fuser import FusedPrompt, fuse
from kvrag.fusion.policies.none import NonePolicy
from kvrag.fusion.repair import Repair, make_repair
from kvrag.ingest.index import Index
from kvrag.kvcache import FusedKV
from kvrag.models import headwise
from kvrag.models.caches import CACHE_ARGUMENT, FusedCache
from kvrag.models.kv_model import KVModel
from kvrag.testing.bench_top import TEXTS, Bench, relative_difference
from tests.support.models import make_model, make_tokenizer

FAMILIES = ("llama", "llama-yarn", "mistral-sliding", "qwen3", "phi3", "gemma3", "gpt-neox")
ORDER = (2, 0, 3, 1)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(KVModel(make_model(), make_tokenizer()))


def scaled(bench: Bench, spec: str, prompt: str | None = None) -> FusedPrompt:
    return bench.fuse(prompt or "Context:\n" + bench.prompt(*ORDER), make_repair(spec))


@contextmanager
def reference_attention(
    bench: Bench, inexact: torch.Tensor, temperature: float, scale: float
) -> Iterator[None]:
    """Give the model an attention of this test's own, over whole rows of scores.

    Weights: ``exp(s / T) * Z ** (S - 1)`` of reused keys, Z their sum of ``exp(s / T)``, and
    ``exp(s)`` of others, over the sum of all.
    """

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1).double() for x in (key, value))
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query.double() @ keys.transpose(2, 3) * factor
        seen = (mask[..., : keys.shape[2]] == 0).double()
        reused = torch.zeros(keys.shape[2], dtype=torch.float64)
        mine = inexact[: len(reused)].double()
        reused[: len(mine)] = mine
        cooled = (scores / temperature).exp() * seen * reused
        total = cooled.sum(-1, keepdim=True)
        weights = cooled * torch.where(total > 0, total ** (scale - 1), 0.0)
        weights = weights + scores.exp() * seen * (1 - reused)
        output = (weights / weights.sum(-1, keepdim=True)) @ values
        return output.transpose(1, 2).to(query.dtype), None

    AttentionInterface.register("reference_of_test", attention)
    AttentionMaskInterface.register("reference_of_test", eager_mask)
    config = bench.model.hf.config
    before, config._attn_implementation = config._attn_implementation, "reference_of_test"
    try:
        yield
    finally:
        config._attn_implementation = before


def inexact_rows(bench: Bench, prompt: str) -> torch.Tensor:
    layout = bench.lay_out(prompt)
    rows = torch.zeros(len(layout.token_ids), dtype=torch.bool)
    for span in layout.spans:
        if not layout.is_exact(span):
            rows[span.prompt_start : span.prompt_end] = True
    return rows


@torch.no_grad()
def reference(bench: Bench, prompt: str, temperature: float, scale: float) -> torch.Tensor:
    """Return the last logits, fresh rows fed one by one over the stored keys and values."""
    layout = bench.lay_out(prompt)
    num_tokens = len(layout.token_ids)
    rows = torch.zeros(num_tokens, dtype=torch.bool)
    for span in layout.spans:
        rows[span.prompt_start : span.prompt_end] = True
    # Stored rows as plain reuse has them; the others are overwritten one after the other.
    buffer = bench.fuse(prompt, NonePolicy()).kv
    logits = torch.empty(0)
    with reference_attention(bench, inexact_rows(bench, prompt), temperature, scale):
        for position in (~rows).nonzero()[:, 0].tolist():
            logits = bench.model.hf(
                input_ids=torch.tensor([[layout.token_ids[position]]]),
                **{CACHE_ARGUMENT: FusedCache(buffer, position)},
                use_cache=True,
            ).logits[0, -1]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("temperature", "scale"), [(0.7, 1.0), (1.0, 0.8), (0.9, 1.3)])
def test_fusing_is_attention_as_written_out(family: str, temperature: float, scale: float) -> None:
    bench = Bench(KVModel(make_model(family), make_tokenizer()))
    prompt = "Context:\n" + bench.prompt(*ORDER)
    fused = scaled(bench, f"none:temperature={temperature}:scale={scale}", prompt)
    expected = reference(bench, prompt, temperature, scale)
    assert relative_difference(fused.logits, expected) < 1e-4
    plain = bench.fuse(prompt, NonePolicy())
    assert relative_difference(fused.logits, plain.logits) > 1e-3


def test_rows_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    spec = "deviation:temperature=0.8:scale=1.2"
    expected = scaled(bench, spec).logits
    monkeypatch.setattr(headwise, "_ROWS_AT_ONCE", 1)
    assert relative_difference(scaled(bench, spec).logits, expected) < 1e-4


def test_the_reference_itself_is_plain_attention_at_one_and_one(bench: Bench) -> None:
    prompt = "Context:\n" + bench.prompt(*ORDER)
    expected = bench.fuse(prompt, NonePolicy()).logits
    assert relative_difference(reference(bench, prompt, 1.0, 1.0), expected) < 1e-4


@pytest.mark.parametrize("policy", ["none", "deviation", "gradual", "query", "boundary"])
def test_one_and_one_is_the_policy_itself(bench: Bench, policy: str) -> None:
    fused = scaled(bench, f"{policy}:temperature=1:scale=1")
    assert torch.equal(fused.logits, scaled(bench, policy).logits)
    assert fused.scaled == ()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_goes_on_with_the_same_attention(family: str, implementation: str) -> None:
    """Feeding tokens behind a fused prompt is fusing the longer prompt."""
    bench = Bench(KVModel(make_model(family), make_tokenizer()))
    bench.model.hf.config._attn_implementation = implementation
    spec = "none:temperature=0.8:scale=1.2"
    prompt = "Context:\n" + bench.prompt(*ORDER)
    layout = bench.lay_out(prompt)
    tail = 5
    short = layout.__class__(
        layout.token_ids[:-tail], layout.spans, layout.prefix_length, layout.has_prefix
    )
    num_short = len(short.token_ids)
    buffer = FusedKV(bench.model.spec, num_short, num_short + tail)
    fused = fuse(bench.model, short, bench.open_kv, make_repair(spec), buffer)
    expected = scaled(bench, spec, prompt).logits
    for steps in ((tail,), (1,) * tail):
        cache = FusedCache(buffer, num_short)
        begin = num_short
        for step in steps:
            fed = torch.tensor([layout.token_ids[begin : begin + step]])
            with torch.no_grad(), fused.answering(bench.model):
                logits = bench.model.hf(fed, **{CACHE_ARGUMENT: cache}, use_cache=True).logits[
                    0, -1
                ]
            begin += step
        assert relative_difference(logits, expected) < 1e-4
    assert bench.model.hf.config._attn_implementation == implementation
    with torch.no_grad():
        fed = torch.tensor([layout.token_ids[num_short:]])
        plain = bench.model.hf(
            fed, **{CACHE_ARGUMENT: FusedCache(buffer, num_short)}, use_cache=True
        )
    assert relative_difference(plain.logits[0, -1], expected) > 1e-4


def test_an_engine_generates_with_it(tmp_path: Path, bench: Bench) -> None:
    index = Index.create(tmp_path, model=bench.model, embedding="hashing", chunk_tokens=64)
    index.add([Document(f"{i}", text) for i, text in enumerate(TEXTS)])
    prompt = "\n\n".join([TEXTS[1], TEXTS[0], TEXTS[2], "Question: who?"])
    spec = "none:temperature=0.3:scale=1.5"
    engine = KVEngine(index)
    answer = engine.generate(prompt, policy=spec, max_tokens=6)
    assert answer.report.policy == "none(temperature=0.3, scale=1.5)"
    fused = engine.fuse(prompt, policy=spec, max_tokens=6)
    token = int(fused.logits.argmax())
    said = [token]
    cache = FusedCache(fused.kv, fused.kv.num_tokens)
    with torch.no_grad(), fused.answering(index.model):
        while len(said) < 6:
            output = index.model.hf(
                torch.tensor([said[-1:]]), **{CACHE_ARGUMENT: cache}, use_cache=True
            )
            said.append(int(output.logits[0, -1].argmax()))
    assert answer.text == index.tokenizer.decode(said, skip_special_tokens=True)


def test_what_is_right_is_attended_to_as_ever(bench: Bench) -> None:
    """One chunk where it was encoded, and rows computed again, know no temperature."""
    spec = "temperature=0.5:scale=2"
    alone = bench.prompt(0)
    exact = scaled(bench, f"none:{spec}", alone)
    assert torch.equal(exact.logits, bench.fuse(alone, NonePolicy()).logits)
    whole = scaled(bench, f"deviation:ratio=1:{spec}")
    prompt = "Context:\n" + bench.prompt(*ORDER)
    assert relative_difference(whole.logits, bench.plain_logits(prompt)) < 1e-4
    some = scaled(bench, f"deviation:ratio=0.3:{spec}")
    rows = inexact_rows(bench, prompt)
    for layer_index, keys in enumerate(some.scaled):
        expected = rows.clone()
        expected[some.picks[layer_index]] = False
        assert torch.equal(keys.reused, expected)


def test_other_forwards_are_left_alone(bench: Bench) -> None:
    fused = scaled(bench, "none:temperature=0.5")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = bench.model.hf(ids).logits
    found = []

    def forward() -> None:
        with torch.no_grad():
            found.append(bench.model.hf(ids).logits)

    prompt = bench.prompt(3, 1)
    (kv,) = bench.model.prefill((0,), [[5, 6, 7]])
    logits = bench.fuse(prompt, NonePolicy()).logits
    with fused.answering(bench.model):
        # Nor is what this thread indexes, fuses or computes meanwhile touched by it.
        assert torch.equal(bench.model.prefill((0,), [[5, 6, 7]])[0].values, kv.values)
        assert torch.equal(bench.fuse(prompt, NonePolicy()).logits, logits)
        forward()
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("none:temperature=0", "expected 0.0001 to 10,000"),
        ("none:temperature=-1", "expected 0.0001 to 10,000"),
        ("none:temperature=nan", "expected 0.0001 to 10,000"),
        ("none:temperature=inf", "expected 0.0001 to 10,000"),
        ("none:temperature=1e-320", "expected 0.0001 to 10,000"),
        ("none:scale=-0.1", "expected 0 to 10,000"),
        ("none:scale=inf", "expected 0 to 10,000"),
        ("none:scale=1e300", "expected 0 to 10,000"),
        ("none:temperature=warm", "has the wrong type"),
        ("none:heat=1", "takes no heat; it takes temperature, scale"),
    ],
)
def test_values_out_of_range_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make_repair(spec)


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
@pytest.mark.parametrize("scale", [0, 1e4])
def test_the_ends_of_the_ranges_stay_finite(bench: Bench, temperature: float, scale: float) -> None:
    fused = scaled(bench, f"none:temperature={temperature}:scale={scale}")
    assert bool(fused.logits.isfinite().all())


def test_what_it_is_called() -> None:
    assert str(make_repair("none:scale=0.9")) == "none(temperature=1.0, scale=0.9)"
    named = make_repair("query:ratio=0.1:temperature=0.9:scale=0.8")
    assert isinstance(named, Repair)
    assert named.name == "query"
    assert str(named).startswith("query(ratio=0.1")
    assert str(named).endswith("temperature=0.9, scale=0.8)")
