from __future__ import annotations

from kvrag.chunk import Chunk
from kvrag.engine.prompts import chat_messages, reading_order
from kvrag.models.plain import few_shot_prompt, plain_prompt


def chunk(source: str, ordinal: int) -> Chunk:
    return Chunk(f"{source}{ordinal}", f"{source}-{ordinal}", (1,), (0,), source, ordinal)


def test_the_best_document_stands_last_and_its_chunks_in_their_order() -> None:
    found = [chunk("b", 2), chunk("a", 1), chunk("b", 0), chunk("a", 0)]
    assert [c.chunk_id for c in reading_order(found)] == ["a0", "a1", "b0", "b2"]


def test_plain_prompt_keeps_texts_verbatim() -> None:
    assert plain_prompt("Who?", ["one ", "two"]) == "one \n\ntwo\n\nQuestion: Who?\nAnswer:"


def test_plain_prompt_without_chunks() -> None:
    assert plain_prompt("Who?", []) == "Question: Who?\nAnswer:"


def test_solved_examples_stand_between_the_chunks_and_the_question() -> None:
    prompt = few_shot_prompt("Who?", ["one ", "two"])
    assert prompt.startswith("one \n\ntwo\n\n")
    assert prompt.endswith("\n\nQuestion: Who?\nAnswer:")
    examples = prompt.removeprefix("one \n\ntwo\n\n").removesuffix("Question: Who?\nAnswer:")
    parts = examples.rstrip().split("\n\n")
    assert len(parts) == 4
    for text, solved in zip(parts[::2], parts[1::2], strict=True):
        asked, answer = solved.split("\n")  # an answer is one line, which the stop string ends
        assert asked.startswith("Question: ")
        assert answer.removeprefix("Answer: ").lower() in text.lower()


def test_messages_carry_earlier_turns_without_their_chunks() -> None:
    messages = chat_messages("And she?", ["text"], [("Who?", "Ines")])
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "Who?"),
        ("assistant", "Ines"),
        ("user", "text\n\nQuestion: And she?"),
    ]


def test_an_instruction_stands_between_the_chunks_and_the_question() -> None:
    (message,) = chat_messages("Who?", ["text"], instruction="Be brief.")
    assert message["content"] == "text\n\nBe brief.\n\nQuestion: Who?"
