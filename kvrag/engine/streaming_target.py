"""The streaming target of a prompt, with what is known about loading and computing so far."""

from __future__ import annotations

import time

from kvrag.errors import KVRagError
from kvrag.ingest.index import Index
from kvrag.loading.streaming import StreamEstimates, Streaming

# The length of a question and of a context: a calibration's cost is linear between them.
_PRIOR_TOKENS = (30, 1000)


def streaming_target(
    index: Index, estimates: StreamEstimates, ttft: float, layout_seconds: float
) -> Streaming:
    """Return the target for one prompt.

    Parameters
    ----------
    index
        Has a calibration, or none that can be read.
    estimates
        Of earlier prompts; without any, the calibration gives the first.
    ttft
        Seconds to the first token.
    layout_seconds
        How much of them has passed.
    """
    started = time.perf_counter() - layout_seconds
    try:
        calibration = index.calibration
    except KVRagError:
        calibration = None  # the estimates then come from earlier prompts
    if calibration is None:
        return Streaming(ttft, started, estimates)
    if not estimates.computing.is_known:
        for num_tokens in _PRIOR_TOKENS:
            num_rows = num_tokens * index.config.num_layers
            estimates.computing.observe(num_rows, calibration.cost.of(num_rows, 0))
    loading = calibration.loading
    prior = None if loading is None else loading.tier(None).seconds_per_token
    return Streaming(ttft, started, estimates, prior)
