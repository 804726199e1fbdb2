"""Weights that stay small: a GGUF file's bits, in the order that kernels on the CPU read them.

`kvrag.weights.convert` writes the folders. Their ``config.json`` names each such weight, as a kind
of quantisation that Transformers learns in `kvrag.models.pretrained`; the bytes are mapped from
the file.
"""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.functional import linear

from kvrag.errors import ModelLoadError
from kvrag.native.attention import ATTENTION_TYPES
from kvrag.native.linear import GroupedLinear, GroupedWeight


class _Small:
    """What layers over such weights share. A mixin of modules with a `weight` and a `bias`."""

    weight: torch.Tensor
    digest: str
    """The digest of the weights in bfloat16, as fingerprints have it."""
    shape: tuple[int, int]

    def _take(self, described: dict[str, Any]) -> None:
        self.shape = shape = (int(described["shape"][0]), int(described["shape"][1]))
        self.digest = str(described["digest"])
        self._checksum = str(described["checksum"])
        kind = int(described["bits"]), shape, bool(described["has_least"])
        self._kind = *kind, float(described["factor"])
        data = torch.empty(sum(GroupedWeight.sizes(*kind)), dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(data, requires_grad=False)
        self._laid: tuple[torch.Tensor, GroupedWeight] | None = None

    def check(self) -> None:
        """Raise ModelLoadError if the bytes are not those whose `digest` it is."""
        if xxhash.xxh3_128_hexdigest(self.weight.detach().numpy().data) != self._checksum:
            raise ModelLoadError(
                "the weights that were converted from a GGUF file are damaged: 'kvrag models list "
                "--check' names their folder; convert the file again: kvrag models rm NAME"
            )

    def laid(self) -> GroupedWeight:
        """Return the weights for kernels, over the bytes that are loaded."""
        if self._laid is None or self._laid[0] is not self.weight:
            self._laid = self.weight, GroupedWeight.of(self.weight, *self._kind)
        return self._laid[1]

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all weights ``[N, K]`` as numbers."""
        return self.laid().rows(torch.arange(self.shape[0]), dtype)


class SmallLinear(_Small, nn.Linear):
    """A linear layer over a GGUF file's bits. Rows are rounded to 8 bits, by groups of 32 inputs.

    Gradients, and rows of other types than kernels take, go through the weights as numbers.

    Parameters
    ----------
    described
        What the folder's ``config.json`` says of its weights.
    bias
        That of the layer that it replaces.
    """

    def __init__(self, described: dict[str, Any], bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self._take(described)
        self.out_features, self.in_features = self.shape
        self.bias = bias  # type: ignore[assignment]  # as `nn.Linear` has it
        self._computes: tuple[GroupedWeight, torch.Tensor | None, GroupedLinear] | None = None

    def kernel(self) -> GroupedLinear:
        """Return what computes the layer."""
        laid, bias, known = self.laid(), self.bias, self._computes
        if known is None or known[0] is not laid or known[1] is not bias:
            known = self._computes = laid, bias, GroupedLinear(laid, bias)
        return known[2]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]``."""
        if rows.dtype in ATTENTION_TYPES and not (torch.is_grad_enabled() and rows.requires_grad):
            return self.kernel()(rows)
        return linear(rows, self.numbers(torch.float32).to(rows.dtype), self.bias)


class SmallEmbedding(_Small, nn.Embedding):
    """A table of embeddings over a GGUF file's bits.

    Parameters
    ----------
    described
        As for `SmallLinear`.
    dtype
        The type of what it looks up, which follows the model's.
    factor
        What that is multiplied by, as in Gemma.
    """

    def __init__(self, described: dict[str, Any], dtype: torch.dtype, factor: float | None) -> None:
        nn.Module.__init__(self)
        self._take(described)
        self.num_embeddings, self.embedding_dim = self.shape
        self.padding_idx, self._factor = None, factor
        like = torch.empty(0, dtype=dtype, device="meta")
        self.register_buffer("_like", like, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ``[..., embedding_dim]``."""
        dtype = self._buffers["_like"].dtype  # type: ignore[union-attr]  # it is there
        found = self.laid().rows(ids, dtype)
        return found if self._factor is None else found * torch.tensor(self._factor).to(dtype)


def small_layers(model: nn.Module) -> dict[str, _Small]:
    """Return a model's layers over a GGUF file's bits, by name."""
    return {name: one for name, one in model.named_modules() if isinstance(one, _Small)}
