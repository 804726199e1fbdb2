"""Chunks and prompts for the property tests: what they are made of and where it stands."""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass

from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from kvrag.chunk import Chunk, normalise_text
from tests.support.models import make_tokenizer
from tests.support.tokenizers import family_tokenizer

WORDS = [
    *("the", "fox", "jumps", "over", "lazy", "dog", "harbour", "of", "Varn.", "Question:", "don't"),
    *("1234", "x", "Café", "naïve", "e\u0301te\u0301", "ﬁn", "Å", "½", "<b>&amp;", "----", "|a|b|"),
    *("दिल्ली", "日本語のテキスト", "北京", "שָׁלוֹם", "العربية", "🦊", "👩\u200d👩\u200d👧", "🇫🇷"),
]

# None of them can stand inside a chunk made here, so no chunk can reach across one.
SEPARATORS = ("\n\n", "\n\n\n", "\n\n---\n\n", " \n\n ", "\r\n\r\n", "\n\n[1] ", "\n\nSource:\n\n")


@dataclass(frozen=True)
class Inserted:
    """A chunk's text (or the beginning of it) as it was put into a prompt."""

    text: str
    start: int
    is_cut: bool


@st.composite
def texts(draw, min_words: int = 1, max_words: int = 40) -> str:
    """Return normalised text of at least 8 characters without blank lines or CR."""
    words = draw(st.lists(st.sampled_from(WORDS), min_size=min_words, max_size=max_words))
    joints = draw(st.lists(st.sampled_from((" ", " ", " ", "\n", "  ")), min_size=1, max_size=3))
    joined = "".join(word + joints[i % len(joints)] for i, word in enumerate(words))
    return normalise_text("Chunk of " + joined)


@st.composite
def corpora(draw) -> dict[str, str]:
    """Return chunks by id, among them near-identical, overlapping, contained and equal ones."""
    found = draw(st.lists(texts(), min_size=1, max_size=4))
    for _ in range(draw(st.integers(0, 4))):
        text = draw(st.sampled_from(found))
        kind = draw(st.sampled_from(("longer", "changed", "window", "contained", "equal")))
        cut = draw(st.integers(0, len(text)))
        if kind == "longer":
            text += " " + draw(texts())
        elif kind == "changed":
            text = text[:cut] + draw(st.sampled_from(WORDS)) + text[cut:]
        elif kind == "window":
            text = text[cut:] + " " + draw(texts())
        elif kind == "contained":
            text = text[cut // 2 : cut]
        text = normalise_text(text)
        if len(text) >= 8:
            found.append(text)
    return {f"chunk-{number}": text for number, text in enumerate(found)}


@st.composite
def prompts(draw, corpus: dict[str, str]) -> tuple[str, list[Inserted]]:
    """Return a prompt with chunks of the corpus between separators, and where they stand."""
    prompt, inserted = draw(st.sampled_from(("", "Use this context:", "Kontext —"))), []
    for _ in range(draw(st.integers(0, 6))):
        prompt += draw(st.sampled_from(SEPARATORS))
        kind = draw(st.sampled_from(("chunk", "chunk", "chunk", "cut", "literal", "crlf", "nfd")))
        text = draw(st.sampled_from(sorted(corpus.values())))
        if kind == "chunk":
            inserted.append(Inserted(text, len(prompt), False))
        elif kind == "cut":
            text = text[: draw(st.integers(0, len(text)))]
            inserted.append(Inserted(text, len(prompt), True))
        elif kind == "literal":
            text = draw(texts())
        elif kind == "crlf":
            text = text.replace("\n", "\r\n")
        else:
            text = unicodedata.normalize("NFD", text)
        prompt += text
    return prompt + draw(st.sampled_from(("", "\n\n", "\n\nQuestion: who?\nAnswer: "))), inserted


def make_chunk(tokenizer: PreTrainedTokenizerFast, chunk_id: str, text: str) -> Chunk:
    """Return a chunk tokenised alone, as ingestion does it."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = tuple(start for start, _ in encoding["offset_mapping"])
    return Chunk(chunk_id, text, tuple(encoding["input_ids"]), starts, "test", 0)


# Full stops joined with line ends (Llama-3, Qwen), a dummy space at the start of a text only (T5),
# merges across words (Llama-2), lower case (BERT).
TOKENIZER_NAMES = ("byte-level", "ignoring-merges", "metaspace-first", "legacy-llama", "word-piece")


@functools.cache
def get_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return one of the tokenizers whose ways with offsets and spaces differ."""
    return make_tokenizer() if name == "byte-level" else family_tokenizer(name)
