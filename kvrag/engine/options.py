"""Every option of an answer, once: its name, type, default, bounds and meaning.

`Request`, `KVEngine`, the commands and `kvrag.toml`, LangChain, LlamaIndex, vLLM and the server
take their options from the classes here. A new field of `Sampling` is at all these doors; what is
left to write is what it does, in `sampling.py`.
"""

# ruff: noqa: RUF009 - what they call are fields

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, Any

from kvrag.errors import ParameterError
from kvrag.loading import MAX_LOAD_THREADS
from kvrag.optiontable import check_options, described, option, options_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvrag.engine.constraint import Constraint
    from kvrag.eviction.base import EvictionPolicy
    from kvrag.fusion.controller import Choice
    from kvrag.fusion.links import LinkTokens
    from kvrag.fusion.policies.base import RecomputePolicy

MAX_LOGPROBS = 20
"""Most alternatives that an answer names for each of its tokens."""
MAX_BATCH = 8
"""Most answers that are written together, by default."""
SESSION_BYTES = 1 << 30
"""Memory for the KV of ended answers, by default."""
DEFAULT_MAX_TOKENS = 256
"""Most tokens of an answer, by default."""

# Below this temperature, the divided logits overflow float32.
_COLDEST = 1e-4


def _of_python(default: Any, text: str, **rule: Any) -> Any:
    return option(default, text, is_everywhere=False, **rule)


def everywhere(*classes: Any) -> dict[str, Field[Any]]:
    """Return the options that all doors have, by name."""
    return {one.name: one for cls in classes for one, rule in options_of(cls) if rule.is_everywhere}


@described
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample tokens."""

    temperature: float = option(
        0.0,
        "0 always takes the most likely token; a higher value divides the logits before sampling.",
        least=0,
        served_most=2,
    )
    top_p: float = option(
        1.0,
        "Sample from the most likely tokens that hold this share of the probability.",
        above=0,
        most=1,
    )
    top_k: int = option(
        0, "Sample from this many most likely tokens; 0 samples from all.", least=0, most=2**31 - 1
    )
    min_p: float = option(
        0.0,
        "Sample from tokens that have at least this share of the most likely token's "
        "probability; 0 samples from all.",
        least=0,
        most=1,
    )
    # Logits are divided by it, or multiplied by it: far from 1 they overflow float32.
    repetition_penalty: float = option(
        1.0,
        "A value above 1 makes tokens already in the prompt or answer less likely; 1 changes "
        "nothing.",
        least=0.01,
        most=100,
        served_most=10,
    )
    frequency_penalty: float = option(
        0.0,
        "Subtracted from a token's logit for each time that the answer has it, as in OpenAI's API.",
        least=-2,
        most=2,
    )
    presence_penalty: float = option(
        0.0,
        "Subtracted once from the logit of each token that the answer has.",
        least=-2,
        most=2,
    )
    seed: int | None = option(
        None,
        "Makes sampled answers repeatable; by default each has a new seed.",
        least=0,
        most=2**63 - 1,
        # As far as a JSON number is exact in every client.
        served_most=2**53 - 1,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if 0.0 < self.temperature < _COLDEST:
            raise ParameterError(
                f"temperature {self.temperature}: expected 0 (the most likely token) or at least "
                f"{_COLDEST}"
            )


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(Sampling):
    """The options of one answer; None means the engine's default."""

    policy: str | Choice | RecomputePolicy | None = option(
        None,
        "Which tokens of reused chunks are recomputed: none, boundary (the first of each chunk), "
        "seam (first and last), deviation (those whose KV deviates most), gradual (the same, "
        "chosen again on every layer), query (those the question attends to), two_stage "
        "(attended to and deviating), random, or auto (uses the results of 'kvrag calibrate'). "
        "Parameters follow colons: query:depth=0.5.",
    )
    ratio: float | None = option(
        None,
        "Share of reused tokens to recompute, 0 to 1; for 'auto', the maximum. By default 0.05 for "
        "the default policy in an index with context similar, otherwise the policy's own.",
        least=0,
        most=1,
    )
    boundary_tokens: int | None = option(
        None,
        "Tokens of each chunk that 'boundary' and 'seam' recompute, instead of 'ratio'.",
        least=1,
    )
    eviction: str | EvictionPolicy | None = option(
        None,
        "Which KV to drop while the answer is generated: corm (keys that no recent query needs), "
        "streaming (all but the first and last tokens), h2o or snapkv (tokens with the least "
        "attention). Parameters follow colons: corm:window=256:recent=256. By default none.",
    )
    ttft: float | None = option(
        None,
        "Target time to the first token, in seconds: as much of each chunk is loaded as that time "
        "allows, or the chunk is computed where that is as quick. By default all is loaded.",
        above=0,
    )
    max_tokens: int | None = option(
        None,
        "Maximum length of the answer, in tokens; the context window may end it earlier.",
        least=1,
    )
    stop: Sequence[str] = _of_python(
        (),
        "Strings that end the answer. The answer does not include them, even if one spans several "
        "tokens.",
    )
    stop_loops: bool = _of_python(
        False,
        'Whether the answer ends, with ``finish_reason="loop"``, where it says the same again '
        "and again. Not in blocks of code, and not with a `constraint`.",
    )
    timeout_seconds: float | None = _of_python(
        None,
        'Ends the answer after this time, with ``finish_reason="timeout"``. In a stream, the '
        "time that the reader takes counts too.",
        above=0,
    )
    hints: Sequence[str] = _of_python(
        (),
        "Ids of chunks that the prompt probably contains, best first: so does the answer name "
        "them. They are compared first, and they decide between chunks with the same text where "
        "the prompt itself does not.",
    )
    reuse: bool = _of_python(
        True, "False computes every token, as a plain pipeline would, for comparison."
    )
    constraint: Constraint | None = _of_python(
        None, "The form that the answer must have; None allows any text."
    )
    tools: Sequence[Mapping[str, Any]] = _of_python(
        (),
        "Functions that the answer may call, as in OpenAI's API; the chat template writes them "
        "into the prompt. The answer is still one text (`kvrag.llms.tool_calls` finds the calls in "
        "it).",
    )
    session: str | None = _of_python(
        None,
        "A name, if this prompt may take KV only from answers with the same name, such as those of "
        "one user; None takes it from answers without a name.",
    )
    explain: bool = _of_python(
        False, "Whether the answer says what happened to each part of the prompt (`Answer.parts`)."
    )
    logprobs: int | None = _of_python(
        None,
        "If the answer says how likely each token was (`Answer.logprobs`): how many of the most "
        "likely tokens it names for each place. None says nothing.",
        least=0,
        most=MAX_LOGPROBS,
    )


