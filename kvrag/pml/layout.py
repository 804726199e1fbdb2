"""Gives everything in a schema absolute positions, once.

Source: Prompt Cache §3.3. A module's first position is its place in the schema. Members of a union
begin at the same position, and the union is as long as its longest member. A parameter takes its
length.

The unit that is encoded and stored under one key is a `Stretch`: the text and parameters between
two nested modules or unions. The paper does this for text outside modules (anonymous modules,
§3.2); kvrag also does it for text next to nested modules. So a stretch never has a gap, and a
module that is only text has the same tokens as an indexed chunk of that text.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvrag.errors import PMLError
from kvrag.models import templates
from kvrag.models.chat import HiddenStrings, PromptText, hide_message
from kvrag.models.control import ControlTokens
from kvrag.models.tokens import encode, num_equal
from kvrag.pml import schema as s

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Renders the turns of a conversation as text, with the model's own chat template.
#
# Source: Prompt Cache §3.2.3: role tags are translated to the model's template. The template is
# rendered with marks instead of contents, and cut at the marks. So the text that the template puts
# around contents is cached, and contents stay modules.
#
# A turn in a module is a part of the conversation only if the module is imported. The text around
# it comes from a rendered conversation that includes it. For every prompt, a check makes sure that
# the template puts the same text around it there.


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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, schema: s.Schema) -> None:
        self._tokenizer = tokenizer
        self._schema = schema
        self._turns = list(s.turns(schema.children))
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

    def spread(self) -> list[s.Node]:
        """Return the schema's nodes; each turn becomes its contents inside the template's text."""
        numbers = iter(range(len(self._turns)))
        nodes = list(self._spread(self._schema.children, numbers))
        if self._opening:
            nodes.insert(0, s.Text(self._opening, self._schema.location))
        return nodes

    def tail(
        self,
        imported: Container[s.Path],
        own: Sequence[tuple[str, str]],
        location: s.Location,
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

    def _spread(self, children: Sequence[s.Node], numbers: Iterator[int]) -> Iterator[s.Node]:
        for node in children:
            if isinstance(node, s.Turn):
                before, after = self._around[next(numbers)]
                if before:
                    yield s.Text(before, node.location)
                yield from node.children
                if after:
                    yield s.Text(after, node.location)
            elif isinstance(node, s.Module):
                yield replace(node, children=tuple(self._spread(node.children, numbers)))
            elif isinstance(node, s.Union):
                members = tuple(self._spread(node.members, numbers))
                yield replace(node, members=members)  # type: ignore[arg-type]
            else:
                yield node

    def _render(
        self,
        numbers: Sequence[int],
        own: Sequence[dict[str, str]],
        location: s.Location,
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


def _compatible(children: Sequence[s.Node], wanted: s.Path, path: s.Path = ()) -> Iterator[s.Path]:
    """Yield modules that can be imported together, including `wanted` and those around it."""
    yield path
    for node in s.flat(tuple(children)):
        if isinstance(node, s.Union):
            around = (one for one in node.members if (*path, one.name) == wanted[: len(path) + 1])
            node = next(around, node.members[0])
        if isinstance(node, s.Module):
            yield from _compatible(node.children, wanted, (*path, node.name))


@dataclass(frozen=True)
class Slot:
    """The room of a parameter: `length` tokens of its stretch, from `offset` on."""

    name: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.offset + self.length


@dataclass(frozen=True)
class Stretch:
    """Consecutive text and parameters of one module.

    Attributes
    ----------
    path
        The module; () is the schema's anonymous text.
    start
        Position of its first token.
    token_ids
        Its tokens, with placeholders for parameters.
    slots
        The parameters, in order.
    is_cached
        Whether it is stored. Otherwise every prompt computes it.
    """

    path: s.Path
    start: int
    token_ids: tuple[int, ...]
    slots: tuple[Slot, ...]
    is_cached: bool = True

    @property
    def end(self) -> int:
        """The first position after it."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class SchemaLayout:
    """A schema's tokens and their positions, for one tokenizer.

    Attributes
    ----------
    prefix_ids
        The part of the shared prefix that prompts of the schema begin with. It is empty if they
        begin differently.
    stretches
        The stretches in the order of the file; members of a union follow each other.
    extents
        For each module, its first position and the first after it; () is the whole schema.
    conversation
        Renders what follows the schema's turns; None if it has no turns.
    """

    schema: s.Schema
    prefix_ids: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    extents: Mapping[s.Path, tuple[int, int]]
    conversation: Conversation | None

    @property
    def num_positions(self) -> int:
        """How many positions the schema takes, including the prefix."""
        return self.extents[()][1]


