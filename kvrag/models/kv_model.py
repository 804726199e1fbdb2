"""`KVModel`: a Hugging Face decoder as kvrag uses it.

Whole chunks go through the model's own forward (`prefill`); at question time its layers are
called one by one on selected rows (`forward_rows`), each reading and writing one fused buffer.
The model's code is never rewritten and never patched.
"""

from __future__ import annotations

import copy
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvrag.errors import ModelLoadError, ParameterError, UnsupportedModelError
from kvrag.kvcache import DTYPES, ChunkKV, FusedKV, KVSpec
from kvrag.models.adapter import RowAdapter, without_adapters
from kvrag.models.attention import (
    AttentionDone,
    AttentionObserver,
    EncodedScope,
    RowMask,
    lock_of,
    row_attention,
)
from kvrag.models.caches import CaptureCache, Deviation, ProjectionDone, ProjectionProbe, RowWriter
from kvrag.models.families import (
    context_window,
    find_family,
    num_kv_heads,
    project_logits,
    sliding_windows,
)
from kvrag.models.loading import (
    check_tokenizer,
    load_tokenizer,
    load_weights,
    model_fingerprint,
    resolve_model,
    shared_prefix_ids,
    tokenizer_fingerprint,
)
from kvrag.models.own_attention import layer_arguments, show_weights
from kvrag.models.scaling import ScaledKeys
from kvrag.models.schemes import find_positions
from kvrag.positions.rotary import RotaryTable

# Rows a layer computes at once: few enough that a block's MLP activations stay small beside the
# fused KV, many enough that its matrix products run at full speed.
ROW_BLOCK = 128

_LARGE_BYTES = 1 << 20

_loaded: WeakValueDictionary[tuple[str, str, str], KVModel] = WeakValueDictionary()
_loading = threading.Lock()


