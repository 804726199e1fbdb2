"""The index of words: in step with the chunks whatever happens to them, and never a way in."""

import sqlite3
from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.errors import ParameterError, StoreError
from kvrag.ingest import words
from kvrag.ingest.config import WORDS_NAME
from kvrag.ingest.filters import Filter
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel

FOX = "The quick brown fox jumps over the lazy dog near the old river bank."
INES = "Ines keeps the harbour ledger of Varn, and the café's too."


def found(index: Index, question: str, k: int = 4) -> list[str]:
    return [hit.chunk.source for hit in index.search_words(question, k)]


@pytest.fixture
def filled(index: Index) -> Index:
    index.add([Document("fox", FOX), Document("ines", INES)])
    return index


def change(index: Index, *statements: str) -> None:
    with sqlite3.connect(index.path / "catalog.sqlite") as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def test_words_follow_the_chunks(filled: Index) -> None:
    assert found(filled, "harbour ledger") == ["ines"]
    filled.add([Document("ines", "Ines keeps a bakery now.")])
    assert found(filled, "harbour ledger") == []
    assert found(filled, "bakery") == ["ines"]
    filled.delete(sources=["ines"])
    assert found(filled, "bakery") == []
    (hit,) = filled.search_words("fox")
    filled.delete(chunk_ids=[hit.chunk.chunk_id])
    assert found(filled, "fox") == []
    assert filled.upkeep.verify().ok


def test_the_best_comes_first_and_equals_in_order(index: Index) -> None:
    index.add(
        [
            Document("twice", "river bank, river bank"),
            Document("long", "the river is " + "very " * 20 + "long"),
            Document("same-1", "a keeper"),
            Document("same-2", "a keeper"),
            *(Document(f"other-{n}", f"nothing of that kind {n}") for n in range(9)),
        ]
    )
    assert found(index, "river bank") == ["twice", "long"]
    assert found(index, "keeper") == ["same-1", "same-2"]
    assert found(index, "keeper", 1) == ["same-1"]
    assert found(index, "nothing keeper")[:2] == ["same-1", "same-2"]  # the rarer word


def test_a_long_question_is_cut(filled: Index) -> None:
    assert found(filled, "fox? " * 3000 + " ".join(f"w{n}" for n in range(300))) == ["fox"]


TEXTS = {
    "chinese": "鲁迅在一九二一年写了短篇小说《故乡》，讲述了他回到绍兴老家的经历。",
    "japanese": "吾輩は猫である。名前はまだ無い。ガラスの窓から山が見える。",
    "korean": "학교에서 친구들과 함께 대한민국의 역사를 배웠다.",
    "thai": "ประเทศไทยมีภาษาราชการคือภาษาไทย และมีกรุงเทพเป็นเมืองหลวง",
    "khmer": "ភ្នំពេញជារាជធានីនៃប្រទេសកម្ពុជា",
    "hindi": "किताब मेज़ पर रखी हुई है और लड़की पढ़ रही है।",
    "arabic": "كَتَبَ الطَّالِبُ رِسَالَةً إِلَى أُسْتَاذِهِ",
    "russian": "Объявление висело на двери всё лето.",
    "turkish": "Iğdır ovasından Ağrı Dağı görünür.",
    "german": "Die Straße führt am Schiffahrts\u00admuseum vorbei.",
    "accent": "Le café du port.",
    "case": "Er mußte gehen.",
    "dotted": "We saw i̇stanbul.",
    "forms": "Departure from Ｇａｔｅ ７ by ﬁre brigade of the o\ufb03ce, ｶﾞﾗｽ door.",
}
MANY = [Document(name, text, is_whole=True) for name, text in TEXTS.items()]


ASKED = [
    ("故乡", "chinese"),
    ("绍兴", "chinese"),
    ("小说《故乡》是谁写的？", "chinese"),
    ("乡", "chinese"),  # a single character, the last of its run
    ("猫", "japanese"),
    ("窓", "japanese"),
    ("吾輩 名前", "japanese"),
    ("대한민국 역사", "korean"),
    ("학교", "korean"),  # whose particle is joined to it in the text
    ("เมืองหลวง", "thai"),
    ("ภาษา", "thai"),
    ("កម្ពុជា", "khmer"),
    ("किताब", "hindi"),
    ("लड़की", "hindi"),
    ("رسالة", "arabic"),  # without its vowel points
    ("استاذه", "arabic"),
    ("ОБЪЯВЛЕНИЕ", "russian"),
    ("все лето", "russian"),
    ("AĞRI", "turkish"),
    ("ığdır", "turkish"),
    ("STRASSE", "german"),
    ("schiffahrtsmuseum", "german"),
    ("Schiffahrts\u00admuseum", "german"),
    ("gate 7", "forms"),
    ("office", "forms"),
    ("o\ufb03ce", "forms"),
    ("ｆｉｒｅ", "forms"),
    ("CAFE", "accent"),
    ("Café", "accent"),
    *((word, "case") for word in ("MUSSTE", "mußte", "musste")),
    ("İstanbul", "dotted"),
    ("ガラス", "forms japanese"),
    ("ｶﾞﾗｽ", "forms japanese"),
    # Fragments of words are no words.
    *((word, "") for word in ("कितना", "乡故", "หนังสือ", "сте", "ale", "?! ...")),
]


def test_words_of_each_script_are_found_and_forms_are_alike(index: Index) -> None:
    index.add(MANY)
    for question, expected in ASKED:
        hits = index.search_words(question)
        assert " ".join(sorted(hit.chunk.source for hit in hits)) == expected, question
        assert all(hit.chunk.text == TEXTS[hit.chunk.source] for hit in hits)  # as it was given
    with pytest.raises(ParameterError, match="the question is empty"):
        index.search_words("  ")


