"""The filler of context ``corpus``: passages of the documents that an index begins with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest

from kvrag.chunk import Document, normalise_text
from kvrag.foreign import document_failures
from kvrag.ingest.contexts import SEPARATOR
from kvrag.ingest.files import read_file
from kvrag.ingest.parsing import Parser
from kvrag.ingest.plan import Sources

# Documents that are read for it, evenly spaced among all: many short passages of many documents
# did better than few long ones.
MOST_DOCUMENTS = 24
# Characters of a passage, at least if it has them, and at most.
_SHORT, _LONG = 200, 500
# More than a token has in common languages, so that the text is long enough.
CHARACTERS_A_TOKEN = 6


def choose_passages(
    sources: Sources, parser: Parser, num_tokens: int, check: Callable[[Document], object]
) -> str:
    """Return passages of some of the documents, joined by blank lines.

    The documents' order does not matter. Files that cannot be read are passed over, and documents
    that are not indexed.

    Parameters
    ----------
    sources
        The arguments of `Index.add`.
    parser
        Reads files.
    num_tokens
        The number of tokens that the text should have, if the documents are long enough.
    check
        Raises DocumentError for a document that is not indexed: it must not reach others' KV.
    """
    names = sorted([*sources.documents, *sources.files])
    step = max(1, len(names) / MOST_DOCUMENTS)
    chosen = [names[int(at * step)] for at in range(min(len(names), MOST_DOCUMENTS))]
    texts: list[str] = []
    for name in chosen:
        # What is wrong with a document is reported when it is indexed.
        with document_failures(lambda _: None):
            if name in sources.documents:
                found = [sources.documents[name]]
            else:
                content = read_file(name, parser.limits.max_file_bytes)
                found = parser.parse(name, content)[:MOST_DOCUMENTS]
            for document in found:
                check(document)
            texts += [one.text for one in found]
    return join_passages(texts, num_tokens)


def join_passages(texts: Iterable[str], num_tokens: int) -> str:
    """Return passages of texts, in turn one of each, until there are enough."""
    enough = num_tokens * CHARACTERS_A_TOKEN
    rounds = zip_longest(*map(_passages, texts))
    chosen: list[str] = []
    for passage in dict.fromkeys(filter(None, chain.from_iterable(rounds))):
        if sum(map(len, chosen)) >= enough:
            break
        chosen.append(passage)
    return SEPARATOR.join(chosen)


def _passages(text: str) -> Iterator[str]:
    """Yield a text's paragraphs, short ones joined and long ones cut at the end of a sentence."""
    passage = ""
    for paragraph in re.split(r"\n\s*\n", normalise_text(text)):
        passage = f"{passage}\n{paragraph.strip()}".strip()
        if len(passage) >= _SHORT:
            yield _cut(passage)
            passage = ""
    if passage:
        yield passage


def _cut(passage: str) -> str:
    if len(passage) <= _LONG:
        return passage
    ends: Sequence[int] = [one.end() for one in re.finditer(r"[.!?]\s", passage[:_LONG])]
    return passage[: ends[-1] if ends and ends[-1] >= _SHORT else _LONG].rstrip()
