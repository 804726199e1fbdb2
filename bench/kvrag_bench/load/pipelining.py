"""Time to first token with layers loaded in the background, against loading them first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.fusion.controller import takes_ratio
from kvrag.fusion.layout import Layout
from kvrag.fusion.policies.base import PromptRows, num_whole_layers
from kvrag.fusion.repair import make_repair
from kvrag.ingest.index import Index
from kvrag.loading import LOAD_THREADS
from kvrag.tune.stores import load_spans
from kvrag_bench.load.prompts import LoadPrompt, check_speeds, indexed
from kvrag_bench.load.throttled import ThrottledStore

_SLACK = 1.10
_SLACK_SECONDS = 0.005


@dataclass(frozen=True)
class PipeliningOptions:
    """What to measure.

    Attributes
    ----------
    prompt
        What is loaded.
    gigabytes_per_second
        Speeds of the store.
    policy, ratios
        What is computed again; shares do not count for a policy that takes none.
    load_threads
        Chunks read at the same time.
    repeats
        Timed runs, of which the median is reported; one more runs first and does not count.
    """

    prompt: LoadPrompt = field(default_factory=LoadPrompt)
    gigabytes_per_second: Sequence[float] = (0.05, 0.2, 1.0, 5.0)
    policy: str = "deviation"
    ratios: Sequence[float] = (0.0, 0.05, 0.15)
    load_threads: int = LOAD_THREADS
    repeats: int = 5

    def __post_init__(self) -> None:
        check_speeds(self.gigabytes_per_second)
        if self.repeats < 1 or not self.ratios:
            raise ParameterError("bench load: repeats must be 1 or more, one ratio at least")
        make_repair(self.policy)


@dataclass(frozen=True)
class PipeliningRow:
    """One share and one speed.

    Attributes
    ----------
    policy, ratio, gigabytes_per_second
        What was measured.
    load_seconds
        Of loading alone what the policy needs, as many chunks at a time as with pipelining.
    recompute_seconds
        Of everything but loading.
    serial_seconds
        Time to first token, each layer loaded before it is computed.
    pipelined_seconds
        Time to first token, layers loaded in the background.
    hidden_seconds
        Of it, those of loading that nobody waited for.
    over_longer
        `pipelined_seconds` over the longer of `load_seconds` and `recompute_seconds`.
    over_bound
        `pipelined_seconds` over 1.10 times that plus 5 ms.
    """

    policy: str
    ratio: float | None
    gigabytes_per_second: float
    load_seconds: float
    recompute_seconds: float
    serial_seconds: float
    pipelined_seconds: float
    hidden_seconds: float
    over_longer: float
    over_bound: float


@dataclass(frozen=True)
class _Run:
    load: float
    recompute: float
    serial: float
    pipelined: float
    hidden: float

    @property
    def longer(self) -> float:
        return max(self.load, self.recompute)


def measure_pipelining(
    options: PipeliningOptions, say: Callable[[str], None] = lambda _: None
) -> Iterator[PipeliningRow]:
    """Yield one row per speed and share; what is compared is measured in turn."""
    ratios = options.ratios if takes_ratio(options.policy) else (None,)
    with indexed(options.prompt, say) as (index, prompt):
        serial, pipelined = (
            KVEngine(index, load_threads=n, session_bytes=0) for n in (0, options.load_threads)
        )
        layout = pipelined.fuse(prompt, policy="none").layout
        whole = index.store
        for speed in options.gigabytes_per_second:
            index.store = ThrottledStore(whole, speed * 1e9)
            for ratio in ratios:
                say(f"{options.policy} {'' if ratio is None else ratio} at {speed} GB/s")
                runs = [
                    _run(index, prompt, layout, options, ratio, serial, pipelined)
                    for _ in range(options.repeats + 1)
                ][1:]
                yield PipeliningRow(
                    policy=options.policy,
                    ratio=ratio,
                    gigabytes_per_second=speed,
                    load_seconds=median(run.load for run in runs),
                    recompute_seconds=median(run.recompute for run in runs),
                    serial_seconds=median(run.serial for run in runs),
                    pipelined_seconds=median(run.pipelined for run in runs),
                    hidden_seconds=median(run.hidden for run in runs),
                    # Machines drift: what is compared belongs to one round.
                    over_longer=median(run.pipelined / run.longer for run in runs),
                    over_bound=median(
                        run.pipelined / (_SLACK * run.longer + _SLACK_SECONDS) for run in runs
                    ),
                )
        index.store = whole


def _run(
    index: Index,
    prompt: str,
    layout: Layout,
    options: PipeliningOptions,
    ratio: float | None,
    serial: KVEngine,
    pipelined: KVEngine,
) -> _Run:
    given = serial.generate(prompt, policy=options.policy, ratio=ratio, max_tokens=1)
    waited = given.report.seconds["load"]
    ahead = pipelined.generate(prompt, policy=options.policy, ratio=ratio, max_tokens=1)
    inexact = tuple(span for span in layout.spans if not layout.is_exact(span))
    rows = PromptRows(len(layout.token_ids), index.model.spec.num_layers, inexact)
    num_whole = num_whole_layers(make_repair(options.policy, ratio=ratio).policy, rows)
    return _Run(
        load=load_spans(
            index,
            layout.spans,
            len(layout.token_ids),
            layout.positions,
            options.load_threads,
            dict.fromkeys(inexact, num_whole),
        )[1],
        recompute=given.ttft_seconds - waited,
        serial=given.ttft_seconds,
        pipelined=ahead.ttft_seconds,
        hidden=ahead.report.hidden_load_seconds,
    )
