"""Run the notebooks in `docs/notebooks/`, and write them with their outputs as pages of the site.

``python -m tools.notebooks`` writes a page for each source (``*.py``, jupytext's percent format),
and its pictures beside it. Texts that libraries write to stderr are left out.
"""

from __future__ import annotations

import argparse
import base64
import re
from collections.abc import Iterator
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"
_MODEL = re.compile(r'^MODEL = ".*"$', re.MULTILINE)
_MOST_OUTPUT = 4000  # characters of a cell's text: a page is read by people


def sources() -> list[Path]:
    return sorted(FOLDER.glob("*.py"))


def run(source: Path, model: str | None = None) -> NotebookNode:
    """Return a notebook with its outputs.

    Parameters
    ----------
    source
        The notebook.
    model
        What to run it with instead of its own model.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell fails.
    """
    notebook = jupytext.read(source)
    if model is not None:
        cells = [cell for cell in notebook.cells if _MODEL.search(cell.source)]
        if len(cells) != 1:
            raise SystemExit(f"{source}: expected one cell with a line 'MODEL = \"...\"'")
        cells[0].source = _MODEL.sub(f'MODEL = "{model}"', cells[0].source)
    # The interpreter that runs this, and the repository's root as on a reader's machine.
    client = NotebookClient(notebook, timeout=1800, kernel_name="python3")
    client.execute(cwd=str(ROOT))
    return notebook


def write_page(notebook: NotebookNode, name: str, folder: Path) -> Path:
    """Write a notebook's cells and outputs as Markdown, its pictures as PNG; return the page."""
    parts = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                picture = folder / f"{name}-{number}.png"
                picture.write_bytes(base64.b64decode(output.data["image/png"]))
                parts.append(f"![What the code above draws]({picture.name})")
            elif text := _text(output):
                parts.append(f"```text\n{text}\n```")
    parts.append(
        f"This page is a notebook with its outputs. Its source is `docs/notebooks/{name}.py`; "
        f"`jupytext --to ipynb {name}.py` makes a notebook of it."
    )
    page = folder / f"{name}.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def _text(output: NotebookNode) -> str:
    if output.output_type == "stream":
        text = output.text if output.name == "stdout" else ""
    else:
        text = output.data.get("text/plain", "")
    if len(text) > _MOST_OUTPUT:
        raise SystemExit(f"an output has {len(text):,} characters, at most {_MOST_OUTPUT:,}")
    return str(text).rstrip()


def missing(source: Path, page: Path) -> Iterator[str]:
    """Yield the cells of a notebook that its page does not have, in this order."""
    text = page.read_text("utf-8") if page.exists() else ""
    for cell in jupytext.read(source).cells:
        before, found, text = text.partition(cell.source)
        if not found:
            text = before
            yield cell.source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="run with this model instead of each notebook's own")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the pages go")
    parser.add_argument("names", nargs="*", help="notebooks to run instead of all")
    named = parser.parse_args()
    for source in sources():
        if not named.names or source.stem in named.names:
            print(write_page(run(source, named.model), source.stem, named.out))


if __name__ == "__main__":
    main()
