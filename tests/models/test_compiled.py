"""All layers of a step in one call, against the layers' own modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from kvrag.kvcache import FusedKV
from kvrag.models import compiled as compiled_module
from kvrag.models.attention import MassObserver, RowMask
from kvrag.models.batch import BatchRow
from kvrag.models.compiled import CompiledLayers
from kvrag.models.kv_model import KVModel
from kvrag.models.linears import multiplies_squares
from kvrag.models.rows import Attending, RowPass
from kvrag.native.kernels import REFERENCE, instruction_set
from kvrag.native.linear import MAX_ROWS
from tests.support.models import make_model, make_tokenizer
from tests.support.properties import few

FAMILIES = ["gemma3", "mistral-sliding", "qwen3", "llama", "llama-yarn", "qwen2", "gemma2"]
FEW = few(3, FAMILIES)

pytestmark = [
    pytest.mark.skipif(instruction_set() == REFERENCE, reason="nothing is compiled"),
    pytest.mark.usefixtures("isa"),
]


def model_of(family: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> KVModel:
    hf = make_model(family)
    torch.manual_seed(3)
    for parameter in hf.parameters():
        if parameter.dim() == 1:  # biases and norms are 0 or 1
            nn.init.normal_(parameter, 0.5, 0.2)
    return KVModel(hf.to(dtype), make_tokenizer(), **more)


def rows_of(model: KVModel, lengths: Sequence[int] = (20, 37, 5)) -> list[BatchRow]:
    """Return prompts' next rows, each but the first after a gap in its positions."""
    rows = []
    for number, length in enumerate(lengths):
        fused = FusedKV(model.spec, length, length + 4)
        torch.manual_seed(number)
        fused.storage.normal_()
        rows.append(BatchRow(fused, fused.addresses, length, length + 3 * number))
    return rows


def steps(model: KVModel, rows: Sequence[BatchRow], num_steps: int = 3) -> torch.Tensor:
    """Return the logits of some steps ``[num_steps, B, vocabulary]``."""
    logits = []
    with model.computing_rows():
        for step in range(num_steps):
            at = [
                replace(row, place=row.place + step, position=row.position + step) for row in rows
            ]
            tokens = [(7 * step + 3 * number) % 300 for number in range(len(rows))]
            logits.append(model.forward_each(tokens, at))
    return torch.stack(logits)


def by_modules(model: KVModel, rows: Sequence[BatchRow]) -> torch.Tensor:
    model._compiled = None
    return steps(model, rows)


def by_kernels(model: KVModel, rows: Sequence[BatchRow]) -> torch.Tensor:
    model.begin_answer()
    assert model._compiled is not None
    with patch.object(model.rows, "forward_each", side_effect=AssertionError("a module ran")):
        return steps(model, rows)


def assert_no_further_off(found: torch.Tensor, expected: torch.Tensor, truth: torch.Tensor) -> None:
    """Compare what was rounded to few bits by its distance to what was not.

    Sums in another order end on the other side of a rounding now and then. In 8 bits that alone
    moves logits by a tenth of their spread, so kernels and modules are not compared directly.
    """
    assert found.dtype == expected.dtype
    assert (found - truth).square().mean() <= 1.5 * (expected - truth).square().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compute_what_modules_do(family: str) -> None:
    model = model_of(family)
    ours, theirs = rows_of(model), rows_of(model)
    found, expected = by_kernels(model, ours), by_modules(model, theirs)
    assert found.dtype == expected.dtype
    tolerance = 1e-5
    assert ((found - expected).abs() <= tolerance * expected.std()).all()
    for one, other in zip(ours, theirs, strict=True):
        wrote = slice(one.place, one.place + 3)
        for mine, others in zip(
            one.fused.keys + one.fused.values, other.fused.keys + other.fused.values, strict=True
        ):
            difference = (mine[:, :, wrote] - others[:, :, wrote]).abs().max()
            assert difference <= tolerance * others.std()
            # Nothing else is written.
            assert torch.equal(mine[:, :, : one.place], others[:, :, : one.place])
            assert torch.equal(mine[:, :, wrote.stop :], others[:, :, wrote.stop :])


@pytest.mark.parametrize(
    ("dtype", "compute"),
    [
        (torch.bfloat16, None),
        (torch.bfloat16, "int8"),
        (torch.float32, "int8"),
        (torch.float32, "int4"),
    ],
)
@pytest.mark.parametrize("family", FEW)
def test_in_few_bits_kernels_are_no_further_off_than_modules(
    family: str, dtype: torch.dtype, compute: str | None
) -> None:
    model = model_of(family, dtype, compute=compute)
    exact = KVModel(copy.deepcopy(model.hf).float(), make_tokenizer())
    rows = rows_of(model)
    copies = [
        BatchRow(
            one := FusedKV(exact.spec, row.place, row.fused.capacity),
            one.addresses,
            row.place,
            row.position,
        )
        for row in rows
    ]
    for row, other in zip(rows, copies, strict=True):
        other.fused.storage.copy_(row.fused.storage)
    truth = by_modules(exact, copies)
    assert_no_further_off(by_kernels(model, rows), by_modules(model, rows_of(model)), truth)


