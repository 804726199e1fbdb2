from __future__ import annotations

from kvrag.chunk import Chunk
from kvrag.cli.prompts import chat_messages, plain_prompt, reading_order


def chunk(source: str, ordinal: int) -> Chunk:
    return Chunk(f"{source}{ordinal}", f"{source}-{ordinal}", (1,), (0,), source, ordinal)


def test_chunks_of_a_document_stand_in_its_order_behind_the_best_document() -> None:
    found = [chunk("b", 2), chunk("a", 1), chunk("b", 0), chunk("a", 0)]
    assert [c.chunk_id for c in reading_order(found)] == ["b0", "b2", "a0", "a1"]


def test_plain_prompt_keeps_texts_verbatim() -> None:
    assert plain_prompt("Who?", ["one ", "two"]) == "one \n\ntwo\n\nQuestion: Who?\nAnswer:"


def test_plain_prompt_without_chunks() -> None:
    assert plain_prompt("Who?", []) == "Question: Who?\nAnswer:"


def test_messages_carry_earlier_turns_without_their_chunks() -> None:
    messages = chat_messages("And she?", ["text"], [("Who?", "Ines")])
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "Who?"),
        ("assistant", "Ines"),
        ("user", "text\n\nQuestion: And she?"),
    ]
