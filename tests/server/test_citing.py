"""Citations: which passages the sentences of an answer rest on."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvrag.server.citing import Support, sentences, supports
from kvrag_corpus.real import generate_set
from tests.support.api_server import Served

LEAVE = (
    "# Leave\n\nFull-time staff have 25 days of paid leave a year, which they may take when their\n"
    "team agrees. Unused days lapse in March."
)
TRAVEL = "# Travel\n\nBook trains early. Taxis are paid after ten at night."


def _said(text: str) -> list[str]:
    return [text[start:end] for start, end in sentences(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One came here. Two went there.", ["One came here.", "Two went there."]),
        ("Mr. Smith saw J. R. Jones there.", ["Mr. Smith saw J. R. Jones there."]),
        ("# A heading\n\nIt costs 3.5 kroner. Yes.", ["It costs 3.5 kroner. Yes."]),
        ("1. Take the bread\n- and butter", ["Take the bread", "and butter"]),
        ("It is **very much so.** And that is it.", ["It is **very much so.**", "And that is it."]),
        (
            "\u4e2d\u6587\u662f\u7684\u3002\u4ed6\u4eec\u4e0d\u77e5\u9053\u5417\uff1f",
            ["\u4e2d\u6587\u662f\u7684\u3002", "\u4ed6\u4eec\u4e0d\u77e5\u9053\u5417\uff1f"],
        ),
        (
            "Plan B... then they all went. And so on and on.",
            ["Plan B... then they all went.", "And so on and on."],
        ),
        ("", []),
        ("\n \n#\n1. ", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert _said(text) == expected


@pytest.mark.parametrize("mark", [".", "? ", "!'", "? ' "])
def test_marks_without_end_are_read_once(mark: str) -> None:
    """From each mark on, it would take hours."""
    text = "One came here." + mark * 200_000 + "x"
    (found,) = sentences(text)
    assert found == (0, len(text))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_nobody_waits_for_the_citations_of_an_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(*given: Any) -> list[Support]:
        begun.set()
        assert may_end.wait(60)
        return supports(*given)

    monkeypatch.setattr("kvrag.server.citing.supports", slow)
    body: Any = {"model": served.rag, "messages": [{"role": "user", "content": "Who keeps it?"}]}
    body |= {"max_tokens": 4, "stream": is_streamed}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{served.url}/chat/completions", json=body)
        try:
            assert begun.wait(60)
            assert httpx.get(f"{served.server.url}/healthz", timeout=20).status_code == 200
        finally:
            may_end.set()
        assert "url_citation" in asked.result().text


def test_each_sentence_names_its_passage_and_the_sentence_in_it() -> None:
    answer = "Staff have 25 days of leave. Taxis are paid at night. The moon is a cheese."
    found = supports(answer, [TRAVEL, LEAVE])
    assert [one.passage for one in found] == [1, 0]
    assert answer[slice(*found[0].sentence)] == "Staff have 25 days of leave."
    # Lines that an editor broke are one sentence.
    best = LEAVE[slice(*found[0].best)]
    assert best.startswith("Full-time staff have")
    assert best.endswith("team agrees.")
    assert TRAVEL[slice(*found[1].best)] == "Taxis are paid after ten at night."


def test_the_question_says_whose_passage_a_short_answer_is_from() -> None:
    texts = [f"This page is about {who}. {who} lives in Oslo." for who in ("Ada", "Ben", "Cy")]
    (found,) = supports("Oslo", texts, "Where does Ben live?")
    assert found.passage == 1


@pytest.mark.parametrize("name", ["biography:8", "needle:2k", "code"])
@pytest.mark.parametrize("form", ["{}", "The answer is {}."])
def test_right_answers_name_what_they_follow_from(name: str, form: str) -> None:
    prose = ["The harbour was closed in winter, and nobody came by the road. " * 40] * 12
    for one in generate_set(name, 3, 20, prose=prose, pages=()):
        found = supports(form.format(one.answers[0]), one.chunks, one.question)
        assert found[0].passage in one.supporting
        assert one.answers[0] in one.chunks[found[0].passage]
