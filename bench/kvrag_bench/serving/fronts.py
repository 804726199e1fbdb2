"""What kvrag reuses of the requests of chat front ends, which search documents by themselves.

Each cuts the handbook in its own way, finds passages for every question, and writes them into the
request as it documents, between instructions as long as its own, in other words. Sources: Open
WebUI 0.12.4 (`apply_source_context_to_messages`), LibreChat (`createContextHandlers`, rag_api),
AnythingLLM (`constructPrompt`, `TextSplitter`).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.engine.prices import Prices
from kvrag.ingest.embedding import get_embedding
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag_bench.corpora import read_handbook

Messages = list[dict[str, str]]
Passage = tuple[str, str]
"""A document's name, and a part of its text."""

_GUIDELINES = """### Task:
Answer what the user asks by means of the context below, and name the sources of what you say in the form [id], **but only for a <source> tag that has an id attribute** (such as <source id="1">).

### Guidelines:
- Where you do not know the answer, say so plainly.
- Where you are not certain, ask the user what is meant.
- Write in the language in which the user has asked.
- Where the context cannot be read or is poor, tell the user, and answer as well as you can.
- Where the context lacks the answer but you know it, explain this to the user, and answer from what you know.
- **Write [id] (such as [1] or [2]) only for a <source> tag that has an id attribute.**
- Name no source for a <source> tag without an id attribute.
- Write no XML tags.
- Keep what you name short, and to the point of what was given.

### Example of a source:
Where the user asks about a subject, and what was found stands in a source with an id attribute, the answer names it as in this example:
* "The study found that the new method is faster by 20% [1]."

### Output:
Answer the user's question clearly and directly, with sources in the form [id] only where the context has a <source> tag with an id attribute.

<context>
{context}
</context>
"""  # noqa: E501
_ASSISTANT = (
    "Below are a conversation, context that belongs to it, and a further question. Reply with an "
    "answer to the question that the user is asking now. Write only the answer to it, by what is "
    "given above, and follow the user's instructions where there are any."
)
_FOOTER = """Use the context as what you have learned, to answer the user better.

In your answer, keep to these guidelines:
- Where you do not know the answer, just say that you do not know it.
- Where you are unsure how to answer, ask what is meant.
- Do not mention that you have what you say from the context.
"""


def _of_open_webui(passages: Sequence[Passage]) -> str:
    ids = {name: number for number, name in enumerate(dict(passages), 1)}
    sources = "\n".join(
        f'<source id="{ids[name]}" name="{name}" resource-type="file" '
        f'resource-id="{ids[name]:08x}-5ec7-4a11-9d0c-0242ac120002">{text}</source>'
        for name, text in passages
    )
    return _GUIDELINES.format(context=sources)


def open_webui(said: Messages, question: str, passages: Sequence[Passage]) -> Messages:
    """Return a request with the passages before the question; they are not kept in the history."""
    return [*said, {"role": "user", "content": f"{_of_open_webui(passages)}\n{question}"}]


def open_webui_system(said: Messages, question: str, passages: Sequence[Passage]) -> Messages:
    """Return the request with ``RAG_SYSTEM_CONTEXT=True``."""
    system = {"role": "system", "content": _of_open_webui(passages)}
    return [system, *said, {"role": "user", "content": question}]


def librechat(said: Messages, question: str, passages: Sequence[Passage]) -> Messages:
    """Return a request with an attached file's passages, as the agents' instructions."""
    name, pad = passages[0][0], " " * 8
    items = "".join(
        f"\n{pad}    <contextItem>\n{pad}      <![CDATA[{text.strip()}]]>\n{pad}    </contextItem>"
        for _, text in passages
    )
    system = (
        "The user has attached a file to the conversation:\n"
        f"{pad}\n{pad}      <file>\n{pad}        <filename>{name}</filename>\n"
        f"{pad}        <type>text/markdown</type>\n{pad}      </file>\n\n"
        f"{pad}The user's message was searched for by its meaning, which found the following "
        f"context, inside <context></context> XML tags.\n\n{pad}<context>\n"
        f"{pad}  <file>\n{pad}    <filename>{name}</filename>\n{pad}    <context>{items}\n"
        f"{pad}    </context>\n{pad}  </file>\n{pad}</context>\n\n{pad}{_FOOTER}"
    )
    return [{"role": "system", "content": system}, *said, {"role": "user", "content": question}]


def anything_llm(said: Messages, question: str, passages: Sequence[Passage]) -> Messages:
    """Return a request of a workspace, whose passages begin with their document's name."""
    context = "".join(
        f"[CONTEXT {number}]:\n<document_metadata>\nsourceDocument: {name}\n"
        f"published: 11/28/2026, 9:00:00 AM\n</document_metadata>\n\n{text}\n"
        f"[END CONTEXT {number}]\n\n"
        for number, (name, text) in enumerate(passages)
    )
    system = {"role": "system", "content": f"{_ASSISTANT}\nContext:\n{context}"}
    return [system, *said, {"role": "user", "content": question}]