@pytest.mark.parametrize("compute", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_among_others_is_a_row_alone(dtype: torch.dtype, compute: str | None) -> None:
    model = model_of("qwen3", dtype, compute=compute)
    lengths = [3 * number + 2 for number in range(MAX_ROWS)]
    tokens = list(range(40, 40 + MAX_ROWS))
    model.begin_answer()
    with model.computing_rows():
        together = model.forward_each(tokens, rows_of(model, lengths))
        alone = [
            model.forward_each([token], [row])
            for token, row in zip(tokens, rows_of(model, lengths), strict=True)
        ]
    assert torch.equal(torch.cat(alone), together)


class _OtherLinear(nn.Linear):
    pass


def _nothing(*_: Any) -> None: ...


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda layer: layer.mlp.register_forward_hook(_nothing),
    "pre-hook": lambda layer: layer.self_attn.q_proj.register_forward_pre_hook(_nothing),
    "forward": lambda layer: setattr(layer.input_layernorm, "forward", _nothing),
    "more": lambda layer: setattr(layer.self_attn, "more", nn.Identity()),
    "class": lambda layer: setattr(layer.self_attn.o_proj, "__class__", _OtherLinear),
    "activation": lambda layer: setattr(layer.mlp, "act_fn", nn.ReLU()),
    "hook of activation": lambda layer: layer.mlp.act_fn.register_forward_hook(_nothing),
    "transposed": lambda layer: _changed(layer.self_attn.k_proj, lambda one: one.T.contiguous().T),
    "widened": lambda layer: _changed(layer.mlp.up_proj, torch.Tensor.double),
    "narrow": lambda layer: _changed(layer.input_layernorm, lambda one: one[:1].clone()),
    "training": lambda layer: layer.train(),
}


