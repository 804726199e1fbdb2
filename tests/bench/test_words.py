"""`kvrag bench words`: ways that cut texts well find more, and the table is printed."""

from pathlib import Path

import pytest

from kvrag.errors import ParameterError
from kvrag_bench.words import WordsRow, run_words_bench

ENGLISH = """Ines keeps the harbour ledger of Varn in a green book.
Tomas repairs the tall clock every spring.
too short
The ferry leaves the quay before dawn on Sundays.
"""
CHINESE = """
\u9c81\u8fc5\u5728\u4e00\u4e5d\u4e8c\u4e00\u5e74\u5199\u4e86\u77ed\u7bc7\u5c0f\u8bf4\u6545\u4e61\u8bb2\u8ff0\u4e86\u4ed6\u56de\u5230\u7ecd\u5174\u7684\u7ecf\u5386
\u57c3\u83f2\u5c14\u94c1\u5854\u4f4d\u4e8e\u6cd5\u56fd\u5df4\u9ece\u6218\u795e\u5e7f\u573a\u662f\u4e16\u754c\u8457\u540d\u7684\u5efa\u7b51\u4e4b\u4e00
"""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "english.txt").write_text(ENGLISH)
    (tmp_path / "chinese.txt").write_text(CHINESE, "utf-8")
    return [tmp_path / "english.txt", tmp_path / "chinese.txt"]


def test_recall_is_counted(files: list[Path], tmp_path: Path) -> None:
    rows: dict[tuple[str, str], WordsRow] = {
        (row.file, row.way): row for row in run_words_bench(files) if row.asked == "piece"
    }
    assert {row.num_questions for (file, _), row in rows.items() if file == "english"} == {3}
    assert {row.num_questions for (file, _), row in rows.items() if file == "chinese"} == {2}
    for way in ("SQLite's words", "kvrag"):
        assert rows["english", way].recall_1 == 1
    assert rows["chinese", "SQLite's words"].recall_4 == 0
    assert rows["chinese", "kvrag"].recall_1 == rows["chinese", "trigrams"].recall_1 == 1
    assert rows["chinese", "kvrag"].index_ratio < rows["chinese", "trigrams"].index_ratio
    (tmp_path / "short.txt").write_text("short\n")
    with pytest.raises(ParameterError, match="there is no such file"):
        list(run_words_bench([tmp_path / "none.txt"]))
    with pytest.raises(ParameterError, match=r"short\.txt: expected lines of at least 20"):
        list(run_words_bench([tmp_path / "short.txt"]))
