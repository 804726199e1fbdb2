"""Where everything in a schema stands: absolute positions, decided once.

Source: Prompt Cache §3.3: a module's first position is its place in the schema; members of a union
begin at one position and the union takes the longest one's length; a parameter takes its length.

What is encoded, and stored under one key, is a `Stretch`: the text and parameters between two
nested modules or unions. The paper treats text outside modules so (anonymous modules, §3.2); here
text beside nested modules as well, so that a stretch never has a gap and a module of text alone is
token for token what an indexed chunk of that text is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvrag.models.control import ControlTokens
from kvrag.pml.conversation import Conversation
from kvrag.pml.schema import Module, Node, Parameter, Path, Schema, Text, Turn, Union


@dataclass(frozen=True)
class Slot:
    """The room of a parameter: `length` tokens from the `offset`-th of its stretch on."""

    name: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first token behind."""
        return self.offset + self.length


@dataclass(frozen=True)
class Stretch:
    """Text and parameters of one module that stand together.

    Attributes
    ----------
    path
        The module; () is the schema's anonymous text.
    start
        Position of its first token.
    token_ids
        Its tokens, placeholders where parameters have their room.
    slots
        The parameters, in order.
    is_cached
        Whether it is stored; otherwise every prompt computes it.
    """

    path: Path
    start: int
    token_ids: tuple[int, ...]
    slots: tuple[Slot, ...]
    is_cached: bool = True

    @property
    def end(self) -> int:
        """The first position behind."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class SchemaLayout:
    """A schema's tokens and their positions, for one tokenizer.

    Attributes
    ----------
    prefix_ids
        The shared prefix, at the positions before all others; empty where prompts of the schema do
        not begin with it, because the chat template begins otherwise.
    stretches
        In the order of the file: of union members the one after the other.
    extents
        For each module its first position and the first behind it; () is the whole schema.
    conversation
        Renders what follows the schema's turns; None where it has none.
    """

    schema: Schema
    prefix_ids: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    extents: Mapping[Path, tuple[int, int]]
    conversation: Conversation | None

    @property
    def num_positions(self) -> int:
        """Positions that the schema takes, the prefix's included."""
        return self.extents[()][1]


