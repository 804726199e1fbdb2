"""Answers that repeat themselves, or ask themselves, end; what repetition means something stays."""

import pytest

from kvrag.engine.constraint import Constraint
from kvrag.engine.engine import KVEngine
from kvrag.engine.text_stream import TextStream
from tests.support.models import make_tokenizer
from tests.support.rag import Rag, rag
from tests.support.scripted import follow

__all__ = ["rag"]

SENTENCE = "The harbour ledger is kept by Ines of Varn every day. "
LOOPS = {
    "sentence": "Ines keeps it. " + SENTENCE * 20,
    "lines": "- the old bridge near Varn\n" * 20,
    "dialogue": "Who keeps it?\n\nThe keeper does.\n\n" * 20,
    "clause": "She is kind, and she is kind, and " * 20,
    "word": "It is " + "very " * 100,
}
MEANT = {
    "list": "".join(f"{n}. Item of the list, which is like the others\n" for n in range(1, 25)),
    "table": "| Ines | harbour ledger of Varn | 0 |\n" * 20,
    "numbers": "0, 0, 0, 0, 0, 0, 0, 0, 0, 0\n" * 20,
    "series": "null, " * 60,
    "yes": "yes\n" * 20,
    "tabs": "the\tsame\tthree\twords\n" * 20,
    "code": "```\nprint the same line again and again\n" + "say hello to all of them\n" * 20,
    "bare code": "    assert_that(value).is_not(None)\n" * 20 + "foo(bar, [1, 2, 3])\n" * 20,
    "json": '{"name": "Ines", "keeps": "the harbour ledger"}, ' * 20,
    "twice": SENTENCE * 2 + "So she does.",
    "rule": "-" * 150 + "\n" + "= " * 80,
}


def ended(text: str) -> str:
    """Return as much of a text as an answer would have."""
    tokenizer = make_tokenizer()
    stream = TextStream(tokenizer, stop_loops=True)
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        stream.push(token)
        if stream.looped:
            break
    stream.finish()
    return stream.text


@pytest.mark.parametrize("text", LOOPS.values(), ids=list(LOOPS))
def test_an_answer_that_repeats_itself_ends(text: str) -> None:
    found = ended(text)
    assert text.startswith(found)
    assert len(found) < len(text) / 3


@pytest.mark.parametrize("text", MEANT.values(), ids=list(MEANT))
def test_what_is_meant_to_repeat_is_whole(text: str) -> None:
    assert ended(text) == text


def test_the_reason_says_so_and_only_if_asked(rag: Rag, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, rag, lambda prompt: LOOPS["sentence"])
    engine = KVEngine(rag.index, max_tokens=150)
    answer = engine.generate("Who keeps it?", stop_loops=True)
    assert answer.finish_reason == "loop"
    assert answer.text.count("kept by Ines") == 3
    pieces = list(engine.stream("Who keeps it?", stop_loops=True))
    assert "".join(piece.text for piece in pieces) == answer.text
    assert engine.generate("Who keeps it?").finish_reason == "length"
    form = Constraint.regex(f"Ines keeps it. ({SENTENCE})*")
    assert engine.generate("Who?", stop_loops=True, constraint=form).finish_reason == "length"
