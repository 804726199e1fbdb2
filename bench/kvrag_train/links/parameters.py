"""The parameters trained beside a model, or instead of it: links, and their adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvrag.errors import ParameterError
from kvrag.fusion.links import WRITER, LinksHeader, LinkTokens
from kvrag.models.adapter import RowAdapter, linear_layers
from kvrag.models.kv_model import KVModel


class LinkParameters(nn.Module):
    """The parameters trained beside the model, or instead of it.

    Parameters
    ----------
    model
        The model; its own embeddings set the size of new ones.
    header
        The links to make.
    rank
        Rank of the adapter, where there is one.
    seed
        Seed of the initial values.
    """

    def __init__(
        self,
        model: KVModel,
        header: LinksHeader,
        rank: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.header = header
        self.embeddings: nn.Parameter | None = None
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        random = torch.Generator().manual_seed(seed)
        if header.num_links:
            self._make_embeddings(model, random)
        if header.way in ("adapter", WRITER):
            layers = linear_layers(model.hf)
            most = max(min(one.in_features, one.out_features) for one in layers.values())
            if rank > most:
                raise ParameterError(
                    f"training: rank {rank:,}: expected at most {most:,}, which leaves no layer of "
                    f"{model.name} anything to add"
                )
            for name, layer in layers.items():
                drawn = torch.randn(rank, layer.in_features, generator=random)
                key = _key(name)
                self.down[key] = nn.Parameter(drawn / layer.in_features**0.5)
                self.up[key] = nn.Parameter(torch.zeros(layer.out_features, rank))
        self._names = {_key(name): name for name in linear_layers(model.hf)}

    def _make_embeddings(self, model: KVModel, random: torch.Generator) -> None:
        embedding: Any = model.hf.get_input_embeddings()
        with torch.no_grad():
            # Through the module: some families scale what they look up.
            some = torch.randint(embedding.num_embeddings, (256,), generator=random)
            known = torch.zeros(len(some), embedding.embedding_dim)
            if not embedding.weight.is_meta:  # else another process has them, and these from it
                known = embedding(some.to(model.device)).float().cpu()
        drawn = torch.randn(self.header.num_rows, known.shape[1], generator=random)
        self.embeddings = nn.Parameter(known.mean(dim=0) + known.std(dim=0) * drawn)

    def adapter(self) -> RowAdapter | None:
        """Return the adapter as it is now; gradients flow into it."""
        if not self.down:
            return None
        return RowAdapter(
            {self._names[key]: weight for key, weight in self.down.items()},
            {self._names[key]: weight for key, weight in self.up.items()},
            self.header.scale,
        )

    def links(self, header: LinksHeader) -> LinkTokens:
        """Return a copy to be saved, under a header that may name another model."""
        adapter = self.adapter()
        if adapter is not None:
            adapter = RowAdapter(
                {name: weight.detach().clone() for name, weight in adapter.down.items()},
                {name: weight.detach().clone() for name, weight in adapter.up.items()},
                adapter.scale,
            )
        embeddings = None if self.embeddings is None else self.embeddings.detach().clone()
        return LinkTokens(header, embeddings, adapter)


def _key(name: str) -> str:
    return name.replace(".", "/")  # torch allows no dots in names of parameters
