"""The prices of computing with one model on one device: measured once, and kept on disk.

That takes a second or less, beside the first prompt's answer: never before its first token. The
result is kept in the user's cache for other processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from kvrag import arguments
from kvrag.errors import ParameterError, StoreError
from kvrag.fusion.fuser import fuse
from kvrag.fusion.layout import Layout
from kvrag.fusion.policies.base import NonePolicy
from kvrag.fusion.pricing import RowPrices
from kvrag.fusion.repair import Repair
from kvrag.ingest.config import write_atomically
from kvrag.kvcache import FusedKV
from kvrag.loading import threads
from kvrag.loading.pace import fit_prices
from kvrag.models.kv_model import KVModel
from kvrag.models.rowgraphs import uses_graphs
from kvrag.models.rows import RowPass
from kvrag.process import after_fork, working
from kvrag.regularfile import read_regular

SWITCH = "KVRAG_NEVER_SLOWER"
"""The environment variable that, set to ``off``, takes stored KV whatever it costs."""

_NUM_ROWS = (16, 64, 256, 1024, 4096)
_REPEATS = 3
_WAY = "line"  # of measuring: prices of another are not taken
# A run that takes longer is the last, at the second number of rows or a later one: other prompts'
# answers wait for each run.
_LONGEST_CPU_RUN, _LONGEST_RUN = 0.03, 0.5

_lock = threading.Lock()
_known: dict[str, RowPrices | None] = {}
_begun: set[str] = set()


def _forget() -> None:
    """Begin again in a forked process: other threads held the lock, or measure in the parent."""
    global _lock
    _lock = threading.Lock()
    _known.clear()
    _begun.clear()


after_fork(_forget)


class Prices:
    """The prices of one engine's model, once they are known.

    Parameters
    ----------
    fingerprint
        That of the model (`KVModel.fingerprint`), for which nothing is hashed here.
    """

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def known(self, model: KVModel) -> RowPrices | None:
        """Return the prices if they were measured, by this process or an earlier one."""
        if not _serves(model):
            return None
        key = _key(model, self._fingerprint)
        with _lock:
            if key not in _known:
                _known[key] = _read(key)
            return _known[key]

    def measure_later(self, model: KVModel) -> None:
        """Measure in another thread, unless the prices are known or being measured."""
        if not _serves(model) or self.known(model) is not None:
            return
        key = _key(model, self._fingerprint)
        with _lock:
            if key in _begun:
                return
            _begun.add(key)
        threads.start(lambda: self.measure(model), threads.READING)

    def measure(self, model: KVModel) -> RowPrices:
        """Measure now, and keep the result."""
        key = _key(model, self._fingerprint)
        found = measure(model)
        with _lock:
            _known[key] = found
            _begun.add(key)
        _write(key, found)
        return found


def is_off() -> bool:
    """Return whether the environment says that stored KV is taken whatever it costs."""
    return os.environ.get(SWITCH, "").lower() == "off"


def _serves(model: KVModel) -> bool:
    return not is_off() and model.ranks.size == 1  # several ranks must all decide alike


def measure(model: KVModel) -> RowPrices:
    """Time some numbers of rows, the fewest first, for as long as that takes little time.

    On the CPU, a few layers stand for all of them. On a GPU the whole model runs, as prompts do.
    """
    is_cpu = model.device.type == "cpu"
    run, longest = (_layers_seconds, _LONGEST_CPU_RUN) if is_cpu else (_seconds, _LONGEST_RUN)
    num_rows: list[int] = []
    seconds: list[float] = []
    for number in _NUM_ROWS:
        number = min(number, model.max_positions - 1)
        if num_rows and number <= num_rows[-1]:
            break
        took, one_run = run(model, number)
        num_rows.append(number)
        seconds.append(took)
        if one_run > longest and len(num_rows) > 1:
            break
    if is_cpu:
        # A line: what else the machine does disturbs single figures, and decisions with them.
        fixed, per_row = fit_prices([(1.0, number) for number in num_rows], seconds)
        num_rows = [num_rows[0], num_rows[-1]]
        seconds = [fixed + per_row * number for number in num_rows]
    # More rows never cost less: what says so was disturbed.
    least = np.minimum.accumulate(seconds[::-1])[::-1]
    return RowPrices(tuple(num_rows), tuple(map(float, least)))


@torch.no_grad()
def _layers_seconds(model: KVModel, num_rows: int) -> tuple[float, float]:
    """Return the seconds of rows in all layers, by those of a few; and those of one of these."""
    num_layers = model.spec.num_layers
    buffer = FusedKV(replace(model.spec, num_layers=1), num_rows, num_rows, model.device)
    buffer.keys, buffer.values = buffer.keys * num_layers, buffer.values * num_layers
    rows = torch.arange(num_rows, device=model.device)
    tables = model.tables(num_rows)
    best = float("inf")
    layers = list(range(min(_REPEATS, num_layers)))
    turns = [(layer, is_timed) for is_timed in (False, True) for layer in layers]
    # The first run of a layer packs its weights. Then another layer each time, whose weights are
    # not in the processor's caches.
    while turns:
        layer, is_timed = turns.pop(0)
        with working(), model.computing_rows():
            hidden = model.embed(rows % _vocabulary(model), rows)
            compiled = model.compile()
            # Processor time: what else the machine does is not the model's price.
            started = time.thread_time()
            model.rows.forward(layer, hidden, RowPass(rows, buffer, tables, compiled))
            took = time.thread_time() - started
        if is_timed:
            best = min(best, took)
        if took > _LONGEST_CPU_RUN:
            turns = [] if is_timed else [(layer, True)]
    return best * num_layers, best


def _seconds(model: KVModel, num_rows: int) -> tuple[float, float]:
    """Return the seconds of a prompt without stored KV, by graphs if it can be, twice."""
    layout = Layout(tuple(one % _vocabulary(model) for one in range(num_rows)), (), 0, False)
    buffer = FusedKV(model.spec, num_rows, num_rows, model.device)

    def run() -> float:
        with working(), model.lock:
            started = time.perf_counter()
            fused = fuse(model, layout, _nothing, Repair(NonePolicy()), buffer)
            float(fused.logits[0])  # waits for the device
            return time.perf_counter() - started

    run()
    # What the first run lacked: later prompts have it.
    model.capture_rows()
    best = min(run() for _ in range(_REPEATS))
    return best, best


def _vocabulary(model: KVModel) -> int:
    return int(model.decoder.config.get_text_config().vocab_size)


def _nothing(chunk_id: str, context_ids: tuple[int, ...]) -> None:
    """Open no record: the prompt has no stored tokens."""


def _key(model: KVModel, fingerprint: str) -> str:
    """Return what the prices depend on, as text."""
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else os.uname().machine
    num_threads = threads.num_computing() if device.type == "cpu" else 0
    way = f"{_WAY}, graphs: {uses_graphs()}" if device.type == "cuda" else _WAY
    values = way, fingerprint, device.type, name, num_threads, model.compute, _version()
    return json.dumps([*map(str, values), torch.__version__])


@cache
def _version() -> str:
    return version("kvrag")  # reads a file


def _path(key: str) -> Path:
    folder = arguments.user_cache() / "kvrag" / "prices"
    return folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"


def _read(key: str) -> RowPrices | None:
    """Return kept prices; None if there are none that can be used, or no folder for them."""
    try:
        values = json.loads(read_regular(_path(key)))
        if values["of"] != key:
            return None
        return RowPrices(tuple(values["num_rows"]), tuple(values["seconds"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ParameterError):
        return None


def _write(key: str, prices: RowPrices) -> None:
    """Keep prices for other processes, whole or not at all; without a cache, nothing is kept."""
    content = json.dumps({"of": key, **asdict(prices)}).encode()
    with suppress(OSError, ParameterError, StoreError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
