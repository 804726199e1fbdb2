"""`PMLPromptTemplate`: prompts built from a schema's modules, for LangChain."""

from __future__ import annotations

from typing import Any

try:
    from langchain_core.prompts.string import StringPromptTemplate
except ImportError as error:
    raise ImportError(
        "kvrag.llms.langchain_pml needs langchain-core: pip install 'kvrag[langchain]'"
    ) from error

from pydantic import model_validator

from kvrag.pml.parser import fill, variables


class PMLPromptTemplate(StringPromptTemplate):
    """A prompt in prompt markup (Prompt Cache §3.2.2) whose variables come from a chain.

    A `KVRagLLM` that knows the schema (``schemas=``) answers the rendered prompt.

    Attributes
    ----------
    markup
        ``<prompt schema="...">`` with variables in braces; ``{{`` and ``}}`` mean braces.
        Values are text: markup in them is escaped.

    Examples
    --------
    >>> template = PMLPromptTemplate(
    ...     markup="<prompt schema='travel'><trip days='{days}'/>{question}</prompt>"
    ... )
    >>> template.format(days="3 < 4", question="Where?")
    "<prompt schema='travel'><trip days='3 &lt; 4'/>Where?</prompt>"
    """

    markup: str

    @model_validator(mode="before")
    @classmethod
    def _find_variables(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("markup"), str):
            known = {*values.get("partial_variables", {})}
            names = [name for name in variables(values["markup"]) if name not in known]
            return {**values, "input_variables": names}
        return values

    def format(self, **kwargs: Any) -> str:
        """Return the markup with its variables filled in. Raises ParameterError."""
        return fill(self.markup, self._merge_partial_and_user_variables(**kwargs))

    @property
    def _prompt_type(self) -> str:
        return "kvrag-pml"
