"""LangChain language models that answer from precomputed KV: `KVRagLLM` and `ChatKVRag`.

They accept any prompt that a chain builds, and find the chunks of the index in it by their text.
So any chain works unchanged, with any retriever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from operator import itemgetter
from typing import Any, Literal

try:
    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
        Callbacks,
    )
    from langchain_core.language_models import BaseChatModel, BaseLLM
    from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
    from langchain_core.messages import (
        AIMessage,
        AIMessageChunk,
        BaseMessage,
        ChatMessage,
        HumanMessage,
        SystemMessage,
        ToolMessage,
    )
    from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
    from langchain_core.messages.tool import tool_call, tool_call_chunk
    from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
    from langchain_core.outputs import (
        ChatGeneration,
        ChatGenerationChunk,
        ChatResult,
        Generation,
        GenerationChunk,
        LLMResult,
    )
    from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
    from langchain_core.tools import BaseTool
    from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
    from langchain_core.utils.pydantic import is_basemodel_subclass
except ImportError as error:
    raise ImportError(
        "kvrag.llms.langchain needs langchain-core: pip install 'kvrag[langchain]'"
    ) from error

from pydantic import ConfigDict, model_validator

from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.shared import place_of
from kvrag.errors import KVRagError, ParameterError
from kvrag.llms.settings import PER_CALL, EngineSettings
from kvrag.llms.tool_calls import ToolCall, answer_details, short_name, token_usage
from kvrag.models.chat import merged


class _LangChainSettings(EngineSettings):
    """The LangChain part that both classes share."""

    @model_validator(mode="before")
    @classmethod
    def _without_api_key(cls, values: Any) -> Any:
        # Callers that can build any provider's model pass a key to each; a local model needs none.
        if isinstance(values, Mapping):
            return {name: value for name, value in values.items() if name != "api_key"}
        return values

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @property
    def lc_attributes(self) -> dict[str, str]:
        """The index as its folder or URL, so that a serialised object can be loaded again."""
        return {"index": place_of(self.index)}

    @property
    def _llm_type(self) -> str:
        return "kvrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self.identity()

    def _traced_name(self, call: Mapping[str, Any]) -> str:
        try:
            return str(call.get("model") or short_name(self.model_name))
        except (KVRagError, OSError):
            # Tracing must not fail a call before the call itself reports the error.
            return "unknown"

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's token ids of `text`, without special tokens."""
        own: Any = getattr(self, "custom_get_token_ids", None)
        ids: list[int] = (own or self.token_ids)(text)
        return ids

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        named = {**kwargs, "model": self._traced_name(kwargs)}
        found: LangSmithParams = super()._get_ls_params(stop=stop, **named)  # type: ignore[misc]
        found["ls_provider"] = "kvrag"
        return found

    def _call(self, stop: list[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
        # "stream" is for LangChain, which has already decided which method to call.
        return {**{k: v for k, v in options.items() if k != "stream"}, "stop": stop}

    def _details(self, answer: Answer, call: Mapping[str, Any]) -> dict[str, Any]:
        return answer_details(answer, str(call.get("model") or short_name(self.model_name)))

    def _chunks(self, call: Mapping[str, Any]) -> Callable[[AnswerDelta], Any]:
        """Return a function from each piece of one answer to LangChain's chunk."""
        raise NotImplementedError

    def _stream(
        self,
        given: Any,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        call = self._call(stop, kwargs)
        to_chunk = self._chunks(call)
        for delta in self.deltas(_prompt(given), call):
            chunk = to_chunk(delta)
            if run_manager is not None and (text := _token_of(chunk)) is not None:
                run_manager.on_llm_new_token(text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        given: Any,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        call = self._call(stop, kwargs)
        to_chunk = self._chunks(call)
        async with aclosing(self.adeltas(_prompt(given), call)) as deltas:
            async for delta in deltas:
                chunk = to_chunk(delta)
                if run_manager is not None and (text := _token_of(chunk)) is not None:
                    await run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk


class KVRagLLM(_LangChainSettings, BaseLLM):  # type: ignore[misc]  # names of parameters
    """A LangChain LLM that reuses the KV of every indexed chunk found in the prompt.

    The prompt string goes to the model unchanged, without a chat template; for models tuned on
    conversations use `ChatKVRag`. Parameters are those of `EngineSettings`; a call may replace
    those in `PER_CALL`, and any other raises ParameterError.

    Each generation's ``generation_info`` holds ``model_name``, ``finish_reason``, ``report`` (see
    `kvrag.FusionReport`), ``sources`` with their texts, ``ttft_seconds``, ``total_seconds``,
    ``saved_tokens`` and ``saved_seconds_estimate``; ``llm_output["token_usage"]`` counts reused
    tokens as ``cached_tokens``.

    >>> llm = KVRagLLM(index="my-index", max_tokens=64)          # doctest: +SKIP
    >>> (prompt | llm).invoke({"question": "..."}, ratio=0.15)   # doctest: +SKIP
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer several prompts; see `BaseLLM.generate`."""
        model, rest = self._for_call(kwargs)
        return super(KVRagLLM, model).generate(prompts, stop, callbacks, **rest)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer several prompts while the event loop runs on; see `BaseLLM.agenerate`."""
        model, rest = self._for_call(kwargs)
        return await super(KVRagLLM, model).agenerate(prompts, stop, callbacks, **rest)

    def _for_call(self, options: dict[str, Any]) -> tuple[KVRagLLM, dict[str, Any]]:
        """Return a copy of the model with the call's parameters, and the other options.

        The keys of LangChain's cache include an LLM's parameters but not a call's. Without the
        copy, a call with another ratio would get the first call's cached answer.
        """
        given = {name: options[name] for name in PER_CALL if name in options}
        if not given:
            return self, options
        rest = {name: value for name, value in options.items() if name not in given}
        return self.model_copy(update=self.call_values(given)), rest

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, kwargs)
        return self._result(self.answers(prompts, call), call)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, kwargs)
        asked = (self.aanswer(prompt, call) for prompt in prompts)
        answers = []
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            answers.append(outcome)
        return self._result(answers, call)

    def _result(self, answers: Sequence[Answer], call: Mapping[str, Any]) -> LLMResult:
        usage = [token_usage(answer) for answer in answers]
        return LLMResult(
            generations=[
                [Generation(text=answer.text, generation_info=self._details(answer, call))]
                for answer in answers
            ],
            llm_output={
                "token_usage": {name: sum(one[name] for one in usage) for name in usage[0]}
                if usage
                else {},
                "model_name": str(call.get("model") or short_name(self.model_name)),
            },
        )

    def _chunks(self, call: Mapping[str, Any]) -> Callable[[AnswerDelta], GenerationChunk]:
        def chunk(delta: AnswerDelta) -> GenerationChunk:
            if (answer := delta.answer) is None:
                return GenerationChunk(text=delta.text)
            info = {**self._details(answer, call), "token_usage": token_usage(answer)}
            return GenerationChunk(text=delta.text, generation_info=info)

        return chunk


class ChatKVRag(_LangChainSettings, BaseChatModel):  # type: ignore[misc]  # the same
    """A LangChain chat model that reuses the KV of every indexed chunk found in the messages.

    Messages are rendered with the model's chat template; neighbouring messages of one role
    become one turn. Text and calls of tools only: images raise ParameterError. Parameters are
    those of `EngineSettings`; a call may replace those in `PER_CALL`, and any other raises
    ParameterError.

    Tools are written by the chat template, or as plain text if it does not know them
    (docs/tools.md). A forced call (`tool_choice`) and `with_structured_output` need the extra
    ``kvrag[structured]``.

    ``response_metadata`` holds ``model_name``, ``finish_reason``, ``report`` (see
    `kvrag.FusionReport`), ``sources`` with their texts, ``ttft_seconds``, ``total_seconds``,
    ``saved_tokens`` and ``saved_seconds_estimate``; reused tokens are
    ``usage_metadata["input_token_details"]["cache_read"]``.

    Attributes
    ----------
    streaming
        Whether `invoke` also passes tokens to callbacks as they are generated.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    streaming: bool = False

    def _asks_in_messages(self) -> bool:
        return True

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools that its answers may call.

        Parameters
        ----------
        tools
            Tools, functions, Pydantic classes, or mappings in the form of OpenAI's API.
        tool_choice
            None and ``"auto"`` let the model decide; ``"any"``, ``"required"`` and True force a
            call; a tool's name forces a call of this tool; ``"none"`` hides the tools.
        kwargs
            Other parameters of each call. ``strict`` is left out, since forced calls always keep to
            the tool's schema.
        """
        kwargs.pop("strict", None)
        return self.bind(
            tools=[convert_to_openai_tool(tool) for tool in tools],
            tool_choice=tool_choice,
            **kwargs,
        )

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable whose answers are objects of a schema.

        Parameters
        ----------
        schema
            A Pydantic class, a TypedDict, a JSON schema, or a function's description.
        method
            ``"json_schema"`` lets the model write only JSON of the schema, ``"json_mode"`` only
            JSON, and ``"function_calling"`` forces the call of a tool with this schema.
        include_raw
            Whether to return a mapping with ``raw``, ``parsed`` and ``parsing_error``.
        """
        kwargs.pop("strict", None)
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        if method not in ("json_schema", "json_mode"):
            raise ParameterError(
                f"method {method!r}: expected json_schema, json_mode or function_calling"
            )
        json_schema = convert_to_json_schema(schema)
        named = {"name": json_schema.get("title", "answer"), "schema": json_schema}
        bound = self.bind(
            response_format={"type": "json_object"}
            if method == "json_mode"
            else {"type": "json_schema", "json_schema": named},
            ls_structured_output_format={"kwargs": {"method": method}, "schema": json_schema},
            **kwargs,
        )
        parser: JsonOutputParser = (
            PydanticOutputParser(pydantic_object=schema)
            if isinstance(schema, type) and is_basemodel_subclass(schema)
            else JsonOutputParser()
        )
        if not include_raw:
            return bound | parser
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=bound) | parsed.with_fallbacks(
            [failed], exception_key="parsing_error"
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(stop, kwargs)
        (answer,) = self.answers([to_turns(messages)], call)
        return self._result(answer, call)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(stop, kwargs)
        return self._result(await self.aanswer(to_turns(messages), call), call)

    def _result(self, answer: Answer, call: Mapping[str, Any]) -> ChatResult:
        details = self._details(answer, call)
        piece = self.parser(call).whole(answer.text)
        message = AIMessage(
            content=piece.text,
            tool_calls=[
                tool_call(name=one.name, args=one.arguments, id=one.id) for one in piece.calls
            ],
            response_metadata=details,
            usage_metadata=_usage_metadata(answer),
        )
        return ChatResult(
            generations=[ChatGeneration(message=message)],
            llm_output={"token_usage": token_usage(answer), "model_name": details["model_name"]},
        )

    def _chunks(self, call: Mapping[str, Any]) -> Callable[[AnswerDelta], ChatGenerationChunk]:
        """Return what makes the chunks of one answer of its pieces."""
        parser = self.parser(call)
        num_calls = 0

        def chunk(delta: AnswerDelta) -> ChatGenerationChunk:
            nonlocal num_calls
            piece = parser.read(delta)
            calls = [
                tool_call_chunk(name=one.name, args=one.json, id=one.id, index=number)
                for number, one in enumerate(piece.calls, num_calls)
            ]
            num_calls += len(calls)
            message = AIMessageChunk(content=piece.text, tool_call_chunks=calls)
            if delta.answer is not None:
                message.response_metadata = self._details(delta.answer, call)
                message.usage_metadata = _usage_metadata(delta.answer)
                message.chunk_position = "last"
            return ChatGenerationChunk(message=message)

        return chunk

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # A serialisable class's default cache key contains only its constructor's arguments, not
        # the fingerprints that the index records.
        return str(sorted(self._get_invocation_params(stop=stop, **kwargs).items()))


def _usage_metadata(answer: Answer) -> UsageMetadata:
    usage = token_usage(answer)
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_token_details=InputTokenDetails(cache_read=usage["cached_tokens"]),
    )


def _prompt(given: str | list[BaseMessage]) -> str | list[dict[str, Any]]:
    return given if isinstance(given, str) else to_turns(given)


def _token_of(chunk: GenerationChunk | ChatGenerationChunk) -> str | None:
    """Return a chunk's text for callbacks, "" for a call, None for neither."""
    message = getattr(chunk, "message", None)
    return chunk.text if chunk.text or getattr(message, "tool_call_chunks", None) else None


def to_turns(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages in the form of OpenAI's API; neighbours of one role become one turn.

    Raises
    ------
    ParameterError
        When a message holds something other than text and calls of tools.
    """
    if not messages:
        raise ParameterError("a conversation needs at least one message, found none")
    return merged(map(_turn, messages))


def _turn(message: BaseMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": _role(message), "content": message.content}
    if isinstance(message, AIMessage) and message.tool_calls:
        calls = [ToolCall(one["id"] or "", one["name"], one["args"]) for one in message.tool_calls]
        turn["tool_calls"] = [call.to_dict() for call in calls]
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
        if message.name:
            turn["name"] = message.name
    return turn


_ROLES = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
}


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise ParameterError(
        f"a {type(message).__name__} cannot be rendered: pass its content as text, for instance in "
        "a HumanMessage"
    )
