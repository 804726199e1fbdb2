"""The real suite: reproducible, readable, and answered by the chunks that say so."""

import json
import re
from pathlib import Path
from random import Random

import pytest

from kvrag.errors import ParameterError
from kvrag_bench.quality.datasets import load_suite
from kvrag_bench.quality.handbook import handbook_pages
from kvrag_corpus.real import NUM_CHOICES, SETS, Asked, cut, generate_set
from kvrag_corpus.real import words as every_word
from kvrag_corpus.real.people import NUM_CASTS, Cast

SHORT = tuple(name for name in SETS if not name.endswith(("4k", "8k")))
WITH_CHOICES = tuple(name for name in SETS if name != "summary")
HANDBOOK = handbook_pages()
PROSE = [chunk for page in HANDBOOK for chunk in cut(page)]
VALUES = {
    f" {value.casefold()} "
    for name, values in vars(every_word).items()
    if name.isupper() and name not in {"MEN", "WOMEN", "SURNAMES"}
    for value in values
}


def generate(name: str, seed: int, count: int) -> list[Asked]:
    return generate_set(name, seed, count, prose=PROSE, pages=HANDBOOK)


def words(text: str) -> str:
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.casefold()))} "


def times(phrase: str, text: str) -> int:
    return words(text).count(words(phrase))


@pytest.mark.parametrize("name", SHORT)
def test_a_set_is_the_same_for_the_same_seed(name: str) -> None:
    (first,) = {tuple(generate(name, 3, 4)) for _ in range(2)}
    assert first[:2] == tuple(generate(name, 3, 2))
    assert not {asked.chunks for asked in first} & {a.chunks for a in generate(name, 4, 4)}


@pytest.mark.parametrize("name", WITH_CHOICES)
def test_the_answer_is_one_of_four_choices_and_is_said_once(name: str) -> None:
    said_by = -1 if name == "carried" else 0
    for asked in generate(name, 5, 15):
        (answer,) = asked.answers
        assert len(set(asked.choices)) == NUM_CHOICES
        assert answer in asked.choices
        found = [times(answer, chunk) for chunk in asked.chunks]
        assert sum(found) == 1
        place = found.index(1)
        assert place in asked.supporting
        if len(asked.supporting) == 1 or name == "carried":
            assert place == asked.supporting[said_by]


@pytest.mark.parametrize(
    ("name", "in_prompt"),
    [
        ("biography:2", 2),
        ("biography:4", 4),
        ("biography:8", 4),
        ("needle:2k", 1),
        ("needles:2k", 4),
        ("carried", 4),
        ("bridge", 3),
        ("code", 4),
    ],
)
def test_wrong_choices_are_said_of_others_in_the_prompt(name: str, in_prompt: int) -> None:
    for asked in generate(name, 6, 15):
        prompt = "\n".join(asked.chunks)
        assert sum(times(choice, prompt) for choice in asked.choices) >= in_prompt


def test_only_the_first_chunk_of_a_document_names_its_subject() -> None:
    for asked in generate("carried", 9, 15):
        subject = _subject(asked)
        first, second = asked.supporting
        assert [times(subject, chunk) for chunk in asked.chunks] == [
            int(place == first) for place in range(len(asked.chunks))
        ]
        assert asked.before[second] == (asked.chunks[first],)
        assert asked.before[first] == ()


def _subject(asked: Asked) -> str:
    """Return the name that stands in the question and in the first supporting chunk."""
    first = asked.chunks[asked.supporting[0]]
    named = re.match(r"This document is about (?:the firm )?([^.]+)\.", first)
    assert named[1] in asked.question
    return named[1]


def test_two_chunks_of_a_bridge_meet_in_one_name() -> None:
    for asked in generate("bridge", 10, 15):
        chunks = [asked.chunks[place] for place in asked.supporting]
        firm = next(firm for firm in every_word.FIRMS if firm in asked.question)
        (director,) = [
            named[1]
            for chunk in chunks
            if (named := re.match(rf"The director of {firm} is ([^.]+)\.", chunk))
        ]
        assert all(director in chunk for chunk in chunks)
        assert sum(director in chunk for chunk in asked.chunks) == 2
        assert director not in asked.question


