"""`KVModel`: a Hugging Face decoder as kvrag uses it.

Whole chunks go through the model's own forward (`prefill`); at question time its layers are
called one by one on selected rows (`forward_rows`), each reading and writing one fused buffer.
The model's code is never rewritten and never patched.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvrag.errors import ModelLoadError, ParameterError, UnsupportedModelError
from kvrag.kvcache import DTYPES, ChunkKV, FusedKV, KVSpec
from kvrag.models.adapter import RowAdapter, without_adapters
from kvrag.models.attention import EncodedScope, lock_of
from kvrag.models.caches import CaptureCache, Deviation
from kvrag.models.chunks import shifted_positions, take_chunk
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
from kvrag.models.rows import ALL_BEFORE, ROW_BLOCK, Attending, RowRunner
from kvrag.models.schemes import find_positions
from kvrag.models.scratch import scratch
from kvrag.positions.rotary import RotaryTable

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
        self._rows = RowRunner(hf, self.family, self.name, self.spec, self._windows)
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
            positions = shifted_positions(len(prefix), lengths, starts, self.max_positions)
            given["position_ids"] = positions.to(self.device)
        with self.lock, without_adapters(self.hf):
            self._base(
                input_ids=padded.to(self.device), past_key_values=cache, use_cache=True, **given
            )
        tables = self._positions.tables(torch.arange(width, device=self.device))
        return [
            take_chunk(cache, tables, self.spec, index, slice(len(prefix), len(prefix) + length))
            for index, length in enumerate(lengths)
        ]

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
        with self._rows.computing(adapter, adapted):
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
        width = self.hf.config.hidden_size
        hidden = scratch(len(token_ids), width, self.spec.dtype, self.device)
        for begin in range(0, len(token_ids), ROW_BLOCK):
            block = slice(begin, begin + ROW_BLOCK)
            embedded = embedding(token_ids[block])
            if learned is not None:
                assert positions is not None, "learned positions are part of the input"
                embedded = embedded + learned(positions[block])
            hidden[block] = embedded if norm is None else norm(embedded)
        return hidden

    def forward_rows(
        self,
        layer_index: int,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        fused: FusedKV,
        table: RotaryTable,
        *,
        attending: Attending = ALL_BEFORE,
        deviation: Deviation | None = None,
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
        attending
            Otherwise than said above.
        deviation
            Of the n rows; filled with how far their fresh K/V are from those they replace.
        writes
            False leaves the buffer as it is, which then holds the rows' own K/V already.
        """
        self._rows.forward(
            layer_index, hidden, rows, fused, table, attending, deviation, writes=writes
        )

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
        return self._rows.project(layer_index, hidden, rows, table, which)

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
        return self._rows.compare(layer_index, hidden, rows, fused, table, encoded)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, vocabulary]`` of the last layer's outputs ``[n, hidden]``."""
        norm = getattr(self._base, self.family.final_norm)
        return project_logits(self.hf, norm(hidden))