@described
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine is made with, beside the defaults of its answers."""

    links: LinkTokens | str | Path | None = option(
        None,
        "Link tokens to insert after each reused chunk: a file from 'kvrag train links', or 'off'. "
        "By default links.safetensors in the model's folder, if it exists and fits; if it does not "
        "fit, prompts get none and their reports count that.",
    )
    load_threads: int | None = _of_python(
        None,
        "Number of chunks whose KV is read at the same time, while the rest of the prompt is "
        "computed layer by layer; 0 reads each layer before it is computed. None decides by the "
        "store and the idle cores.",
        least=0,
        most=MAX_LOAD_THREADS,
    )
    max_batch: int = _of_python(
        MAX_BATCH,
        "Most answers that are written together. Further ones wait in order, and join when another "
        "answer ends. Each one holds its prompt's KV in memory.",
        least=1,
        most=1024,
    )
    session_bytes: int = option(
        SESSION_BYTES,
        "Memory for the KV of ended answers, which a prompt that continues one of them takes "
        "instead of computing it. The least recently used is dropped first; 0 keeps none.",
        least=0,
        is_bytes=True,
    )
    session_store_bytes: int = option(
        0,
        "Room in the index's store for what that memory has no room for, until the engine or the "
        "index ends; 0 writes nothing. KV tells what was said (docs/conversations.md).",
        least=0,
        is_bytes=True,
    )
    card_bytes: int | None = option(
        None,
        "Room on a graphics card for the KV of chunks, which later prompts take from there; the "
        "least recently used leaves first. By default a fourth of what is free at the first "
        "prompt; 0 keeps none. Without a card it does nothing.",
        least=0,
        is_bytes=True,
    )
    pinned_bytes: int | None = option(
        None,
        "Page-locked memory of the host, which a card reads by itself, for KV that the card has no "
        "room for. By default an eighth of the memory; 0 keeps none. Without a card it does "
        "nothing.",
        least=0,
        is_bytes=True,
    )
    store_patience: float | None = option(
        None,
        "Seconds that a prompt gives each stored chunk before it computes what is not loaded, and "
        "counts misses. By default the price of computing, at least two seconds, for stores on "
        "other machines; local ones are waited for.",
        above=0,
    )
    never_slower: bool = option(
        True,
        "Whether a prompt is computed as a whole where that is expected to be as fast as taking "
        "its stored KV, as for short prompts. What computing costs is measured once for each "
        "model and device, beside the first answer; until then, stored KV is taken. With `ttft`, "
        "for prompt markup and link tokens, and in several processes it is "
        "taken always.",
    )

    def __post_init__(self) -> None:
        check_options(self)


ENGINE_DEFAULTS = tuple(
    one.name
    for one, rule in options_of(AnswerOptions)
    if rule.is_everywhere and one.default is None and one.name not in Sampling.__annotations__
)
"""The options of answers for which an engine has defaults."""
