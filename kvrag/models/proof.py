"""A self-test of a model: whether kvrag computes what Transformers does, and moves keys exactly.

It runs at the first use of a model whose type no test knows, over a small model of the same classes
with random weights, and then over the loaded weights. What passed is remembered by model type,
fingerprint, and what computes: versions, device, and packages whose kernels Transformers takes.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from kvrag import arguments
from kvrag.arguments import shown
from kvrag.errors import KVRagError, ParameterError, UnsupportedModelError
from kvrag.kvcache import FusedKV, packed
from kvrag.models.batch import BatchRow
from kvrag.models.caches import CaptureCache
from kvrag.models.families import INSTEAD, context_window
from kvrag.models.quantised import is_quantised
from kvrag.models.rows import RowPass
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag.process import working
from kvrag.regularfile import replace_file

# `kvrag.models.kv_model`, which has it, imports this module.
KVModel = Any

_NUM_TOKENS, _QUESTION = 64, 8
_MOST_TOKENS = 1100
_WINDOW = 16
_AWAY = 9
# A share of the logits' spread, or of the norm of keys; rounding alone stays far below.
_EXACT = 1e-4
# Rounding in 16 bits, if Transformers' own is not larger: of logits, and of a layer's keys.
_ROUNDED, _ROUNDED_KEYS = 0.25, 0.05
_VOCABULARY = 256
_LENGTHS = ("original_max_position_embeddings",)
_COMPUTING = ("transformers", "kvrag", "torch")
# Transformers takes states' kernels from these where they are installed, and its own otherwise.
_KERNELS = ("mamba-ssm", "causal-conv1d", "flash-linear-attention", "fla-core", "kernels")


@dataclass(frozen=True)
class Check:
    """One thing that was measured.

    Attributes
    ----------
    model
        ``"small"`` or ``"loaded"``.
    what
        What was measured.
    figure, bound
        What was found, and the most that is taken.
    layer
        The layer that is furthest off, where layers are compared.
    """

    model: str
    what: str
    figure: float
    bound: float
    layer: int | None = None

    @property
    def is_good(self) -> bool:
        """Whether the figure is within its bound; a figure that is no number is not."""
        return self.figure <= self.bound


def prove(model: KVModel, make: Callable[[PreTrainedModel], KVModel]) -> tuple[list[Check], str]:
    """Return what a self-test measured, and why there is no small model, if there is none.

    Parameters
    ----------
    model
        The model. Hold no lock of it.
    make
        Makes the same of another loaded model.
    """
    checks: list[Check] = []
    why = ""
    try:
        small = small_model(model.hf.config)
    except Exception as error:  # whatever its configuration does not allow
        why = f"no small model of its classes could be made ({str(error)[:200]})"
    else:
        checks += _checks(make(small), "small")
    return checks + list(_checks(model, "loaded")), why


def require(model: KVModel, fingerprint: str, prove: Callable[[], tuple[list[Check], str]]) -> None:
    """Raise UnsupportedModelError, with the figure and the layer, unless a model proves itself.

    `prove` returns what the function of that name does.
    """
    kind = model.hf.config.model_type
    installed = [_version(name) for name in (*_COMPUTING, *_KERNELS)]
    key = json.dumps([kind, fingerprint, model.device.type, *installed])
    if _is_known(key):
        return
    refused = f"model type {shown(kind)} is not supported: its self-test"
    try:
        checks, why = prove()
    except KVRagError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {str(error)[:200]}"
        raise UnsupportedModelError(f"{refused} ended with {told}. {INSTEAD}") from error
    if why and any(one is not None and one >= _num_tokens(model) for one in model.windows):
        raise UnsupportedModelError(f"{refused} crossed no window: {why}. {INSTEAD}")
    if bad := next((one for one in checks if not one.is_good), None):
        place = "" if bad.layer is None else f", furthest in layer {bad.layer}"
        raise UnsupportedModelError(
            f"{refused} failed over the {bad.model} model: {bad.what} is off by {bad.figure:.2g}, "
            f"expected {bad.bound:.2g} at most{place}. {INSTEAD}"
        )
    _remember(key, checks)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def small_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a small model of the same classes with random weights, float32 on the CPU."""
    fields = _smaller(config.to_dict())
    made = type(config)(**fields)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        hf: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            made, dtype=torch.float32, trust_remote_code=False
        )
        for parameter in hf.parameters():
            if parameter.ndim >= 2:  # wide enough for attention not to be uniform
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    hf.eval()  # type: ignore[no-untyped-call]
    return hf