@dataclass(frozen=True)
class Front:
    """A front end: how it writes a request, and its defaults for cutting and searching documents.

    `size` is in characters; `by_heading` cuts at headings first and rewrites line ends there, and
    `is_one` means that all is one attached file.
    """

    write: Callable[[Messages, str, Sequence[Passage]], Messages]
    size: int
    num_found: int
    by_heading: bool = False
    is_one: bool = False


FRONTS = {
    "Open WebUI": Front(open_webui, 1000, 3, by_heading=True),
    "Open WebUI, in the system's message": Front(open_webui_system, 1000, 3, by_heading=True),
    "LibreChat": Front(librechat, 1500, 4, is_one=True),
    "AnythingLLM": Front(anything_llm, 1000, 4),
}


@dataclass(frozen=True)
class Turn:
    """What kvrag's report says of one request.

    Attributes
    ----------
    front, number, replay
        The front end, the turn and the replay of the conversation, each from 1 on.
    num_tokens, num_kept, num_cached, num_outpriced
        Tokens of the prompt; those that an earlier answer left; all that were not computed; those
        that were stored, but full prefill was faster.
    ttft_seconds
        Time to the first token.
    """

    front: str
    number: int
    replay: int
    num_tokens: int
    num_kept: int
    num_cached: int
    num_outpriced: int
    ttft_seconds: float


def replay_fronts(
    model: str | KVModel,
    num_turns: int = 10,
    num_replays: int = 1,
    max_tokens: int = 32,
    say: Callable[[str], None] = lambda _: None,
    embedding: str = "minilm",
) -> list[Turn]:
    """Replay a conversation of each front end, over an index that has the handbook too.

    Parameters
    ----------
    model
        The model.
    num_turns, num_replays
        Turns of each conversation, and how often each is replayed, each time in another session.
    max_tokens
        Most tokens of an answer.
    say
        Told what is done.
    embedding
        What the front ends search with.
    """
    documents, cases = read_handbook()
    turns = []
    with tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder:
        say("indexing")
        with Index.create(Path(folder) / "index", model=model) as index:
            index.add(documents)
            index.on_demand.make_all()
            engine = KVEngine(index, max_tokens=max_tokens)
            Prices(index.config.model_fingerprint).measure(index.model)
            for name, front in FRONTS.items():
                find = _Search(documents, front, embedding)
                for replay in range(1, num_replays + 1):
                    said: Messages = []
                    for number, case in enumerate(cases[:num_turns], 1):
                        say(f"{name}, replay {replay}, turn {number}")
                        asked = front.write(said, case.question, find(case.question))
                        answer = engine.generate(asked, session=f"{name} {replay}")
                        said += [
                            {"role": "user", "content": case.question},
                            {"role": "assistant", "content": answer.text},
                        ]
                        report = answer.report
                        turns.append(
                            Turn(
                                name,
                                number,
                                replay,
                                report.num_tokens,
                                report.num_kept,
                                report.num_cached,
                                report.num_outpriced,
                                answer.ttft_seconds,
                            )
                        )
    return turns


class _Search:
    """A front end's own search, by the vectors that most of them take."""

    def __init__(self, documents: Sequence[Document], front: Front, embedding: str) -> None:
        if front.is_one:
            text = "\n\n".join(one.text for one in documents)
            documents = [replace(documents[0], source="handbook.md", text=text)]
        self._passages = [(one.source, text) for one in documents for text in cut(one.text, front)]
        self._embedding, self._count = get_embedding(embedding), front.num_found
        self._vectors = np.asarray(self._embedding.embed([text for _, text in self._passages]))

    def __call__(self, question: str) -> list[Passage]:
        scores = self._vectors @ np.asarray(self._embedding.embed_query(question)).ravel()
        return [self._passages[place] for place in np.argsort(-scores)[: self._count]]


def cut(text: str, front: Front) -> Iterator[str]:
    """Yield a document's passages: cut at the last paragraph, line or word that fits."""
    parts = [text]
    if front.by_heading:
        parts = [
            "  \n".join(one.strip() for one in re.split(r"\n\s*\n", part) if one.strip())
            for part in re.split(r"(?m)^(?=#)", text)
        ]
    for part in parts:
        while len(part) > front.size:
            ends = (part.rfind(mark, 0, front.size) for mark in ("\n\n", "\n", " "))
            end = next((end for end in ends if end > 0), front.size)
            yield part[:end].strip()
            part = part[end:]
        if part.strip():
            yield part.strip()
