"""The LlamaIndex language model that answers from precomputed KV: `KVRagLLM`.

It accepts any prompt that a query engine builds, and finds the chunks of the index in it by their
text. So any index, retriever or response mode works unchanged.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

try:
    from llama_index.core.base.llms import types as t
    from llama_index.core.base.llms.generic_utils import (
        messages_to_prompt as generic_messages_to_prompt,
    )
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.function_calling import FunctionCallingLLM
    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.tools.types import BaseTool
except ImportError as error:
    raise ImportError(
        "kvrag.llms.llamaindex needs llama-index-core: pip install 'kvrag[llama-index]'"
    ) from error

from pydantic import ConfigDict

from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.constraint import is_installed
from kvrag.engine.shared import shared_index
from kvrag.llms.settings import EngineSettings, Prompt
from kvrag.llms.tool_calls import Piece, ToolCall, answer_details, short_name, token_usage
from kvrag.models.chat import merged

T = TypeVar("T")


class KVRagLLM(EngineSettings, FunctionCallingLLM):
    """A LlamaIndex LLM that reuses the KV of every indexed chunk found in the prompt.

    If the model has a chat template, query engines use it (`is_chat_model`); `complete` always
    passes the string unchanged. If you set `messages_to_prompt`, it replaces the template.
    Parameters are those of `EngineSettings`; a call may replace those in `PER_CALL`, and any other
    raises ParameterError.

    With the extra ``kvrag[structured]``, a model with a chat template is a function-calling model
    for LlamaIndex: agents call tools, and `structured_predict` forces a call (docs/tools.md).

    A response's ``raw`` holds ``usage`` (with ``cached_tokens``), ``model_name``,
    ``finish_reason``, ``report`` (see `kvrag.FusionReport`) and ``sources``. None of it is in
    ``additional_kwargs``, because LlamaIndex writes those into later prompts.

    Let LlamaIndex count tokens as the model does, so that it cuts nodes only if it must:

    >>> llm = KVRagLLM(index="my-index")                         # doctest: +SKIP
    >>> Settings.tokenizer = llm.token_ids                       # doctest: +SKIP
    >>> index.as_query_engine(llm=llm).query("...")              # doctest: +SKIP

    Attributes
    ----------
    is_chat_model
        Whether query engines send conversations; None means if there is a chat template.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    is_chat_model: bool | None = None

    @classmethod
    def class_name(cls) -> str:
        return "KVRagLLM"

    @property
    def metadata(self) -> t.LLMMetadata:
        """The model's limits, from which LlamaIndex plans its prompts."""
        return t.LLMMetadata(
            context_window=self.context_window(),
            num_output=self.max_tokens,
            is_chat_model=self._asks_in_messages(),
            is_function_calling_model=self._calls_functions(),
            model_name=str(self.model_name),
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> t.CompletionResponse:
        """Answer one prompt."""
        (answer,) = self.answers([self._formatted(prompt, formatted)], kwargs)
        return t.CompletionResponse(text=answer.text, raw=self._raw(answer, kwargs))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> t.CompletionResponseGen:
        """Answer one prompt piece by piece."""
        to_response = self._completions(kwargs)
        deltas = self.deltas(self._formatted(prompt, formatted), kwargs)
        return (to_response(delta) for delta in deltas)

    @llm_chat_callback()
    def chat(self, messages: Sequence[t.ChatMessage], **kwargs: Any) -> t.ChatResponse:
        """Answer a conversation."""
        (answer,) = self.answers([self._turns(messages)], kwargs)
        return self._response(answer, kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[t.ChatMessage], **kwargs: Any) -> t.ChatResponseGen:
        """Answer a conversation piece by piece."""
        to_response = self._responses(kwargs)
        return (to_response(delta) for delta in self.deltas(self._turns(messages), kwargs))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> t.CompletionResponse:
        """Answer one prompt while the event loop runs on."""
        answer = await self.aanswer(self._formatted(prompt, formatted), kwargs)
        return t.CompletionResponse(text=answer.text, raw=self._raw(answer, kwargs))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> t.CompletionResponseAsyncGen:
        """Answer one prompt piece by piece while the event loop runs on."""
        prompt = self._formatted(prompt, formatted)
        return self._responding(prompt, kwargs, self._completions(kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[t.ChatMessage], **kwargs: Any) -> t.ChatResponse:
        """Answer a conversation while the event loop runs on."""
        answer = await self.aanswer(self._turns(messages), kwargs)
        return self._response(answer, kwargs)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[t.ChatMessage], **kwargs: Any
    ) -> t.ChatResponseAsyncGen:
        """Answer a conversation piece by piece while the event loop runs on."""
        return self._responding(self._turns(messages), kwargs, self._responses(kwargs))

    def get_tool_calls_from_response(
        self,
        response: t.ChatResponse,
        error_on_no_tool_call: bool = True,
        **kwargs: Any,  # noqa: ARG002
    ) -> list[ToolSelection]:
        """Return the calls in a response; without any, raise ValueError or return none."""
        calls = [one for one in response.message.blocks if isinstance(one, t.ToolCallBlock)]
        if error_on_no_tool_call and not calls:
            raise ValueError(f"the answer calls no tool: {response.message.content!r:.200}")
        return [
            ToolSelection(
                tool_id=one.tool_call_id or "",
                tool_name=one.tool_name,
                tool_kwargs=dict(one.tool_kwargs) if isinstance(one.tool_kwargs, dict) else {},
            )
            for one in calls
        ]

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | t.ChatMessage | None = None,
        chat_history: list[t.ChatMessage] | None = None,
        verbose: bool = False,  # noqa: ARG002
        allow_parallel_tool_calls: bool = False,  # noqa: ARG002 - the response is cut instead
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of `chat`; `tool_choice` names a tool that must be called."""
        messages = list(chat_history or ())
        if isinstance(user_msg, str):
            user_msg = t.ChatMessage(role=t.MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        choice = kwargs.pop("tool_choice", None) or ("required" if tool_required else None)
        given = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        return {"messages": messages, "tools": given, "tool_choice": choice, **kwargs}

    async def _responding(
        self, prompt: Prompt, call: dict[str, Any], to_response: Callable[[AnswerDelta], T]
    ) -> AsyncGenerator[T, None]:
        async with aclosing(self.adeltas(prompt, call)) as deltas:
            async for delta in deltas:
                yield to_response(delta)

    def _completions(self, call: dict[str, Any]) -> Callable[[AnswerDelta], t.CompletionResponse]:
        """Return what makes the completions of one answer of its pieces."""
        text = ""

        def response(delta: AnswerDelta) -> t.CompletionResponse:
            nonlocal text
            text += delta.text
            raw = None if delta.answer is None else self._raw(delta.answer, call)
            return t.CompletionResponse(text=text, delta=delta.text, raw=raw)

        return response

    def _validate_chat_with_tools_response(
        self,
        response: t.ChatResponse,
        tools: Sequence[BaseTool],  # noqa: ARG002
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,  # noqa: ARG002
    ) -> t.ChatResponse:
        if not allow_parallel_tool_calls:
            blocks = response.message.blocks
            calls = [one for one in blocks if isinstance(one, t.ToolCallBlock)]
            response.message.blocks = [one for one in blocks if one not in calls[1:]]
        return response

    def _response(self, answer: Answer, call: dict[str, Any]) -> t.ChatResponse:
        piece = self.parser(call).whole(answer.text)
        return t.ChatResponse(message=to_message(piece), raw=self._raw(answer, call))

    def _responses(self, call: dict[str, Any]) -> Callable[[AnswerDelta], t.ChatResponse]:
        """Return what makes the responses of one answer of its pieces."""
        whole, parser = Piece(), self.parser(call)

        def response(delta: AnswerDelta) -> t.ChatResponse:
            nonlocal whole
            piece = parser.read(delta)
            whole += piece
            raw = None if delta.answer is None else self._raw(delta.answer, call)
            return t.ChatResponse(message=to_message(whole), delta=piece.text, raw=raw)

        return response

    def _raw(self, answer: Answer, call: dict[str, Any]) -> dict[str, Any]:
        name = str(call.get("model") or short_name(self.model_name))
        return {"usage": token_usage(answer), **answer_details(answer, name)}

    def _asks_in_messages(self) -> bool:
        return self._has_template() if self.is_chat_model is None else self.is_chat_model

    def _calls_functions(self) -> bool:
        return is_installed() and self._asks_in_messages() and self._renders()

    def _renders(self) -> bool:
        """Return whether the chat template renders messages."""
        to_prompt = self.messages_to_prompt or generic_messages_to_prompt
        return to_prompt is generic_messages_to_prompt and self._has_template()

    def _has_template(self) -> bool:
        return bool(getattr(shared_index(self.index).tokenizer, "chat_template", None))

    def _formatted(self, prompt: str, formatted: bool) -> str:
        to_prompt = self.completion_to_prompt
        return prompt if formatted or to_prompt is None else to_prompt(prompt)

    def _turns(self, messages: Sequence[t.ChatMessage]) -> Prompt:
        if self._renders():
            return to_turns(messages)
        return (self.messages_to_prompt or generic_messages_to_prompt)(messages)


def to_turns(messages: Sequence[t.ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the form of OpenAI's API; neighbours of one role become one turn.

    Raises
    ------
    ParameterError
        When a message holds something other than text and calls of tools.
    """
    return merged(map(_turn, messages))


def to_message(piece: Piece) -> t.ChatMessage:
    """Return what a model has said and called as one message."""
    blocks: list[Any] = [t.TextBlock(text=piece.text)] if piece.text or not piece.calls else []
    blocks += [
        t.ToolCallBlock(tool_call_id=one.id, tool_name=one.name, tool_kwargs=one.arguments)
        for one in piece.calls
    ]
    return t.ChatMessage(role=t.MessageRole.ASSISTANT, blocks=blocks)


def _turn(message: t.ChatMessage) -> dict[str, Any]:
    calls = [_call(block) for block in message.blocks if isinstance(block, t.ToolCallBlock)]
    said = [block for block in message.blocks if not isinstance(block, t.ToolCallBlock)]
    given = message.additional_kwargs
    turn: dict[str, Any] = {
        "role": message.role.value,
        "content": [
            block.text if isinstance(block, t.TextBlock) else {"type": block.block_type}
            for block in said
        ],
    }
    # Models that know no blocks of calls put them into the other arguments.
    calls = calls or [dict(one) for one in given.get("tool_calls") or () if isinstance(one, dict)]
    if calls:
        turn["tool_calls"] = calls
    return turn | {
        name: str(given[name]) for name in ("tool_call_id", "name") if given.get(name) is not None
    }


def _call(block: t.ToolCallBlock) -> dict[str, Any]:
    call = ToolCall(block.tool_call_id or "", block.tool_name, {}).to_dict()
    call["function"]["arguments"] = block.tool_kwargs
    return call
