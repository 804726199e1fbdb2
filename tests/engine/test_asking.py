"""Questions over an index: `KVEngine.ask`, and the prompts that it builds."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvrag.chunk import Chunk
from kvrag.engine.asking import Asking, few_shot_prompt, plain_prompt, reading_order
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag_bench.judge.questions import render
from tests.support.rag import PASSAGES, Rag, rag

__all__ = ["rag"]


def chunk(source: str, ordinal: int) -> Chunk:
    return Chunk(f"{source}{ordinal}", f"{source}-{ordinal}", (1,), (0,), source, ordinal)


def test_the_best_document_stands_last_and_its_chunks_in_their_order() -> None:
    found = [chunk("b", 2), chunk("a", 1), chunk("b", 0), chunk("a", 0)]
    assert [c.chunk_id for c in reading_order(found)] == ["a0", "a1", "b0", "b2"]


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


class TestAsk:
    """`KVEngine.ask` is search, reading order, prompt and stop strings, and then `generate`."""

    @pytest.fixture
    def engine(self, rag: Rag) -> KVEngine:
        return KVEngine(rag.index, max_tokens=8, session_bytes=0)

    def test_it_answers_over_what_a_search_finds(self, engine: KVEngine) -> None:
        answer = engine.ask("Who keeps the ledger?", k=2)
        hits = engine.index.search("Who keeps the ledger?", 2)
        assert [s.chunk_id for s in answer.sources] == [hit.chunk.chunk_id for hit in hits]
        texts = [chunk.text for chunk in reading_order([hit.chunk for hit in hits])]
        said = "\n\n".join([*texts, "Question: Who keeps the ledger?"])
        by_hand = engine.generate([{"role": "user", "content": said}], stop=["\nQuestion:"])
        assert answer.text == by_hand.text
        assert answer.report.num_cached > 0

    def test_options_are_a_requests(self, engine: KVEngine) -> None:
        asked = engine.question("Who?", 1, stop=["\n"], hints=["x"], max_tokens=3, policy="none")
        assert asked.stop == ("\n", "\nQuestion:")
        assert asked.hints[1:] == ("x",)
        assert (asked.stop_loops, asked.max_tokens, asked.policy) == (True, 3, "none")
        assert engine.question("Who?", stop_loops=False).stop_loops is False
        with pytest.raises(ParameterError, match="unknown option mood"):
            engine.ask("Who?", mood=1)

    def test_a_filter_and_pieces(self, engine: KVEngine) -> None:
        asked = engine.question("Varn", filter={"source": "fox"}, max_tokens=4)
        *_, last = engine.stream(asked)
        assert [source.source for source in last.answer.sources] == ["fox"]

    def test_a_conversation_goes_on_without_the_same_chunks_again(self, engine: KVEngine) -> None:
        first = engine.question("Who keeps the ledger?", 2)
        answer = engine.generate(first)
        said = {"role": "assistant", "content": answer.text}
        again = engine.question("And the ledger of Varn?", 2, history=[*first.prompt, said])
        assert [one["role"] for one in again.prompt] == ["user", "assistant", "user"]
        assert again.prompt[:2] == [*first.prompt, said]
        whole = "".join(one["content"] for one in again.prompt)
        for hit in engine.index.search("And the ledger of Varn?", 2):
            assert whole.count(hit.chunk.text) == 1

    @pytest.mark.parametrize(
        ("question", "options", "said"),
        [
            ("", {}, "empty"),
            (" ", {}, "empty"),
            (3, {}, "content"),
            ("Who?", {"k": 0}, "k 0"),
            ("Who?", {"filter": {"$nor": []}}, "nor"),
            ("Who?", {"history": [{"role": "user"}]}, "has no content"),
            ("Who?", {"history": "Hello"}, "such as"),
            ("Who?", {"history": {"role": "user", "content": "Hello"}}, "such as"),
            ("Who?", {"stop": "END"}, "expected several"),
            ("Who?", {"stop": None}, "expected several"),
            ("Who?", {"hints": "abc"}, "expected several"),
            ("Who?", {"reranker": "model"}, "such as"),
            ("Who?", {"temperature": -1}, "temperature -1"),
        ],
    )
    def test_what_is_refused(
        self, engine: KVEngine, question: Any, options: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(ParameterError, match=said):
            engine.ask(question, **options)


def test_the_last_question_is_searched_for_and_what_follows_it_stays(rag: Rag) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who keeps the ledger?"},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "content": "Ines", "tool_call_id": "1"},
    ]
    asked = Asking(k=1, instruction="Answer in a word.").request(rag.index, turns)
    assert [one["role"] for one in asked.prompt] == ["system", "user", "assistant", "tool"]
    assert asked.prompt[1]["content"] == (
        f"{PASSAGES['ledger']}\n\nAnswer in a word.\n\nQuestion: Who keeps the ledger?"
    )
    for unfit in ([], turns[:1], turns[:3]):
        with pytest.raises(ParameterError, match="searches for what the user asks last"):
            Asking().request(rag.index, unfit)
    with pytest.raises(ParameterError, match="it cannot hold other messages"):
        Asking(use_chat_template=False).request(rag.index, turns)


@pytest.mark.parametrize(
    ("template", "use_chat_template", "expected", "stop"),
    [
        (None, True, few_shot_prompt, ("\n",)),
        (None, False, plain_prompt, ("\nQuestion:",)),
        ("{{ messages }}", False, plain_prompt, ("\nQuestion:",)),
    ],
)
def test_a_base_model_is_shown_solved_examples(
    template: str | None, use_chat_template: bool, expected: Any, stop: tuple[str, ...]
) -> None:
    found = SimpleNamespace(chunk=Chunk("id", "text", (1,), (0,), "a.txt", 0))
    index: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template=template), search=lambda *_, **__: [found]
    )
    asking = Asking(1, use_chat_template=use_chat_template)
    asked = asking.request(index, [{"role": "user", "content": "Who?"}])
    assert (asked.prompt, asked.stop) == (expected("Who?", ["text"]), stop)
    # What calibration and the referee measure is what users get.
    judged = render("Who?", ["text"], index.tokenizer, use_chat_template)
    assert judged.text == asked.prompt
