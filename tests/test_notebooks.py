"""The notebooks run, and the pages of the site are these notebooks."""

from pathlib import Path

import pytest

from kvrag.weights.named import named_model
from tools.notebooks import FOLDER, SOURCES, execute, missing, write_page

MODEL = "smollm2-135m"
ALL = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


@ALL
def test_the_page_is_current(source: Path) -> None:
    page = source.with_suffix(".md")
    assert list(missing(source, page)) == [], f"run 'python -m tools.notebooks {source.stem}'"
    assert "```text\n" in page.read_text()


def test_outputs_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000


def test_a_changed_cell_is_missing(tmp_path: Path) -> None:
    source, page = tmp_path / "a.py", tmp_path / "a.md"
    source.write_text("# %%\nx = 1\n\n# %%\ny = 2\n\n# %%\nz = 3\n")
    page.write_text("x = 1\n\nz = 3\n")
    assert list(missing(source, page)) == ["y = 2"]


@pytest.mark.slow
@ALL
def test_it_runs(source: Path, tmp_path: Path) -> None:
    named = named_model(MODEL)
    if named is None or not named.is_installed:
        pytest.skip(f"needs 'kvrag models pull {MODEL}'")
    page = write_page(execute(source), source.stem, tmp_path)
    assert "```text\n" in page.read_text()
    assert page.read_text().count(".png)") == source.read_text().count("plt.show()")
