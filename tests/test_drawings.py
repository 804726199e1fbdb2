"""The pictures that explain how kvrag works are those that their script draws."""

import re
from pathlib import Path

from tools import drawings


def _words(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>|<tspan[^>]*>([^<]*)", picture.read_text("utf-8"))


def test_the_pictures_are_current(tmp_path: Path) -> None:
    drawings.main(tmp_path)
    for name in drawings.PICTURES:
        # Another version of Matplotlib may place them a little differently.
        assert _words(tmp_path / name), name
        assert _words(tmp_path / name) == _words(drawings.FOLDER / name), "python -m tools.drawings"
