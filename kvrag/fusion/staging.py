"""Records on their way to a graphics card, and those that stay there for later prompts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from kvrag.codec.base import EncodedChunk
from kvrag.codec.card import Coder, can_decode
from kvrag.codec.container import padded_size
from kvrag.codec.raw import HeadRange
from kvrag.errors import RecordError
from kvrag.fusion.layout import RecordId
from kvrag.fusion.slices import DAMAGE
from kvrag.kvcache import KVSpec
from kvrag.loading import threads
from kvrag.loading.hot import HotChunk, HotTier, buffers, copy_stream, registered, start_copy
from kvrag.native.gpu.compiling import free_bytes
from kvrag.process import memory_bytes
from kvrag.store.base import Store, tiers_of
from kvrag.store.metrics import StoreCounts

GROUP_LAYERS = 8
"""The most layers that are read, copied and placed at once."""
_READ_BYTES = 32 << 20
"""The most that a thread reads at once."""
_CARD_SHARE, _HOST_SHARE = 4, 8
"""By default chunks may take a fourth of the card's free memory, and an eighth of the host's."""
_FREE_SHARE = 16
"""The part of a card's memory that chunks leave free, whatever their limit is."""

_starting = threading.Lock()
"""Held while a copy is queued with what it waits for."""

Wanted = Callable[[], bool]
T = TypeVar("T")


