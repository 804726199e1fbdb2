"""Turns of a conversation as text, by the model's own chat template.

Source: Prompt Cache §3.2.3: tags of roles are translated to the model's template. The template is
rendered with marks in place of the contents and cut at them, so what is cached is what the template
puts around contents, and the contents stay modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from kvrag.models.chat import PromptText, hide_message
from kvrag.models.control import ControlTokens
from kvrag.pml.places import Place
from kvrag.pml.schema import Node, Text, Turn

_MARK = "\ue000{}\ue001"
_REMEDY = "use a model with a chat template that fits, or write the prompt without roles"


class Conversation:
    """Renders the turns of one schema and of prompts that go on from them.

    Parameters
    ----------
    tokenizer
        Whose chat template is used.
    turns
        The schema's, in order.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn]) -> None:
        self._tokenizer = tokenizer
        self._messages = [
            {"role": turn.role, "content": _MARK.format(number)}
            for number, turn in enumerate(turns)
        ]
        self._head = ""
        if turns:
            self._head = self._render(self._messages, turns[0].place, False)

    def spread(self, children: Sequence[Node]) -> list[Node]:
        """Return a schema's nodes with each turn as the template's text around its contents."""
        nodes: list[Node] = []
        rest, number = self._head, 0
        for node in children:
            if not isinstance(node, Turn):
                nodes.append(node)
                continue
            before, _, rest = rest.partition(_MARK.format(number))
            number += 1
            nodes += [Text(before, node.place), *node.children]
            # What closes a turn goes before anything that stands between turns.
            following = rest.partition(_MARK.format(number))[0]
            closing = self._closing(number, following, node.place)
            nodes.append(Text(closing, node.place))
            rest = rest[len(closing) :]
        return [node for node in nodes if not (isinstance(node, Text) and not node.text)]

    def _closing(self, number: int, following: str, place: Place) -> str:
        """Return how the template ends the turn before `number`, given all that follows it."""
        alone = self._render(self._messages[:number], place, False)
        closing = alone.partition(_MARK.format(number - 1))[2]
        return closing if following.startswith(closing) else following

    def tail(
        self,
        turns: Sequence[tuple[str, str]],
        place: Place,
        control: ControlTokens | None = None,
    ) -> PromptText:
        """Return what follows the schema's turns: a prompt's own, and the answer's beginning.

        Parameters
        ----------
        turns
            Role and content of each.
        place
            Where errors say that they are.
        control
            Its strings in the contents are noted as data; None notes none.
        """
        own = [{"role": role, "content": content} for role, content in turns]
        hidden = None if control is None else control.hiding()
        if hidden is not None:
            own = [hide_message(hidden, message) for message in own]
        whole = self._render([*self._messages, *own], place, True)
        if not whole.startswith(self._head):
            raise place.error(
                "the chat template renders the schema's turns otherwise once others follow", _REMEDY
            )
        rest = whole[len(self._head) :]
        text, data = (rest, None) if hidden is None else hidden.restore(rest)
        return PromptText(text, False, data)

    def _render(
        self, messages: Sequence[dict[str, str]], place: Place, add_generation_prompt: bool
    ) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise place.error("the model's tokenizer has no chat template for roles", _REMEDY)
        try:
            rendered = str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except Exception as error:  # Jinja's own and whatever a template raises
            raise place.error(f"the chat template refuses the turns: {error}", _REMEDY) from error
        found = [
            rendered.find(_MARK.format(n)) for n in range(min(len(messages), len(self._messages)))
        ]
        if -1 in found or found != sorted(found):
            raise place.error("the chat template leaves out or reorders turns", _REMEDY)
        return rendered
