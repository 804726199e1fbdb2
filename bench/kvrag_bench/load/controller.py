"""The share that ``auto`` takes by what loading costs, against every share in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from kvrag.engine.answer import Answer
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.fusion.controller import (
    Calibration,
    Choice,
    Cost,
    LoadingController,
    Measured,
    takes_ratio,
)
from kvrag.fusion.repair import Repair, make_repair
from kvrag.ingest.index import Index
from kvrag.loading.pace import fit_prices
from kvrag.tune.stores import measure_loading
from kvrag_bench.load.prompts import LoadPrompt, check_speeds, indexed
from kvrag_bench.load.throttled import ThrottledStore


@dataclass(frozen=True)
class ControllerOptions:
    """What to measure.

    Attributes
    ----------
    prompt
        The prompt that is loaded.
    gigabytes_per_second
        Speeds of the store.
    policy, ratios
        The shares among which is chosen.
    floor
        The least share that keeps quality: what has random weights has no quality to measure.
    repeats
        Timed rounds, of which the median is reported; one more runs first and does not count.
    """

    prompt: LoadPrompt = field(default_factory=LoadPrompt)
    gigabytes_per_second: Sequence[float] = (0.05, 0.2, 1.0, 5.0)
    policy: str = "boundary"
    ratios: Sequence[float] = (0.0, 0.02, 0.05, 0.1, 0.15, 0.3)
    floor: float = 0.02
    repeats: int = 5

    def __post_init__(self) -> None:
        check_speeds(self.gigabytes_per_second)
        if self.repeats < 1 or not self.allowed:
            raise ParameterError(
                f"bench load: repeats must be 1 or more, and one ratio at least {self.floor}, the "
                "floor"
            )
        if not takes_ratio(self.policy):
            raise ParameterError(f"policy {self.policy!r} has no share to choose")

    @property
    def allowed(self) -> tuple[float, ...]:
        """Shares that keep quality."""
        return tuple(ratio for ratio in self.ratios if ratio >= self.floor)


@dataclass(frozen=True)
class ControllerRow:
    """One speed.

    Attributes
    ----------
    policy, floor, gigabytes_per_second
        What was measured.
    ratio, num_computed, seconds
        The share that ``auto`` took of what it loaded, the chunks that it computed in place of
        loading them, and its time to first token.
    expected_seconds, expected_load_seconds, load_seconds
        What it expected that to be, and its loading; and what that was.
    best_ratio, best_seconds
        The fastest of all shares that keep quality.
    over_best
        Median over the rounds of the ratio of both.
    """

    policy: str
    floor: float
    gigabytes_per_second: float
    ratio: float
    num_computed: int
    seconds: float
    expected_seconds: float
    expected_load_seconds: float
    load_seconds: float
    best_ratio: float
    best_seconds: float
    over_best: float


def measure_controller(
    options: ControllerOptions, say: Callable[[str], None] = lambda _: None
) -> Iterator[ControllerRow]:
    """Yield one row per speed; shares and ``auto`` are timed in turn."""
    with indexed(options.prompt, say) as (index, prompt):
        engine = KVEngine(index, session_bytes=0)
        say("computing")
        cost = _compute_cost(engine, prompt, options)
        whole = index.store
        for speed in options.gigabytes_per_second:
            index.store = ThrottledStore(whole, speed * 1e9)
            auto = _auto(index, cost, options, say)
            say(f"{options.policy} at {speed} GB/s")
            contenders: list[Choice] = [auto, *_fixed(options)]
            rounds = [
                [_answer(engine, prompt, policy) for policy in contenders]
                for _ in range(options.repeats + 1)
            ][1:]
            seconds = [median(one.ttft_seconds for one in way) for way in zip(*rounds, strict=True)]
            best = min(range(len(options.allowed)), key=lambda number: seconds[1 + number])
            report = rounds[-1][0].report
            assert report.expected_loss is not None
            assert report.expected_seconds is not None
            assert report.expected_load_seconds is not None
            yield ControllerRow(
                policy=options.policy,
                floor=options.floor,
                gigabytes_per_second=speed,
                ratio=round(1.0 - report.expected_loss, 9),
                num_computed=sum(one.is_computed for one in report.decisions),
                seconds=seconds[0],
                expected_seconds=report.expected_seconds,
                expected_load_seconds=report.expected_load_seconds,
                load_seconds=median(one[0].report.load_seconds for one in rounds),
                best_ratio=options.allowed[best],
                best_seconds=seconds[1 + best],
                # Machines drift: what is compared belongs to one round.
                over_best=median(
                    one[0].ttft_seconds / one[1 + best].ttft_seconds for one in rounds
                ),
            )
        index.store = whole


def _fixed(options: ControllerOptions) -> list[Repair]:
    return [make_repair(options.policy, ratio=ratio) for ratio in options.allowed]


def _answer(engine: KVEngine, prompt: str, policy: Choice) -> Answer:
    return engine.generate(prompt, policy=policy, max_tokens=1)


def _compute_cost(engine: KVEngine, prompt: str, options: ControllerOptions) -> Cost:
    """Return what computing costs, from the KV in memory."""
    amounts, seconds = [], []
    for number in range(3):
        for policy in _fixed(options):
            answer = _answer(engine, prompt, policy)
            report = answer.report
            if number:
                num_rows = sum(report.rows_by_layer) + report.rows_asked
                amounts.append((1.0, float(num_rows)))
                seconds.append(answer.ttft_seconds - report.seconds["load"])
    fixed, per_row = fit_prices(amounts, seconds)
    return Cost(fixed, per_row, 0.0)


def _auto(
    index: Index, cost: Cost, options: ControllerOptions, say: Callable[[str], None]
) -> LoadingController:
    loading = measure_loading(index, options.prompt.num_chunks, say)
    assert loading is not None
    calibration = Calibration(
        model_fingerprint=index.model.fingerprint,
        data="none",
        measure="share computed again",
        num_questions=0,
        # The share stands for quality here: the more, the less is lost.
        policies=tuple(
            Measured(options.policy, ratio, 1.0 - ratio, 1.0 - ratio, 1.0 - ratio)
            for ratio in options.ratios
        ),
        cost=cost,
        loading=loading,
    )
    return LoadingController(loss=1.0 - options.floor, calibration=calibration)
