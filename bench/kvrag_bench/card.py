"""A pretended graphics card: tensors that say they are on one, and operations that are counted.

Code that is given a model on it takes all its branches for a GPU, and every operation that a GPU
would get passes through here. It runs on the CPU, at once, so results can be compared. No time is
that of a card; counts are.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from kvrag.codec.card import CardDecoding
from kvrag.fusion import card as placing
from kvrag.fusion import staging
from kvrag.fusion.card import Placement
from kvrag.loading import threads
from kvrag.loading.hot import buffers, streams
from kvrag.models import cardlayers, compiled, rowgraphs
from kvrag.models.compiled import Description
from kvrag.native.gpu import tiled
from kvrag.native.gpu.rows import RowPlaces, RowTensors
from kvrag.positions.rotary import RotaryTable
from kvrag_bench.codec.played import play

_KERNELS = ("place", "rans", "escapes", "synthesise", "unpack", "kept")
_OPEN = ""  # a phase that has no name yet
_OPERATION_SECONDS = 6e-6
"""What it costs the host to start something on a card: PyTorch takes 4 to 8 µs for an operation."""
_VIEW_SECONDS = 1e-6
"""What looking at a tensor otherwise costs without pretending."""
_TRIALS = 400
_LARGE = 1 << 20
CARD = torch.device("cuda", 0)
_CPU = torch.device("cpu")
# They only say how memory is looked at: nothing is started.
_VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "expand",
        "slice",
        "select",
        "transpose",
        "t",
        "permute",
        "unsqueeze",
        "squeeze",
        "alias",
        "detach",
        "as_strided",
        "split",
        "split_with_sizes",
        "unbind",
        "chunk",
        "reshape",
        "_reshape_alias",
        "narrow",
        "diagonal",
        "unfold",
        "lift_fresh",
        "empty",
        "empty_strided",
        "new_empty",
        "empty_like",
        "new_empty_strided",
        "set_",
        "view_as",
    ]
)
# The host needs their results, or the sizes of them.
_WAITS = frozenset(
    ["_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"]
)

# Their Python methods ask for a guard of the device, which a build for CPUs lacks.
_NUMBERS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("item", "__int__", "__float__", "__bool__", "__index__", "__contains__", "cpu")
)

# They only ask about a tensor, or about this thread.
_LOOKS = frozenset(
    [
        *(getattr(torch.Tensor, name) for name in ("numel", "dim", "stride", "data_ptr")),
        *(getattr(torch.Tensor, name) for name in ("is_contiguous", "size", "__len__")),
        torch._C._set_grad_enabled,
    ]
)


class Counts:
    """What was started on the card: kernels, copies to it, and waits of the host for it.

    Attributes
    ----------
    launches, copies, waits
        Numbers by phase: ``"loader"`` in other threads, and what `settle` names in this one.
    names
        Numbers by phase and operation.
    seconds
        This thread's processor time in operations, which a card would spend instead, and in
        pretending. What the host computes in the host's memory is not among it.
    held
        Large memory of the card, until `clear`: the operating system takes long to free it, a
        card's allocator no time.
    started
        How much this thread has started on the card; each costs the host a dispatch.
    entry, looking
        Seconds that an operation takes before and after it can look at the time, and that asking
        a tensor for its shape or the like takes.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.names: Counter[tuple[str, str]] = Counter()
        self.seconds = self.entry = self.looking = 0.0
        self.started = 0
        self.held: list[torch.Tensor] = []
        self._is_computing = False
        self._unseen = threading.local()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Begin again at nothing."""
        for counter in (self.launches, self.copies, self.waits, self.names):
            counter.clear()
        self.held.clear()
        self.seconds, self.started = 0.0, 0

    def note(self, counter: Counter[str], name: str) -> None:
        """Count something."""
        if getattr(self._unseen, "is_on", False):
            return
        phase = _OPEN if threading.get_ident() == self._thread else "loader"
        self.started += phase == _OPEN
        with self._lock:
            counter[phase] += 1
            self.names[phase, name] += 1

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Count nothing that this thread starts in here."""
        before, self._unseen.is_on = getattr(self._unseen, "is_on", False), True
        try:
            yield
        finally:
            self._unseen.is_on = before

    def settle(self, phase: str) -> None:
        """Say which phase everything since the last call belongs to."""
        with self._lock:
            for counter in (self.launches, self.copies, self.waits):
                counter[phase] += counter.pop(_OPEN, 0)
            for one in [one for one in self.names if one[0] == _OPEN]:
                self.names[phase, one[1]] += self.names.pop(one)

    @property
    def host_seconds(self) -> float:
        """What the host would spend to start on a card what was started here."""
        return self.started * _OPERATION_SECONDS

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Leave out this thread's time in here: on a card, the card would spend it."""
        if not self.enter():
            yield
            return
        started = time.thread_time()
        try:
            yield
        finally:
            self.leave(started)

    def enter(self) -> bool:
        """Return whether an operation begins here that is not a part of another one."""
        if self._is_computing or threading.get_ident() != self._thread:
            return False
        self._is_computing = True
        return True

    def leave(self, started: float, own: float = 0.0, *, looks: bool = False) -> None:
        """End an operation that `enter` began.

        Parameters
        ----------
        started
            This thread's time when it began.
        own
            Seconds of it that the host would have spent as well.
        looks
            Whether a tensor was only asked for its shape or the like.
        """
        self._is_computing = False
        self.seconds += (self.looking if looks else self.entry) - own
        self.seconds += time.thread_time() - started

    def measure_entry(self) -> None:
        """Measure what pretending takes apart from what it sees of itself."""
        probe = CardTensor(torch.zeros(4), self)
        self.looking = self._left_by(probe.numel)
        self.entry = max(0.0, self._left_by(lambda: probe.view(2, 2)) - _VIEW_SECONDS)

    def _left_by(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call that are not left out."""
        self.clear()
        started = time.thread_time()
        for _ in range(_TRIALS):
            call()
        left = time.thread_time() - started - self.seconds
        self.clear()
        return max(0.0, left / _TRIALS)


class CardTensor(torch.Tensor):
    """A tensor that says it is on the card."""

    held: torch.Tensor
    counts: Counts
    address: int

    @staticmethod
    def __new__(cls, held: torch.Tensor, counts: Counts) -> CardTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: CardTensor = make(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CARD,
        )
        made.held, made.counts, made.address = held, counts, held.data_ptr()
        if held.untyped_storage().nbytes() >= _LARGE:
            counts.held.append(held)
        return made

    def __init__(self, *_: object) -> None: ...

    def tolist(self) -> Any:
        self.counts.note(self.counts.waits, "tolist")
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.address

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.thread_time()
        given = tree_flatten((args, kwargs or {}))[0]
        counts: Counts = next(one.counts for one in given if isinstance(one, CardTensor))
        is_first = counts.enter()
        try:
            return cls._call(func, args, kwargs or {}, counts)
        finally:
            if is_first:
                counts.leave(started)

    @classmethod
    def _call(cls, func: Any, args: Any, kwargs: dict[str, Any], counts: Counts) -> Any:
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            # A build for CPUs has no guard of the card's device, which indexing asks for.
            return _at(counts, func is torch.Tensor.__setitem__, *args)
        if func is torch.Tensor.copy_:
            _at(counts, True, args[0], ..., args[1])
            return args[0]
        if func in _NUMBERS:
            counts.note(counts.waits, func.__name__)
            return func(args[0].held)
        if func is nn.functional.scaled_dot_product_attention:
            # On the CPU it would be taken apart.
            counts.note(counts.launches, "attention")
            return CardTensor(func(*_held(args), **_held(kwargs)), counts)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except RuntimeError as error:
            # As above: some methods ask for the guard before anything else.
            if "not linked with support" not in str(error):
                raise
            counts.note(counts.launches, func.__name__)
            made = func(*_held(args), **_held(kwargs))
            return CardTensor(made, counts) if isinstance(made, torch.Tensor) else made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {}, None)


def _at(counts: Counts, writes: bool, tensor: Any, index: Any, value: Any = None) -> Any:
    """Index a tensor, or write there."""
    indices = [one for one in tree_flatten(index)[0] if isinstance(one, torch.Tensor)]
    if _has_mask(indices):
        counts.note(counts.waits, "mask as an index")
    if isinstance(tensor, CardTensor) and type(value) is torch.Tensor and value.dim():
        counts.note(counts.copies, "copy to the card")
    elif writes or indices:
        counts.note(counts.launches, "write" if writes else "index")
    if not writes:
        return CardTensor(_held(tensor)[_held(index)], counts)
    _held(tensor)[_held(index)] = _held(value)
    return None


def _held(arguments: Any) -> Any:
    return tree_map_only(CardTensor, lambda one: one.held, arguments)


def _run(func: Any, args: Any, kwargs: dict[str, Any], counts: Counts | None) -> Any:
    """Carry out an operation; its result is on the card if its inputs or its device are."""
    given, _ = tree_flatten((args, kwargs))
    here = [one for one in given if isinstance(one, CardTensor)]
    device = kwargs.get("device")
    to_card = device.type == CARD.type if isinstance(device, torch.device) else bool(here)
    counts = here[0].counts if here else counts
    if counts is None or not (here or to_card):
        return func(*args, **kwargs)
    _count(func, args, to_card, counts)
    if device is not None:
        kwargs = kwargs | {"device": _CPU}
    with counts.computing():
        made = func(*_held(args), **_held(kwargs))
    if func._schema.is_mutable:
        if "out" in kwargs:
            return kwargs["out"]
        if func._schema.name.endswith("_"):
            return args[0]
    if not to_card:
        return made
    return tree_map_only(
        torch.Tensor,
        lambda one: one if isinstance(one, CardTensor) else CardTensor(one, counts),
        made,
    )


def _count(func: Any, args: Any, to_card: bool, counts: Counts) -> None:
    name = func._schema.name.partition("::")[2]
    if name in _WAITS or (name == "index" and _has_mask(args[1])):
        counts.note(counts.waits, name)
    if name in ("_to_copy", "copy_"):
        source = args[1] if name == "copy_" else args[0]
        target = isinstance(args[0], CardTensor) if name == "copy_" else to_card
        if isinstance(source, CardTensor) and not target:
            counts.note(counts.waits, "copy to the host")
            return
        if target and not isinstance(source, CardTensor):
            counts.note(counts.copies, "copy to the card")
            return
    if name not in _VIEWS and name != "_local_scalar_dense":
        counts.note(counts.launches, name)


def _has_mask(indices: Any) -> bool:
    return any(one is not None and one.dtype == torch.bool for one in indices)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes tensors on the card, in one thread."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self._counts)


class _Making(TorchFunctionMode):
    """Page-locked memory is ordinary memory, and lists go to the card as copies, in one thread."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts = self._counts
        started = time.thread_time()
        is_first, own = counts.enter(), 0.0
        try:
            kwargs = dict(kwargs or {})
            kwargs.pop("pin_memory", None)
            device = kwargs.get("device")
            is_there = device is not None and torch.device(device).type == CARD.type
            if func is torch.tensor and is_there:
                counts.note(counts.copies, "copy to the card")
                return CardTensor(func(*args, **kwargs | {"device": _CPU}), counts)
            if is_there or not is_first or _is_there((args, kwargs)):
                return func(*args, **kwargs)
            # The host's own tensors: that is what it would take beside a card, too.
            with torch._C._DisableTorchDispatch():
                before = time.thread_time()
                made = func(*args, **kwargs)
                own = time.thread_time() - before
            return made
        finally:
            if is_first:
                counts.leave(started, own, looks=_only_looks(func))


def _only_looks(func: Any) -> bool:
    return func in _LOOKS or getattr(func, "__name__", "") == "__get__"


def _is_there(arguments: Any) -> bool:
    """Return whether something is on the card, or says that something is to go there."""
    if isinstance(arguments, dict):
        arguments = arguments.values()
    for one in arguments:
        if isinstance(one, CardTensor):
            return True
        if isinstance(one, torch.device):
            if one.type == CARD.type:
                return True
        elif isinstance(one, list | tuple | dict) and _is_there(one):
            return True
    return False


class _RowOperations:
    """Counts kernels over rows, which PyTorch plays."""

    def __init__(self, places: RowPlaces, counts: Counts) -> None:
        held = {field.name: _held(getattr(places, field.name)) for field in fields(places)}
        self._tensors = RowTensors(RowPlaces(**held))
        self._counts = counts

    def __getattr__(self, name: str) -> Callable[..., None]:
        played = getattr(self._tensors, name)

        def start(*given: Any, **named: Any) -> None:
            self._counts.note(self._counts.launches, f"kernel {name}")
            with self._counts.computing():
                played(*_held(given), **_held(named))

        return start


class StateOperations:
    """Operations over the rows that a state says when they run, as kernels read it.

    Parameters
    ----------
    positions, state
        See `kvrag.native.gpu.rows.RowKernels`.
    """

    def __init__(self, positions: torch.Tensor, state: torch.Tensor, made: Description) -> None:
        self._positions, self._state, self._made = positions, state, made

    def __getattr__(self, name: str) -> Callable[..., None]:
        def start(*given: Any, **named: Any) -> None:
            recorded(partial(self._play, name, *given, **named))

        return start

    def _play(self, name: str, *given: Any, **named: Any) -> None:
        state: list[int] = _held(self._state).tolist()
        num_rows, held = state[0], list(_held(given))
        if not num_rows:
            return
        places: Any = None
        if name in ("norm", "gated"):  # of other rows nothing is read
            slots = [isinstance(one, torch.Tensor) for one in held]
            held = [
                one[:num_rows] if is_slot else one for one, is_slot in zip(held, slots, strict=True)
            ]
        else:
            place = 1 if name == "mass" else 2
            places = self._places(state, held[place], looks=name == "mass")
            held[place] = 0
        getattr(RowTensors(places), name)(*held, **named)

    def _places(self, state: list[int], layer: int, *, looks: bool) -> RowPlaces:
        """Return what a state says of one layer, which is then the first."""
        num_rows, capacity, first_counted, num_keys, mass, stride, *addresses = state
        positions = _held(self._positions)[:num_rows]
        last, dtype = int(positions[-1]), self._made.dtype
        head_dim = self._made.head_dim
        angles = [_at_address(one, torch.float32, last + 1, head_dim) for one in addresses[:4]]
        tables = [(angles[0], angles[1]), (angles[2], angles[3])]
        shape = self._made.num_heads[1], capacity, head_dim
        keys, values = (
            _at_address(one, dtype, *shape) for one in addresses[4 + 2 * layer : 6 + 2 * layer]
        )
        taken = None
        if looks:
            taken = _at_address(mass + 4 * stride * layer, torch.float32, 1, num_keys)
        places = positions, num_rows, tables, keys[None], values[None], last, taken, first_counted
        return RowPlaces(*places)


def _at_address(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor over memory that lives elsewhere."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


_recording = threading.local()


def recorded(call: Callable[[], None]) -> None:
    """Carry a call out, or note it for the graph that this thread captures."""
    calls = getattr(_recording, "calls", None)
    if calls is None:
        call()
    else:
        calls.append(call)


class RecordedGraph:
    """What a graph would start (`kvrag.models.rowgraphs.Graph`), with its buffers; on the CPU.

    Nothing is carried out while it is captured. A replay carries out what was noted.
    """

    def __init__(self, run: Callable[[], Any], *_: object) -> None:
        self.calls: list[Callable[[], Any]] = []
        _recording.calls = self.calls
        try:
            with _Recording(self.calls):
                self.made = run()
        finally:
            _recording.calls = None

    def replay(self) -> None:
        for call in self.calls:
            call()


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations that write to memory that is there, instead of carrying them out."""

    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in _VIEWS and not name.startswith(("empty", "new_empty")):
            return func(*args, **kwargs)
        if not func._schema.is_mutable:
            raise RuntimeError(f"{name} takes new memory while a graph is captured")
        self._calls.append(partial(func, *args, **kwargs))
        return kwargs.get("out", args[0])


class _Event:
    """An event that has happened: all work is done at once."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._counts.note(self._counts.waits, "event")


class _Stream:
    """A stream whose work is done."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event(self._counts)

    def wait_event(self, event: _Event) -> None: ...

    def wait_stream(self, stream: _Stream) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._counts.note(self._counts.waits, "stream")

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


def _host_memory(num_bytes: int) -> torch.Tensor:
    """Return memory that is said to be page-locked."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def _is_ready(name: str, *_: object, **__: object) -> bool:
    """Return whether a kernel is pretended."""
    return name in _KERNELS and os.environ.get(tiled.VARIABLE, "").lower() not in ("off", "0")


def _place(placement: Placement, number: int, layers: range, table: RotaryTable) -> None:
    """Count one launch, and do with PyTorch what it does."""
    counts = table.cos.counts  # type: ignore[attr-defined]
    counts.note(counts.launches, "place")
    with counts.computing(), patch.object(tiled, "is_ready", lambda *_, **__: False):
        keys, values = _held((placement.keys, placement.values))
        parts = [one._replace(memory=_held(one.memory)) for one in placement.groups[number]]
        held = Placement([parts], keys, values, (), lambda numbers: numbers)
        held.place(0, layers, RotaryTable(*_held((table.cos, table.sin))))


def _decode(_: CardDecoding, name: str, grid: Any, *given: Any, **constants: Any) -> None:
    """Count one launch, and do on the host what it does."""
    if 0 in grid:
        return
    counts = next(one.counts for one in given if isinstance(one, CardTensor))
    counts.note(counts.launches, f"kernel {name}")
    with counts.computing():
        play(name, *_held(given), **constants)


@contextmanager
def pretended_card() -> Iterator[Counts]:
    """Let `CARD` be used in this thread, and in those that read stored KV."""
    counts = Counts()
    start = threads.start

    def started(work: Callable[[], None], kind: str = threads.LOADING) -> Any:
        is_loading = kind == threads.LOADING

        def run() -> None:
            hidden = nullcontext() if is_loading else counts.unseen()
            with hidden, _Making(counts), _Operations(counts):
                work()

        future = start(run, kind)
        if not is_loading:  # what is done beside prompts is done before the next one
            future.result()
        return future

    class Replayed(RecordedGraph):
        """A graph, whose replay is one launch."""

        def replay(self) -> None:
            counts.note(counts.launches, "graph")
            with counts.computing(), counts.unseen():
                super().replay()

    def stream(*_: object, **__: object) -> _Stream:
        return _Stream(counts)

    fakes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "current_stream": stream,
        "Stream": stream,
        "stream": lambda one: one,
        "Event": lambda *_, **__: _Event(counts),
        "synchronize": lambda *_: counts.note(counts.waits, "device"),
    }

    random_numbers = torch.Generator

    def operations_for(places: RowPlaces, _: Description) -> _RowOperations:
        counts.note(counts.copies, "copy to the card")
        return _RowOperations(places, counts)

    torch._C._ensureCUDADeviceGuardSet()
    with ExitStack() as stack:
        stack.enter_context(patch.dict(streams, clear=True))
        buffers.cache_clear()
        stack.callback(buffers.cache_clear)
        for name, fake in fakes.items():
            stack.enter_context(patch.object(torch.cuda, name, fake))
        stack.enter_context(patch.object(threads, "start", started))
        stack.enter_context(patch.object(torch, "Generator", lambda *_: random_numbers()))
        for one in (staging, cardlayers):
            stack.enter_context(patch.object(one, "free_bytes", lambda _: (1 << 40, 1 << 40)))
        stack.enter_context(patch.object(staging, "registered", _host_memory))
        for name in ("are_ready", "is_right"):
            stack.enter_context(patch.object(cardlayers, name, lambda *_, **__: True))
        # A parameter that says it is on the card has another type.
        stack.enter_context(patch.object(compiled, "is_plain", lambda _: True))
        stack.enter_context(patch.object(cardlayers, "operations_for", operations_for))
        stack.enter_context(patch.object(cardlayers, "kernels_over", StateOperations))
        stack.enter_context(patch.object(rowgraphs, "Graph", Replayed))
        stack.enter_context(patch.object(rowgraphs, "_failures", []))
        stack.enter_context(patch.object(tiled, "is_ready", _is_ready))
        stack.enter_context(patch.object(placing, "is_right", lambda *_: True))
        stack.enter_context(patch.object(tiled, "architecture", lambda _: "sm_80"))
        stack.enter_context(patch.object(tiled, "is_trusted", lambda *_, **__: True))
        stack.enter_context(patch.object(CardDecoding, "_start", _decode))
        stack.enter_context(patch.object(Placement, "_start", _place))
        stack.enter_context(_Making(counts))
        stack.enter_context(_Operations(counts))
        counts.measure_entry()
        yield counts


def to_card(module: nn.Module, counts: Counts) -> None:
    """Move a module's weights and buffers to the card."""
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None and not isinstance(weight, CardTensor):
                part._parameters[name] = nn.Parameter(
                    CardTensor(weight.data.clone(), counts), requires_grad=False
                )
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and not isinstance(buffer, CardTensor):
                part._buffers[name] = CardTensor(buffer, counts)
