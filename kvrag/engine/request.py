"""`Request`: one prompt and the options for answering it, the same for every entry point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self, TypedDict

from kvrag import arguments
from kvrag.engine.constraint import Constraint
from kvrag.engine.sampling import MAX_LOGPROBS, Sampling
from kvrag.errors import ParameterError
from kvrag.eviction.base import EvictionPolicy
from kvrag.eviction.registry import make_eviction
from kvrag.fusion.controller import Choice, make_choice
from kvrag.fusion.layout import Layout
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.policies.base import RecomputePolicy
from kvrag.fusion.repair import Repair
from kvrag.models.messages import normalised

Message = Mapping[str, Any]


@dataclass(frozen=True)
class PlacedPrompt:
    """A prompt that is already laid out.

    Attributes
    ----------
    layout
        Its tokens and positions, and which of them are stored.
    open_kv
        Opens the records that the layout's spans name.
    """

    layout: Layout
    open_kv: OpenKV


Prompt = str | Sequence[Message] | PlacedPrompt


@dataclass(frozen=True)
class Recompute:
    """The reused tokens to recompute, as callers specify them.

    Attributes
    ----------
    policy
        A name with parameters, as in ``"gradual:spread=0.8"``, or an object; None uses the
        default.
    ratio, boundary_tokens
        Parameters of a named policy; None uses the default's or the policy's own.
    """

    policy: str | Choice | RecomputePolicy | None = None
    ratio: float | None = None
    boundary_tokens: int | None = None

    def over(self, default: Recompute) -> Recompute:
        """Return these settings, with `default` for what they leave out.

        The default's parameters belong to the default's policy. If either is given here, both of
        the default's are dropped, because ``"boundary"`` takes one or the other.
        """
        if self.policy is not None and self.policy != default.policy:
            return self
        if self.ratio is None and self.boundary_tokens is None:
            return default
        return replace(self, policy=default.policy)

    def choice(self) -> Choice:
        """Return the policy, or the controller that chooses one.

        Raises
        ------
        ParameterError
            If the policy is unknown, a value is out of range, or a parameter is given together
            with a policy object.
        """
        if self.policy is None or isinstance(self.policy, str):
            return make_choice(
                self.policy or "", ratio=self.ratio, boundary_tokens=self.boundary_tokens
            )
        for name in ("ratio", "boundary_tokens"):
            if getattr(self, name) is not None:
                raise ParameterError(
                    f"{name} {getattr(self, name)} given with policy {self.policy}: a policy "
                    "object sets its own parameters; leave one out, or name the policy"
                )
        if isinstance(self.policy, RecomputePolicy):
            return Repair(self.policy)
        if isinstance(self.policy, Choice):
            return self.policy
        raise ParameterError(
            f"policy {arguments.shown(self.policy)}: expected a name such as 'query', or a policy"
        )


class RequestOptions(TypedDict, total=False):
    """The fields of a `Request` other than its prompt."""

    policy: str | Choice | RecomputePolicy | None
    ratio: float | None
    boundary_tokens: int | None
    eviction: str | EvictionPolicy | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    min_p: float
    seed: int | None
    stop: Sequence[str]
    stop_loops: bool
    timeout_seconds: float | None
    hints: Sequence[str]
    reuse: bool
    ttft: float | None
    constraint: Constraint | None
    tools: Sequence[Mapping[str, Any]]
    session: str | None
    explain: bool
    logprobs: int | None


@dataclass(frozen=True)
class Request:
    """A prompt and the options for answering it; the constructor checks them.

    Parameters
    ----------
    prompt
        One string, or messages (``{"role": ..., "content": ...}``) for the chat template.
    policy, ratio, boundary_tokens
        Which reused tokens to recompute (`Recompute`); None uses the engine's default.
    eviction
        What to evict from the cache while the answer is generated; None uses the engine's default.
    max_tokens
        Maximum number of tokens in the answer; the context window may end it earlier. None uses
        the engine's default.
    temperature, top_p, top_k, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed
        How to sample tokens (`Sampling`); the default always takes the most likely one.
    stop
        Strings that end the answer. The answer does not include them, even if one spans several
        tokens.
    stop_loops
        Whether the answer ends, with ``finish_reason="loop"``, where it says the same again and
        again. Not in blocks of code, and not with a `constraint`.
    timeout_seconds
        Ends the answer after this time, with ``finish_reason="timeout"``. In a stream, the time
        that the reader takes counts too.
    hints
        Ids of chunks that the prompt probably contains, best first: so does the answer name them.
        They are compared first, and they decide between chunks with the same text where the prompt
        itself does not.
    reuse
        False computes every token, as a plain pipeline would, for comparison.
    ttft
        Target for the time to first token, in seconds, when streaming stored KV; None uses the
        engine's default.
    constraint
        The form that the answer must have; None allows any text.
    tools
        Functions that the answer may call, as in OpenAI's API; the chat template writes them into
        the prompt. The answer is still one text (`kvrag.llms.tool_calls` finds the calls in it).
    session
        A name, if this prompt may take KV only from answers with the same name, such as those of
        one user; None takes it from answers without a name.
    explain
        Whether the answer says what happened to each part of the prompt (`Answer.parts`).
    logprobs
        If the answer says how likely each token was (`Answer.logprobs`): how many of the most
        likely tokens it names for each place, 0 to 20. None says nothing.

    Raises
    ------
    ParameterError
        If a value has the wrong type or is out of range.
    """

    prompt: Prompt
    policy: str | Choice | RecomputePolicy | None = None
    ratio: float | None = None
    boundary_tokens: int | None = None
    eviction: str | EvictionPolicy | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_loops: bool = False
    timeout_seconds: float | None = None
    hints: Sequence[str] = ()
    reuse: bool = True
    ttft: float | None = None
    constraint: Constraint | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    session: str | None = None
    explain: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.policy is not None:
            self.recompute.choice()
        checked: dict[str, Any] = {
            "hints": tuple(arguments.texts(self.hints, "hints", is_utf8=True)),
            "reuse": arguments.flag(self.reuse, "reuse"),
            "tools": checked_tools(self.tools),
            "explain": arguments.flag(self.explain, "explain"),
            "stop_loops": arguments.flag(self.stop_loops, "stop_loops"),
        }
        if not isinstance(self.prompt, str | PlacedPrompt):
            checked["prompt"] = checked_messages(self.prompt)
        elif self.tools:
            raise ParameterError(
                "tools given with a prompt that is one text: the chat template writes them; pass "
                "messages"
            )
        if not isinstance(self.constraint, Constraint | None):
            raise ParameterError(
                f"constraint {arguments.shown(self.constraint)}: expected a Constraint, such as "
                "Constraint.regex('[0-9]+')"
            )
        if not isinstance(self.stop, list | tuple) or not all(
            one and isinstance(one, str) for one in self.stop
        ):
            raise ParameterError(
                f"stop {arguments.shown(self.stop)}: expected a list of non-empty strings"
            )
        checked["stop"] = tuple(self.stop)  # the caller may change a list later
        for name in ("max_tokens", "boundary_tokens"):
            if getattr(self, name) is not None:
                checked[name] = arguments.whole(getattr(self, name), name, 1)
        if self.ratio is not None:
            checked["ratio"] = arguments.number(self.ratio, "ratio", 0.0, 1.0)
        for name in ("timeout_seconds", "ttft"):
            if getattr(self, name) is not None:
                checked[name] = arguments.number(getattr(self, name), name, above=0.0)
        if self.logprobs is not None:
            checked["logprobs"] = arguments.whole(self.logprobs, "logprobs", 0, MAX_LOGPROBS)
        if self.session is not None:
            checked["session"] = arguments.text(self.session, "session")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        _ = self.sampling, self.eviction_policy

    @classmethod
    def of(cls, prompt: Prompt | Request, options: RequestOptions) -> Request:
        """Return a request unchanged, or make one from a prompt and its options.

        Raises
        ------
        ParameterError
            If a value has the wrong type or is out of range, an option is unknown, or options are
            given together with a request.
        """
        if isinstance(prompt, Request):
            if options:
                raise ParameterError(
                    f"{', '.join(options)} given with a Request: use "
                    "dataclasses.replace(request, ...)"
                )
            return prompt
        unknown = sorted(set(options) - RequestOptions.__optional_keys__)
        if unknown:
            known = ", ".join(sorted(RequestOptions.__optional_keys__))
            raise ParameterError(
                f"unknown option {arguments.cut(', '.join(unknown))}; a request takes {known}"
            )
        return cls(prompt, **options)

    def over(self, defaults: Request) -> Self:
        """Return the request with an engine's defaults for the fields that it leaves out."""
        meant = self.recompute.over(defaults.recompute)
        given = {
            name: getattr(self if getattr(self, name) is not None else defaults, name)
            for name in ("eviction", "max_tokens", "ttft")
        }
        return replace(
            self,
            policy=meant.policy,
            ratio=meant.ratio,
            boundary_tokens=meant.boundary_tokens,
            **given,
        )

    @property
    def recompute(self) -> Recompute:
        """The reused tokens to recompute."""
        return Recompute(self.policy, self.ratio, self.boundary_tokens)

    @cached_property
    def sampling(self) -> Sampling:
        """How to sample tokens."""
        return Sampling(**{one.name: getattr(self, one.name) for one in fields(Sampling)})

    @cached_property
    def eviction_policy(self) -> EvictionPolicy | None:
        """What to evict while the answer is generated; None keeps everything."""
        return make_eviction(self.eviction)


