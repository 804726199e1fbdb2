"""What the server answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvrag.server.requests import RankedText

FinishReason = Literal["stop", "length", "tool_calls"]


class Error(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error."""

    error: Error


class PromptDetails(BaseModel):
    """Tokens of the prompt whose KV was stored."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class URLCitation(BaseModel):
    """A passage of a document that was in the prompt.

    Attributes
    ----------
    start_index, end_index
        The part of the answer that the citation is for: a sentence, or the whole answer.
    title, url
        The document's name, and its source with the number of the chunk.
    chunk_id, ordinal, text, best
        The chunk, and where its sentence that fits best begins and ends in `text`; None if no
        sentence of the answer rests on the chunk. These fields are kvrag's.
    """

    start_index: int
    end_index: int
    title: str
    url: str
    chunk_id: str
    ordinal: int
    text: str
    best: tuple[int, int] | None = None


class Annotation(BaseModel):
    """A citation."""

    type: Literal["url_citation"] = "url_citation"
    url_citation: URLCitation


class Verification(BaseModel):
    """An answer beside full prefill; the other fields are those of `kvrag.engine.verify.Verdict`.

    Attributes
    ----------
    answer
        The answer from reused KV.
    is_same
        Whether the likeliest token is the same everywhere.
    """

    answer: str
    is_same: bool
    policy: str
    num_tokens: int
    num_agreed: int
    num_same: int
    kl: float
    instead: str | None


class KVRagDetails(BaseModel):
    """kvrag's own part of an answer, if the request asks for it.

    Attributes
    ----------
    reports
        For each choice, how the prompt's KV was computed.
    sources
        For each choice, the chunks that were found in the prompt.
    ttft_seconds
        For each choice, the time from its turn to its first token.
    search_seconds
        The time in which the server found the chunks; None if it did not search.
    parts
        For each choice, what happened to each part of the prompt, if the request asks for it.
    """

    reports: list[dict[str, Any]]
    sources: list[list[dict[str, Any]]]
    ttft_seconds: list[float]
    search_seconds: float | None = None
    parts: list[list[dict[str, Any]]] | None = None


class CalledFunction(BaseModel):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool; in a stream with its number, and always whole."""

    index: int | None = None
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class LikelyToken(BaseModel):
    """A token, and the natural logarithm of its probability.

    `token` is its text; a part of a character is written as ``bytes:`` and its bytes.
    """

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(LikelyToken):
    """A token of the answer, and the most likely ones of its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    """How likely the tokens of an answer, or of its piece, were."""

    content: list[ChosenToken]
    refusal: None = None


class TextLogprobs(BaseModel):
    """How likely the tokens of a completion, or of its piece, were: a list for each field.

    `text_offset` counts characters of the completion.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatMessage(BaseModel):
    """The answer, or a piece of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    annotations: list[Annotation] | None = None


class ChatChoice(BaseModel):
    """One of the answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatDelta(BaseModel):
    """A piece of one of the answers."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextChoice(BaseModel):
    """One of the completions, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class Head(BaseModel):
    """The fields that all answers share."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    kvrag: KVRagDetails | None = None


class ChatCompletion(Head):
    """The answer to a chat request."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatChunk(Head):
    """An event of a streamed answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatDelta]


class Completion(Head):
    """The answer to a completion request; also an event of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class ItemsResponse(BaseModel):
    """The answer to a request of the Responses API, as OpenAI describes it.

    Attributes
    ----------
    output
        Items of the types message and function_call.
    kvrag
        kvrag's own part, if the request asks for it.
    """

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"] = "response"
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    kvrag: KVRagDetails | None = None