@pytest.mark.parametrize(("name", "least", "most"), [("2k", 1200, 1400), ("8k", 5000, 5600)])
def test_needles_are_hidden_in_prose_of_the_length_asked_for(
    name: str, least: int, most: int
) -> None:
    for asked in generate(f"needle:{name}", 13, 5):
        assert least <= sum(len(chunk.split()) for chunk in asked.chunks) <= most + 20
        hidden = [chunk for chunk in asked.chunks if chunk not in PROSE]
        assert hidden == [asked.chunks[asked.supporting[0]]]


def test_code_returns_what_is_asked_for() -> None:
    for asked in generate("code", 11, 15):
        imports = re.compile(r"^from .*$", re.MULTILINE)
        scope: dict[str, object] = {}
        for chunk in asked.chunks:
            exec(imports.sub("", chunk), scope)
        called = re.search(r"(\w+)\(\)", asked.question)
        returned = scope[called[1]]
        assert callable(returned)
        assert (returned(),) == asked.answers


def test_a_summary_is_given_every_chunk_of_a_page_with_those_before_it() -> None:
    asked = generate("summary", 12, len(HANDBOOK))
    assert len({question.answers for question in asked}) == len(HANDBOOK)
    for question in asked:
        in_order = sorted(question.chunks, key=lambda c: len(question.before[_at(question, c)]))
        (page,) = [page for page in HANDBOOK if page.startswith(in_order[0])]
        assert list(question.chunks).count(in_order[0]) == 1
        assert in_order == cut(page)
        assert all(
            question.before[_at(question, c)] == tuple(in_order[:i]) for i, c in enumerate(in_order)
        )
        assert question.is_summary
        assert question.choices == ()
        assert question.answers[0] in " ".join(in_order[0].split())


def _at(question: Asked, chunk: str) -> int:
    return question.chunks.index(chunk)


@pytest.fixture
def musique(tmp_path: Path) -> str:
    rows = [
        {
            "question": f"Who wrote book {number}?",
            "answers": [f"Writer {number}"],
            "ctxs": [
                {"title": "", "text": f"Text {number}.{i}. " + "Word after word. " * 30}
                for i in range(10)
            ],
        }
        for number in range(4)
    ]
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(rows), "utf-8")
    return str(path)


def test_questions_and_prose_come_from_a_file(musique: str) -> None:
    suite = load_suite(["musique", "needle:2k"], num_questions_per_set=3, musique=musique)
    assert [question.type for question in suite] == ["musique"] * 3 + ["needle 2k"] * 3
    assert suite[0].answers == ("Writer 0",)
    assert suite[0].choices == ()
    assert "Word after word" in suite[3].texts[0]


def test_what_is_missing_is_said(musique: str) -> None:
    with pytest.raises(ParameterError, match=r"no real set 'biography:3'.*biography:4"):
        load_suite(["biography:3"])
    with pytest.raises(ParameterError, match="0 questions"):
        load_suite(["biography:4"], num_questions_per_set=0)
    with pytest.raises(ParameterError, match="set 'musique': name the file"):
        load_suite(["musique"])
    with pytest.raises(ParameterError, match="8000 tokens need 5600 words"):
        load_suite(["needle:8k"], musique=musique)


def test_seeds_share_no_person_and_prompts_no_part_of_a_name() -> None:
    casts = [
        {person.name for person in Cast(seed, Random(0)).draw(30)} for seed in range(NUM_CASTS)
    ]
    assert len(set.union(*casts)) == 30 * NUM_CASTS
    cast, seen = Cast(1, Random(0)), set[str]()
    for _ in range(40):
        people = cast.draw(8)
        assert len({person.first for person in people}) == 8
        assert len({person.last for person in people}) == 8
        assert not seen & {person.name for person in people}  # who came comes again last
        seen |= {person.name for person in people}