def placeholder_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the placeholder token for parameters: ``<unk>`` (Prompt Cache §3.3).

    Byte-level tokenizers have none. Then it is the padding token, the end of text, or token 0.
    """
    named = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in named if token is not None), 0)


def lay_out_schema(
    schema: s.Schema,
    tokenizer: PreTrainedTokenizerBase,
    prefix_ids: Sequence[int],
    control: ControlTokens | None = None,
) -> SchemaLayout:
    """Tokenise a schema and give everything in it a position.

    With `control`, control strings in files that the schema names are plain text. Those in the
    schema itself are its author's choice and stay control tokens.

    Raises
    ------
    PMLError
        If the chat template does not fit the schema's turns, or a scaffold its parameter.
    """
    conversation = Conversation(tokenizer, schema) if schema.has_turns else None
    children: Sequence[s.Node] = schema.children
    if conversation is not None:
        children = conversation.spread()
    arranger = _Arranger(tokenizer, children, control)
    prefix = tuple(prefix_ids)
    if conversation is not None:
        begin = arranger.take_prefix(children, prefix)
    else:
        # What the plain pipeline would put before a string.
        begin = num_equal(encode(tokenizer, [""], True)[0].token_ids, prefix)
    end = arranger.arrange((), children, begin)
    arranger.extents[()] = (begin, end)
    return SchemaLayout(
        schema, prefix[:begin], tuple(arranger.stretches), arranger.extents, conversation
    )


class _Arranger:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        children: Sequence[s.Node],
        control: ControlTokens | None,
    ) -> None:
        self.stretches: list[Stretch] = []
        self.extents: dict[s.Path, tuple[int, int]] = {}
        self._taken = 0
        self._placeholder = placeholder_id(tokenizer)
        # All in one call: ten thousand calls of a tokenizer take seconds.
        texts = list(
            dict.fromkeys(text for text, is_document in _texts(children) if not is_document)
        )
        self._ids = dict(zip(texts, token_ids_of(tokenizer, texts), strict=True))
        files = list(dict.fromkeys(text for text, is_document in _texts(children) if is_document))
        self._file_ids = dict(zip(files, token_ids_of(tokenizer, files, control), strict=True))

    def take_prefix(self, children: Sequence[s.Node], prefix: tuple[int, ...]) -> int:
        """Remove from the first text what it begins with of the prefix; return how many tokens."""
        first = next(iter(_groups(children)), None)
        while isinstance(first, s.Module) and not first.name:
            first = next(iter(_groups(first.children)), None)
        head = first[0] if isinstance(first, list) else None
        if isinstance(head, s.Text):
            self._taken = num_equal(self._ids_of(head), prefix)
        return self._taken

    def _ids_of(self, text: s.Text) -> list[int]:
        return (self._file_ids if text.is_document else self._ids)[text.text]

    def arrange(
        self, path: s.Path, children: Sequence[s.Node], start: int, is_cached: bool = True
    ) -> int:
        """Lay out the contents of one module from a position on; return the first one after it."""
        position = start
        for group in _groups(children):
            if isinstance(group, s.Module):
                position = self._module(path, group, position)
            elif isinstance(group, s.Union):
                begin = position
                for member in group.members:
                    position = max(position, self._module(path, member, begin))
            else:
                position = self._stretch(path, group, position, is_cached)
        return position

    def _module(self, path: s.Path, module: s.Module, start: int) -> int:
        inner = (*path, module.name) if module.name else path
        end = self.arrange(inner, module.children, start, module.is_cached)
        if module.name:
            self.extents[inner] = (start, end)
        return end

    def _stretch(
        self, path: s.Path, nodes: Sequence[s.Text | s.Parameter], start: int, is_cached: bool
    ) -> int:
        ids: list[int] = []
        slots: list[Slot] = []
        for node in nodes:
            if isinstance(node, s.Text):
                # The prefix is the beginning of the first text.
                taken, self._taken = self._taken, 0
                ids += self._ids_of(node)[taken:]
            else:
                slots.append(Slot(node.name, len(ids), node.length))
                ids += self._room(node)
        if not ids:
            return start
        self.stretches.append(Stretch(path, start, tuple(ids), tuple(slots), is_cached))
        return start + len(ids)

    def _room(self, parameter: s.Parameter) -> list[int]:
        ids = list(self._ids[parameter.scaffold]) if parameter.scaffold else []
        if len(ids) > parameter.length:
            raise parameter.location.error(
                f"the scaffold of parameter {parameter.name!r} has {len(ids)} tokens, its length "
                f"is {parameter.length}",
                "shorten the scaffold or raise the length",
            )
        return ids + [self._placeholder] * (parameter.length - len(ids))


def token_ids_of(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], control: ControlTokens | None = None
) -> list[list[int]]:
    """Return each text's tokens, without adding special tokens.

    With `control`, control strings in the texts are plain text.
    """
    if not texts:
        return []
    if control is not None:
        return [list(tokens.token_ids) for tokens in control.documents(texts)]
    return [list(tokens.token_ids) for tokens in encode(tokenizer, texts, False)]


def _groups(
    children: Sequence[s.Node],
) -> Iterable[s.Module | s.Union | list[s.Text | s.Parameter]]:
    """Yield nested modules and unions, and the groups of text and parameters between them.

    Adjacent texts become one, so that they are tokenised as one text.
    """
    group: list[s.Text | s.Parameter] = []
    for node in children:
        if isinstance(node, s.Module | s.Union):
            if group:
                yield group
            group = []
            yield node
        elif isinstance(node, s.Text) and group and isinstance(group[-1], s.Text):
            group[-1] = s.Text(group[-1].text + node.text, group[-1].location)
        else:
            assert not isinstance(node, s.Turn)
            group.append(node)
    if group:
        yield group


def _texts(children: Sequence[s.Node]) -> Iterable[tuple[str, bool]]:
    """Yield all texts, and whether each comes from a file."""
    for group in _groups(children):
        if isinstance(group, list):
            for node in group:
                text = node.text if isinstance(node, s.Text) else node.scaffold
                if text:
                    yield text, isinstance(node, s.Text) and node.is_document
            continue
        for module in group.members if isinstance(group, s.Union) else (group,):
            yield from _texts(module.children)
