"""The handbook of a made-up ferry line: the prose that ships with kvrag."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from kvrag.errors import ParameterError

_CHECKOUT = Path(__file__).resolve().parents[3]


def handbook_pages() -> list[str]:
    """Return the Markdown pages, from the checkout or from the shared data of an installation.

    Raises
    ------
    ParameterError
        When neither has them.
    """
    data = Path(sysconfig.get_path("data"))
    folders = [_CHECKOUT / "examples" / "handbook", data / "share" / "kvrag" / "handbook"]
    for folder in folders:
        if pages := sorted(folder.glob("*.md")):
            return [page.read_text("utf-8") for page in pages]
    raise ParameterError(
        f"the handbook is in neither {folders[0]} nor {folders[1]}; install kvrag again"
    )