class KVModel:
    """A decoder whose KV can be captured, placed and recomputed row by row.

    Parameters
    ----------
    hf
        A loaded causal language model of a supported family; used as it is, in evaluation mode.
    tokenizer
        Its fast tokenizer; copied.
    name
        What reports call it.

    Attributes
    ----------
    spec
        Shape and type of its KV.
    max_positions
        The context window in tokens.
    lock
        Held during every forward pass here: one thread at a time uses the loaded model.

    Raises
    ------
    UnsupportedModelError
        When the family, its positions or its tokenizer cannot be served; names what is missing.
    """

    def __init__(
        self, hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str = ""
    ) -> None:
        config = hf.config
        self.family = find_family(hf)
        if hf.dtype not in DTYPES.values():
            raise UnsupportedModelError(
                f"weights of type {hf.dtype} are not supported; expected {', '.join(DTYPES)}"
            )
        self.hf = hf
        # A copy: fast tokenizers keep the truncation and padding of their last call, and another
        # thread using the caller's object would shorten our prompts.
        self.tokenizer = copy.deepcopy(check_tokenizer(tokenizer))
        self.name = name or getattr(config, "_name_or_path", "") or config.model_type
        num_heads = config.num_attention_heads
        self.spec = KVSpec(
            num_layers=config.num_hidden_layers,
            num_kv_heads=num_kv_heads(config),
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            dtype=hf.dtype,
        )
        self.max_positions = context_window(config)
        self.lock = lock_of(hf)
        self._base: Any = hf.base_model
        self._windows = sliding_windows(hf)
        self._layers: Any = getattr(self._base, self.family.layers)
        # What adapters are told in the middle of a layer; written under the lock.
        self._rows_at_hand = torch.empty(0, dtype=torch.long)
        self._positions = find_positions(hf, self.family, self.spec)

    @classmethod
    def load(
        cls,
        model: str | Path | PreTrainedModel | KVModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | str | None = None,
        device: str | None = None,
    ) -> KVModel:
        """Return a model by path, hub name or loaded object.

        The same path, dtype and device give the same object for as long as anyone holds it.
        Nothing is fetched from a network unless `model` is a hub name absent from the local
        cache; pickled weights are never read.

        Parameters
        ----------
        model
            A folder, ``"org/name"``, ``"kvrag-tiny"``, or a loaded causal language model.
        tokenizer
            Needed with a loaded object whose folder is unknown; otherwise replaces the model's own,
        and the object returned is shared with nobody.
        dtype
            ``"float32"``, ``"bfloat16"``, ``"float16"`` or the torch type; None keeps the
            checkpoint's.
        device
            Such as ``"cuda"``; None means the CPU for weights loaded here.

        Raises
        ------
        ModelLoadError, UnsupportedModelError, ParameterError
        """
        if isinstance(model, KVModel):
            return model
        if isinstance(model, PreTrainedModel):
            if tokenizer is None:
                folder = getattr(model.config, "_name_or_path", "")
                if not folder:
                    raise ModelLoadError(
                        "a model object built in memory carries no tokenizer: pass tokenizer=..."
                    )
                tokenizer = load_tokenizer(folder)
            model.eval()  # type: ignore[no-untyped-call]
            return cls(model, tokenizer)
        if isinstance(dtype, str):
            if dtype not in DTYPES:
                raise ParameterError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
            dtype = DTYPES[dtype]
        path = resolve_model(model)
        if tokenizer is not None:
            return cls(load_weights(model, dtype, device), tokenizer, name=str(model))
        with _loading:
            loaded = _loaded.get((path, str(dtype), str(device)))
            if loaded is None:
                loaded = cls(
                    load_weights(model, dtype, device),
                    load_tokenizer(model),
                    name=str(model),
                )
                # Found again both by what was asked for and by what it turned out to be: an index
                # is created with "the checkpoint's type" and opened with the type it recorded.
                for found_as in (dtype, loaded.spec.dtype):
                    _loaded[path, str(found_as), str(device)] = loaded
        return loaded

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.hf.device

    @property
    def folder(self) -> Path | None:
        """The folder that it was loaded from; None of a hub's model, or one made in memory."""
        # A hub's name is no folder, whatever lies where the program was started.
        path = Path(getattr(self.hf, "name_or_path", ""))
        return path if path.is_absolute() else None

    @cached_property
    def fingerprint(self) -> str:
        """Digest of weights and config (see `model_fingerprint`)."""
        return model_fingerprint(self.hf)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Digest of what decides token ids (see `tokenizer_fingerprint`)."""
        return tokenizer_fingerprint(self.tokenizer)

    @property
    def windows(self) -> list[int | None]:
        """Each layer's sliding window in tokens, None where it sees everything."""
        return self._windows

    @property
    def is_position_bound(self) -> bool:
        """Whether KV holds for the positions alone that it was computed at (learned positions)."""
        return self.family.position_embedding is not None

    def default_prefix_ids(self) -> tuple[int, ...]:
        """Token ids every chunk is encoded behind (see `shared_prefix_ids`)."""
        return shared_prefix_ids(self.tokenizer)

    # -- offline: whole chunks ---------------------------------------------------------------

    @torch.no_grad()
    def prefill(
        self,
        prefix_ids: Sequence[int],
        chunks: Sequence[Sequence[int]],
        starts: Sequence[int] | None = None,
    ) -> list[ChunkKV]:
        """Compute the position-free KV of several chunks in one batch.

        Each chunk stands alone behind the shared prefix, at positions ``P .. P + T - 1``; the
        prefix's own rows are not returned (CacheBlend §4; the attention sink is present while
        the chunk is encoded). Sequences are padded on the right, where causal attention never
        looks.

        Parameters
        ----------
        prefix_ids
            P token ids, possibly none.
        chunks
            Token ids of each chunk, 1 to ``max_positions - P`` of them.
        starts
            For each chunk the position of its first token, P at least; None stands for P. Only of
            KV that is bound to positions does it matter.

        Returns
        -------
        list of ChunkKV
            In the order given, on the CPU.
        """
        prefix = list(prefix_ids)
        lengths = [len(chunk) for chunk in chunks]
        width = len(prefix) + max(lengths)
        if min(lengths) == 0 or width > self.max_positions:
            raise ParameterError(
                f"chunks of {min(lengths)} to {max(lengths)} tokens behind a prefix of "
                f"{len(prefix)}: expected at least 1 token and at most {self.max_positions} in all"
            )
        padded = torch.zeros(len(chunks), width, dtype=torch.long)
        for row, chunk in zip(padded, chunks, strict=True):
            row[: len(prefix) + len(chunk)] = torch.tensor([*prefix, *chunk])
        cache = CaptureCache(self.spec.num_layers)
        given: dict[str, Any] = {}
        if starts is not None and self.is_position_bound:
            given["position_ids"] = self._shifted(len(prefix), lengths, starts, width)
        with self.lock, without_adapters(self.hf):
            self._base(
                input_ids=padded.to(self.device), past_key_values=cache, use_cache=True, **given
            )
        tables = self._positions.tables(torch.arange(width, device=self.device))
        return [
            self._take_chunk(cache, tables, index, len(prefix), length)
            for index, length in enumerate(lengths)
        ]

    def _shifted(
        self, num_prefix: int, lengths: Sequence[int], starts: Sequence[int], width: int
    ) -> torch.Tensor:
        """Return ``[B, width]`` positions: the prefix's as ever, the chunks' from `starts` on."""
        for start, length in zip(starts, lengths, strict=True):
            if start < num_prefix or start + length > self.max_positions:
                raise ParameterError(
                    f"a chunk of {length} tokens at position {start}: expected it behind the "
                    f"prefix of {num_prefix} and within {self.max_positions} positions"
                )
        positions = torch.arange(width).repeat(len(starts), 1)
        for row, start in zip(positions, starts, strict=True):
            row[num_prefix:] += start - num_prefix
        # Of the padding nothing is kept, whatever its positions.
        return positions.clamp(max=self.max_positions - 1).to(self.device)

    def _take_chunk(
        self,
        cache: CaptureCache,
        tables: Sequence[RotaryTable],
        index: int,
        start: int,
        length: int,
    ) -> ChunkKV:
        spec = self.spec
        shape = (spec.num_layers, spec.num_kv_heads, length, spec.head_dim)
        keys = torch.empty(shape, dtype=spec.dtype, device=self.device)
        values = torch.empty_like(keys)
        rows = slice(start, start + length)
        layers: list[Any] = cache.layers
        for layer_index, layer in enumerate(layers):
            tables[layer_index].strip(layer.keys[index, :, rows], rows, keys[layer_index])
            values[layer_index] = layer.values[index, :, rows]
        return ChunkKV(keys.cpu(), values.cpu())

    # -- online: selected rows ---------------------------------------------------------------

    @contextmanager
    def computing_rows(
        self, adapter: RowAdapter | None = None, adapted: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Hold the model for calls of `forward_rows` and `project_rows` without gradients.

        Parameters
        ----------
        adapter
            Acts in those calls, on the rows that `adapted` names.
        adapted
            Positions; None stands for all.
        """
        seen: torch.Tensor | None = None
        chosen: torch.Tensor | None = None

        def gate() -> torch.Tensor | None:
            # Asked for by every linear layer: looked up once for each block of rows.
            nonlocal seen, chosen
            if seen is not self._rows_at_hand and adapted is not None:
                seen = self._rows_at_hand
                chosen = torch.isin(seen, adapted)
                if bool(chosen.all()):
                    chosen = None
            return chosen

        acting = without_adapters(self.hf) if adapter is None else adapter.acting(self.hf, gate)
        # Families that attend in code of their own know no other implementation.
        attending = nullcontext() if self.family.attends_itself else row_attention(self.hf)
        with self.lock, torch.no_grad(), attending, acting:
            yield

    def tables(self, num_tokens: int, positions: Sequence[int] | None = None) -> list[RotaryTable]:
        """Return each layer's table of rows ``0 .. num_tokens - 1``.

        Parameters
        ----------
        num_tokens
            Rows.
        positions
            Of each row, ascending; None means that row r has position r.
        """
        if positions is None:
            return self._positions.tables(torch.arange(num_tokens, device=self.device))
        return self._positions.tables(torch.tensor(positions, device=self.device))

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return the first layer's input ``[n, hidden]`` of token ids ``[n]``.

        Parameters
        ----------
        positions
            ``[n]``; needed where the model learned its positions.
        """
        family = self.family
        embedding = self._base.get_input_embeddings()
        norm = getattr(self._base, family.embedding_norm) if family.embedding_norm else None
        learned = (
            getattr(self._base, family.position_embedding) if family.position_embedding else None
        )
        hidden = self._scratch(len(token_ids), self.hf.config.hidden_size)
        for begin in range(0, len(token_ids), ROW_BLOCK):
            block = slice(begin, begin + ROW_BLOCK)
            embedded = embedding(token_ids[block])
            if learned is not None:
                assert positions is not None, "learned positions are part of the input"
                embedded = embedded + learned(positions[block])
            hidden[block] = embedded if norm is None else norm(embedded)
        return hidden

    def _scratch(self, num_rows: int, width: int) -> torch.Tensor:
        """Return memory for hidden states that leaves the process when it is let go.

        The C allocator would keep it: after one large block is freed, glibc takes later ones
        of that size from its heap and holds them, beside the fused KV that then fills up.
        """
        num_bytes = num_rows * width * self.spec.dtype.itemsize
        if self.device.type != "cpu" or num_bytes < _LARGE_BYTES:
            return torch.empty(num_rows, width, dtype=self.spec.dtype, device=self.device)
        memory = mmap.mmap(-1, num_bytes)
        return torch.frombuffer(memory, dtype=self.spec.dtype).view(num_rows, width)

    def forward_rows(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        fused: FusedKV,
        table: RotaryTable,
        *,
        observer: AttentionObserver | None = None,
        deviation: Deviation | None = None,
        scaled: ScaledKeys | None = None,
        visible: torch.Tensor | None = None,
        writes: bool = True,
    ) -> None:
        """Run one layer over selected rows; their K/V replace what the buffer held.

        Row i attends every row j <= i of the buffer inside the layer's window, recomputed or
        reused. Call inside `computing_rows`.

        Parameters
        ----------
        layer_index
            The layer.
        hidden
            ``[n, hidden]`` inputs of the rows; replaced by the layer's outputs.
        rows
            ``[n]`` ascending positions.
        fused
            The prompt's buffer; every position below ``rows[-1]`` holds this layer's K/V already
            or is among `rows`.
        table
            The layer's rotary table over all positions.
        observer
            Is shown every block's queries with the keys and values that it attends to.
        deviation
            Of the n rows; filled with how far their fresh K/V are from those they replace.
        scaled
            Which keys are attended to otherwise; None: none.
        visible
            ``[n, K]`` bool: which of the buffer's first K rows each row sees, among them only such
            as stand before it in `rows` or are there already. None: all before it, as said above.
            With it rows need not ascend, and no window of the layer is looked at.
        writes
            False leaves the buffer as it is, which then holds the rows' own K/V already.
        """
        window = self._windows[layer_index]
        if scaled is not None and self.family.attends_itself:
            raise UnsupportedModelError(
                f"{self.name} attends in code of its own, which knows no temperature or scale of "
                "reused keys; leave both out of the policy"
            )
        # Rows come in ascending order, so a later block's K/V are never seen by an earlier one.
        for block, positions, first_key, last in self._blocks(layer_index, rows):
            seen = None
            if visible is not None:
                seen, first_key, last, window = visible[block], 0, visible.shape[1] - 1, None
            noted = None if deviation is None else deviation[block]
            writer = RowWriter(fused, positions, first_key, last, noted, writes)
            mask = RowMask(positions, first_key, window, observer, scaled, seen)
            output = self._run(
                layer_index, hidden[block], mask, last + 1 - first_key, table, writer
            )
            if isinstance(output, tuple):
                if observer is not None and self.family.attends_itself:
                    show_weights(observer, mask, output[1], fused.values[layer_index])
                output = output[0]
            hidden[block] = output[0]

    def _blocks(
        self, layer_index: int, rows: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, int, int]]:
        """Yield blocks of rows: which they are, their positions, the first and last key seen."""
        window = self._windows[layer_index]
        for begin in range(0, len(rows), ROW_BLOCK):
            positions = rows[begin : begin + ROW_BLOCK]
            first, last = int(positions[0]), int(positions[-1])
            first_key = 0 if window is None else max(0, first - window + 1)
            yield slice(begin, begin + ROW_BLOCK), positions, first_key, last

    def _run(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        mask: RowMask,
        num_keys: int,
        table: RotaryTable,
        cache: RowWriter | ProjectionProbe,
    ) -> Any:
        """Return what a layer's own forward returns for a block of rows ``[n, hidden]``."""
        self._rows_at_hand = mask.positions
        return self._layers[layer_index](
            hidden[None],
            **self._arguments(mask, num_keys, table),
            **{self.family.cache_argument: cache},
        )

    def _arguments(self, mask: RowMask, num_keys: int, table: RotaryTable) -> dict[str, Any]:
        """Return what a layer wants to know of its rows besides their hidden states."""
        if self.family.attends_itself:
            return layer_arguments(self.hf, mask, num_keys, table)
        return {
            "attention_mask": mask,
            "position_ids": mask.positions[None],
            "position_embeddings": table.embeddings(mask.positions, self.spec.dtype),
        }

    def project_rows(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        table: RotaryTable,
        which: torch.Tensor,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield one layer's fresh K/V of some of the rows, without its attention and MLP.

        Parameters
        ----------
        layer_index, hidden, rows, table
            As in `forward_rows`; nothing is changed.
        which
            ``[m]`` indices into `rows`.

        Yields
        ------
        tensor, tensor, tensor
            A block of `which` (never all of it at once, so that no second copy of `hidden`
            exists), the placed keys and the values ``[H, m, D]`` of its rows.
        """
        for block in torch.split(which, ROW_BLOCK):
            mask = RowMask(rows[block], 0, None)
            try:
                self._run(layer_index, hidden[block], mask, 0, table, ProjectionProbe())
            except ProjectionDone as done:
                yield block, done.keys[0], done.values[0]

    def compare_rows(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        fused: FusedKV,
        table: RotaryTable,
        *,
        encoded: EncodedScope,
    ) -> torch.Tensor:
        """Return how much else rows gather in a layer than they did when they were encoded.

        Costs their projections and attention, not their MLP. Their K/V of the layer are written, as
        `forward_rows` does. Of families that attend in code of their own it cannot be told.

        Parameters
        ----------
        layer_index, hidden, rows, fused, table
            As in `forward_rows`; `hidden` stays as it is.
        encoded
            What each of the rows was encoded with.

        Returns
        -------
        tensor
            ``[n]`` float32, squared L2 distances (see `AttentionDone`).
        """
        window = self._windows[layer_index]
        change = torch.zeros(len(rows), device=rows.device)
        for block, positions, first_key, last in self._blocks(layer_index, rows):
            scope = replace(encoded, starts=encoded.starts[block])
            mask = RowMask(positions, first_key, window, encoded=scope)
            writer = RowWriter(fused, positions, first_key, last)
            try:
                self._run(layer_index, hidden[block], mask, last + 1 - first_key, table, writer)
            except AttentionDone as done:
                change[block] = done.change
        return change

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, vocabulary]`` of the last layer's outputs ``[n, hidden]``."""
        norm = getattr(self._base, self.family.final_norm)
        return project_logits(self.hf, norm(hidden))
