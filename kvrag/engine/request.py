"""`Request`: one prompt and how it is answered, as every door to the engine hands it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypedDict

from kvrag import arguments
from kvrag.engine.sampling import Sampling
from kvrag.errors import ParameterError
from kvrag.eviction.base import EvictionPolicy
from kvrag.eviction.registry import make_eviction
from kvrag.fusion.controller import Choice, make_choice
from kvrag.fusion.layout import Layout
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.policies.base import RecomputePolicy
from kvrag.fusion.repair import Repair

Message = Mapping[str, str]


@dataclass(frozen=True)
class PlacedPrompt:
    """A prompt that is laid out already.

    Attributes
    ----------
    layout
        Its tokens, positions, and what of it is stored.
    open_kv
        Opens what the layout's spans name.
    """

    layout: Layout
    open_kv: OpenKV


Prompt = str | Sequence[Message] | PlacedPrompt


@dataclass(frozen=True)
class Recompute:
    """Which reused tokens are recomputed, as callers say it.

    Attributes
    ----------
    policy
        A name with parameters, as in ``"gradual:spread=0.8"``, or an object; None leaves it to
        the default.
    ratio, boundary_tokens
        Parameters of a policy that is named; None leaves them to the default or the policy.
    """

    policy: str | Choice | RecomputePolicy | None = None
    ratio: float | None = None
    boundary_tokens: int | None = None

    def over(self, default: Recompute) -> Recompute:
        """Return what is meant where `default` stands for what is not said.

        The default's parameters belong to the default's policy and give way together, because
        ``"boundary"`` takes the one or the other.
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
            For an unknown policy, a value out of range, or a parameter beside an object.
        """
        if self.policy is None or isinstance(self.policy, str):
            return make_choice(
                self.policy or "", ratio=self.ratio, boundary_tokens=self.boundary_tokens
            )
        for name in ("ratio", "boundary_tokens"):
            if getattr(self, name) is not None:
                raise ParameterError(
                    f"{name} {getattr(self, name)} beside policy {self.policy}: an object says "
                    "that itself; leave one out, or name the policy"
                )
        if isinstance(self.policy, RecomputePolicy):
            return Repair(self.policy)
        if isinstance(self.policy, Choice):
            return self.policy
        raise ParameterError(f"policy {self.policy!r}: expected a name, as 'query', or a policy")


class RequestOptions(TypedDict, total=False):
    """The fields of a `Request` beside its prompt."""

    policy: str | Choice | RecomputePolicy | None
    ratio: float | None
    boundary_tokens: int | None
    eviction: str | EvictionPolicy | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    seed: int | None
    stop: Sequence[str]
    timeout_seconds: float | None
    hints: Sequence[str]
    reuse: bool
    ttft: float | None


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is answered. Checked when it is made.

    Parameters
    ----------
    prompt
        One string, or messages (``{"role": ..., "content": ...}``) for the chat template.
    policy, ratio, boundary_tokens
        Which reused tokens are recomputed (`Recompute`); None leaves it to the engine.
    eviction
        What is forgotten while the answer is written; None leaves it to the engine.
    max_tokens
        Tokens of the answer at the most; the context window may end it earlier. None leaves it
        to the engine.
    temperature, top_p, top_k, repetition_penalty, seed
        How tokens are drawn (`Sampling`); the default takes the likeliest.
    stop
        Strings that end the answer; they are not part of it, even across tokens.
    timeout_seconds
        Ends the answer after that time, with ``finish_reason="timeout"``; of a stream, the
        time its reader takes counts too.
    hints
        Ids of chunks likely in the prompt: they are compared first, and tell chunks of one
        text apart where what stands in the prompt does not.
    reuse
        False computes every token, as a plain pipeline would: for comparison.
    ttft
        Seconds to the first token that stored KV is streamed towards; None leaves it to the
        engine.

    Raises
    ------
    ParameterError
        For a value of another type or out of range.
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
    seed: int | None = None
    stop: Sequence[str] = ()
    timeout_seconds: float | None = None
    hints: Sequence[str] = ()
    reuse: bool = True
    ttft: float | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "hints": arguments.texts(self.hints, "hints"),
            "reuse": arguments.flag(self.reuse, "reuse"),
        }
        if not isinstance(self.prompt, str | PlacedPrompt):
            checked["prompt"] = checked_messages(self.prompt)
        if not isinstance(self.stop, list | tuple) or not all(
            one and isinstance(one, str) for one in self.stop
        ):
            raise ParameterError(f"stop {self.stop!r}: expected a list of non-empty strings")
        if self.max_tokens is not None:
            checked["max_tokens"] = arguments.whole(self.max_tokens, "max_tokens", 1)
        for name in ("timeout_seconds", "ttft"):
            if getattr(self, name) is not None:
                checked[name] = arguments.number(getattr(self, name), name, above=0.0)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        _ = self.sampling, self.eviction_policy
        if self.policy is not None:
            self.recompute.choice()

    @classmethod
    def of(cls, prompt: Prompt | Request, options: RequestOptions) -> Request:
        """Return a request as it is, or a prompt with its options as one.

        Raises
        ------
        ParameterError
            For a value of another type or out of range, an option that there is none of, or
            options beside a request.
        """
        if isinstance(prompt, Request):
            if options:
                raise ParameterError(
                    f"{', '.join(options)} beside a Request: use dataclasses.replace(request, ...)"
                )
            return prompt
        unknown = sorted(set(options) - RequestOptions.__optional_keys__)
        if unknown:
            known = ", ".join(sorted(RequestOptions.__optional_keys__))
            raise ParameterError(f"unknown option {', '.join(unknown)}; a request takes {known}")
        return cls(prompt, **options)

    def over(self, defaults: Request) -> Self:
        """Return the request with an engine's defaults for what it does not say."""
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
        """Which reused tokens are recomputed."""
        return Recompute(self.policy, self.ratio, self.boundary_tokens)

    @cached_property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(
            self.temperature, self.top_p, self.top_k, self.repetition_penalty, self.seed
        )

    @cached_property
    def eviction_policy(self) -> EvictionPolicy | None:
        """What is forgotten while the answer is written; None: nothing."""
        return make_eviction(self.eviction)


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages as the chat template takes them. Raises ParameterError."""
    if (
        isinstance(messages, str | bytes | Mapping)
        or not isinstance(messages, Sequence)
        or not all(isinstance(one, Mapping) for one in messages)
    ):
        raise ParameterError(
            f"a prompt is one text, or messages such as {{'role': 'user', 'content': '...'}} in a "
            f"list; found {type(messages).__name__} {str(messages)[:60]!r}"
        )
    if not messages:
        raise ParameterError("the prompt has no messages: there is nothing to answer")
    return [dict(one) for one in messages]