def placeholder_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that holds a parameter's room: ``<unk>`` (Prompt Cache §3.3).

    Tokenizers on bytes have none; then it is the padding token, the end of text, or token 0.
    """
    named = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in named if token is not None), 0)


def lay_out_schema(
    schema: Schema,
    tokenizer: PreTrainedTokenizerBase,
    prefix_ids: Sequence[int],
    control: ControlTokens | None = None,
) -> SchemaLayout:
    """Tokenise a schema and give everything in it a position.

    With `control`, control strings are text in the files that it names; what the schema itself
    says is its author's.

    Raises
    ------
    PMLError
        When the chat template does not fit the schema's turns, or a scaffold its parameter.
    """
    conversation = Conversation(tokenizer, schema) if schema.has_turns else None
    children: Sequence[Node] = schema.children
    if conversation is not None:
        children = conversation.spread()
    arranger = _Arranger(tokenizer, children, control)
    prefix = tuple(prefix_ids)
    if conversation is not None:
        has_prefix = arranger.take_prefix(children, prefix)
    else:
        # As the plain pipeline puts special tokens before a string.
        has_prefix = tuple(tokenizer("")["input_ids"])[: len(prefix)] == prefix
    prefix = prefix if has_prefix else ()
    end = arranger.arrange((), children, len(prefix))
    arranger.extents[()] = (len(prefix), end)
    return SchemaLayout(schema, prefix, tuple(arranger.stretches), arranger.extents, conversation)


class _Arranger:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        children: Sequence[Node],
        control: ControlTokens | None,
    ) -> None:
        self.stretches: list[Stretch] = []
        self.extents: dict[Path, tuple[int, int]] = {}
        self._taken = 0
        self._placeholder = placeholder_id(tokenizer)
        # At once: ten thousand calls of a tokenizer take seconds.
        texts = list(
            dict.fromkeys(text for text, is_document in _texts(children) if not is_document)
        )
        self._ids = dict(zip(texts, token_ids_of(tokenizer, texts), strict=True))
        files = list(dict.fromkeys(text for text, is_document in _texts(children) if is_document))
        self._file_ids = dict(zip(files, token_ids_of(tokenizer, files, control), strict=True))

    def take_prefix(self, children: Sequence[Node], prefix: tuple[int, ...]) -> bool:
        """Take the shared prefix off the first text, if the chat template begins with it."""
        first = next(iter(_groups(children)), None)
        while isinstance(first, Module) and not first.name:
            first = next(iter(_groups(first.children)), None)
        head = first[0] if isinstance(first, list) else None
        if not isinstance(head, Text) or tuple(self._ids_of(head)[: len(prefix)]) != prefix:
            return False
        self._taken = len(prefix)
        return True

    def _ids_of(self, text: Text) -> list[int]:
        return (self._file_ids if text.is_document else self._ids)[text.text]

    def arrange(
        self, path: Path, children: Sequence[Node], start: int, is_cached: bool = True
    ) -> int:
        """Lay out the contents of one module from a position on; return the first behind."""
        position = start
        for group in _groups(children):
            if isinstance(group, Module):
                position = self._module(path, group, position)
            elif isinstance(group, Union):
                begin = position
                for member in group.members:
                    position = max(position, self._module(path, member, begin))
            else:
                position = self._stretch(path, group, position, is_cached)
        return position

    def _module(self, path: Path, module: Module, start: int) -> int:
        inner = (*path, module.name) if module.name else path
        end = self.arrange(inner, module.children, start, module.is_cached)
        if module.name:
            self.extents[inner] = (start, end)
        return end

    def _stretch(
        self, path: Path, nodes: Sequence[Text | Parameter], start: int, is_cached: bool
    ) -> int:
        ids: list[int] = []
        slots: list[Slot] = []
        for node in nodes:
            if isinstance(node, Text):
                # The prefix is the beginning of the very first text.
                taken, self._taken = self._taken, 0
                ids += self._ids_of(node)[taken:]
            else:
                slots.append(Slot(node.name, len(ids), node.length))
                ids += self._room(node)
        if not ids:
            return start
        self.stretches.append(Stretch(path, start, tuple(ids), tuple(slots), is_cached))
        return start + len(ids)

    def _room(self, parameter: Parameter) -> list[int]:
        ids = list(self._ids[parameter.scaffold]) if parameter.scaffold else []
        if len(ids) > parameter.length:
            raise parameter.location.error(
                f"the scaffold of parameter {parameter.name!r} has {len(ids)} tokens, its length "
                f"is {parameter.length}",
                "shorten the one or raise the other",
            )
        return ids + [self._placeholder] * (parameter.length - len(ids))


def token_ids_of(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    control: ControlTokens | None = None,
) -> list[list[int]]:
    """Return each text's tokens, special ones not added.

    With `control`, control strings in them are text.
    """
    if not texts:
        return []
    if control is not None:
        return [list(tokens.token_ids) for tokens in control.documents(texts)]
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return [list(ids) for ids in encoded["input_ids"]]


def _groups(
    children: Sequence[Node],
) -> Iterable[Module | Union | list[Text | Parameter]]:
    """Yield nested modules and unions, and between them what stands together.

    Texts side by side become one, so that their tokens are those of one text.
    """
    group: list[Text | Parameter] = []
    for node in children:
        if isinstance(node, Module | Union):
            if group:
                yield group
            group = []
            yield node
        elif isinstance(node, Text) and group and isinstance(group[-1], Text):
            group[-1] = Text(group[-1].text + node.text, group[-1].location)
        else:
            assert not isinstance(node, Turn)
            group.append(node)
    if group:
        yield group


def _texts(children: Sequence[Node]) -> Iterable[tuple[str, bool]]:
    """Yield all texts, and whether each is a file's."""
    for group in _groups(children):
        if isinstance(group, list):
            for node in group:
                text = node.text if isinstance(node, Text) else node.scaffold
                if text:
                    yield text, isinstance(node, Text) and node.is_document
            continue
        for module in group.members if isinstance(group, Union) else (group,):
            yield from _texts(module.children)