def test_a_text_removed_while_the_file_is_made_does_not_stay(
    filled: Index, model: KVModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled.path / WORDS_NAME
    fill = words.WordIndex._fill

    def removing(self: words.WordIndex, *given: object) -> None:
        fill(self, *given)  # type: ignore[arg-type]
        monkeypatch.undo()
        with Index.open(filled.path, model=model) as other:
            other.delete(sources=["ines"])

    monkeypatch.setattr(words.WordIndex, "_fill", removing)
    filled.search_words("fox", 1)
    assert not path.exists() or b"harbour" not in path.read_bytes()
    assert found(filled, "harbour") == []
    assert b"harbour" not in path.read_bytes()


def cache_of(index: Index) -> Path:
    return index.path / WORDS_NAME


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def test_a_missing_one_is_made_and_an_old_one_follows(filled: Index) -> None:
    assert not cache_of(filled).exists()
    assert found(filled, "fox") == ["fox"]
    assert cache_of(filled).exists()
    with Index.open(filled.path, model=filled.model) as other:
        other.add([Document("new", "A lantern.")])
    assert found(filled, "lantern") == ["new"]
    cache_of(filled).unlink()
    filled.add([Document("newer", "A lighthouse.")])
    assert not cache_of(filled).exists()  # whoever never searches by words needs none
    assert found(filled, "lighthouse") == ["newer"]
    assert filled.upkeep.verify().ok


def test_a_removed_text_leaves_the_file(filled: Index) -> None:
    found(filled, "harbour")
    assert b"harbour" in cache_of(filled).read_bytes()
    filled.delete(sources=["ines"])
    assert b"harbour" not in cache_of(filled).read_bytes()
    filled.add([Document("fox", "A wolf.")])
    assert b"quick" not in cache_of(filled).read_bytes()


def test_damage_is_found_and_mended(filled: Index) -> None:
    expected = filled.search_words("harbour fox")
    places = (0, 30, 5000, -40, -1)
    for mend, place in zip(("search", "ingest", "repair", "search", "ingest"), places, strict=True):
        filled.catalog.words.close()
        flip(cache_of(filled), place)
        report = filled.upkeep.verify()
        assert not report.ok
        assert "index of words" in report.catalog_problems[0]
        if mend == "ingest":
            filled.add([Document("fox", FOX)])
        elif mend == "repair":
            assert filled.upkeep.verify(repair=True).ok
        else:
            assert filled.search_words("harbour fox") == expected
        assert filled.upkeep.verify().ok
        assert filled.search_words("harbour fox") == expected


def test_what_is_damaged_while_it_is_open_is_made_anew(filled: Index) -> None:
    assert found(filled, "harbour") == ["ines"]
    path = cache_of(filled)
    with path.open("r+b") as file:
        file.truncate(100)
    filled.catalog.words._connection.execute("PRAGMA shrink_memory")
    assert found(filled, "ledger") == ["ines"]


def test_a_statement_that_sqlite_refuses_is_no_damage(filled: Index) -> None:
    assert found(filled, "harbour") == ["ines"]
    before = cache_of(filled).stat().st_ino
    for refused in ("no_such_column = 1", "row IN (" + "?, " * 250_001 + "?)"):
        values = (1,) * refused.count("?")
        with pytest.raises(StoreError, match="cannot do this search"):
            filled.catalog.words.rows_of(Filter("any", refused, values))
    assert cache_of(filled).stat().st_ino == before


def test_what_cannot_be_written_is_searched_in_memory(
    filled: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(words.WordIndex, "_write", refuse)
    assert found(filled, "fox") == ["fox"]
    assert not cache_of(filled).exists()
    filled.add([Document("wolf", "A wolf, no fox; a fox, no wolf.")])
    assert set(found(filled, "fox")) == {"fox", "wolf"}


def test_one_of_an_older_version_is_made_anew(
    index: Index, model: KVModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as old:  # as files were made before texts were cut
        old.setattr(words, "_VERSION", b"3")
        old.setattr(words, "_SCHEMA", words._SCHEMA.replace("'ascii'", "'unicode61'"))
        old.setattr(words, "words_of", lambda text: [text])
        index.add(MANY)
        assert found(index, "gate") == []
        assert cache_of(index).exists()
    for then in ("verify", "search", "delete"):
        with Index.open(index.path, model=model) as again:
            if then == "verify":
                assert again.upkeep.verify().ok  # old is not damaged
            elif then == "search":
                before = cache_of(index).read_bytes()
                assert found(again, "故乡") == ["chinese"]
                assert cache_of(index).read_bytes() != before
                cache_of(index).write_bytes(before)
            else:
                again.delete(sources=["chinese"])
                assert "鲁迅".encode() not in cache_of(index).read_bytes()
                assert found(again, "猫") == ["japanese"]


def test_one_of_another_index_is_not_believed(filled: Index, tmp_path: Path) -> None:
    found(filled, "fox")
    with Index.create(tmp_path / "other", model=filled.model, embedding="hashing") as other:
        other.add([Document("fox", FOX.replace("fox", "wolf")), Document("ines", INES)])
        found(other, "fox")
        filled.catalog.words.close()
        cache_of(filled).write_bytes(cache_of(other).read_bytes())
    assert found(filled, "fox") == ["fox"]


def test_sqlite_without_full_text_search_says_so(
    filled: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "_SCHEMA", words._SCHEMA.replace("fts5", "fts99"))
    with pytest.raises(StoreError, match="FTS5"):
        filled.search_words("fox")
