"""Turns of a conversation as text, by the model's own chat template.

Source: Prompt Cache §3.2.3: tags of roles are translated to the model's template. The template is
rendered with marks in place of the contents and cut at them, so what is cached is what the template
puts around contents, and the contents stay modules.

A turn may stand in a module, and then it is a part of the conversation only where the module is
imported. What stands around it is taken from a conversation in which it is; that the template puts
the same around it in a prompt is checked for every prompt.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from kvrag.errors import PMLError
from kvrag.models.chat import PromptText, hide_message
from kvrag.models.control import ControlTokens
from kvrag.models.hidden import HiddenStrings
from kvrag.pml.locations import Location
from kvrag.pml.schema import Module, Node, Path, Schema, Text, Turn, Union, flat, turns

_MARK = "\ue000{}\ue001"
_REMEDY = "use a model with a chat template that fits, or write the prompt without roles"


class Conversation:
    """Renders the turns of one schema and of prompts that go on from them.

    Parameters
    ----------
    tokenizer
        Whose chat template is used.
    schema
        One with turns.

    Raises
    ------
    PMLError
        When the template refuses the turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, schema: Schema) -> None:
        self._tokenizer = tokenizer
        self._schema = schema
        self._turns = list(turns(schema.children))
        self._around: dict[int, tuple[str, str]] = {}
        # What begins every conversation is no part of its first turn, which may be left out, or
        # stand after a text.
        self._opening = ""
        bos = str(tokenizer.bos_token or "")
        if self._together(0)[1].startswith(bos):
            self._opening = bos
        for number in range(len(self._turns)):
            if number not in self._around:
                self._learn(number)

    def spread(self) -> list[Node]:
        """Return the schema's nodes with each turn as the template's text around its contents."""
        numbers = iter(range(len(self._turns)))
        nodes = list(self._spread(self._schema.children, numbers))
        if self._opening:
            nodes.insert(0, Text(self._opening, self._schema.location))
        return nodes

    def tail(
        self,
        imported: Container[Path],
        own: Sequence[tuple[str, str]],
        location: Location,
        control: ControlTokens | None = None,
    ) -> PromptText:
        """Return what follows the schema's turns: a prompt's own, and the answer's beginning.

        Parameters
        ----------
        imported
            The modules that the prompt imports, () among them.
        own
            Role and content of each of the prompt's own turns.
        location
            Where errors say that they are.
        control
            Its strings in the contents are noted as data; None notes none.
        """
        present = [number for number, (path, _) in enumerate(self._turns) if path in imported]
        if not present and not own:
            raise location.error(
                "a prompt without a turn", "import a module with one, or write what the user says"
            )
        said = [{"role": role, "content": content} for role, content in own]
        hidden = None if control is None else HiddenStrings(control)
        if hidden is not None:
            said = [hide_message(hidden, message) for message in said]
        whole = self._render(present, said, location, True)
        head = ""
        for number in present:
            before, after = self._around[number]
            head += before + _MARK.format(number) + after
        if not whole.startswith(head):
            raise location.error(
                "the chat template renders the schema's turns otherwise in this prompt than where "
                "other modules are imported, or other turns follow",
                "import them together, begin the schema with a turn that is always there, or "
                f"{_REMEDY}",
            )
        rest = whole[len(head) :]
        text, data = (rest, None) if hidden is None else hidden.restore(rest)
        return PromptText(text, False, data)

    # -- private --------------------------------------------------------------------------------

    def _learn(self, number: int) -> None:
        """Find out what the template puts around a turn, and around all those beside it."""
        together, rendered = self._together(number)
        location = self._turns[number][1].location
        before, _, rest = rendered.partition(_MARK.format(together[0]))
        for index, one in enumerate(together):
            following, _, behind = (
                rest.partition(_MARK.format(together[index + 1]))
                if index + 1 < len(together)
                else (rest, "", "")
            )
            # What closes a turn goes before anything that stands between turns.
            try:
                alone = self._render(together[: index + 1], (), location, False)
                closing = alone.partition(_MARK.format(one))[2]
            except PMLError:
                # Some templates put what the system says into the user's turn that follows.
                closing = following
            after = closing if following.startswith(closing) else following
            self._around.setdefault(one, (before, after))
            before, rest = following[len(after) :], behind

    def _together(self, number: int) -> tuple[list[int], str]:
        """Return the turns of a conversation with one of them, and the conversation."""
        wanted, turn = self._turns[number]
        # All that can be: templates know more of a turn from what precedes it. They may refuse it,
        # as two turns of one role; then none that can be left out.
        fewest = {wanted[:depth] for depth in range(len(wanted) + 1)}
        most = set(_compatible(self._schema.children, wanted))
        for chosen in (most, fewest):
            together = [one for one, (path, _) in enumerate(self._turns) if path in chosen]
            try:
                return together, self._render(together, (), turn.location, False)
            except PMLError:
                if chosen is fewest or most == fewest:
                    raise
        raise AssertionError

    def _spread(self, children: Sequence[Node], numbers: Iterator[int]) -> Iterator[Node]:
        for node in children:
            if isinstance(node, Turn):
                before, after = self._around[next(numbers)]
                if before:
                    yield Text(before, node.location)
                yield from node.children
                if after:
                    yield Text(after, node.location)
            elif isinstance(node, Module):
                yield replace(node, children=tuple(self._spread(node.children, numbers)))
            elif isinstance(node, Union):
                members = tuple(self._spread(node.members, numbers))
                yield replace(node, members=members)  # type: ignore[arg-type]
            else:
                yield node

    def _render(
        self,
        numbers: Sequence[int],
        own: Sequence[dict[str, str]],
        location: Location,
        add_generation_prompt: bool,
    ) -> str:
        """Return some of the schema's turns, marks for their contents, and others after them."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise location.error("the model's tokenizer has no chat template for roles", _REMEDY)
        messages = [
            {"role": self._turns[number][1].role, "content": _MARK.format(number)}
            for number in numbers
        ]
        messages += own
        try:
            rendered = str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except Exception as error:  # Jinja's own and whatever a template raises
            raise location.error(
                f"the chat template refuses the turns: {error}", _REMEDY
            ) from error
        found = [rendered.find(_MARK.format(number)) for number in numbers]
        if -1 in found or found != sorted(found) or not rendered.startswith(self._opening):
            raise location.error("the chat template leaves out or reorders turns", _REMEDY)
        return rendered[len(self._opening) :]


def _compatible(children: Sequence[Node], wanted: Path, path: Path = ()) -> Iterator[Path]:
    """Yield modules that can be imported together, those of `wanted` and all around it included."""
    yield path
    for node in flat(tuple(children)):
        if isinstance(node, Union):
            around = (one for one in node.members if (*path, one.name) == wanted[: len(path) + 1])
            node = next(around, node.members[0])
        if isinstance(node, Module):
            yield from _compatible(node.children, wanted, (*path, node.name))
