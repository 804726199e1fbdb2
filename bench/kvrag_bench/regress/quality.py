"""What reuse and the codec lose, question by question, or chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from kvrag.codec.config import choose_codec
from kvrag.codec.fitting import fit_profile
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
from kvrag_bench.regress.results import QUALITY, Entry

CODEC = "transform:1"
"""The codec that is measured."""

_TINY = "kvrag-tiny"
_SMOLLM2 = "smollm2-135m"
_SETS = ("biography:4", "carried", "bridge", "code")
_RATIO = 0.15
_CHUNK_TOKENS = 250


def rate_entries(say: Callable[[str], None]) -> Iterator[Entry]:
    """Yield the size and the error of the codec's records of kvrag-tiny's KV."""
    wanted = CodecBenchOptions(
        chunk_tokens=(_CHUNK_TOKENS,), fit_tokens=20 * _CHUNK_TOKENS, test_tokens=10 * _CHUNK_TOKENS
    )
    source = make_source(_TINY, wanted, say)
    choice = choose_codec(CODEC)
    assert choice.config is not None
    codec = get_codec(
        choice.label, fit_profile(choice.config, source.spec, NO_MODEL, source.fit, say)
    )
    points = [measure_codec(codec, source, [chunk])[0] for chunk in source.measured[_CHUNK_TOKENS]]
    yield _cases(f"rate of {CODEC}", "bits an element", [point.bits for point in points])
    yield _cases(f"error of {CODEC}", "of the variance", [point.error for point in points])


def tiny_entries(say: Callable[[str], None], num_questions: int = 100) -> Iterator[Entry]:
    """Yield how far reuse of kvrag-tiny's KV is from full prefill, with and without a codec."""
    yield from _reuse_entries(_options(_TINY, num_questions, codecs=("raw", CODEC)), say)


def smollm2_entries(say: Callable[[str], None]) -> Iterator[Entry]:
    """Yield how far reuse of SmolLM2-135M's KV is from full prefill; nothing if it is missing."""
    named = named_model(_SMOLLM2)
    if named is None or not named.is_installed:
        say(f"{_SMOLLM2} is not installed and is left out: kvrag models pull {_SMOLLM2}")
        return
    # Without the codec: fitting it takes longer than all questions. Four questions of each set.
    yield from _reuse_entries(_options(_SMOLLM2, 4, suite=_SETS), say)


def _options(
    model: str, num_questions: int, suite: Sequence[str] = (), codecs: Sequence[str] = ("raw",)
) -> QualityOptions:
    return QualityOptions(
        model=KVModel.load(model),
        suite=suite,
        policies=("none", DEFAULT_POLICY),
        ratios=(_RATIO,),
        codecs=codecs,
        num_questions=num_questions,
        max_tokens=8,
        links="off",
        controls=False,
    )


def _reuse_entries(options: QualityOptions, say: Callable[[str], None]) -> Iterator[Entry]:
    assert isinstance(options.model, KVModel)
    judged, _ = judge_questions(options.model, load_asked(options), options, say)
    for contestant, judgements in judged.items():
        codec = "" if contestant.codec == "raw" else f", {contestant.codec}"
        yield _cases(
            f"{options.model.name}, {contestant.policy}{codec}",
            "nats a token from full prefill",
            [fmean(one.kl) for one in judgements],
        )


def _cases(name: str, unit: str, values: Sequence[float]) -> Entry:
    # Six digits: the rest is rounding, which differs between processors.
    return Entry(QUALITY, name, unit, tuple(float(f"{value:.6g}") for value in values))
