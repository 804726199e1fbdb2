"""What reuse and the codec lose, question by question, or chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from kvrag.codec.fitting import fit_profile
from kvrag.codec.presets import choose_codec
from kvrag.codec.registry import get_codec
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.models.kv_model import KVModel
from kvrag.weights.named import named_model
from kvrag_bench.codec.options import CodecBenchOptions
from kvrag_bench.codec.presets import NO_MODEL
from kvrag_bench.codec.records import measure_codec
from kvrag_bench.codec.sources import make_source
from kvrag_bench.quality.contest import judge_questions
from kvrag_bench.quality.entrants import QualityOptions, load_asked
from kvrag_bench.regress.options import CODEC, TINY, RegressOptions
from kvrag_bench.regress.results import Entry
from kvrag_bench.regress.speed import Say

_SETS = ("biography:4", "carried", "bridge", "code")
_RATIO = 0.15
_NATS = "nats a token from full prefill"


def rate_entries(options: RegressOptions, say: Say) -> Iterator[Entry]:
    """Yield the size and the error of the codec's records of kvrag-tiny's KV."""
    length = options.chunk_tokens
    wanted = CodecBenchOptions(
        chunk_tokens=(length,), fit_tokens=20 * length, test_tokens=10 * length
    )
    source = make_source(TINY, wanted, say)
    choice = choose_codec(CODEC)
    assert choice.config is not None
    codec = get_codec(
        choice.label, fit_profile(choice.config, source.spec, NO_MODEL, source.fit, say)
    )
    points = [measure_codec(codec, source, [chunk])[0] for chunk in source.measured[length]]
    yield _cases(f"rate of {CODEC}", "bits an element", [point.bits for point in points])
    yield _cases(f"error of {CODEC}", "of the variance", [point.error for point in points])


def quality_entries(options: RegressOptions, say: Say) -> Iterator[Entry]:
    """Yield how far reuse is from full prefill, for each model that is installed."""
    for name in options.models:
        named = named_model(name)
        if named is not None and not named.is_installed:
            say(f"{name} is not installed and is left out: kvrag models pull {name}")
            continue
        model = KVModel.load(name)
        wanted = QualityOptions(
            model=model,
            suite=() if name == TINY else _SETS,
            policies=("none", DEFAULT_POLICY),
            ratios=(_RATIO,),
            # Fitting the codec to a larger model takes longer than all questions.
            codecs=("raw", CODEC) if name == TINY else ("raw",),
            num_questions=options.num_questions
            if name == TINY
            else max(1, options.num_questions // 25),
            max_tokens=8,
            links="off",
            controls=False,
        )
        judged, _ = judge_questions(model, load_asked(wanted), wanted, say)
        for contestant, judgements in judged.items():
            codec = "" if contestant.codec == "raw" else f", {contestant.codec}"
            kl = [fmean(one.kl) for one in judgements]
            yield _cases(f"{name}, {contestant.policy}{codec}", _NATS, kl)


def _cases(name: str, unit: str, values: Sequence[float]) -> Entry:
    # Six digits: the rest is rounding, which differs between processors.
    rounded = tuple(float(f"{value:.6g}") for value in values)
    return Entry("quality", name, unit, is_more_better=False, is_timed=False, values=rounded)
