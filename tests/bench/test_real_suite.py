"""The real suite: reproducible, readable, and answered by the chunks that say so."""

import hashlib
import json
import re
from pathlib import Path
from random import Random

import pytest

from kvrag.errors import ParameterError
from kvrag_bench.quality.datasets import load_suite
from kvrag_bench.quality.handbook import handbook_pages
from kvrag_corpus.real import NUM_CHOICES, SETS, Asked, cut, generate_set
from kvrag_corpus.real.people import NUM_CASTS, Cast

SHORT = tuple(name for name in SETS if not name.endswith(("4k", "8k")))
WITH_CHOICES = tuple(name for name in SETS if name != "summary")
HANDBOOK = handbook_pages()
PROSE = [chunk for page in HANDBOOK for chunk in cut(page)]


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


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("biography:4", "3a3c6faaca1986bc"),
        ("bridge", "14c1b58bb0ae5292"),
        ("carried", "83e23d90feb85691"),
        ("code", "aa7f678fe20efffe"),
    ],
)
def test_sets_are_those_that_were_checked(name: str, digest: str) -> None:
    """Wrong choices are said of others, bridges meet in one name, code returns its answer."""
    written = repr(generate(name, 5, 15)).encode()
    assert hashlib.sha256(written).hexdigest()[:16] == digest, "check its labels, and write it here"


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


@pytest.mark.parametrize(("name", "least", "most"), [("2k", 1200, 1400), ("8k", 5000, 5600)])
def test_needles_are_hidden_in_prose_of_the_length_asked_for(
    name: str, least: int, most: int
) -> None:
    for asked in generate(f"needle:{name}", 13, 5):
        assert least <= sum(len(chunk.split()) for chunk in asked.chunks) <= most + 20
        hidden = [chunk for chunk in asked.chunks if chunk not in PROSE]
        assert hidden == [asked.chunks[asked.supporting[0]]]


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
