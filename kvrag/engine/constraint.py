"""`Constraint`: the form that an answer must have, kept while its tokens are chosen.

llguidance computes which tokens may follow. It is part of the extra ``kvrag[structured]``. A
grammar is first read in a separate process (`grammar_process.py`), since some crash the library and
others take it hours.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvrag import arguments
from kvrag.errors import ParameterError
from kvrag.loading import threads
from kvrag.process import Child, ChildError

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase

Kind = Literal["json_schema", "regex", "lark"]

# As `json.dumps` writes: models have seen it most, and no white space can go on without end.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

MAX_CHARACTERS = 256 << 10
"""The longest text of a constraint, or of all parts of one."""
_READING_SECONDS = 1.0  # of computing; ordinary grammars take a hundredth
MASK_SECONDS = 5.0
"""Time for the tokens that may come next; a mask that needs longer ends its answer."""
_MAX_VERDICTS = 4096
_MOST_SAID = 1000

_reader = Child("kvrag.engine.grammar_process", _READING_SECONDS)
_verdicts: dict[bytes, str] = {}

_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, LLTokenizer]] = (
    WeakKeyDictionary()
)
_making = threading.Lock()


class TooComplexError(ParameterError):
    """A grammar that takes more time, memory or depth to read than one request may."""


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
    TooComplexError
        If reading `text` takes too much time, memory or depth: rules or references that lead to
        each other in a chain of over about 100, say.

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
        if len(self.text) > MAX_CHARACTERS:
            raise TooComplexError(
                f"{self.kind} {arguments.shown(self.text)}: it has {len(self.text):,} characters, "
                f"and at most {MAX_CHARACTERS:,} are read; simplify it"
            )
        try:
            wrong = _what_is_wrong(self._grammar())
        except ChildError as error:
            raise TooComplexError(
                f"{self.kind} {arguments.shown(self.text)}: the grammar is too complex ({error}); "
                "simplify it: fewer rules, references, alternatives and repetitions"
            ) from error
        if wrong:
            raise ParameterError(f"{self.kind} {arguments.shown(self.text)}: {wrong[:_MOST_SAID]}")

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
        try:
            schema = json.loads(self.text)
        except RecursionError as error:
            raise _too_deep(self.text) from error
        return str(matcher.grammar_from_json_schema(_styled(schema)))


def _what_is_wrong(grammar: str) -> str:
    """Return what the library says against a grammar. Raises ChildError if it fails at it."""
    key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
    found = _verdicts.get(key)
    if found is None:
        found = str(_reader.ask(grammar)).strip().removesuffix("<non-verbose/>").strip()
        if found == "NoExtensionBias":  # the library's word for it
            found = "no text has this form"
        if len(_verdicts) >= _MAX_VERDICTS:
            _verdicts.clear()
        _verdicts[key] = found
    return found


def json_in_lark(schema: Any) -> str:
    """Return a JSON schema as part of a Lark grammar, in the style of a whole answer's."""
    return f"%json {_styled(schema)}"


def _styled(schema: Any) -> str:
    """Return a schema as JSON, with the style, and with objects that have only known keys."""
    try:
        # Members of allOf add keys to each other, so a closed one would refuse the others'.
        if "allOf" not in json.dumps(schema):
            schema = _closed(schema)
        if isinstance(schema, Mapping):
            schema = {"x-guidance": _JSON_STYLE, **schema}
        return json.dumps(schema)
    except RecursionError as error:
        raise _too_deep(schema) from error


def _too_deep(schema: Any) -> TooComplexError:
    return TooComplexError(
        f"json_schema {arguments.shown(schema)}: it is nested too deeply; simplify it"
    )


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
    """Which tokens may follow in one answer; computed in another thread, beside the model.

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

    Attributes
    ----------
    is_complete
        Whether nothing can follow.

    Raises
    ------
    ParameterError
        If the library cannot keep to the constraint.
    """

    def __init__(
        self,
        constraint: Constraint,
        tokenizer: PreTrainedTokenizerBase,
        num_tokens: int,
        ends: Collection[int],
    ) -> None:
        self._ends = sorted(ends)
        library = _library()
        self._matcher = library.LLMatcher(
            _own_tokenizer(tokenizer, num_tokens),
            constraint._grammar(),
            log_level=0,
            limits=library.LLParserLimits(verbose_errors=False),  # they quote the whole grammar
        )
        self._check()
        self.is_complete = False
        self._until = 0.0
        self._mask: Future[bytes]
        self._look()

    @property
    def coming(self) -> Future[bytes] | None:
        """The tokens that may come next, while they are looked for and there is time."""
        is_coming = not self._mask.done() and time.monotonic() < self._until
        return self._mask if is_coming else None

    def only(self, scores: torch.Tensor) -> torch.Tensor:
        """Return ``[..., vocabulary]`` scores with minus infinity for tokens that may not follow.

        Raises
        ------
        ParameterError
            If the constraint needs more work than the library's limits, or `MASK_SECONDS`, allow.
        """
        try:
            mask = self._mask.result(max(0.0, self._until - time.monotonic()))
        except TimeoutError as error:
            raise ParameterError(
                f"constraint: to find the tokens that may come next takes over {MASK_SECONDS:g} s; "
                "simplify it: fewer alternatives and repetitions"
            ) from error
        self._check()
        allowed = np.frombuffer(mask, np.uint8) != 0
        # The library knows one end; the model may declare several.
        allowed[self._ends] = self._matcher.is_accepting()
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def follow(self, token: int) -> None:
        """Note the chosen token."""
        if token not in self._ends:
            wait([self._mask])  # until it ends, the matcher takes no other call
            self._matcher.consume_token(token)
            self._check()
            self._look()

    def _look(self) -> None:
        """Begin to find the tokens that may come next."""
        self.is_complete = bool(self._matcher.is_stopped())
        self._until = time.monotonic() + MASK_SECONDS
        self._mask = threads.start(self._matcher.compute_logit_bias)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ParameterError(f"constraint: {self._matcher.get_error().strip()}; simplify it")


def _own_tokenizer(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> LLTokenizer:
    """Return the library's form of a tokenizer, made once: that takes about a second."""
    library = _library()
    with _making:
        made = _tokenizers.setdefault(tokenizer, {})
        if num_tokens not in made:
            if not tokenizer.is_fast:
                raise ParameterError(
                    "constraint: this model's tokenizer is not a fast one, which llguidance needs"
                )
            ends: Any = tokenizer.eos_token_id
            # As `llguidance.hf` does, which imports Transformers.
            definition = json.loads(tokenizer.backend_tokenizer.to_str())
            definition["padding"] = definition["truncation"] = None
            made[num_tokens] = library.LLTokenizer(
                json.dumps(definition), n_vocab=num_tokens, eos_token=ends
            )
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
