"""`KVModel`: a Hugging Face decoder as kvrag uses it.

Whole chunks go through the model's own forward (`prefill`); at question time its layers are
called one by one on selected rows (`RowRunner`), each reading and writing one fused buffer. On
the CPU, both attend in kvrag's kernel.
The model's code is never rewritten and never patched.
"""

from __future__ import annotations

import copy
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch
from torch import nn

from kvrag import plugins
from kvrag.arguments import QUANTISED, check_compute, shown
from kvrag.errors import ModelLoadError, ParameterError, UnsupportedModelError
from kvrag.kvcache import DTYPES, ChunkKV, KVSpec, packed
from kvrag.models.adapter import RowAdapter, without_adapters
from kvrag.models.attention import lock_of, share_lock, whole_attention
from kvrag.models.batch import BatchRow, BatchRows
from kvrag.models.cardlayers import CardLayers, Slots, on_card
from kvrag.models.compiled import CompiledLayers, Description, compile_layers, describe_layers
from kvrag.models.compute import resolved_compute
from kvrag.models.decoders import Decoder, Model
from kvrag.models.elements import has_global_hooks, is_hooked, state_of
from kvrag.models.families import (
    TESTED,
    WHOLE,
    Chunked,
    Family,
    base_of,
    context_window,
    find_family,
    latent_of,
    no_chunks,
    num_kv_heads,
    project_logits,
    sliding_windows,
)
from kvrag.models.linears import ROWS_STEP, fast_modules, twin_of
from kvrag.models.loading import (
    has_bfloat16,
    is_transformers,
    load_model,
    load_tokenizer,
    model_fingerprint,
    shared_prefix_ids,
)
from kvrag.models.quantised import is_quantised, unpack
from kvrag.models.references import resolve_model
from kvrag.models.rowgraphs import CapturedLayers, CapturedSteps, RowGraphs
from kvrag.models.rows import RowRunner, rows_at_once
from kvrag.models.schemes import Positions, find_positions
from kvrag.models.tokens import Tokenizer, check_tokenizer, tokenizer_fingerprint
from kvrag.models.writers import CACHE_ARGUMENT, Captured, CapturedKV
from kvrag.native.kernels import IS_COMPILED
from kvrag.positions.rotary import RotaryTable
from kvrag.process import after_fork, working

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvrag.models import proof


def shifted_positions(
    num_prefix: int, lengths: Sequence[int], starts: Sequence[int], max_positions: int
) -> torch.Tensor:
    """Return ``[B, width]`` positions: the prefix's unchanged, the chunks' from `starts` on."""
    for start, length in zip(starts, lengths, strict=True):
        if start < num_prefix or start + length > max_positions:
            raise ParameterError(
                f"a chunk of {length} tokens at position {start}: expected it after the "
                f"prefix of {num_prefix} and within {max_positions} positions"
            )
    positions = torch.arange(num_prefix + max(lengths)).repeat(len(starts), 1)
    for row, start in zip(positions, starts, strict=True):
        row[num_prefix:] += start - num_prefix
    # The padding's rows are not kept, whatever their positions.
    return positions.clamp(max=max_positions - 1)


def take_chunk(
    cache: Captured, tables: Sequence[RotaryTable], spec: KVSpec, index: int, rows: slice
) -> ChunkKV:
    """Return the position-free KV of one sequence's rows, on the CPU.

    Parameters
    ----------
    cache
        The cache that the model's forward filled.
    tables
        Each layer's table of the positions at which the sequence was encoded.
    spec
        Shape and type of the KV.
    index
        The sequence's place in the batch.
    rows
        The chunk's rows.
    """
    layers: list[Any] = cache.layers
    shape = (spec.num_layers, spec.num_kv_heads, rows.stop - rows.start, spec.head_dim)
    keys = torch.empty(shape, dtype=spec.dtype, device=layers[0].keys.device)
    values = torch.empty_like(keys)
    for layer_index, layer in enumerate(layers):
        given = packed(spec.latent, layer.keys[index, :, rows], layer.values[index, :, rows])
        tables[layer_index].strip(given[0], rows, keys[layer_index])
        values[layer_index] = given[1]
    return ChunkKV(keys.cpu(), values.cpu())


