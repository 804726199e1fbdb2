"""What clients may send. A field that is not here, or a value that has no effect, is refused."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from kvrag import arguments
from kvrag.engine.options import MAX_LOGPROBS, Sampling
from kvrag.llms.tool_calls import Shape, shape
from kvrag.models.chat import role_of
from kvrag.optiontable import Option, kind_of, options_of
from kvrag.server.problems import validation_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHOICES = 16
MAX_INPUTS = 2048
MAX_TOKEN_IDS = 1 << 19
MAX_STOP = 4
MAX_STOP_LENGTH = 200
MAX_MESSAGES = 2048
MAX_PIECES = 4096
MAX_HITS = 100
MAX_TOOLS = 128
MAX_DEPTH = 100
# More than any object of OpenAI's API has.
MAX_FIELDS = 64

MAX_TOKENS = 2**31 - 1
MAX_NAME = 200


Body = TypeVar("Body", bound=BaseModel)


class Strict(BaseModel):
    """Refuses unknown fields, and numbers in strings."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        # Else pydantic makes an error for each unknown field, perhaps a million.
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"{len(value)} fields; expected at most {MAX_FIELDS}")
        return value


def _bool(value: Any) -> Any:
    if value is not None and not isinstance(value, bool):
        raise ValueError("expected false")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


# To Python, 0 is False and True is 1; in JSON they differ.
False_ = Annotated[Literal[False] | None, BeforeValidator(_bool)]
_One = Annotated[Literal[1] | None, BeforeValidator(_number)]


def _shallow(value: Any) -> Any:
    """Refuse objects whose depth would exhaust the stack of what reads them later."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return value
    raise ValueError(f"objects and lists in it are nested over {MAX_DEPTH} deep")


Object = Annotated[dict[str, Any], AfterValidator(_shallow)]
"""An object that is not looked into here."""


def _few_pieces(messages: Any) -> Any:
    """Refuse parts and calls whose number would hold up others for seconds."""
    if isinstance(messages, list):
        fields = (one.get(name) for one in messages if isinstance(one, dict) for name in _PIECES)
        number = sum(len(field) for field in fields if isinstance(field, list))
        if number > MAX_PIECES:
            raise ValueError(f"{number:,} parts and calls in all; expected at most {MAX_PIECES:,}")
    return messages


_PIECES = ("content", "tool_calls", "output")
few_pieces = BeforeValidator(_few_pieces)
"""The check of a conversation's messages."""


