"""The handbook of a made-up ferry line: the prose that ships with kvrag."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from kvrag.errors import ParameterError

_CHECKOUT = Path(__file__).resolve().parents[3]


def handbook_folder() -> Path:
    """Return the folder of the pages: the checkout's, or that of an installation's shared data.

    Raises
    ------
    ParameterError
        When neither has them.
    """
    data = Path(sysconfig.get_path("data"))
    folders = [_CHECKOUT / "examples" / "handbook", data / "share" / "kvrag" / "handbook"]
    for folder in folders:
        if any(folder.glob("*.md")):
            return folder
    raise ParameterError(
        f"the handbook is in neither {folders[0]} nor {folders[1]}; install kvrag again"
    )


def handbook_pages() -> list[str]:
    """Return the Markdown pages, in the order of their names. Raises as `handbook_folder`."""
    return [page.read_text("utf-8") for page in sorted(handbook_folder().glob("*.md"))]