class Ranks:
    """One process that has the whole model.

    A subclass connects several that compute it together, each with some of its heads. Each of them
    makes the same calls in the same order, from one thread at a time, and all get the same bits.

    Attributes
    ----------
    rank, size
        This process's number, from 0, and the number of processes.
    """

    rank: int = 0
    size: int = 1

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all processes' tensors of one shape; the argument may be changed."""
        return part

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return, for each place of a list, the greatest number that a process has there."""
        return list(numbers)


ALONE = Ranks()


@dataclass(frozen=True)
class EncodedPrefix:
    """A prefix with its KV, from `KVModel.encode_prefix`; belongs to that model."""

    token_ids: tuple[int, ...]
    cache: Captured


_LARGE_BYTES = 1 << 20


def _kind_of(hf: Model) -> type[KVModel]:
    return WholeModel if hf.config.model_type in WHOLE else KVModel


_loaded: WeakValueDictionary[tuple[str, str, str, str | None], KVModel] = WeakValueDictionary()
_loading = threading.Lock()


def _forget() -> None:
    """Share nothing with the parent of a forked process: its threads may hold a model's lock."""
    global _loading
    _loading = threading.Lock()
    _loaded.clear()


after_fork(_forget)


class KVModel:
    """A decoder whose KV can be captured, placed and recomputed row by row.

    Parameters
    ----------
    hf
        A loaded causal language model of a supported family; used as it is, in evaluation mode.
    tokenizer
        Its fast tokenizer, which is copied, or the folder or hub name to load one from.
    name
        Name of the model in reports.
    compute
        What linear layers of answers compute in (see `load`).
    chunk_dtype
        The type of chunks' KV; None means that of the weights.
    proves
        Whether a model whose type no test knows has to pass the self-test of `kvrag.models.proof`,
        which takes seconds, and is remembered.

    Attributes
    ----------
    spec
        Shape and type of the KV of prompts, which the model computes with.
    chunk_spec
        Shape and type of the KV of chunks, which is stored.
    compute
        The precision that linear layers of answers compute in: ``"float32"``, ``"bfloat16"``,
        ``"float16"``, ``"int8"`` or ``"int4"``.
    max_positions
        The context window in tokens.
    lock
        Held during every forward pass here: one thread at a time uses the loaded model.
    ranks
        The processes that compute the model together. With several, `spec` is that of this
        process's heads, and only prompts can be computed, not chunks.
    rows
        Runs the layers over selected rows.
    why_whole
        Why chunks have no KV; empty for all but `WholeModel`.
    layer_stop
        Number of first layers whose KV a prompt needs here: all, or in a pipeline's process those
        up to its last layer.

    Raises
    ------
    UnsupportedModelError
        When the family, its positions or its tokenizer is not supported; names what is missing.
    """

    why_whole = ""
    _family_of = staticmethod(find_family)
    spec: KVSpec
    rows: RowRunner
    _windows: list[int | None]
    _positions: Positions
    _captured: CapturedSteps
    _compiled: CompiledLayers | None
    _one_row: list[RotaryTable] | None = None
    # The layers' state when they were described, and for a card what kernels may compute.
    _seen: tuple[object, ...] | None = None
    _described: Description | None = None
    # What layers were compiled to in that state, without copies of their weights.
    _made: CompiledLayers | None = None
    _slots: Slots | None = None
    _graphs: RowGraphs | None = None

    def __init__(
        self,
        hf: Model,
        tokenizer: PreTrainedTokenizerBase | str | Path,
        *,
        name: str = "",
        compute: str | None = None,
        chunk_dtype: torch.dtype | None = None,
        proves: bool = True,
    ) -> None:
        self.family = self._family_of(hf)
        if hf.dtype not in DTYPES.values():
            raise UnsupportedModelError(
                f"weights of type {hf.dtype} are not supported; expected {', '.join(DTYPES)}"
            )
        if is_quantised(hf):
            # Before computing lays bytes out otherwise.
            self.__dict__["fingerprint"] = model_fingerprint(hf)
            unpack(hf)
        self.decoder: Model = hf
        self.tokenizer: PreTrainedTokenizerBase
        if isinstance(tokenizer, str | Path):
            self.tokenizer = load_tokenizer(tokenizer)
        elif isinstance(tokenizer, Tokenizer):
            self.tokenizer = tokenizer
        else:
            # A copy: fast tokenizers keep the truncation and padding of their last call, and
            # another thread using the caller's object would shorten our prompts.
            self.tokenizer = copy.deepcopy(check_tokenizer(tokenizer))
        config: Any = hf.config
        self.name = name or getattr(config, "_name_or_path", "") or config.model_type
        self.max_positions = context_window(config)
        self.lock = lock_of(hf)
        self.ranks: Ranks = ALONE
        self.compute = resolved_compute(hf, compute)
        self._twins: tuple[Any, dict[int, KVModel | None]] = None, {}
        self._shape(hf, chunk_dtype or hf.dtype)
        if proves and hf.config.model_type not in TESTED:
            from kvrag.models import proof

            proof.require(self, self.fingerprint, self.prove)

    def _shape(self, hf: Model, chunk_dtype: torch.dtype) -> None:
        """Take what has to do with KV."""
        config: Any = hf.config
        latent = latent_of(config)
        own = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.spec = KVSpec(
            num_layers=config.num_hidden_layers,
            num_kv_heads=num_kv_heads(config) if latent is None else 1,
            head_dim=own if latent is None else latent.head_dim,
            dtype=hf.dtype,
            latent=latent,
        )
        self.chunk_spec = replace(self.spec, dtype=chunk_dtype)
        self.layer_stop = self.spec.num_layers
        self._take(hf)

    def _take(self, decoder: Model) -> None:
        """Compute with a loaded model from now on."""
        self.decoder = decoder
        self.family = find_family(decoder)
        self._base: Any = base_of(decoder)
        self._windows = sliding_windows(decoder)
        self.rows = RowRunner(decoder, self.family, self.spec, self._windows, self.compute)
        self._positions = find_positions(decoder, self.family, self.spec)
        self._captured = CapturedSteps(decoder, self._windows)
        self._compiled: CompiledLayers | None = None

    @property
    def hf(self) -> PreTrainedModel:
        """The model as Transformers' own object, which this model computes with from then on.

        Where kvrag's modules computed instead, it is made over their weights at its first use.
        """
        if isinstance(self.decoder, Decoder):
            from kvrag.models.pretrained import over_weights

            with self.lock:
                if isinstance(self.decoder, Decoder):
                    made = over_weights(self.decoder)
                    share_lock(made, self.lock)
                    self._take(made)
        return cast("PreTrainedModel", self.decoder)

    def twin(self, number: int) -> KVModel | None:
        """Return a model over the same weights, with which another thread may fuse a prompt.

        None where kernels do not compute the layers. Use it for one prompt: for a later one, ask
        again, since this model may have changed.

        Parameters
        ----------
        number
            Which of the twins, from 0.
        """
        if type(self) is not KVModel or self.device.type != "cpu" or self.ranks.size > 1:
            return None
        # While others compute, modules have other forwards for a while.
        with self.lock:
            state = state_of(self.decoder)
            if self._twins[0] != state:
                self._twins = state, {}
            twins = self._twins[1]
            if number not in twins:
                twins[number] = self._made_twin()
            return twins[number]

    def _made_twin(self) -> KVModel | None:
        if any(map(is_hooked, self.decoder.modules())):
            return None  # hooks outside the layers may not stand several threads either
        twin: KVModel = object.__new__(KVModel)
        vars(twin).update(vars(self))
        twin._one_row = twin._seen = twin._described = twin._made = None
        twin._twins = None, {}  # not those that it is among: what is dropped is freed at once
        decoder = cast("Model", twin_of(self.decoder))
        twin.lock = lock_of(decoder)
        twin._take(decoder)
        with twin.lock:
            return None if twin.compile() is None else twin

    def prove(self) -> tuple[list[proof.Check], str]:
        """Run the self-test in the weights' own type; return what `kvrag.models.proof.prove` does.

        What is proven counts for every `compute`: its rounding would hide what is wrong.
        """
        from kvrag.models import proof

        own = self._computing_in(str(self.decoder.dtype).removeprefix("torch."))
        return proof.prove(own, lambda hf: KVModel(hf, self.tokenizer, proves=False))

    @classmethod
    def load(
        cls,
        model: str | Path | PreTrainedModel | KVModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | str | None = None,
        device: str | None = None,
        compute: str | None = None,
    ) -> KVModel:
        """Load a model by path or hub name, or wrap a loaded object.

        The same path, dtype, device and `compute` return the same object while any caller holds it.
        Nothing is fetched from a network unless `model` is a hub name that is absent from the local
        cache. Pickled weights are never read.

        Parameters
        ----------
        model
            A folder, ``"org/name"``, ``"kvrag-tiny"``, or a loaded causal language model.
        tokenizer
            Required with a loaded object whose folder is unknown; otherwise it replaces the model's
            own, and the object returned is not shared.
        dtype
            Type of the weights and of stored KV: ``"float32"``, ``"bfloat16"``, ``"float16"`` or
            the torch type; None keeps the checkpoint's. A processor that does not multiply bfloat16
            computes with such weights in float32, unless `compute` says otherwise.
        device
            Device such as ``"cuda"``; None means the CPU for weights loaded here.
        compute
            What linear layers compute in, on the CPU, when a prompt is answered: ``"float32"``,
            ``"bfloat16"``, ``"int8"`` (weights by output, inputs by row), ``"int4"`` (weights in
            groups of 32 inputs, the head's in 8 bits), or ``"auto"``, which measures all but the
            last and takes the fastest. Chunks that are stored, and whatever Transformers
            computes, stay in the type of the weights, which None means for answers too.

        Raises
        ------
        ModelLoadError, UnsupportedModelError, ParameterError
        """
        check_compute(compute)
        if isinstance(model, KVModel):
            return model._computing_in(compute)
        if is_transformers(model):
            folder = str(getattr(model.config, "_name_or_path", ""))
            given = folder if tokenizer is None else tokenizer
            if not given:
                raise ModelLoadError(
                    "a model object built in memory carries no tokenizer: pass tokenizer=..."
                )
            model.eval()  # type: ignore[no-untyped-call]
            return _kind_of(model)(model, given, compute=compute)
        if isinstance(dtype, str):
            if dtype not in DTYPES:
                raise ParameterError(f"dtype {shown(dtype)}: expected one of {', '.join(DTYPES)}")
            dtype = DTYPES[dtype]
        is_small = IS_COMPILED and compute is None and str(device) in ("None", "cpu")
        path = resolve_model(
            cast("str | Path", model), is_small=is_small and dtype in (None, torch.bfloat16)
        )
        if tokenizer is not None:
            return cls._loaded(path, tokenizer, str(model), dtype, device, compute)
        with _loading:
            loaded = _loaded.get((path, str(dtype), str(device), compute))
            if loaded is None:
                loaded = cls._loaded(path, path, str(model), dtype, device, compute)
                # Cached both under the request and under the result: an index is created with "the
                # checkpoint's type" and opened with the type it recorded.
                for found_as in (dtype, loaded.chunk_spec.dtype):
                    _loaded[path, str(found_as), str(device), compute] = loaded
        return loaded

    @classmethod
    def _loaded(
        cls,
        path: str,
        tokenizer: PreTrainedTokenizerBase | str,
        name: str,
        dtype: torch.dtype | None,
        device: str | None,
        compute: str | None,
    ) -> KVModel:
        """Load weights, and widen those that this processor does not multiply."""
        hf = load_model(path, dtype, device)
        own, fingerprint = hf.dtype, None
        slow = own == torch.bfloat16 and hf.device.type == "cpu" and not has_bfloat16()
        if slow and compute != "bfloat16" and not is_quantised(hf):
            # That of the checkpoint, so that an index is the same on all processors.
            fingerprint = model_fingerprint(hf)
            hf.float()
        try:
            kind = _kind_of(hf)
            model = kind(hf, tokenizer, name=name, compute=compute, chunk_dtype=own)
        except BaseException as error:
            raise ModelLoadError(
                f"model {shown(name)}: its config.json describes no model that kvrag can use "
                f"({plugins.reason(error)}); restore it"
            ) from error
        if fingerprint is not None:
            model.__dict__["fingerprint"] = fingerprint
        return model

    def _computing_in(self, compute: str | None) -> KVModel:
        """Return this model, or one over the same weights that computes in another precision."""
        if compute is None or (wanted := resolved_compute(self.decoder, compute)) == self.compute:
            return self
        other = type(self)(
            self.decoder,
            self.tokenizer,
            name=self.name,
            compute=wanted,
            chunk_dtype=self.chunk_spec.dtype,
            proves=False,
        )
        known = ("fingerprint", "tokenizer_fingerprint")
        other.__dict__ |= {name: self.__dict__[name] for name in known if name in self.__dict__}
        return other

    @property
    def folder(self) -> Path | None:
        """The folder that it was loaded from; None for a hub's model or one made in memory."""
        # A hub name is not a folder, even if the working directory has one of that name.
        path = Path(getattr(self.decoder, "name_or_path", ""))
        return path if path.is_absolute() else None

    @cached_property
    def fingerprint(self) -> str:
        """Digest of weights and config (see `model_fingerprint`)."""
        return model_fingerprint(self.decoder)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Digest of everything that decides token ids (see `tokenizer_fingerprint`)."""
        return tokenizer_fingerprint(self.tokenizer)

    @property
    def is_position_bound(self) -> bool:
        """Whether KV is valid only at the positions it was computed at (learned positions)."""
        return self.family.position_embedding is not None

    def default_prefix_ids(self) -> tuple[int, ...]:
        """Token ids that every chunk is encoded after (see `shared_prefix_ids`)."""
        return shared_prefix_ids(self.tokenizer)

    # -- offline: whole chunks ---------------------------------------------------------------

    def encode_prefix(
        self, prefix_ids: Sequence[int], adapter: RowAdapter | None = None
    ) -> EncodedPrefix:
        """Compute a prefix's KV, for several calls of `prefill` that continue it.

        Parameters
        ----------
        prefix_ids
            1 to ``max_positions - 1`` token ids.
        adapter
            Acts on all rows.
        """
        cache, _ = self._capture((), [prefix_ids], None, adapter=adapter)
        return EncodedPrefix(tuple(prefix_ids), cache)

    def prefill(
        self,
        prefix: Sequence[int] | EncodedPrefix,
        chunks: Sequence[Sequence[int]],
        starts: Sequence[int] | None = None,
        *,
        check: Callable[[], None] | None = None,
        adapter: RowAdapter | None = None,
    ) -> list[ChunkKV]:
        """Compute the position-free KV of several chunks in one batch.

        Each chunk is encoded alone after the shared prefix, at positions ``P .. P + T - 1``. The
        prefix's own rows are not returned (CacheBlend §4; the attention sink is present while the
        chunk is encoded). Sequences are padded on the right, where causal attention never looks.

        Parameters
        ----------
        prefix
            P token ids, possibly none. If they are encoded already, their KV is not computed again.
        chunks
            Token ids of each chunk, 1 to ``max_positions - P`` of them.
        starts
            Position of each chunk's first token, at least P; None means P. It matters only for KV
            that is bound to positions.
        check
            Called in each layer; an error that it raises ends the work.
        adapter
            Acts on all rows that are computed.

        Returns
        -------
        list of ChunkKV
            In the order given, on the CPU.
        """
        with working():
            cache, num_prefix = self._capture(
                prefix, chunks, starts, step=ROWS_STEP, check=check, adapter=adapter
            )
            width = num_prefix + max(map(len, chunks))
            tables = self._positions.tables(torch.arange(width, device=self.device))
            return [
                take_chunk(
                    cache,
                    tables,
                    self.chunk_spec,
                    index,
                    slice(num_prefix, num_prefix + len(chunk)),
                )
                for index, chunk in enumerate(chunks)
            ]

    @torch.no_grad()
    def _capture(
        self,
        prefix: Sequence[int] | EncodedPrefix,
        chunks: Sequence[Sequence[int]],
        starts: Sequence[int] | None,
        *,
        step: int = 1,
        check: Callable[[], None] | None = None,
        adapter: RowAdapter | None = None,
    ) -> tuple[Captured, int]:
        """Return the K/V of chunks after a prefix, and the number of the prefix's tokens.

        Rows after a chunk's fill up a multiple of `step`, as far as the context window goes. Their
        K/V mean nothing. KV that is bound to positions is not filled up.
        """
        before = prefix.cache if isinstance(prefix, EncodedPrefix) else None
        prefix_ids = prefix.token_ids if isinstance(prefix, EncodedPrefix) else tuple(prefix)
        lengths = [len(chunk) for chunk in chunks]
        width = len(prefix_ids) + max(lengths)
        if min(lengths) == 0 or width > self.max_positions:
            raise ParameterError(
                f"chunks of {min(lengths)} to {max(lengths)} tokens after a prefix of "
                f"{len(prefix_ids)}: expected at least 1 token and at most {self.max_positions} "
                "in all"
            )
        begin = 0 if before is None else len(prefix_ids)
        if not self.is_position_bound:
            width = min(width + (begin - width) % step, self.max_positions)
        padded = torch.zeros(len(chunks), width, dtype=torch.long)
        for row, chunk in zip(padded, chunks, strict=True):
            row[: len(prefix_ids) + len(chunk)] = torch.tensor([*prefix_ids, *chunk])
        positions = None
        if starts is not None and self.is_position_bound:
            positions = shifted_positions(len(prefix_ids), lengths, starts, self.max_positions)
        held = ExitStack()
        kind: type[Any] = CapturedKV
        if not isinstance(self.decoder, Decoder):
            from kvrag.models.caches import CaptureCache as kind  # noqa: N813
        cache = kind(self.spec.num_layers, before, partial(self._between, held, check, adapter))
        rows = slice(begin, width)
        given: dict[str, Any] = {}
        if positions is not None:
            given["position_ids"] = positions[:, rows].to(self.device)
        with working(), held:
            self._hold(held, adapter)
            self._base(
                input_ids=padded[:, rows].to(self.device),
                **{CACHE_ARGUMENT: cache},
                use_cache=True,
                **given,
            )
        return cache, len(prefix_ids)

    def _hold(self, held: ExitStack, adapter: RowAdapter | None) -> None:
        """Hold the model for a pass over whole sequences, until the stack ends."""
        held.enter_context(self.lock)
        own = without_adapters(self.decoder) if adapter is None else adapter.acting(self.decoder)
        held.enter_context(own)
        # Families that attend in their own code have no other implementation, and the kernel has
        # no windows that begin again.
        in_chunks = any(isinstance(one, Chunked) for one in self._windows)
        if not (self.family.attends_itself or in_chunks):
            held.enter_context(whole_attention(self.decoder))
        # In the weights' own type: what is stored must not depend on how this process answers.
        held.enter_context(fast_modules(self.decoder, str(self.spec.dtype).removeprefix("torch.")))

    def _between(
        self, held: ExitStack, check: Callable[[], None] | None, adapter: RowAdapter | None
    ) -> None:
        """Let others who wait for the model compute, such as tokens of answers; in each layer."""
        if check is not None:
            check()
        if self.lock.is_wanted:
            held.close()
            self.lock.step_aside()
            self._hold(held, adapter)

    # -- online: rows of prompts -------------------------------------------------------------

    @property
    def windows(self) -> list[int | None]:
        """Each layer's sliding window in tokens, None if it sees everything."""
        return self._windows

    @property
    def has_batches(self) -> bool:
        """Whether rows of several prompts can be computed together (`forward_each`)."""
        return not self.family.attends_itself and self.spec.latent is None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        # A prompt asks a dozen times: without the generators of `parameters`.
        modules: list[nn.Module] = [self.decoder]
        while True:
            module = modules.pop()
            for weight in module._parameters.values():
                if weight is not None:
                    return weight.device
            modules += filter(None, reversed(module._modules.values()))

    def computing_rows(
        self, adapter: RowAdapter | None = None, adapted: torch.Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Hold the model for calls of its `rows` without gradients.

        Parameters
        ----------
        adapter
            Acts in those calls, on the rows that `adapted` names.
        adapted
            Positions of the adapted rows; None means all.
        """
        return self.rows.computing(adapter, adapted)

    def tables(self, num_tokens: int, positions: Sequence[int] | None = None) -> list[RotaryTable]:
        """Return each layer's table for rows ``0 .. num_tokens - 1``.

        Parameters
        ----------
        num_tokens
            Number of rows.
        positions
            Position of each row, ascending; None means that row r has position r.
        """
        if positions is None:
            return self._positions.tables(torch.arange(num_tokens, device=self.device))
        return self._positions.tables(torch.tensor(positions, device=self.device))

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return the first layer's input ``[n, hidden]`` for token ids ``[n]``.

        Parameters
        ----------
        positions
            ``[n]``; required if the model has learned positions.
        """
        family = self.family
        embedding = self._base.get_input_embeddings()
        norm = getattr(self._base, family.embedding_norm) if family.embedding_norm else None
        learned = (
            getattr(self._base, family.position_embedding) if family.position_embedding else None
        )
        factor = getattr(self._base, "embedding_multiplier", None)
        width = self.decoder.config.hidden_size
        hidden = _scratch(len(token_ids), width, self.spec.dtype, self.device)
        size = rows_at_once(self.device)
        for begin in range(0, len(token_ids), size):
            block = slice(begin, begin + size)
            embedded = embedding(token_ids[block])
            if factor is not None:
                embedded = embedded * factor
            if learned is not None:
                assert positions is not None, "learned positions are part of the input"
                embedded = embedded + learned(positions[block])
            hidden[block] = embedded if norm is None else norm(embedded)
        return hidden

    def begin_answer(self) -> None:
        """Call this before an answer's first `forward_each`: the model may have changed.

        What changes later (hooks, weights that are replaced) counts from the next answer on.
        """
        with self.lock:
            self._captured.check_model()
            if self.device.type == "cpu":
                compiled = self.compile()
                assert not isinstance(compiled, CardLayers)
                self._compiled = compiled

    def compile(self) -> CompiledLayers | CardLayers | None:
        """Return the layers as modules would compute them now, if kernels can.

        Use it for one prompt or answer: what changes later (hooks, weights that are replaced) does
        not count.
        """
        quantised = self.compute if self.compute in QUANTISED else None
        if quantised is None and self.compute != str(self.spec.dtype).removeprefix("torch."):
            return None
        device, tables, layers = self.device, self._any_tables(), self.rows.layers
        is_on_cpu = device.type == "cpu"
        seen = device, has_global_hooks(), *state_of(*layers)
        if seen != self._seen:
            described = describe_layers(layers, self._windows, tables)
            if not is_on_cpu:
                width = tables[0].cos.shape[-1]
                if described is not None and not on_card(described, device, width):
                    described = None
                self._slots = self._graphs = None
                if described is not None:
                    self._slots = Slots(described, device)
                    self._graphs = RowGraphs(described, self._slots, device, self.lock)
            self._described, self._seen, self._made = described, seen, None
        if is_on_cpu:
            made = self._made
            if made is None:
                made = compile_layers(self._described, quantised=quantised)
                # Quantised weights are copies: in-place changes count from the next prompt on.
                self._made = made if quantised is None else None
            return made
        if self._described is None or self._slots is None or self._graphs is None:
            return None
        return CapturedLayers(self._described, self._slots, self._graphs)

    @property
    def lacks_graphs(self) -> bool:
        """Whether prompts would have been faster with layers that are captured as graphs."""
        return self._graphs is not None and self._graphs.wants_more

    def capture_rows(self) -> None:
        """Capture the layers that prompts lacked as graphs: beside prompts, never for one of them.

        After a capture that fails, one warning says so, and everything goes on as before.
        """
        if self._graphs is not None:
            self._graphs.capture()

    def _any_tables(self) -> list[RotaryTable]:
        """Return each layer's table of any positions: made once."""
        if self._one_row is None:
            self._one_row = self.tables(1)
        return self._one_row

    def forward_each(self, token_ids: Sequence[int], rows: Sequence[BatchRow]) -> torch.Tensor:
        """Run all layers over one row of each of B prompts; return logits ``[B, vocabulary]``.

        Each row's K/V are written to its prompt's buffer. Call this inside `computing_rows`, whose
        adapter acts on all rows. Families that attend in their own code have no batches.

        Parameters
        ----------
        token_ids
            The B rows' tokens.
        rows
            Where each row belongs.
        """
        if not self.rows.is_adapted:
            captured = self._captured.find(rows, self._step)
            if captured is not None:
                return captured.run(token_ids, rows)
        ids = torch.tensor(token_ids, device=self.device)
        return self._step(ids, BatchRows(rows, self._windows))

    def _step(self, ids: torch.Tensor, batch: BatchRows) -> torch.Tensor:
        """Return logits ``[B, vocabulary]`` for the batch's tokens ``[B]``."""
        hidden = self.embed(ids, batch.positions)
        tables = self._positions.tables(batch.positions)
        with self.rows.each_row():
            if self._compiled is not None and batch.in_kernel and not self.rows.is_adapted:
                self._compiled.run(hidden, tables, batch)
                return self.logits(hidden)
            # Layers share tables.
            embeddings = {
                id(table): table.embeddings(slice(None), self.spec.dtype) for table in tables
            }
            for layer_index, table in enumerate(tables):
                self.rows.forward_each(layer_index, hidden, batch, embeddings[id(table)])
            return self.logits(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, vocabulary]`` for the last layer's outputs ``[n, hidden]``."""
        norm = getattr(self._base, self.family.final_norm)
        return project_logits(self.decoder, norm(hidden))


def _scratch(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for hidden states ``[num_rows, width]``.

    The C allocator would keep it. After one large block is freed, glibc takes later blocks of that
    size from its heap and holds them, beside the fused KV that then fills up.
    """
    num_bytes = num_rows * width * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LARGE_BYTES:
        return torch.empty(num_rows, width, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes)
    return torch.frombuffer(memory, dtype=dtype).view(num_rows, width)


# -- models that compute prompts as wholes -------------------------------------------------------
#
# A layer with a state (state space, linear attention, convolution) has read all tokens before it,
# and no two chunks' states add up to that of both. But the state and the KV after a prompt's
# first tokens are those of every prompt that begins with them. Transformers' own classes and
# cache compute all.

_PROVEN_TOKENS, _CONTINUED_FROM = 29, 13


class State:
    """What a model has after some tokens: Transformers' cache, and these tokens."""

    def __init__(self, cache: Any = None, token_ids: Sequence[int] = ()) -> None:
        self.cache = cache
        self.token_ids = list(token_ids)

    def copy(self) -> State:
        """Return another one that shares nothing with this."""
        return State(copy.deepcopy(self.cache), self.token_ids)

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that its tensors take."""
        storages = [one.untyped_storage() for one in _tensors(self.cache)]
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache, whatever its layers call them."""
    if isinstance(held, torch.Tensor):
        yield held
        return
    if not isinstance(held, list | tuple | dict):
        held = getattr(held, "__dict__", {})
    for one in held.values() if isinstance(held, dict) else held:
        yield from _tensors(one)


class WholeModel(KVModel):
    """A model of a type of `kvrag.models.families.WHOLE`.

    Parameters, attributes and errors are those of `KVModel`, as far as they concern no chunk's KV:
    what needs that raises UnsupportedModelError.
    """

    _family_of = staticmethod(lambda model: Family())  # noqa: ARG005  # as the other is called

    def _shape(self, hf: Model, chunk_dtype: torch.dtype) -> None:
        config: Any = hf.config
        self.why_whole = f"{config.model_type}: {WHOLE[config.model_type]}"
        # The counted layers, and a shape that nothing is stored in.
        self.chunk_spec = KVSpec(config.num_hidden_layers, 1, 1, chunk_dtype)

    @property
    def spec(self) -> KVSpec:  # type: ignore[override]  # what needs it cannot be done
        """No shape: raises UnsupportedModelError."""
        raise UnsupportedModelError(no_chunks(self.decoder.config.model_type))

    @torch.no_grad()
    def read(
        self, state: State, token_ids: Sequence[int], *, compute: str | None = None
    ) -> torch.Tensor:
        """Continue a state by tokens; return the logits ``[vocabulary]`` after the last.

        An error leaves the state of no use.

        Parameters
        ----------
        state
            What the model has after the tokens before; changed in place.
        token_ids
            The tokens, at least one.
        compute
            What linear layers compute in; None means the model's own `compute`.
        """
        hf: Any = self.decoder
        precision = compute or self.compute
        with working(), self.lock, without_adapters(hf), fast_modules(hf, precision):
            output = hf(
                input_ids=torch.tensor([token_ids], device=self.device),
                **{CACHE_ARGUMENT: state.cache},
                use_cache=True,
                logits_to_keep=1,
            )
        state.cache = getattr(output, CACHE_ARGUMENT)
        state.token_ids += token_ids
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def prove(self) -> tuple[list[proof.Check], str]:
        """Compare a prompt that continues a copied state with the whole prompt.

        Both compute in the weights' own type: what is proven counts for every `compute`, whose
        rounding would hide a state that is lost.
        """
        from kvrag.models.proof import Check, bound_of, mostly_apart

        drawn = torch.Generator().manual_seed(0)
        vocabulary = int(self.decoder.config.vocab_size)
        ids = torch.randint(0, vocabulary, (_PROVEN_TOKENS,), generator=drawn).tolist()
        state, own = State(), str(self.decoder.dtype).removeprefix("torch.")
        self.read(state, ids[:_CONTINUED_FROM], compute=own)
        continued = self.read(state.copy(), ids[_CONTINUED_FROM:], compute=own)
        with working(), self.lock, torch.no_grad():
            plain: Any = self.hf
            expected = plain(input_ids=torch.tensor([ids], device=self.device)).logits[0, -1]
        figure = mostly_apart(continued, expected)
        return [Check("loaded", "a prompt after a kept beginning", figure, bound_of(self.hf))], ""