def of_other_form(kind: type[Body], given: dict[str, Any]) -> Body:
    """Return a request that came in another form. Raises ValueError that says what is wrong."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found = [one | {"loc": ("body", *one["loc"])} for one in error.errors()]
        raise ValueError(validation_problem(found).message) from error


class StreamOptions(Strict):
    """``stream_options``."""

    include_usage: bool = False
    include_obfuscation: False_ = None


class KVRagOptions(Strict):
    """kvrag's own options: the field ``kvrag`` of a request.

    Attributes
    ----------
    policy, ratio, boundary_tokens, reuse
        See `kvrag.engine.request.Request`.
    report
        Whether the answer carries kvrag's report.
    explain
        Whether the report says what happened to each part of the prompt.
    found
        Whether a stream of chat completions begins with the chunks that the server has found.
    k
        How many chunks the server retrieves, for the models ``rag:NAME``.
    filter
        Which of them it may retrieve, as in `Index.search`.
    """

    policy: str | None = Field(default=None, max_length=200)
    ratio: float | None = Field(default=None, ge=0, le=1)
    boundary_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    reuse: bool = True
    report: bool = False
    explain: bool = False
    found: bool = False
    k: int | None = Field(default=None, ge=1, le=MAX_HITS)
    filter: Object | None = None

    @model_validator(mode="after")
    def _parts_are_in_the_report(self) -> Self:
        if self.explain and not self.report:
            raise ValueError("explain adds to the report; set report to true, or leave it out")
        return self


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """The function of an earlier call, and its arguments as JSON."""

    name: str = Field(max_length=MAX_NAME)
    arguments: str


class ToolCall(Strict):
    """A call in an earlier answer."""

    id: str = Field(max_length=MAX_NAME)
    type: Literal["function"]
    function: CalledFunction


class Message(Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "model", "chatbot", "tool"]
    content: (
        str
        | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    name: str | None = Field(default=None, max_length=MAX_NAME)
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(default=None, max_length=MAX_NAME)
    # Clients send answers back as they came, with these fields; no model reads them.
    annotations: list[Object] | None = Field(default=None, max_length=MAX_HITS)
    refusal: None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_what_its_role_has(self) -> Self:
        for name in ("tool_calls", "annotations"):
            if role_of(self.role) != "assistant" and getattr(self, name):
                raise ValueError(f"{name} are an assistant's; leave them out")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id is for messages of role tool, and each of them has one")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    @property
    def turn(self) -> dict[str, Any]:
        """The message as the engine takes it."""
        turn: dict[str, Any] = {
            "role": self.role,
            "content": [one.text for one in self.content]
            if isinstance(self.content, list)
            else self.content,
        }
        if self.tool_calls:
            turn["tool_calls"] = [one.model_dump() for one in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
            if self.name is not None:
                turn["name"] = self.name
        return turn


class Asked(Strict):
    """The fields that all requests for answers share."""

    model: str = Field(max_length=500)
    stream: bool | None = None
    kvrag: KVRagOptions = KVRagOptions()
    # Whose a request is and how it is billed; no answer depends on these.
    user: str | None = Field(default=None, max_length=200)
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    store: bool | None = None
    service_tier: str | None = Field(default=None, max_length=MAX_NAME)
    safety_identifier: str | None = Field(default=None, max_length=200)
    prompt_cache_key: str | None = Field(default=None, max_length=200)
    prompt_cache_retention: str | None = Field(default=None, max_length=MAX_NAME)


def _field(one: Any, rule: Option) -> tuple[Any, Any]:
    """Return an option as a field of a request, within a server's bounds."""
    most = rule.most if rule.served_most is None else rule.served_most
    bounds: dict[str, Any] = {"gt": rule.above, "ge": rule.least, "le": most}
    return kind_of(one) | None, Field(default=None, **bounds)


SAMPLING_FIELDS: dict[str, Any] = {
    one.name: _field(one, rule) for one, rule in options_of(Sampling)
}
"""The options of sampling as fields of a request."""

if TYPE_CHECKING:
    _Sampling = Asked
else:
    _Sampling = create_model("_Sampling", __base__=Asked, **SAMPLING_FIELDS)


class Generating(_Sampling, ABC):
    """The fields that chat completions and completions share."""

    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP, fail_fast=True)] | None = None
    stream_options: StreamOptions | None = None
    # Many clients send this empty, which asks for nothing.
    logit_bias: dict[str, Any] | None = Field(default=None, max_length=0)

    @field_validator("stop", mode="after")
    @classmethod
    def _stops_are_short_and_not_empty(
        cls, value: str | list[str] | None
    ) -> str | list[str] | None:
        if value is not None and value != [] and not all([value] if value == "" else value):
            raise ValueError("a stop string is empty; leave it out")
        stops = [value] if isinstance(value, str) else value or ()
        for one in stops:
            arguments.text(one, "a stop string")
        if any(len(one) > MAX_STOP_LENGTH for one in stops):
            raise ValueError(f"a stop string has over {MAX_STOP_LENGTH} characters; shorten it")
        return value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams; set stream to true, or leave it out")
        return self

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens to name for each token; None: no logprobs."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class JSONSchema(Strict):
    """The schema of ``response_format``. The answer keeps to it, `strict` or not."""

    name: str = Field(max_length=MAX_NAME)
    description: str | None = None
    schema_: Object = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """``response_format``; the types ``regex`` and ``lark`` are kvrag's own."""

    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: JSONSchema | None = None
    regex: str | None = None
    lark: str | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> Self:
        for name in ("json_schema", "regex", "lark"):
            if (self.type == name) != (getattr(self, name) is not None):
                raise ValueError(f"{name} belongs to the type {name}, which needs it")
        return self


