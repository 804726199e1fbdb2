"""Decoders of the usual families on the CPU, without the code of Transformers.

Importing that takes seconds. These have the modules and the weights' names of its models, and
compute the same, bit for bit. They compute what `KVModel` asks for: rows of a prompt, and the KV of
whole sequences. For everything else, `KVModel.hf` is Transformers' own model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from kvrag.models.elements import KINDS, Kind
from kvrag.models.implementations import own_attention
from kvrag.models.remembered import Config, Remembered
from kvrag.models.small import SmallEmbedding, SmallLinear
from kvrag.models.writers import CapturedKV
from kvrag.native.reconstruction import gated, rms_norm
from kvrag.regularfile import read_regular

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPES = (torch.float32, torch.bfloat16)
"""What kvrag's kernels compute in."""

Weights: TypeAlias = "Mapping[str, torch.Tensor]"
Facts: TypeAlias = "Mapping[str, Any]"
"""What `kvrag.models.describe` found out about a model's modules."""


class RMSNorm(nn.Module):
    """A norm of rows."""

    def __init__(self, facts: Facts, weights: Weights, name: str) -> None:
        super().__init__()
        self.weight = _parameter(weights[f"{name}.weight"])
        self.epsilon, self.adds_one = facts["epsilon"], facts["adds_one"]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, self.weight, self.epsilon, adds_one=self.adds_one)


