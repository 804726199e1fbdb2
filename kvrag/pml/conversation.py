"""Renders the turns of a conversation as text, with the model's own chat template.

Source: Prompt Cache §3.2.3: role tags are translated to the model's template. The template is
rendered with marks instead of contents, and cut at the marks. So the text that the template puts
around contents is cached, and contents stay modules.

A turn in a module is a part of the conversation only if the module is imported. The text around it
comes from a rendered conversation that includes it. For every prompt, a check makes sure that the
template puts the same text around it there.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from kvrag.errors import PMLError
from kvrag.models import templates
from kvrag.models.chat import PromptText, hide_message
from kvrag.models.control import ControlTokens
from kvrag.models.hidden import HiddenStrings
from kvrag.pml.schema import Location, Module, Node, Path, Schema, Text, Turn, Union, flat, turns

_MARK = "\ue000{}\ue001"
_REMEDY = "use a model with a chat template that fits, or write the prompt without roles"


class Conversation:
    """Renders the turns of one schema, and of prompts that continue them.

    Parameters
    ----------
    tokenizer
        The tokenizer with the chat template.
    schema
        A schema with turns.

    Raises
    ------
    PMLError
        If the template refuses the turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, schema: Schema) -> None:
        self._tokenizer = tokenizer
        self._schema = schema
        self._turns = list(turns(schema.children))
        self._around: dict[int, tuple[str, str]] = {}
        # The text that begins every conversation is not part of the first turn, which may be
        # missing, or follow a text.
        self._opening = ""
        bos = str(tokenizer.bos_token or "")
        if self._together(0)[1].startswith(bos):
            self._opening = bos
        for number in range(len(self._turns)):
            if number not in self._around:
                self._learn(number)

    def spread(self) -> list[Node]:
        """Return the schema's nodes; each turn becomes its contents inside the template's text."""
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
        """Return the text after the schema's turns: the prompt's own, and the answer's beginning.

        Parameters
        ----------
        imported
            The modules that the prompt imports, including ().
        own
            Role and content of each of the prompt's own turns.
        location
            The location that errors name.
        control
            Control strings that are marked as data in the contents; None marks none.
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
                "the chat template renders the schema's turns differently in this prompt than with "
                "other modules or other turns after them",
                "import them together, begin the schema with a turn that is always there, or "
                f"{_REMEDY}",
            )
        rest = whole[len(head) :]
        text, data = (rest, None) if hidden is None else hidden.restore(rest)
        return PromptText(text, False, data)

    # -- private --------------------------------------------------------------------------------

    def _learn(self, number: int) -> None:
        """Find the text that the template puts around a turn and around those rendered with it."""
        together, rendered = self._together(number)
        location = self._turns[number][1].location
        before, _, rest = rendered.partition(_MARK.format(together[0]))
        for index, one in enumerate(together):
            following, _, behind = (
                rest.partition(_MARK.format(together[index + 1]))
                if index + 1 < len(together)
                else (rest, "", "")
            )
            # The text that closes a turn precedes anything between turns.
            try:
                alone = self._render(together[: index + 1], (), location, False)
                closing = alone.partition(_MARK.format(one))[2]
            except PMLError:
                # Some templates put the system's text into the user's turn that follows.
                closing = following
            after = closing if following.startswith(closing) else following
            self._around.setdefault(one, (before, after))
            before, rest = following[len(after) :], behind

    def _together(self, number: int) -> tuple[list[int], str]:
        """Return the numbers of the turns rendered together with one turn, and their rendering."""
        wanted, turn = self._turns[number]
        # First with all turns that can be imported together: what precedes a turn may change it. A
        # template may refuse that, for example two turns of one role. Then only required turns.
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
        """Render some of the schema's turns, with marks as contents, and others after them."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise location.error("the model's tokenizer has no chat template for roles", _REMEDY)
        messages = [
            {"role": self._turns[number][1].role, "content": _MARK.format(number)}
            for number in numbers
        ]
        messages += own
        try:
            rendered = templates.render(
                self._tokenizer, messages, add_generation_prompt=add_generation_prompt
            )
        except templates.TemplateRefusalError as error:
            raise location.error(
                f"the chat template refuses the turns: {error}", _REMEDY
            ) from error
        found = [rendered.find(_MARK.format(number)) for number in numbers]
        if -1 in found or found != sorted(found) or not rendered.startswith(self._opening):
            raise location.error("the chat template leaves out or reorders turns", _REMEDY)
        return rendered[len(self._opening) :]


def _compatible(children: Sequence[Node], wanted: Path, path: Path = ()) -> Iterator[Path]:
    """Yield modules that can be imported together, including `wanted` and those around it."""
    yield path
    for node in flat(tuple(children)):
        if isinstance(node, Union):
            around = (one for one in node.members if (*path, one.name) == wanted[: len(path) + 1])
            node = next(around, node.members[0])
        if isinstance(node, Module):
            yield from _compatible(node.children, wanted, (*path, node.name))
