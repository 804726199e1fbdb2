"""Pages of prose, cut into chunks."""

from __future__ import annotations

_LEAST_WORDS = 90


def cut(page: str) -> list[str]:
    """Return a Markdown page as chunks of whole paragraphs, of at least 90 words but the last."""
    pieces: list[str] = []
    for paragraph in page.strip().split("\n\n"):
        if pieces and len(pieces[-1].split()) < _LEAST_WORDS:
            pieces[-1] += f"\n\n{paragraph}"
        else:
            pieces.append(paragraph)
    return pieces


def first_paragraph(page: str) -> str:
    """Return the first paragraph of a page, as one line; headings do not count."""
    paragraphs = page.strip().split("\n\n")
    return " ".join(next(text for text in paragraphs if text[0] != "#").split())