def _smaller(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's fields with fewer layers, heads, experts and channels."""
    fields = copy.deepcopy(fields)
    before: int = fields["num_hidden_layers"]
    kinds = fields.get("layer_types") or [None]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    layers = min(before, max(2, *(1 + first for first in firsts)))
    heads = fields["num_attention_heads"]
    given = fields.get("num_key_value_heads") or heads
    few = min(given, 2)
    asked = few * min(heads // given, 2)
    width = fields["hidden_size"]
    changed: dict[str, Any] = {
        "num_hidden_layers": layers,
        "vocab_size": _VOCABULARY,
        "num_attention_heads": asked,
        "num_key_value_heads": few,
        "num_kv_heads": few,
        "hidden_size": min(width, 64) if fields.get("head_dim") else asked * (width // heads),
    }
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == before:
            changed[name] = value[:layers]
        elif name == "rope_parameters":
            changed[name] = _changing_soon(value)
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif "intermediate_size" in name:
            changed[name] = min(value, 96)
        elif name in ("num_experts", "num_local_experts", "n_routed_experts"):
            changed[name] = min(value, 4)
        elif name == "num_experts_per_tok":
            changed[name] = min(value, 2)
        elif name in ("sliding_window", "attention_chunk_size"):
            changed[name] = min(value, _WINDOW)
        elif name.endswith("_token_id"):
            changed[name] = 0
    for name in ("quantization_config", "dtype", "torch_dtype"):
        fields.pop(name, None)
    return fields | {name: value for name, value in changed.items() if name in fields}


def _changing_soon(rope: Any) -> Any:
    """Return rotary parameters whose lengths a self-test crosses; longrope ends at its own."""
    if not isinstance(rope, dict) or rope.get("rope_type") == "longrope":
        return rope
    made = {name: _changing_soon(value) for name, value in rope.items()}
    return made | {name: min(made[name], 2 * _WINDOW) for name in _LENGTHS if made.get(name)}


def _num_tokens(model: KVModel) -> int:
    """Return how many tokens a self-test reads: past each place where layers change, if near."""
    rope: Any = getattr(model.hf.config, "rope_parameters", None) or {}
    kinds = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    places = [*model.windows, *(one.get(name) for one in kinds for name in _LENGTHS)]
    most = min(_MOST_TOKENS, context_window(model.hf.config) - 1)
    past = [int(place) + _QUESTION for place in places if place is not None]
    return max([_NUM_TOKENS, *(one for one in past if one <= most)])


def bound_of(hf: Any) -> float:
    """Return how far logits may be from a model's own, in their spread, if rounding adds little."""
    return _EXACT if hf.dtype == torch.float32 and not is_quantised(hf) else _ROUNDED


@torch.no_grad()
def _checks(model: KVModel, name: str) -> Iterator[Check]:
    hf: Any = model.hf
    is_exact = bound_of(hf) == _EXACT
    # The furthest of many thousands of logits in 16 bits is noise.
    apart = _apart if is_exact else mostly_apart
    drawn = torch.Generator().manual_seed(0)
    vocabulary = int(hf.config.vocab_size)
    num_tokens = _num_tokens(model)
    ids = torch.randint(0, vocabulary, (num_tokens + 1,), generator=drawn).to(model.device)
    ids, token = ids[:-1], int(ids[-1])
    with working(), model.lock:
        plain = _captured(model, ids)
        expected = hf(input_ids=ids[None]).logits[0, -1].float()
        rounding = 0.0 if is_exact else apart(_in_two(model, ids), expected)
    bound = _EXACT if is_exact else max(_ROUNDED, 6 * rounding)
    near = _EXACT if is_exact else _ROUNDED_KEYS

    fused = FusedKV(model.spec, num_tokens, num_tokens + 1, model.device)
    rows = torch.arange(num_tokens, device=model.device)
    logits = _computed(model, ids, rows, fused)
    figures = [
        max(_off(ours[0, :, rows], theirs) for ours, theirs in zip(both, layer, strict=True))
        for both, layer in zip(zip(fused.keys, fused.values, strict=True), plain, strict=True)
    ]
    layer = next((number for number, one in enumerate(figures) if not one <= near), None)
    crossed = any(window is not None and window < num_tokens for window in model.windows)
    what = "full prefill, a window crossed" if crossed else "full prefill"
    yield Check(name, what, apart(logits, expected), bound, layer)

    chosen = torch.cat([rows[:-1:3], rows[-1:]])
    logits = _computed(model, ids, chosen, fused)
    yield Check(name, "chosen rows of a prompt", apart(logits, expected), bound)

    if model.family.position_embedding is None:
        yield _moved(model, name, ids, near)

    if model.has_batches:
        row = BatchRow(fused, fused.addresses, num_tokens, num_tokens)
        model.begin_answer()
        with model.computing_rows():
            logits = model.forward_each([token], [row])[0]
        with working(), model.lock:
            longer = torch.cat([ids, ids.new_tensor([token])])
            expected = hf(input_ids=longer[None]).logits[0, -1].float()
        yield Check(name, "the next token of an answer", apart(logits, expected), bound)


def _moved(model: KVModel, name: str, ids: torch.Tensor, near: float) -> Check:
    """Keys that are moved by some positions are those that each layer makes there, and back.

    Values are the same there.
    """
    rows = torch.arange(len(ids), device=model.device)
    buffer = FusedKV(model.spec, len(ids), len(ids), model.device)
    here, there = (
        RowPass(rows, buffer, model.tables(len(ids), (rows + by).tolist())) for by in (0, _AWAY)
    )
    figures = []
    with working(), model.computing_rows():
        hidden = model.embed(ids, rows)
        for index, (table, other) in enumerate(zip(here.tables, there.tables, strict=True)):
            (keys, values), (moved, others) = (
                [torch.cat(kv, 1) for kv in list(zip(*made, strict=True))[1:]]
                for made in (model.rows.project(index, hidden, of, rows) for of in (here, there))
            )
            free, placed, back = (torch.empty_like(keys) for _ in range(3))
            table.strip(keys, slice(None), free)
            other.place(free, slice(None), placed)
            other.strip(placed, slice(None), free)
            table.place(free, slice(None), back)
            pairs = (placed, moved), (back, keys), (others, values)
            figures.append(max(_off(*pair) for pair in pairs))
    worst = max(range(len(figures)), key=figures.__getitem__)
    return Check(name, "keys moved, and moved back", figures[worst], near, worst)


def _captured(model: KVModel, ids: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return each layer's keys and values ``[H, n, D]`` as Transformers computes them."""
    cache = CaptureCache(model.spec.num_layers)
    hf: Any = model.hf
    hf(input_ids=ids[None], **{CACHE_ARGUMENT: cache, "use_cache": True})
    layers: Any = cache.layers
    kept = [packed(model.spec.latent, layer.keys, layer.values) for layer in layers]
    return [[keys[0], values[0]] for keys, values in kept]


def _in_two(model: KVModel, ids: torch.Tensor) -> torch.Tensor:
    """Return Transformers' own logits when it computes a prompt in two pieces."""
    hf: Any = model.hf
    given = {CACHE_ARGUMENT: DynamicCache(config=hf.config), "use_cache": True}
    half = len(ids) // 2
    hf(input_ids=ids[None, :half], **given)
    logits: torch.Tensor = hf(input_ids=ids[None, half:], **given).logits[0, -1]
    return logits


def _computed(
    model: KVModel, ids: torch.Tensor, rows: torch.Tensor, fused: FusedKV
) -> torch.Tensor:
    """Return the last row's logits, after the rows were computed into a buffer."""
    tables = model.tables(len(ids))
    with working(), model.computing_rows():
        hidden = model.embed(ids[rows], rows)
        of = RowPass(rows, fused, tables)
        for index in range(len(tables)):
            model.rows.forward(index, hidden, of)
        logits: torch.Tensor = model.logits(hidden[-1:])[0]
        return logits


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of logits, in their spread."""
    expected = expected.float()
    return float((found.float() - expected).abs().max() / expected.std())


def mostly_apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root of the mean square of logits' differences, in their spread."""
    expected = expected.float()
    return float((found.float() - expected).square().mean().sqrt() / expected.std())


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of a difference over that of what is expected."""
    expected = expected.float()
    return float((found.float() - expected).norm() / expected.norm().clamp_min(1e-30))


def _path(key: str) -> Path:
    folder = arguments.user_cache() / "kvrag" / "proofs"
    return folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"


def _is_known(key: str) -> bool:
    try:
        return bool(json.loads(_path(key).read_text())["of"] == key)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ParameterError):
        return False


def _remember(key: str, checks: list[Check]) -> None:
    """Keep what passed for other processes; without a folder for it, nothing is kept."""
    with suppress(OSError, ParameterError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        said = {"of": key, "checks": [asdict(one) for one in checks]}
        replace_file(path, json.dumps(said).encode())
