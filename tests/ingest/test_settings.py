"""What callers of `Index.create` choose, and parts of an index that share what it keeps."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvrag.chunk import Document
from kvrag.ingest.index import Index
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.ray.driver import RayOptions
from kvrag.ingest.settings import IndexSettings
from kvrag.models.kv_model import KVModel
from kvrag.optiontable import options_of, text_of
from kvrag.store.memory import MemoryStore


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


def test_all_parts_use_the_store_that_is_set(index: Index) -> None:
    own, other = index.store, MemoryStore()
    index.store = other
    index.add([Document("a", "Ines keeps the harbour ledger of Varn.")])
    assert not list(own.keys())
    assert len(list(other.keys())) == index.upkeep.verify().num_records == 1
    assert index.open_kv(index.search_words("ledger", 1)[0].chunk.chunk_id) is not None
    index.store = own
