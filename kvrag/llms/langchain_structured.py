"""LangChain's structured output over a constraint."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from kvrag.errors import ParameterError


def structured_output(
    model: BaseChatModel,
    schema: dict[str, Any] | type,
    method: str,
    *,
    include_raw: bool,
    **options: Any,
) -> Runnable[LanguageModelInput, Any]:
    """Return a chain of the model, bound to a response format, and a parser.

    For the parameters see `kvrag.llms.langchain.ChatKVRag.with_structured_output`; `options` are
    those of each call.
    """
    if method not in ("json_schema", "json_mode"):
        raise ParameterError(
            f"method {method!r}: expected json_schema, json_mode or function_calling"
        )
    json_schema = convert_to_json_schema(schema)
    named = {"name": json_schema.get("title", "answer"), "schema": json_schema}
    bound = model.bind(
        response_format={"type": "json_object"}
        if method == "json_mode"
        else {"type": "json_schema", "json_schema": named},
        ls_structured_output_format={"kwargs": {"method": method}, "schema": json_schema},
        **options,
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
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")