class MLP(nn.Module):
    """A gated MLP."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, facts: Facts, weights: Weights, name: str) -> None:
        super().__init__()
        for one in ("gate_proj", "up_proj", "down_proj"):
            self.add_module(one, _linear(facts, weights, f"{name}.{one}"))
        self.is_gelu: bool = facts["is_gelu"]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made = gated(self.gate_proj(rows), self.up_proj(rows), is_gelu=self.is_gelu)
        return self.down_proj(made)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention by whichever of kvrag's functions the configuration names."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear

    def __init__(
        self, config: Config, facts: Facts, weights: Weights, name: str, index: int
    ) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.head_dim: int = facts["head_dim"]
        self.scaling: float = facts["scaling"]
        self.window: int | None = facts["windows"][index]
        for one in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(one, _linear(facts, weights, f"{name}.{one}"))
        self.has_norms = KINDS[facts["family"]].head_norms
        if self.has_norms:
            self.q_norm = RMSNorm(facts, weights, f"{name}.q_norm")
            self.k_norm = RMSNorm(facts, weights, f"{name}.k_norm")

    def forward(
        self,
        rows: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        mask: Any,
        cache: Any,
    ) -> torch.Tensor:
        query, key, value = (
            project(rows).view(*rows.shape[:-1], -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.has_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        query, key = (part * cos + _half_turned(part) * sin for part in (query, key))
        key, value = cache.update(key, value, self.index)
        attend, scaling = own_attention(self.config), self.scaling
        gathered, _ = attend(
            self, query, key, value, mask, scaling=scaling, sliding_window=self.window
        )
        return self.o_proj(gathered.reshape(*rows.shape[:-1], -1))  # type: ignore[no-any-return]


def _half_turned(rows: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _parameter(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _linear(facts: Facts, weights: Weights, name: str) -> nn.Linear:
    """Return a linear layer."""
    found, small = weights.get(f"{name}.bias"), facts["small"].get(name)
    bias = None if found is None else _parameter(found)
    weight = _parameter(weights[f"{name}.weight"])
    if small is not None:
        layer = SmallLinear(small, bias)
        layer.weight = weight
        return layer
    # Its class would first fill memory with random numbers.
    made = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(made)
    made.weight = weight
    made.register_parameter("bias", bias)
    made.out_features, made.in_features = made.weight.shape
    return made


class DecoderLayer(nn.Module):
    """Attention and an MLP, with a norm before each; some families have one after each as well."""

    def __init__(self, config: Config, facts: Facts, weights: Weights, index: int) -> None:
        super().__init__()
        name = f"model.layers.{index}"
        self.kind: Kind = KINDS[facts["family"]]
        self.self_attn = Attention(config, facts, weights, f"{name}.self_attn", index)
        self.mlp = MLP(facts, weights, f"{name}.mlp")
        for norm in self.kind.norms:
            self.add_module(norm, RMSNorm(facts, weights, f"{name}.{norm}"))

    def forward(
        self,
        rows: torch.Tensor,
        *,
        attention_mask: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Any,
        position_ids: torch.Tensor | None = None,  # noqa: ARG002  # as layers of Transformers
    ) -> torch.Tensor:
        norms = [getattr(self, name) for name in self.kind.norms]
        before, after = self.kind.around(norms)
        moved = self.self_attn(before[0](rows), position_embeddings, attention_mask, cache)
        rows = rows + (moved if after[0] is None else after[0](moved))
        moved = self.mlp(before[1](rows))
        made: torch.Tensor = rows + (moved if after[1] is None else after[1](moved))
        return made


class Embedding(nn.Embedding):
    """Embedded tokens, times a number that is rounded to their type."""

    def __init__(self, facts: Facts, weight: torch.Tensor) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight)
        self.factor: float | None = facts["factor"]

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = super().forward(token_ids)
        return rows if self.factor is None else rows * torch.tensor(self.factor).to(rows.dtype)


def _embedding(facts: Facts, weights: Weights) -> nn.Embedding:
    name = "model.embed_tokens"
    weight, small = weights[f"{name}.weight"], facts["small"].get(name)
    if small is None:
        return Embedding(facts, weight)
    made = SmallEmbedding(small, weights["model.norm.weight"].dtype, facts["factor"])
    made.weight = _parameter(weight)
    return made


class Rotary(nn.Module):
    """Cosines and sines of positions, for each type of layer that has its own."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        found = facts["rope"]
        self.rope_type = {name: rope["type"] for name, rope in found.items()}
        self._angles = {
            name or None: (torch.tensor(rope["angles"]), rope["scaling"])
            for name, rope in found.items()
        }

    def forward(
        self, like: torch.Tensor, positions: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angles, scaling = self._angles[layer_type]
        half = positions[..., None].float() * angles
        turned = torch.cat((half, half), dim=-1)
        return (turned.cos() * scaling).to(like.dtype), (turned.sin() * scaling).to(like.dtype)


class Stack(nn.Module):
    """A decoder without its head."""

    def __init__(self, config: Config, facts: Facts, weights: Weights) -> None:
        super().__init__()
        self.embed_tokens = _embedding(facts, weights)
        self.layers = nn.ModuleList(
            DecoderLayer(config, facts, weights, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(facts, weights, "model.norm")
        self.rotary_emb = Rotary(facts)
        self._rope_types: list[str | None] = facts["rope_types"]

    def get_input_embeddings(self) -> nn.Module:
        """Return what embeds tokens."""
        return self.embed_tokens

    def forward(self, input_ids: torch.Tensor, cache: CapturedKV, **_: Any) -> None:
        """Fill a cache with the KV of whole sequences."""
        rows = self.embed_tokens(input_ids)
        begin = cache.get_seq_length()
        positions = torch.arange(begin, begin + input_ids.shape[1])[None]
        turns = {kind: self.rotary_emb(rows, positions, kind) for kind in set(self._rope_types)}
        for kind, layer in zip(self._rope_types, self.layers, strict=True):
            rows = layer(rows, attention_mask=None, position_embeddings=turns[kind], cache=cache)


class Decoder(nn.Module):
    """A causal language model.

    Parameters
    ----------
    known
        What is known of the model.
    weights
        By their names in its files.
    folder
        Where it is.
    """

    def __init__(self, known: Remembered, weights: Weights, folder: str) -> None:
        super().__init__()
        facts: Facts = known.layers or {}
        self.config = Config(**known.config | {"_name_or_path": folder})
        self.config._attn_implementation = "sdpa"
        self.generation_config = Config(**known.generation)
        self.windows: list[int | None] = facts["windows"]
        self.has_rope_types = None not in facts["rope_types"]
        self.model = Stack(self.config, facts, weights)
        tied = self.config.tie_word_embeddings
        self.lm_head = _linear(facts, weights, "model.embed_tokens" if tied else "lm_head")
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> Stack:
        """The decoder without its head."""
        return self.model

    @property
    def name_or_path(self) -> str:
        """The folder that it is of."""
        return str(self.config._name_or_path)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return self.model.norm.weight.device

    def get_output_embeddings(self) -> nn.Module:
        """Return what makes logits of rows."""
        return self.lm_head


Model: TypeAlias = "PreTrainedModel | Decoder"


def load_decoder(folder: str, known: Remembered, dtype: torch.dtype | None) -> Decoder | None:
    """Return the decoder in a folder; None if only Transformers can say what is in it.

    Its weights are the files' own pages, as long as they have the type asked for.
    """
    if known.layers is None:
        return None
    weights: dict[str, torch.Tensor] = {}
    try:
        for path in weight_files(Path(folder)):
            weights |= load_file(path)
    except (OSError, ValueError, SafetensorError):
        return None
    own = getattr(torch, str(known.config["dtype"]), None)
    kind = dtype or own or next((one.dtype for one in weights.values()), None)
    head, tied = "lm_head.weight", bool(known.config["tie_word_embeddings"])
    shapes = {name: list(one.shape) for name, one in weights.items()}
    expected = dict(known.layers["shapes"])
    if tied:
        expected.pop(head)
    small = {f"{name}.weight" for name in known.layers["small"]}
    for name in small & expected.keys():
        expected[name] = shapes.get(name)  # bytes, which the layer checks
    plain = [one.dtype for name, one in weights.items() if name not in small]
    is_plain = {*DTYPES, torch.float16}.issuperset(plain)
    if kind not in DTYPES or not is_plain or shapes != expected:
        return None
    weights = {name: one if name in small else one.to(kind) for name, one in weights.items()}
    try:
        made = Decoder(known, weights, folder)
    except (KeyError, TypeError, ValueError):
        # The description of kept bits is damaged; loading by Transformers says so.
        return None
    return made.requires_grad_(False).eval()


def weight_files(folder: Path) -> Iterator[Path]:
    """Yield a model's files of weights; nothing if there are none."""
    if (folder / ONE_FILE).is_file():
        yield folder / ONE_FILE
    elif (folder / INDEX_FILE).is_file():
        names = set(json.loads(read_regular(folder / INDEX_FILE))["weight_map"].values())
        yield from (folder / name for name in sorted(names))
