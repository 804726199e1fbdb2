"""Answers that repeat themselves, or ask themselves, end; what repetition means something stays."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from openai import OpenAI

from kvrag.engine.constraint import Constraint
from kvrag.engine.engine import KVEngine
from kvrag.engine.text_stream import TextStream
from tests.cli.conftest import Run, index_folder, model_folder, run, whole_index
from tests.server.conftest import client, served
from tests.support.api_server import Served
from tests.support.models import make_tokenizer
from tests.support.rag import Rag, rag
from tests.support.scripted import follow

__all__ = ["client", "index_folder", "model_folder", "rag", "run", "served", "whole_index"]

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


def test_the_server_ends_answers_over_its_own_prompts(
    rag: Rag, served: Served, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = SENTENCE * 12
    follow(monkeypatch, rag, lambda prompt: said)

    def ask(model: str, question: str, **options: Any) -> tuple[str, Any]:
        turns: Any = [{"role": "user", "content": question}]
        asked: dict[str, Any] = {"model": model, "messages": turns, "max_tokens": 150, **options}
        choice = client.chat.completions.create(**asked).choices[0]
        streamed = [one.choices[0] for one in client.chat.completions.create(**asked, stream=True)]
        assert choice.message.content == "".join(one.delta.content or "" for one in streamed)
        assert choice.finish_reason == streamed[-1].finish_reason
        return choice.message.content, choice.finish_reason

    text, finish = ask(served.rag, "Who keeps it?")
    assert (text.count("kept by Ines"), finish) == (3, "stop")
    answer = client.responses.create(model=served.rag, input="Who?", max_output_tokens=150)
    assert (answer.output_text, answer.status) == (text, "completed")
    # A prompt of the client's own is answered as the model does.
    assert ask("model", "Who keeps it?")[1] == "length"
    said = "Ines.\n\nQuestion: And who?\nAnswer: Ines."
    follow(monkeypatch, rag, lambda prompt: said)
    assert ask(served.rag, "Who keeps it?") == ("Ines.\n", "stop")
    assert ask(served.rag, "Write a question with its answer.") == (said, "stop")
    form: Any = {"type": "regex", "regex": r"Ines\.\n\nQuestion: And who\?\nAnswer: Ines\."}
    assert ask(served.rag, "Who keeps it?", response_format=form) == (said, "stop")


@pytest.mark.parametrize("command", ["query", "chat"])
def test_commands_end_such_answers(
    run: Run, index_folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    model = cast(Rag, SimpleNamespace(index=SimpleNamespace(tokenizer=make_tokenizer())))
    follow(monkeypatch, model, lambda prompt: SENTENCE * 20)
    question = "Who keeps it?"
    given, line = ([question], None) if command == "query" else ([], question + "\n/why\n")
    common = (command, *given, "-i", index_folder, "--max-tokens", 300)
    done = run(*common, "--json", stdin=line and question + "\n")
    answer = done.json if command == "query" else done.json["turns"][0]
    assert answer["answer"].count("kept by Ines") == 3
    assert answer["finish_reason"] == "loop"
    if command == "chat":
        assert "ended by loop" in run(*common, stdin=line).out
    follow(monkeypatch, model, lambda prompt: "Ines.\nQuestion: And who?\nAnswer: Ines.")
    done = run(*common, "--json", stdin=line and question + "\n")
    answer = done.json if command == "query" else done.json["turns"][0]
    assert answer["answer"] == "Ines."