def _changed(part: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    part.weight = nn.Parameter(change(part.weight.detach()))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_layers_that_are_not_known_stay_modules(change: Callable[[Any], None]) -> None:
    model = model_of()
    change(model.hf.model.layers[1])
    model.begin_answer()
    assert model._compiled is None


@pytest.mark.parametrize(
    "decorate",
    [
        lambda _: lambda patched: patched,
        wraps,
        lambda forward: lambda patched: torch.no_grad()(wraps(forward)(patched)),
    ],
)
def test_patched_classes_and_global_hooks_stay_modules(
    decorate: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    for part in ("self_attn", "mlp", "input_layernorm", "self_attn.q_proj", "mlp.act_fn", ""):
        kind = type(model.hf.model.layers[0].get_submodule(part))
        with monkeypatch.context() as patching:
            forward = kind.forward

            @decorate(forward)
            def patched(*given: Any, _forward: Any = forward, **named: Any) -> Any:
                return _forward(*given, **named)

            patching.setattr(kind, "forward", patched)
            model.begin_answer()
            assert model._compiled is None, part
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        model.begin_answer()
        assert model._compiled is None
    finally:
        hook.remove()
    model.begin_answer()
    assert model._compiled is not None


def test_what_is_not_known_stays_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families, a precision of its own, and a kvrag without compiled kernels."""
    families = ("phi3", "gpt2", "gpt-neox", "falcon-alibi", "bloom", "mpt")
    models = [KVModel(make_model(family), make_tokenizer()) for family in families]
    for model in (*models, model_of(compute="bfloat16"), model_of()):
        if model.compute == "float32" and model.decoder.config.model_type == "llama":
            monkeypatch.setattr(compiled_module, "IS_COMPILED", False)
        model.begin_answer()
        assert model._compiled is None


@torch.no_grad()
@pytest.mark.parametrize("compute", [None, "int8", "int4"])
def test_changed_weights_count_from_the_next_answer_on(compute: str | None) -> None:
    model, other = model_of(compute=compute), model_of(compute=compute)
    before = by_kernels(model, rows_of(model))
    for one in (model, other):
        layer: Any = one.hf.model.layers[0]
        layer.mlp.down_proj.weight.mul_(3)
        layer.self_attn.v_proj.weight = nn.Parameter(-layer.self_attn.v_proj.weight)
    # The other had these weights before anything was computed.
    found, expected = (by_kernels(one, rows_of(one)) for one in (model, other))
    assert not torch.allclose(found, before, atol=1e-2)
    assert torch.equal(found, expected)


def layers_of_prompt(
    model: KVModel,
    compiled: CompiledLayers | None,
    num_rows: int = 4,
    *,
    first: int = 0,
    writes: bool = True,
    **attending: Any,
) -> tuple[torch.Tensor, FusedKV, list[torch.Tensor]]:
    """Return some rows of a prompt after all layers, its KV, and what its keys get.

    No row is before `first`.
    """
    fused = FusedKV(model.spec, 70, 74)
    torch.manual_seed(0)
    fused.storage.normal_()
    rows = first + torch.randperm(70 - first)[:num_rows].sort().values
    # A gap after row 40.
    tables = model.tables(70, [*range(40), *range(43, 73)])
    noted: list[torch.Tensor] = []

    def note(mask: RowMask, mass: torch.Tensor, value: torch.Tensor) -> None:
        assert mass.shape == value.shape[:2]
        noted.append(nn.functional.pad(mass, (mask.first_key, 70 - mask.first_key - mass.shape[1])))

    observer = MassObserver(20, note)
    with model.computing_rows():
        hidden = model.embed(torch.arange(num_rows) + 9)
        of = RowPass(rows, fused, tables, compiled)
        how = Attending(**{"observer": observer, **attending})
        for layer_index in range(model.spec.num_layers):
            model.rows.forward(layer_index, hidden, of, attending=how, writes=writes)
    return hidden, fused, noted


@pytest.fixture
def no_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[KVModel], None]:
    def forbid(model: KVModel) -> None:
        monkeypatch.setattr(
            model.rows, "_run", lambda *_: pytest.fail("a module ran"), raising=True
        )

    return forbid


@pytest.mark.parametrize("first", [0, 35])  # windows are shorter
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compute_rows_of_a_prompt_as_modules_do(
    family: str, first: int, no_modules: Callable[[KVModel], None]
) -> None:
    model = model_of(family)
    expected, theirs, their_mass = layers_of_prompt(model, None, 16, first=first)
    no_modules(model)
    found, ours, our_mass = layers_of_prompt(model, model.compile(), 16, first=first)
    assert ((found - expected).abs() <= 1e-5 * expected.std()).all()
    assert (ours.storage - theirs.storage).abs().max() <= 1e-5 * theirs.storage.std()
    assert len(our_mass) == len(their_mass) == model.spec.num_layers
    for one, other in zip(our_mass, their_mass, strict=True):
        assert (one - other).abs().max() <= 1e-5 * 16


@pytest.mark.parametrize(
    ("dtype", "compute", "num_rows", "first"),
    [
        (torch.bfloat16, None, 33, 0),
        (torch.bfloat16, None, 70, 0),
        (torch.float32, "int8", 70, 0),
        (torch.float32, "int8", 30, 35),
    ],
)
@pytest.mark.parametrize("family", FEW)
def test_in_few_bits_many_rows_are_no_further_off(
    family: str,
    dtype: torch.dtype,
    compute: str | None,
    num_rows: int,
    first: int,
    no_modules: Callable[[KVModel], None],
) -> None:
    # In 8 bits, kernels compute any number of rows.
    if compute is None and not multiplies_squares(dtype):
        pytest.skip("no matrix unit")
    model = model_of(family, dtype, compute=compute)
    exact = KVModel(copy.deepcopy(model.hf).float(), make_tokenizer())
    truth, kv, mass = layers_of_prompt(exact, None, num_rows, first=first)
    expected, theirs, their_mass = layers_of_prompt(model, None, num_rows, first=first)
    no_modules(model)
    found, ours, our_mass = layers_of_prompt(model, model.compile(), num_rows, first=first)
    assert_no_further_off(found, expected, truth)
    assert_no_further_off(ours.storage, theirs.storage, kv.storage)
    assert len(our_mass) == len(their_mass) == model.spec.num_layers
    assert_no_further_off(*(torch.stack(one) for one in (our_mass, their_mass, mass)))


def test_rows_that_attend_otherwise_stay_with_modules() -> None:
    model = model_of()
    compiled = model.compile()
    others: list[dict[str, Any]] = [
        {"visible": torch.ones(4, 70, dtype=torch.bool).tril(60)},
        {"changed": lambda *_: None},
        {"observer": lambda *_: None},
        {"stops": True},
        {"writes": False},
    ]
    with patch.object(CompiledLayers, "run_rows", side_effect=AssertionError("kernels ran")):
        for attending in others:
            found, *_ = layers_of_prompt(model, compiled, **attending)
            expected, *_ = layers_of_prompt(model, None, **attending)
            assert torch.equal(found, expected)
        # Too many for weights as they are.
        layers_of_prompt(model, compiled, 17)
        with pytest.raises(AssertionError, match="kernels ran"):
            layers_of_prompt(model, compiled)