class Source:
    """Where a record's layers come from: its store, or page-locked memory that has them.

    What a card decodes is there as it is stored.

    Parameters
    ----------
    record
        The open record.
    spec
        The KV's shape and type.
    device
        The card.

    Attributes
    ----------
    record
        As given.
    stored
        The record as it is stored, with all heads.
    heads
        Those that are wanted; None: all.
    num_planes
        Of streams, which a card decodes.
    is_coded
        Whether the record's bytes go to the card as they are stored, which decodes them.
    num_tokens
        The record's.
    stride
        Elements from layer to layer: keys ``[H, T, D]``, values, padding.
    num_bytes
        Bytes of all layers.
    name
        What the record is, content included; None: nobody can tell.
    """

    def __init__(self, record: EncodedChunk, spec: KVSpec, device: torch.device) -> None:
        self.record, self._spec, self.num_tokens = record, spec, record.num_tokens
        self.stored: Any = record
        self.heads: range | None = None
        if isinstance(record, HeadRange):
            self.stored, self.heads = record.record, range(record.heads.start, record.heads.stop)
        coder: Any = getattr(self.stored, "coder", None)
        self.num_planes: int = getattr(self.stored, "num_planes", 0)
        self.is_coded = False
        if isinstance(coder, Coder):
            whole = coder.profile.spec
            given = whole.num_kv_heads if self.heads is None else len(self.heads)
            self.is_coded = replace(whole, num_kv_heads=given) == spec and can_decode(
                coder, self.num_planes, device
            )
        # Vectors of D elements begin at multiples of D, layers at 64 bytes, too.
        unit = spec.head_dim * spec.dtype.itemsize
        layer_bytes = padded_size(spec.layer_bytes_per_token * self.num_tokens)
        while layer_bytes % unit:
            layer_bytes += padded_size(1)
        self._layer_bytes, self.stride = layer_bytes, layer_bytes // spec.dtype.itemsize
        self._layers = range(spec.num_layers)
        self.num_bytes = spec.num_layers * layer_bytes
        self.name: Hashable = getattr(record, "identity", None)
        self._pinned: HotChunk | None = None
        self._is_lost = False

    @property
    def is_decoded_by_host(self) -> bool:
        """Whether the card has no kernels for what is stored, and the host decodes it."""
        is_plain = self.name is None or hasattr(self.stored, "stored_layer")
        return not (self.is_coded or self._pinned or is_plain)

    @property
    def should_be_pinned(self) -> bool:
        """Whether page-locked memory lacks the layers, and would be of use."""
        return not (self.is_pinned or self._is_lost)

    @property
    def is_pinned(self) -> bool:
        """Whether the layers come from page-locked memory."""
        return self._pinned is not None

    @property
    def pinned_bytes(self) -> int:
        """Bytes that all layers take there."""
        return self.stored.coded_bytes(self._layers) if self.is_coded else self.num_bytes

    @property
    def _pinned_name(self) -> Hashable:
        # Whether a card decodes a record may change, and with it what is kept.
        return self.name, self.is_coded

    def find(self, tier: HotTier) -> bool:
        """Take the layers from page-locked memory; return whether it has them."""
        if self.should_be_pinned:
            self._pinned = tier.find(self._pinned_name)
        return self.is_pinned

    def pin(self, tier: HotTier) -> None:
        """Read the record into page-locked memory, where later prompts find it."""
        chunk = tier.make(self._pinned_name, self.pinned_bytes)
        if chunk is None:
            return
        try:
            if self.is_coded:
                self.stored.read_coded(self._layers, chunk.memory.numpy().data)
            else:
                for layers in self.pieces(self._layers):
                    self._read(layers, self._bytes_of(layers, chunk.memory))
            tier.keep(chunk)
        except DAMAGE:
            pass  # who needs the record finds the same, and says so
        finally:
            tier.release(chunk)

    def release(self, tier: HotTier, uses: Sequence[torch.cuda.Event]) -> None:
        """Let page-locked memory go, once the card has reached events."""
        chunk, self._pinned = self._pinned, None
        if chunk is not None:
            tier.release(chunk, uses)

    def copy(
        self, layers: range, into: torch.Tensor, after: torch.cuda.Event, is_wanted: Wanted
    ) -> list[torch.cuda.Event]:
        """Read layers, and have them copied to a card; return what it then reaches.

        Parameters
        ----------
        layers
            Layers that follow each other.
        into
            `stride` elements of the card's memory for each.
        after
            What the card has to reach before it may write there.
        is_wanted
            Asked before each copy.
        """
        if self._pinned is not None:
            memory = self._bytes_of(layers, self._pinned.memory)
            return queue_copy(into, memory, after, is_wanted)
        events = []
        for some in self.pieces(layers):
            first = (some.start - layers.start) * self.stride
            part = into[first : first + len(some) * self.stride]
            _, copied = self._by_buffer(part, partial(self._read, some), after, is_wanted)
            events += copied
        return events

    def copy_coded(
        self, layers: range, into: torch.Tensor, after: torch.cuda.Event, is_wanted: Wanted
    ) -> tuple[list[Any], list[torch.cuda.Event]]:
        """Have layers copied as they are stored; as `copy`, but return their parts as well.

        Parameters
        ----------
        into
            As many bytes of the card's memory as they have.
        """
        if self._pinned is not None:
            pieces = [self._pinned.memory[one] for one in self.stored.coded_places(layers)]
            parts = self.stored.coded_parts(layers, [one.numpy().data for one in pieces])
            copied = []
            for to, memory in zip(torch.split(into, [*map(len, pieces)]), pieces, strict=True):
                copied = queue_copy(to, memory, after, is_wanted)
            return parts, copied

        def read(memory: torch.Tensor) -> list[Any]:
            parts: list[Any] = self.stored.read_coded(layers, memory.numpy().data)
            return parts

        return self._by_buffer(into, read, after, is_wanted)

    def refuse_streams(self) -> RecordError:
        """Return what is wrong with a record whose streams a card found damaged."""
        self._is_lost = True
        try:
            self.stored.refuse_streams()
        except RecordError as error:
            return error
        raise AssertionError("the record refuses")

    def _by_buffer(
        self,
        into: torch.Tensor,
        read: Callable[[torch.Tensor], T],
        after: torch.cuda.Event,
        is_wanted: Wanted,
    ) -> tuple[T, list[torch.cuda.Event]]:
        """Read to page-locked bytes, and have them copied; keep nothing of what cannot be read."""
        size = into.numel() * into.itemsize
        pinned, copied = buffers().take(size), []
        try:
            found = read(pinned.memory[:size])
            copied = queue_copy(into, pinned.memory[:size], after, is_wanted)
        except BaseException:
            self._is_lost = True
            raise
        finally:
            buffers().give_back(pinned, copied[0] if copied else None)
        return found, copied

    def pieces(self, layers: range) -> Iterator[range]:
        """Yield the layers that are read at once."""
        at_once = max(1, _READ_BYTES // self._layer_bytes)
        for first in range(0, len(layers), at_once):
            yield layers[first : first + at_once]

    def _bytes_of(self, layers: range, memory: torch.Tensor) -> torch.Tensor:
        return memory[layers.start * self._layer_bytes : layers.stop * self._layer_bytes]

    def _read(self, layers: range, memory: torch.Tensor) -> None:
        """Fill bytes with layers, and check them."""
        record, spec, size = self.record, self._spec, self._layer_bytes
        if getattr(record, "stored_layer", None) == (spec.dtype, size):
            record.read_layers(layers, memory.numpy().data)  # type: ignore[attr-defined]
            return
        used = spec.layer_bytes_per_token * self.num_tokens
        shape = (2, spec.num_kv_heads, self.num_tokens, spec.head_dim)
        for number, layer_index in enumerate(layers):
            both = memory[number * size : number * size + used].view(spec.dtype).view(shape)
            for into, one in zip(both, record.read_layer(layer_index), strict=True):
                into.copy_(one)


def queue_copy(
    into: torch.Tensor, memory: torch.Tensor, after: torch.cuda.Event, is_wanted: Wanted
) -> list[torch.cuda.Event]:
    """Queue a copy to a card on the one stream of copies."""
    stream = copy_stream(into.device)
    with _starting, torch.cuda.stream(stream):
        if not is_wanted():
            return []
        stream.wait_event(after)
        start_copy(into, memory.view(into.dtype))
        return [stream.record_event()]


class Hot:
    """A record in memory of the card that outlives the prompt, or on its way there.

    Parameters
    ----------
    source
        Where layers come from.
    chunk
        The memory, held.
    tier
        Whose it is.
    after
        What the card has to reach before it may write there; None: all layers are there.

    Attributes
    ----------
    memory
        ``[L * stride]``, of the KV's type.
    chunk, after
        As given.
    """

    def __init__(
        self, source: Source, chunk: HotChunk, tier: HotTier, after: torch.cuda.Event | None
    ) -> None:
        spec = source._spec
        self.memory = chunk.memory.view(spec.dtype)
        self._source, self._tier = source, tier
        self.chunk, self.after = chunk, after
        self._missing = set() if after is None else set(range(spec.num_layers))
        # What it decodes is missing until it has told that all of it is sound.
        self._undecoded = set(self._missing)
        self._copied = [] if chunk.written is None else [chunk.written]
        self._lock = threading.Lock()

    def note_decoded(self, layers: range, event: torch.cuda.Event) -> None:
        """Say that the card has decoded layers when it reaches an event."""
        with self._lock:
            self._undecoded -= set(layers)
            self._copied = [event]

    def keep(self) -> None:
        """Let later prompts find what was decoded, if it is whole; it is known to be sound."""
        with self._lock:
            if not self._undecoded and self.after is not None:
                self._missing.clear()
                self._tier.keep(self.chunk, self._copied[-1])

    @property
    def is_whole(self) -> bool:
        """Whether all layers are there, or being copied."""
        return not self._missing

    def bring(self, layers: range, is_wanted: Wanted) -> list[torch.cuda.Event]:
        """Copy those of some layers that are missing; return what the card then reaches."""
        with self._lock:
            if self._missing.isdisjoint(layers):
                return self._copied[-1:]
            assert self.after is not None
            missing = self._missing.intersection(layers)
            stride, copied = self._source.stride, []
            # Piece by piece: a prompt may be given up between two of them.
            for some in self._source.pieces(range(min(missing), max(missing) + 1)):
                into = self.memory[some.start * stride : some.stop * stride]
                queued = self._source.copy(some, into, self.after, is_wanted)
                if not queued:
                    break
                copied += queued
                self._copied = queued
                self._missing -= set(some)
            if not self._missing:
                self._tier.keep(self.chunk, copied[-1])
            return copied


class HotTiers:
    """What one engine keeps of its chunks, in a card's memory and in page-locked memory.

    Parameters
    ----------
    card_bytes, pinned_bytes
        The most that each takes; None: a share of what is free at the first prompt.
    """

    def __init__(self, card_bytes: int | None, pinned_bytes: int | None) -> None:
        self._limits = card_bytes, pinned_bytes
        self._made: tuple[HotTier, HotTier] | None = None
        self._device: torch.device | None = None
        self._lock = threading.Lock()

    def of_prompt(self, device: torch.device, store: Store) -> HotRecords | None:
        """Return what a prompt takes and leaves; None without a card, or without room."""
        if device.type != "cuda" or self._limits == (0, 0):
            return None
        with self._lock:
            if self._made is None or self._device != device:  # the model has moved
                self._made, self._device = self._make(device), device
        # A far store would be asked twice; where another tier comes first, that one has a copy.
        return HotRecords(*self._made, device, pins=threads.is_local(tiers_of(store)[0]))

    def counts(self) -> tuple[StoreCounts, ...]:
        """Return the counts of the card's memory, then of page-locked memory."""
        return () if self._made is None else tuple(one.counts() for one in self._made)

    def _make(self, device: torch.device) -> tuple[HotTier, HotTier]:
        card, pinned = self._limits
        if card is None:
            card = free_bytes(device)[0] // _CARD_SHARE
        if pinned is None:
            pinned = memory_bytes() // _HOST_SHARE
        on_this = partial(on_card, device)
        return HotTier("card", card, on_this), HotTier("pinned", pinned, registered)


class HotRecords:
    """Which of a prompt's records stay for later prompts.

    Parameters
    ----------
    card, pinned
        The memories.
    device
        The card.
    pins
        Whether reading a record again is as cheap as page-locked memory is worth.

    Attributes
    ----------
    num_found, bytes_found
        Chunks that were there already, and their bytes, by the memory.
    """

    def __init__(
        self, card: HotTier, pinned: HotTier, device: torch.device, *, pins: bool = True
    ) -> None:
        self._card, self._pinned, self._device, self._pins = card, pinned, device, pins
        self.num_found, self.bytes_found = Counter(card=0, pinned=0), Counter(card=0, pinned=0)
        self._taken: dict[Hashable, tuple[Source, Hot | None]] = {}
        self._lock = threading.Lock()

    def take(self, source: Source) -> tuple[Source, Hot | None]:
        """Return a record's place in the card's memory, if it has one; the first call decides.

        The memory is written on the stream of copies, after what the caller's stream has queued.
        """
        if source.name is None:
            return source, None
        with self._lock:
            if source.name not in self._taken:
                hot = self._find(source)
                found = {}
                if hot is not None and hot.is_whole:
                    found = {"card": source.num_bytes}
                elif source.find(self._pinned):
                    found = {"pinned": source.pinned_bytes}
                self.num_found.update(found.keys())
                self.bytes_found.update(found)
                self._taken[source.name] = source, hot
            return self._taken[source.name]

    def close(self) -> None:
        """Give everything back. What was read and has no other place is read to the host's."""
        taken, self._taken = self._taken, {}
        if not taken:
            return
        streams = torch.cuda.current_stream(self._device), copy_stream(self._device)
        uses = [stream.record_event() for stream in streams]
        is_full = self._card.counts().evictions > 0
        for source, hot in taken.values():
            is_kept = hot is not None and hot.is_whole and not is_full
            is_pinned = self._pins and not is_kept and source.should_be_pinned
            source.release(self._pinned, uses)
            if hot is not None:
                self._card.release(hot.chunk, uses)
            if is_pinned:
                threads.start(partial(source.pin, self._pinned), threads.KEEPING)

    def _find(self, source: Source) -> Hot | None:
        chunk = self._card.find(source.name)
        if chunk is not None:
            return Hot(source, chunk, self._card, None)
        chunk = self._card.make(source.name, source.num_bytes)
        if chunk is None:
            return None
        after = torch.cuda.current_stream(self._device).record_event()
        return Hot(source, chunk, self._card, after)


class EarlyRecords:
    """Opens a prompt's records, and copies them to a card, before the prompt is laid out.

    Parameters
    ----------
    open_kv
        Opens a record, as `kvrag.fusion.loader.OpenKV`.
    hot
        Where records stay, closed with this; None: nothing begins early.
    spec
        The KV's shape and type.
    num_threads
        Records that are opened and copied at the same time.
    pays
        Whether a prompt will take what is stored; given the numbers that `begin` is.
    """

    def __init__(
        self,
        open_kv: Callable[[str, tuple[int, ...]], EncodedChunk | None],
        hot: HotRecords | None,
        spec: KVSpec,
        num_threads: int,
        pays: Callable[[int, int, int], bool] = lambda *_: True,
    ) -> None:
        self.hot = hot
        self._open_kv, self._spec = open_kv, spec
        self._num_threads, self._pays = num_threads, pays
        self._opened: dict[RecordId, Future[EncodedChunk | None]] = {}
        self._threads: list[Future[None]] = []
        self._is_closed = False

    def begin(
        self,
        record_ids: Iterable[RecordId],
        num_stored: int = 0,
        num_fresh: int = 0,
        num_leading: int = 0,
    ) -> None:
        """Begin with the records that a prompt probably needs.

        Parameters
        ----------
        record_ids
            The records, in their order in the prompt.
        num_stored, num_fresh, num_leading
            About how many of the prompt's tokens they have, how many they lack, and how many of
            these precede all others.
        """
        if self.hot is None or not self._pays(num_stored, num_fresh, num_leading):
            return
        self._opened = {one: Future() for one in record_ids}
        left = iter(list(self._opened.items()))
        taking = threading.Lock()

        def work() -> None:
            while not self._is_closed:
                with taking:
                    one = next(left, None)
                if one is None:
                    return
                self._bring(*one)

        for _ in range(min(self._num_threads, len(self._opened))):
            self._threads.append(threads.start(work))

    def open_kv(self, chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk | None:
        """Return a record that is open already, or open it; raises what opening it raised."""
        opened = self._opened.pop((chunk_id, context_ids), None)
        # Nobody waits for a record that no thread has taken.
        found = None if opened is None or opened.cancel() else opened.result()
        return self._open_kv(chunk_id, context_ids) if found is None else found

    def close(self) -> None:
        """Wait until nothing is copied, and give everything back."""
        self._is_closed = True
        threads.end(self._threads)
        self._opened = {}
        if self.hot is not None:
            self.hot.close()

    def __del__(self) -> None:
        self.close()

    def _bring(self, record_id: RecordId, opened: Future[EncodedChunk | None]) -> None:
        if not opened.set_running_or_notify_cancel():
            return
        try:
            record = self._open_kv(*record_id)
        except BaseException as error:
            # Its frames would keep this object, and so the memory that it holds.
            opened.set_exception(error.with_traceback(None))
            return
        opened.set_result(record)
        if record is not None:
            # The prompt finds the same error where it needs the record.
            with suppress(Exception):
                self._copy(record)

    def _copy(self, record: EncodedChunk) -> None:
        assert self.hot is not None
        source = Source(record, self._spec, self.hot._device)
        source, hot = self.hot.take(source)
        if source.is_coded:
            # Compressed records are decoded all together, later; their bytes come early.
            if not source.is_pinned and (hot is None or not hot.is_whole):
                record.fetch(max(1, source.num_planes))
            return
        layers = range(self._spec.num_layers)
        for first in layers[::GROUP_LAYERS]:
            if hot is None or self._is_closed:
                return
            hot.bring(layers[first : first + GROUP_LAYERS], lambda: not self._is_closed)


def on_card(device: torch.device, num_bytes: int) -> torch.Tensor | None:
    """Return memory of a card, unless that would leave too little."""
    free, total = free_bytes(device)
    if free - num_bytes < total // _FREE_SHARE:
        return None
    try:
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None
