"""Run the notebooks in `docs/notebooks/`, and write them with their outputs as pages of the site.

``python -m tools.notebooks [NAME ...]`` writes a page for each source (``*.py``, jupytext's percent
format), and its pictures beside it. What libraries write to stderr is left out.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
_MOST_OUTPUT = 2000  # characters of a cell's text: a page is read by people


def execute(source: Path) -> NotebookNode:
    """Return a notebook with its outputs.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell fails.
    """
    notebook = jupytext.read(source)
    # The kernel is this interpreter, in the repository's root. Sockets of files, not of a network.
    client = NotebookClient(notebook, timeout=1800, kernel_name="python3")
    client.km = client.create_kernel_manager()
    client.km.transport = "ipc"
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
        if text := "".join(map(_text, cell.outputs)).rstrip():
            parts.append(f"```text\n{text}\n```")
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                picture = folder / f"{name}-{number}.png"
                drawn = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
                drawn.convert("RGB").quantize(128).save(picture, optimize=True)
                parts.append(f"![What the code above draws]({picture.name})")
    parts.append(
        f"This page is the notebook `docs/notebooks/{name}.py` with its outputs. "
        f"`jupytext --to ipynb` makes a notebook of that file, `make notebooks` this page."
    )
    page = folder / f"{name}.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def _text(output: NotebookNode) -> str:
    text = str(output.text) if output.get("name") == "stdout" else ""
    if len(text) > _MOST_OUTPUT:
        raise SystemExit(f"an output has {len(text):,} characters, at most {_MOST_OUTPUT:,}")
    return text


def missing(source: Path, page: Path) -> Iterator[str]:
    """Yield the cells of a notebook that its page does not have, in this order."""
    text = page.read_text("utf-8")
    for cell in jupytext.read(source).cells:
        before, found, text = text.partition(cell.source)
        if not found:
            text = before
            yield cell.source


def main() -> None:
    for source in SOURCES:
        if not sys.argv[1:] or source.stem in sys.argv[1:]:
            print(write_page(execute(source), source.stem, FOLDER))


if __name__ == "__main__":
    main()