def checked_batch(prompts: Any) -> list[Any]:
    """Return the prompts and requests of a batch, not yet checked. Raises ParameterError."""
    if isinstance(prompts, str | bytes | Mapping | Request | PlacedPrompt) or not isinstance(
        prompts, Iterable
    ):
        raise ParameterError(
            "a batch must be a list of prompts: put the prompt into a list; found "
            f"{arguments.shown(prompts)}"
        )
    return list(prompts)


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages in the form of `normalised`. Raises ParameterError."""
    if (
        isinstance(messages, str | bytes | Mapping)
        or not isinstance(messages, Sequence)
        or not all(isinstance(one, Mapping) for one in messages)
    ):
        raise ParameterError(
            "a prompt is one text, or a list of messages such as "
            "{'role': 'user', 'content': '...'}; "
            f"found {type(messages).__name__} {arguments.shown(messages)}"
        )
    if not messages:
        raise ParameterError("the prompt has no messages: there is nothing to answer")
    return normalised(messages)


def checked_tools(tools: Any) -> list[dict[str, Any]]:
    """Return tools in the form that the chat template takes. Raises ParameterError."""
    given = tools if isinstance(tools, Sequence) and not isinstance(tools, str | bytes) else [tools]
    for one in given:
        function = one.get("function") if isinstance(one, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            raise ParameterError(
                f"tool {arguments.shown(one)}: expected a function such as {{'type': 'function', "
                "'function': {'name': 'search', 'parameters': {'type': 'object', ...}}}"
            )
    return [dict(one) for one in given]
