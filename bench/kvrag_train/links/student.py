"""The model with links, computed as at question time but with gradients.

Documents are encoded alone, at the positions of their prompt, and everything else is computed over
their keys and values in one forward (KVLink §3.2-3.3): what the fuser does with stored KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from kvrag.errors import UnsupportedModelError
from kvrag.fusion.links import WRITER
from kvrag.models.caches import CaptureCache
from kvrag.models.families import project_logits, sliding_windows
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag.positions.rotary import RotaryTable
from kvrag_train.batches import IGNORED
from kvrag_train.links.batch import LinkBatch
from kvrag_train.links.memory import checkpointed_layers
from kvrag_train.links.parameters import LinkParameters
from kvrag_train.links.sharding import Running

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KV: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


class Student:
    """Runs batches through a model with links.

    Parameters
    ----------
    model
        The model.
    parameters
        Its links.
    trains_model
        Whether gradients go to the model's own weights, documents included (mode ``tuned``).
    running
        Calls each forward, where the model is shared among processes.
    """

    def __init__(
        self,
        model: KVModel,
        parameters: LinkParameters,
        trains_model: bool,
        running: Running | None = None,
    ) -> None:
        self._model = model
        self._running = running
        self._base: Any = model.hf.base_model
        turns_pairs = any(table.in_pairs for table in model.tables(1))
        if turns_pairs or hasattr(self._base, "embedding_multiplier") or model.spec.latent:
            raise UnsupportedModelError(
                f"links are not trained for models of type {model.hf.config.model_type}, which "
                "turn channels in pairs, multiply what they embed, or keep latents; take a type "
                "such as llama"
            )
        self._parameters = parameters
        self._trains_model = trains_model

    def logits(
        self, batch: LinkBatch, kept: list[KV] | None = None, *, writes: bool = True
    ) -> torch.Tensor:
        """Return logits ``[answer tokens, vocabulary]``, in the order of the batch's targets.

        Parameters
        ----------
        kept
            Receives each layer's keys and values ``[B, H, rows, channels]``: of the stored rows, or
            of all rows of plain prompts.
        writes
            Whether a writer acts, if there is one.
        """
        if self._running is None:
            return self._forward(batch, kept, writes)
        return self._running(partial(self._forward, batch))

    def _forward(
        self, batch: LinkBatch, kept: list[KV] | None = None, writes: bool = True
    ) -> torch.Tensor:
        is_writer = self._parameters.header.way == WRITER
        is_linked = batch.stored.shape[1] > 0
        model = self._model
        batch = batch.to(model.device)
        stored: list[KV] = []
        if is_linked and is_writer:
            stored = self._written(batch, writes)
        elif is_linked:
            with nullcontext() if self._trains_model else torch.no_grad():
                stored = self._encoded(batch)
        embeds = self._base.get_input_embeddings()(batch.input_ids)
        table = self._parameters.embeddings
        if is_linked and table is not None:
            rows = batch.link_rows
            embeds = torch.where(
                (rows >= 0)[..., None], table[rows.clamp(min=0)].to(embeds.dtype), embeds
            )
        adapter = self._parameters.adapter() if is_linked and not is_writer else None
        cache: Any = _BehindCache(stored) if is_linked else None
        if kept is not None and not is_linked:
            cache = CaptureCache(model.spec.num_layers)
        with nullcontext() if adapter is None else adapter.acting(model.hf):
            hidden = self._base(
                inputs_embeds=embeds,
                position_ids=batch.positions,
                attention_mask=self._masks(batch),
                **{CACHE_ARGUMENT: cache},
                use_cache=cache is not None,
            ).last_hidden_state
        if kept is not None:
            kept += stored or [(layer.keys, layer.values) for layer in cache.layers]
        return project_logits(model.hf, hidden[batch.targets != IGNORED])

    def _written(self, batch: LinkBatch, writes: bool) -> list[KV]:
        """Return what `_encoded` does; a writer acts on documents after a context, and on it."""
        width = batch.chunk_ids.shape[1]
        order: list[torch.Tensor] = []
        parts: list[list[KV]] = []
        for is_written in (False, True):
            group = (batch.is_written == is_written).nonzero()[:, 0]
            if not len(group):
                continue
            # Shorter without a context: what fills the rest is not read.
            ends = batch.stored[(batch.stored_segments == 0)]
            ends = ends[(ends // width)[:, None].eq(group).any(1)] % width
            used = int(ends.max()) + 1 if len(ends) else 1
            adapter = self._parameters.adapter() if is_written and writes else None
            cache = CaptureCache(self._model.spec.num_layers)
            with (
                nullcontext() if adapter is None else adapter.acting(self._model.hf),
                torch.set_grad_enabled(adapter is not None and torch.is_grad_enabled()),
            ):
                self._base(
                    input_ids=batch.chunk_ids[group, :used],
                    position_ids=batch.chunk_positions[group, :used],
                    **{CACHE_ARGUMENT: cache},
                    use_cache=True,
                )
            order.append(group)
            layers: list[Any] = cache.layers
            more = (0, 0, 0, width - used)
            parts.append([(pad(one.keys, more), pad(one.values, more)) for one in layers])
        back = torch.cat(order).argsort()
        return [
            (
                _gathered(torch.cat(keys)[back], batch.stored),
                _gathered(torch.cat(values)[back], batch.stored),
            )
            for keys, values in (zip(*layer, strict=True) for layer in zip(*parts, strict=True))
        ]

    def _encoded(self, batch: LinkBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's placed K/V ``[B, H, D, channels]`` of the documents."""
        # Processes that share a model run the same forwards, whatever their rows are.
        if self._running is None and not self._trains_model:
            return self._encoded_once(batch)
        cache = CaptureCache(self._model.spec.num_layers)
        self._base(
            input_ids=batch.chunk_ids,
            position_ids=batch.chunk_positions,
            **{CACHE_ARGUMENT: cache},
            use_cache=True,
        )
        layers: list[Any] = cache.layers
        return [
            (_gathered(x.keys, batch.stored), _gathered(x.values, batch.stored)) for x in layers
        ]

    def _encoded_once(self, batch: LinkBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the same; what precedes documents is computed once for all of them.

        A filler is longer than most documents. It has one place here, so documents are moved.
        """
        num_layers = self._model.spec.num_layers
        columns = torch.arange(batch.chunk_ids.shape[1], device=batch.chunk_ids.device)
        parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(num_layers)]
        order: list[int] = []
        for length in dict.fromkeys(batch.num_before):
            group = [c for c, number in enumerate(batch.num_before) if number == length]
            order += group
            ids = batch.chunk_ids[group]
            before = self._captured(ids[:1, :length], columns[:length])
            after = self._captured(ids[:, length:], columns[length:], before)
            for part, layer in zip(parts, after.layers, strict=True):
                kv: Any = layer
                part.append((kv.keys, kv.values))
        back = torch.tensor(order).argsort()
        sources, targets = batch.stored % len(columns), batch.stored_positions
        tables = self._model.tables(int(torch.maximum(sources.max(), targets.max())) + 1)
        found = []
        for part, table in zip(parts, tables, strict=True):
            keys, values = (torch.cat(kind)[back] for kind in zip(*part, strict=True))
            placed = _moved(_gathered(keys, batch.stored), table, sources, targets)
            found.append((placed, _gathered(values, batch.stored)))
        return found

    def _captured(
        self, ids: torch.Tensor, positions: torch.Tensor, before: CaptureCache | None = None
    ) -> CaptureCache:
        cache = CaptureCache(self._model.spec.num_layers, before)
        self._base(
            input_ids=ids,
            position_ids=positions.expand(len(ids), -1),
            **{CACHE_ARGUMENT: cache},
            use_cache=True,
        )
        return cache

    def _masks(self, batch: LinkBatch) -> Any:
        """Return what the model takes as its mask: one for all layers, or one a type of layer."""
        queries = batch.positions[:, :, None]
        keys = torch.cat([batch.stored_positions, batch.positions], 1)[:, None]
        key_segments = torch.cat([batch.stored_segments, batch.segments], 1)[:, None]
        query_segments = batch.segments[:, :, None]
        causal = keys <= queries
        allowed = causal & ((key_segments == 0) | (key_segments == query_segments))
        return _model_masks(
            self._model.hf,
            allowed,
            batch.positions,
            torch.cat([batch.stored_positions, batch.positions], 1),
        )


def _model_masks(
    hf: PreTrainedModel, allowed: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> Any:
    """Return the model's mask argument: one mask for all layers, or one for each layer type.

    Parameters
    ----------
    hf
        The model.
    allowed
        ``[B, q, k]`` bool: which rows see which, without the layers' windows.
    queries, keys
        ``[B, q]`` and ``[B, k]``: positions, for the layers' windows.
    """
    layer_windows = sliding_windows(hf)
    windows = set(layer_windows)
    found = {
        window: _as_model_wants(
            hf,
            allowed if window is None else allowed & (keys[:, None] > queries[:, :, None] - window),
        )
        for window in windows
    }
    if len(found) == 1:
        return found[layer_windows[0]]
    sliding = next(window for window in windows if window is not None)
    return {"full_attention": found[None], "sliding_attention": found[sliding]}


def _as_model_wants(hf: PreTrainedModel, allowed: torch.Tensor) -> torch.Tensor:
    if hf.config._attn_implementation != "eager":
        return allowed[:, None]
    additive = torch.zeros(allowed.shape, dtype=hf.dtype, device=allowed.device)
    return additive.masked_fill_(~allowed, torch.finfo(hf.dtype).min)[:, None]


@contextmanager
def training_mode(
    model: KVModel, trains_model: bool, *, checkpointing: bool = False
) -> Iterator[None]:
    """Let gradients into the model's weights, or keep them out, and restore what was.

    With `checkpointing`, layers are computed again for the backward pass.
    """
    before = [parameter.requires_grad for parameter in model.hf.parameters()]
    model.hf.requires_grad_(trains_model)
    try:
        with checkpointed_layers(model.hf) if checkpointing else nullcontext():
            yield
    finally:
        for parameter, required in zip(model.hf.parameters(), before, strict=True):
            parameter.requires_grad_(required)


def distance(found: Sequence[KV], full: Sequence[KV], batch: LinkBatch) -> torch.Tensor:
    """Return how far keys and values are from full prefill's, mean over layers.

    That is the mean squared difference over the variance of full prefill's, over all rows of
    documents that were encoded after a context.

    Parameters
    ----------
    found
        Of a batch's stored rows, as `Student.logits` keeps them.
    full
        Of all rows of the same prompts as plain ones: before a prompt's tail, row p is at p.
    batch
        The batch of `found`.
    """
    is_written = batch.is_written[batch.stored // batch.chunk_ids.shape[1]]
    wanted = is_written & (batch.stored_segments == 0)
    rows, columns = wanted.nonzero(as_tuple=True)
    places = batch.stored_positions[rows, columns]
    total = found[0][0].new_zeros((), dtype=torch.float32)
    for both in zip(found, full, strict=True):
        for ours, theirs in zip(*both, strict=True):
            right = theirs.transpose(1, 2)[rows, places].float()
            total = total + (ours.transpose(1, 2)[rows, columns] - right).square().mean() / (
                right.var() + 1e-9
            )
    return total / (2 * len(found))


class _BehindLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Shows stored K/V before those of the rows computed; keeps nothing."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stored = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._stored
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._stored[0].shape[2] + query_length, 0

    def get_seq_length(self) -> int:
        return self._stored[0].shape[2]

    def get_max_length(self) -> int:
        return -1


class _BehindCache(Cache):
    def __init__(self, stored: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(layers=[_BehindLayer(keys, values) for keys, values in stored])


def _gathered(kv: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``[B, H, D, channels]``: of ``[C, H, W, channels]`` the rows ``[B, D]`` of C * W."""
    num_heads, channels = kv.shape[1], kv.shape[3]
    flat = kv.transpose(1, 2).reshape(-1, num_heads, channels)
    return flat[rows].transpose(1, 2)


def _placed(keys: torch.Tensor, table: RotaryTable, positions: torch.Tensor) -> torch.Tensor:
    """Return keys ``[B, H, n, D]`` at positions ``[B, n]``: `RotaryTable.place`, with gradients."""
    cos, sin = (part[positions][:, None] for part in (table.cos, table.sin))
    return _rotated(keys, cos, sin)


def _moved(
    keys: torch.Tensor, table: RotaryTable, sources: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return keys ``[B, H, n, D]`` at other positions ``[B, n]`` than those they have."""
    cos, sin = (part[sources][:, None] for part in (table.cos, table.sin))
    square = cos.square() + sin.square()  # the attention scaling, as in `RotaryTable.strip`
    free = _rotated(keys, cos / square, -sin / square)
    return _placed(free, table, targets)


def _rotated(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    num_rotated = cos.shape[-1]
    # In float32, as `RotaryTable` does.
    turned, rest = keys[..., :num_rotated].float(), keys[..., num_rotated:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(keys.dtype), rest], dim=-1)
