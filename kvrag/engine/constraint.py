"""`Constraint`: the form that an answer must have, kept while its tokens are chosen.

llguidance computes which tokens may follow. It is part of the extra ``kvrag[structured]``.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvrag import arguments
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase

Kind = Literal["json_schema", "regex", "lark"]

# As `json.dumps` writes: models have seen it most, and no white space can go on without end.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, LLTokenizer]] = (
    WeakKeyDictionary()
)
_making = threading.Lock()


@dataclass(frozen=True)
class Constraint:
    r"""The form of an answer: every answer has it, unless `max_tokens` cuts the answer short.

    Control tokens never belong to such an answer, except where a grammar names one.

    Attributes
    ----------
    kind
        ``"json_schema"``, ``"regex"`` or ``"lark"``.
    text
        The JSON schema as JSON; the regular expression in the syntax of Rust's crate regex, which
        has neither look-around nor back-references; or the grammar in llguidance's dialect of Lark.

    Raises
    ------
    ParameterError
        If the library is missing, or it does not know what `text` says. It does not ignore any part
        of a schema.

    Examples
    --------
    >>> engine.generate(prompt, constraint=Constraint.regex(r"\d{4}"))    # doctest: +SKIP
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "lark"):
            raise ParameterError(
                f"constraint {arguments.shown(self.kind)}: expected json_schema, regex or lark"
            )
        arguments.text(self.text, self.kind)
        is_wrong, said = _library().LLMatcher.validate_grammar_with_warnings(self._grammar())
        if is_wrong:
            raise ParameterError(f"{self.kind} {arguments.shown(self.text)}: {said[0].strip()}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Self:
        """Return the constraint to JSON of a schema.

        Keys come in the schema's order. An object has no other keys than its ``properties``, unless
        the schema has ``additionalProperties``.
        """
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError(
                f"json_schema {arguments.shown(schema)}: expected JSON values: {error}"
            ) from error
        return cls("json_schema", text)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return the constraint to texts that match a regular expression as a whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Return the constraint to the texts of a grammar."""
        return cls("lark", grammar)

    @classmethod
    def of(cls, response_format: Any) -> Self | None:
        """Return the constraint that an OpenAI-style ``response_format`` asks for, if any.

        Parameters
        ----------
        response_format
            A mapping with ``type``: ``text``, ``json_object``, ``json_schema``, or kvrag's own
            ``regex`` and ``lark``, whose text has the same name as the type. A constraint is
            returned as it is.

        Raises
        ------
        ParameterError
            If it is none of these.
        """
        if response_format is None or isinstance(response_format, cls):
            return response_format
        asked = response_format if isinstance(response_format, Mapping) else {}
        kind = asked.get("type")
        given = asked.get(kind) if isinstance(kind, str) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return cls.json_schema({"type": "object"})
        if kind == "json_schema" and isinstance(given, Mapping):
            return cls.json_schema(given.get("schema", {"type": "object"}))
        if kind in ("regex", "lark") and isinstance(given, str):
            return cls(kind, given)
        raise ParameterError(
            f"response_format {arguments.shown(response_format)}: expected a mapping such as "
            "{'type': 'json_schema', 'json_schema': {'name': ..., 'schema': ...}}, "
            "{'type': 'json_object'} or {'type': 'regex', 'regex': '[0-9]+'}"
        )

    def _grammar(self) -> str:
        matcher = _library().LLMatcher
        if self.kind == "regex":
            return str(matcher.grammar_from_regex(self.text))
        if self.kind == "lark":
            return str(matcher.grammar_from_lark(self.text))
        return str(matcher.grammar_from_json_schema(_styled(json.loads(self.text))))


def json_in_lark(schema: Any) -> str:
    """Return a JSON schema as part of a Lark grammar, in the style of a whole answer's."""
    return f"%json {_styled(schema)}"


def _styled(schema: Any) -> str:
    """Return a schema as JSON, with the style, and with objects that have only known keys."""
    # Members of allOf add keys to each other, so a closed one would refuse the others'.
    if "allOf" not in json.dumps(schema):
        schema = _closed(schema)
    if isinstance(schema, Mapping):
        schema = {"x-guidance": _JSON_STYLE, **schema}
    return json.dumps(schema)


def _closed(schema: Any) -> Any:
    """Return a schema without the leave to make up keys, which small models take without end."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {
        name: one if name in ("const", "enum", "default", "examples") else _closed(one)
        for name, one in schema.items()
    }
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), Mapping)
    if is_object and not schema.keys() & {"additionalProperties", "patternProperties"}:
        closed["additionalProperties"] = False
    return closed


class Allowed:
    """Which tokens may follow in one answer.

    Parameters
    ----------
    constraint
        The answer's form.
    tokenizer
        The model's tokenizer, a fast one.
    num_tokens
        Length of the logits.
    ends
        Tokens that end an answer; they are allowed as soon as the answer is complete.
    """

    def __init__(
        self,
        constraint: Constraint,
        tokenizer: PreTrainedTokenizerBase,
        num_tokens: int,
        ends: Collection[int],
    ) -> None:
        self._ends = sorted(ends)
        self._matcher = _library().LLMatcher(
            _own_tokenizer(tokenizer, num_tokens), constraint._grammar(), log_level=0
        )
        self._check()

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def only(self, scores: torch.Tensor) -> torch.Tensor:
        """Return ``[..., vocabulary]`` scores with minus infinity for tokens that may not follow.

        Raises
        ------
        ParameterError
            If the constraint needs more work than the library's limits allow.
        """
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) != 0
        self._check()
        # The library knows one end; the model may declare several.
        allowed[self._ends] = self._matcher.is_accepting()
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def follow(self, token: int) -> None:
        """Note the chosen token."""
        if token not in self._ends:
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ParameterError(f"constraint: {self._matcher.get_error().strip()}; simplify it")


def _own_tokenizer(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> LLTokenizer:
    """Return the library's form of a tokenizer, made once: that takes about a second."""
    _library()
    from llguidance import hf

    with _making:
        made = _tokenizers.setdefault(tokenizer, {})
        if num_tokens not in made:
            if not tokenizer.is_fast:
                raise ParameterError(
                    "constraint: this model's tokenizer is not a fast one, which llguidance needs"
                )
            fast: Any = tokenizer
            made[num_tokens] = hf.from_tokenizer(fast, n_vocab=num_tokens)
        return made[num_tokens]


def is_installed() -> bool:
    """Return whether the library is there."""
    return importlib.util.find_spec("llguidance") is not None


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ParameterError(
            "a constrained answer needs llguidance: pip install 'kvrag[structured]'"
        ) from error
    return llguidance
