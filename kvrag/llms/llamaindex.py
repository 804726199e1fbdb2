"""The LlamaIndex language model that answers from precomputed KV: `KVRagLLM`.

It accepts any prompt that a query engine builds, and finds the chunks of the index in it by their
text. So any index, retriever or response mode works unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

try:
    from llama_index.core.base.llms.generic_utils import (
        astream_completion_response_to_chat_response,
        completion_response_to_chat_response,
        stream_completion_response_to_chat_response,
    )
    from llama_index.core.base.llms.generic_utils import (
        messages_to_prompt as generic_messages_to_prompt,
    )
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        LLMMetadata,
        TextBlock,
    )
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.custom import CustomLLM
except ImportError as error:
    raise ImportError(
        "kvrag.llms.llamaindex needs llama-index-core: pip install 'kvrag[llama-index]'"
    ) from error

from pydantic import ConfigDict

from kvrag.engine.answer import Answer
from kvrag.engine.shared import shared_index
from kvrag.errors import ParameterError
from kvrag.llms.results import answer_details, short_name, token_usage
from kvrag.llms.settings import EngineSettings, Prompt
from kvrag.llms.turns import merge_turns


class KVRagLLM(EngineSettings, CustomLLM):
    """A LlamaIndex LLM that reuses the KV of every indexed chunk found in the prompt.

    If the model has a chat template, query engines use it (`is_chat_model`); `complete` always
    passes the string unchanged. If you set `messages_to_prompt`, it replaces the template.
    Parameters are those of `EngineSettings`; a call may replace those in `PER_CALL`, and any other
    raises ParameterError.

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
    def metadata(self) -> LLMMetadata:
        """The model's limits, from which LlamaIndex plans its prompts."""
        return LLMMetadata(
            context_window=self.context_window(),
            num_output=self.max_tokens,
            is_chat_model=self._asks_in_messages(),
            model_name=str(self.model_name),
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer one prompt."""
        return self._complete(self._formatted(prompt, formatted), kwargs)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Answer one prompt piece by piece."""
        return self._stream_complete(self._formatted(prompt, formatted), kwargs)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return completion_response_to_chat_response(self._complete(self._turns(messages), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece."""
        return stream_completion_response_to_chat_response(
            self._stream_complete(self._turns(messages), kwargs)
        )

    # The defaults of CustomLLM run the model in the event loop's thread.

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Answer one prompt while the event loop runs on."""
        return await self._acomplete(self._formatted(prompt, formatted), kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Answer one prompt piece by piece while the event loop runs on."""
        return self._astream_complete(self._formatted(prompt, formatted), kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation while the event loop runs on."""
        return completion_response_to_chat_response(
            await self._acomplete(self._turns(messages), kwargs)
        )

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Answer a conversation piece by piece while the event loop runs on."""
        return astream_completion_response_to_chat_response(
            self._astream_complete(self._turns(messages), kwargs)
        )

    async def _acomplete(self, prompt: Prompt, call: dict[str, Any]) -> CompletionResponse:
        answer = await self.aanswer(prompt, call)
        return CompletionResponse(text=answer.text, raw=self._raw(answer, call))

    async def _astream_complete(
        self, prompt: Prompt, call: dict[str, Any]
    ) -> CompletionResponseAsyncGen:
        text = ""
        async with aclosing(self.adeltas(prompt, call)) as deltas:
            async for delta in deltas:
                text += delta.text
                raw = None if delta.answer is None else self._raw(delta.answer, call)
                yield CompletionResponse(text=text, delta=delta.text, raw=raw)

    def _complete(self, prompt: Prompt, call: dict[str, Any]) -> CompletionResponse:
        answer = self.answer(prompt, call)
        return CompletionResponse(text=answer.text, raw=self._raw(answer, call))

    def _stream_complete(self, prompt: Prompt, call: dict[str, Any]) -> CompletionResponseGen:
        text = ""
        for delta in self.deltas(prompt, call):
            text += delta.text
            raw = None if delta.answer is None else self._raw(delta.answer, call)
            yield CompletionResponse(text=text, delta=delta.text, raw=raw)

    def _raw(self, answer: Answer, call: dict[str, Any]) -> dict[str, Any]:
        name = str(call.get("model") or short_name(self.model_name))
        return {"usage": token_usage(answer), **answer_details(answer, name)}

    def _asks_in_messages(self) -> bool:
        return self._has_template() if self.is_chat_model is None else self.is_chat_model

    def _has_template(self) -> bool:
        return bool(getattr(shared_index(self.index).tokenizer, "chat_template", None))

    def _formatted(self, prompt: str, formatted: bool) -> str:
        to_prompt = self.completion_to_prompt
        return prompt if formatted or to_prompt is None else to_prompt(prompt)

    def _turns(self, messages: Sequence[ChatMessage]) -> Prompt:
        to_prompt = self.messages_to_prompt or generic_messages_to_prompt
        if to_prompt is not generic_messages_to_prompt or not self._has_template():
            return to_prompt(messages)
        return merge_turns((message.role.value, _text(message)) for message in messages)


def _text(message: ChatMessage) -> str:
    if message.role.value in ("tool", "function") or message.additional_kwargs.get("tool_calls"):
        raise ParameterError(
            f"a message of role {message.role.value!r} with tool calls or their results cannot be "
            "rendered: this model does not call tools. Pass the result as text"
        )
    texts = []
    for block in message.blocks:
        if not isinstance(block, TextBlock):
            raise ParameterError(
                f"a {type(block).__name__} cannot be rendered: this model reads text only"
            )
        texts.append(block.text)
    return "\n".join(texts)