class Function(Strict):
    """A function that the model may call. Forced calls keep to its parameters, `strict` or not."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function's name."""

    name: str = Field(max_length=MAX_NAME)


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Generating):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), few_pieces
    ]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = Field(default=None, fail_fast=True)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise ValueError("max_tokens and max_completion_tokens differ; leave one out")
            self.max_tokens = self.max_completion_tokens
        return self

    @model_validator(mode="after")
    def _logprobs_are_of_text(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs; set logprobs to true, or leave it out")
        if self.logprobs and self.calls_tools:
            raise ValueError(
                "logprobs: answers that may call tools have none; leave out logprobs, or the tools"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens to name for each token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def question(self) -> str:
        """The last text that the user said."""
        for message in reversed(self.messages):
            if message.role == "user":
                said = message.turn["content"] or ""
                return said if isinstance(said, str) else "\n".join(said)
        return ""

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def has_form(self) -> bool:
        """Whether the answer must have a form, which may take a second to read."""
        is_free = self.response_format is None or self.response_format.type == "text"
        return not is_free or self.tool_choice not in (None, "auto", "none")

    def shaped(self, tokenizer: PreTrainedTokenizerBase) -> Shape:
        """Return the tools and the constraint that the request asks for."""
        choice, form = (
            one.model_dump(exclude_none=True, by_alias=True) if isinstance(one, BaseModel) else one
            for one in (self.tool_choice, self.response_format)
        )
        tools = [one.model_dump(exclude_none=True) for one in self.tools or ()]
        return shape(tokenizer, tools, choice, form)


def _few_tokens(value: Any) -> Any:
    # Checking each of eight million, which a body may have, stops the server for a second.
    if isinstance(value, list):
        num = sum(len(one) if isinstance(one, list) else 1 for one in value)
        if num > MAX_TOKEN_IDS:
            raise ValueError(f"{num:,} token ids; expected at most {MAX_TOKEN_IDS:,}")
    return value


TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], Field(min_length=1, fail_fast=True)
]


def _texts_or_ids(most: int) -> Any:
    """Return the type of one or several texts, or of their token ids."""
    several = Field(min_length=1, max_length=most, fail_fast=True)
    return Annotated[
        str | Annotated[list[str], several] | TokenIds | Annotated[list[TokenIds], several],
        BeforeValidator(_few_tokens),
    ]


Prompts: Any = _texts_or_ids(MAX_CHOICES)
Inputs: Any = _texts_or_ids(MAX_INPUTS)


class CompletionRequest(Generating):
    """The body of ``POST /v1/completions``."""

    prompt: Prompts
    best_of: _One = None
    echo: False_ = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    suffix: Literal[""] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens to name for each token; None: no logprobs."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or more: texts, or token ids."""
        return _several(self.prompt)


class RankedText(Strict):
    """A document to rank, or one of a ranking."""

    text: str


class RerankRequest(Strict):
    """The body of ``POST /v1/rerank``, as Jina's and Cohere's APIs have it."""

    model: str = Field(max_length=500)
    query: str
    documents: Annotated[
        list[str | RankedText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    ]
    top_n: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    return_documents: bool | None = None
    user: str | None = Field(default=None, max_length=200)

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class EmbeddingRequest(Strict):
    """The body of ``POST /v1/embeddings``."""

    model: str = Field(max_length=500)
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    user: str | None = Field(default=None, max_length=200)

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs, one or more: texts, or token ids."""
        return _several(self.input)


def _several(given: Any) -> list[str | list[int]]:
    """Return one text or one list of token ids in a list; several as they are."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return [given] if is_one else list(given)
