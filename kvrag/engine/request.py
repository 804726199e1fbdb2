"""`Request`: one prompt and the options for answering it, the same for every entry point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

from kvrag import arguments
from kvrag.engine.constraint import Constraint
from kvrag.engine.options import AnswerOptions, Sampling
from kvrag.errors import ParameterError
from kvrag.eviction.base import EvictionPolicy
from kvrag.eviction.registry import make_eviction
from kvrag.fusion.controller import Choice, make_choice
from kvrag.fusion.layout import Layout
from kvrag.fusion.loader import OpenKV
from kvrag.fusion.policies.base import RecomputePolicy
from kvrag.fusion.repair import Repair
from kvrag.models.chat import normalised
from kvrag.optiontable import attributes, options_of, with_options

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


@dataclass(frozen=True)
class Request(AnswerOptions):
    """A prompt and the options for answering it; the constructor checks them.

    Parameters
    ----------
    prompt
        One string, or messages (``{"role": ..., "content": ...}``) for the chat template.

    Raises
    ------
    ParameterError
        If a value has the wrong type or is out of range.
    """

    prompt: Prompt

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy is not None:
            self.recompute.choice()
        given: dict[str, Any] = {
            "hints": tuple(arguments.texts(self.hints, "hints", is_utf8=True)),
            "tools": checked_tools(self.tools),
        }
        if not isinstance(self.prompt, str | PlacedPrompt):
            given["prompt"] = checked_messages(self.prompt)
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
        given["stop"] = tuple(self.stop)  # the caller may change a list later
        if self.session is not None:
            arguments.text(self.session, "session")
        for name, value in given.items():
            object.__setattr__(self, name, value)
        _ = self.eviction_policy

    @classmethod
    def of(cls, prompt: Prompt | Request, options: Mapping[str, Any]) -> Request:
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
        arguments.only(options, [one.name for one, _ in options_of(cls)], "a request")
        return cls(prompt, **options)

    def over(self, defaults: Request) -> Self:
        """Return the request with an engine's defaults for the fields that it leaves out."""
        meant = self.recompute.over(defaults.recompute)
        given = {
            one.name: getattr(defaults, one.name)
            for one, _ in options_of(type(self))
            if getattr(self, one.name) is None
        }
        made = object.__new__(type(self))  # both were checked when they were made
        vars(made).update(vars(self) | given | vars(meant))
        vars(made).pop("eviction_policy", None)  # the default may be another
        return made

    @property
    def recompute(self) -> Recompute:
        """The reused tokens to recompute."""
        return Recompute(self.policy, self.ratio, self.boundary_tokens)

    @property
    def sampling(self) -> Sampling:
        """How to sample tokens."""
        return Sampling(**{one.name: getattr(self, one.name) for one in fields(Sampling)})

    @cached_property
    def eviction_policy(self) -> EvictionPolicy | None:
        """What to evict while the answer is generated; None keeps everything."""
        return make_eviction(self.eviction)


Request.__doc__ = with_options(Request, attributes(Request))


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