class Model(BaseModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kvrag"] = "kvrag"


class ModelList(BaseModel):
    """The models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Embedding(BaseModel):
    """A text's vector: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class TextUsage(BaseModel):
    """Token counts, by the tokenizer of the index's language model."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The vectors of all texts."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: TextUsage


class Ranked(BaseModel):
    """A document's place in the request, and how well it fits.

    `relevance_score` is the cross-encoder's, mostly 0 to 1, or a cosine, -1 to 1.
    """

    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(BaseModel):
    """The documents of a request, best first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[Ranked]
    usage: TextUsage


class Effort(BaseModel):
    """A way to answer: what the field ``kvrag`` says, and the seconds of computing, if known."""

    options: dict[str, bool | float | str]
    seconds: float | None


class About(BaseModel):
    """The index and the defaults of answers, for the page.

    Attributes
    ----------
    index
        The name of the index's folder.
    model, rag
        The names in requests: the model alone, and the model over the index.
    is_chat
        Whether a prompt can hold earlier messages.
    top_k, max_tokens, policy
        The defaults of answers.
    policies
        The names of the recompute policies that the index takes.
    efforts
        From the fastest way to answer to full prefill; without options, the default.
    examples
        Headings of the documents, to ask about.
    keeps_history, can_upload
        Whether the server keeps conversations, and whether it takes and deletes documents.
    """

    version: str
    index: str
    model: str
    rag: str
    is_chat: bool
    num_documents: int
    num_chunks: int
    num_tokens: int
    top_k: int
    max_tokens: int
    policy: str
    policies: list[str]
    efforts: list[Effort]
    examples: list[str]
    keeps_history: bool
    can_upload: bool


class Passage(BaseModel):
    """A chunk's text, and its place in its document."""

    chunk_id: str
    ordinal: int
    text: str
    heading: str | None
    page: str | None


class Passages(BaseModel):
    """Consecutive chunks of a document, around the chunk `chunk_id`."""

    source: str
    title: str
    num_chunks: int
    chunk_id: str
    passages: list[Passage]


class Document(BaseModel):
    """A document of the index; `is_file` says whether it was read from a file."""

    source: str
    title: str
    num_chunks: int
    num_tokens: int
    is_file: bool


class Documents(BaseModel):
    """The documents, ordered by source."""

    documents: list[Document]


class Added(BaseModel):
    """A step of adding a document: ``read``, ``profile``, ``compute``, ``done``."""

    stage: str
    num_tokens_done: int = 0
    num_tokens: int = 0
    num_chunks: int = 0


class Deleted(BaseModel):
    """How many chunks were deleted."""

    num_chunks: int


class ConversationHead(BaseModel):
    """A conversation in a list; `updated` is a time in seconds since 1970."""

    id: str
    title: str
    updated: float


class Conversations(BaseModel):
    """A tenant's conversations, the latest first."""

    conversations: list[ConversationHead]


class Conversation(ConversationHead):
    """A conversation, with its turns as the page keeps them."""

    turns: list[dict[str, Any]]


class Health(BaseModel):
    """Whether the server works."""

    status: Literal["ok", "busy"] = Field(examples=["ok"])


# Each event's data is a body like the whole answer's, or [DONE]. OpenAPI 3.2's word, as FastAPI
# writes it.
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAM = {"text/event-stream": {"itemSchema": _EVENT}}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in {
        400: "The request is wrong, or asks for what this server does not support.",
        401: "There is no key, or a wrong one.",
        403: "A server without keys answers to localhost alone, or the key has not this right.",
        404: "There is no such model, chunk or document.",
        409: "There is a document of this name.",
        408: "The body took too long.",
        413: "The body is too large.",
        429: "A limit of the key is reached; Retry-After says for how long.",
        500: "The server failed.",
        507: "The disk is full, or the key may keep no more.",
        503: "The queue is full, or the index cannot be read; Retry-After says for how long.",
    }.items()
}
"""What a route may answer besides, for the OpenAPI document."""


def answers(
    model: Any, *, streams: bool = False, lines: bool = False
) -> dict[int | str, dict[str, Any]]:
    """Return a route's responses for the OpenAPI document."""
    if lines:
        schema = {"application/x-ndjson": {"schema": {"type": "string"}}}
        return {200: {"description": "Lines of JSON.", "content": schema}, **ERRORS}
    content = {"content": _STREAM} if streams else {}
    return {200: {"model": model, "description": "The answer.", **content}, **ERRORS}
