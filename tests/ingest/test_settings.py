"""What callers of `Index.create` choose, and parts of an index that share what it keeps."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvrag.ingest.index import Index
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.ray.driver import RayOptions
from kvrag.ingest.settings import IndexSettings
from kvrag.models.kv_model import KVModel
from kvrag.optiontable import options_of, text_of


def test_every_option_says_what_it_does() -> None:
    for options in (IndexSettings, ParseLimits, RayOptions):
        names = [one.name for one, _ in options_of(options)]
        assert names == [one.name for one in fields(options)]
        for name in names:
            assert f"    {name}\n        {text_of(options, name)[:20]}" in str(options.__doc__)


def test_an_unknown_option_makes_nothing(tmp_path: Path, model: KVModel) -> None:
    options: Any = {"chunk_token": 64}
    with pytest.raises(TypeError, match="'chunk_token'"):
        Index.create(tmp_path / "index", model=model, **options)
    assert not (tmp_path / "index").exists()
