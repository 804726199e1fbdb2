"""`PMLPromptTemplate`: prompts built from a schema's modules, for LlamaIndex."""

from __future__ import annotations

from typing import Any

try:
    from llama_index.core.prompts import PromptTemplate
except ImportError as error:
    raise ImportError(
        "kvrag.llms.llamaindex_pml needs llama-index-core: pip install 'kvrag[llama-index]'"
    ) from error

from kvrag.pml.parser import fill, variables


class PMLPromptTemplate(PromptTemplate):
    """A prompt in prompt markup (Prompt Cache §3.2.2); its variables come from a query engine.

    A `KVRagLLM` that knows the schema (``schemas=``) answers the rendered prompt. Variables are
    in braces; markup in their values is escaped, so that values stay text.

    Parameters
    ----------
    markup
        ``<prompt schema="...">`` with variables in braces.
    settings
        Further parameters of LlamaIndex's `PromptTemplate`.
    """

    def __init__(self, markup: str, **settings: Any) -> None:
        variables(markup)
        super().__init__(markup, **settings)

    def format(self, llm: Any = None, completion_to_prompt: Any = None, **kwargs: Any) -> str:
        """Return the markup with its variables filled in. Raises ParameterError."""
        del llm, completion_to_prompt  # a markup prompt is complete: nothing wraps it
        mapped = self._map_all_vars({**self.kwargs, **kwargs})
        return fill(self.template, mapped)
