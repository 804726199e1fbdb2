"""Modules do not import one another in circles, and the map in the docs is the house's."""

from __future__ import annotations

import re

from kvrag import errors
from kvrag.models.families import FAMILIES
from tools import models
from tools.structure import PICTURE, ROOT, circles, draw, module_graph, package_graph, with_files

GRAPH = module_graph()
MAP = (ROOT / "docs" / "structure.md").read_text()


def test_no_modules_import_one_another() -> None:
    assert circles(GRAPH) == []
    assert circles(package_graph(GRAPH)) == []


def test_circles_are_found() -> None:
    graph = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset("a")}
    assert circles(graph) == [["a", "b", "c"]]


def test_imports_for_typing_and_inside_functions_count() -> None:
    assert "kvrag.models.kv_model" in GRAPH["kvrag.ingest.encoders"]
    assert "kvrag.fusion.compression.encoding" in GRAPH["kvrag.ingest.encoders"]


def test_the_picture_is_current() -> None:
    assert PICTURE.read_text() == draw(package_graph(GRAPH)), "run 'python -m tools.structure'"


def test_the_page_of_models_is_current() -> None:
    page = models.PAGE.read_text()
    assert models.with_tables(page) == page, "run 'python -m tools.models'"
    assert all(f"| `{name}` |" in page for name in FAMILIES)


def test_the_list_of_files_is_current() -> None:
    assert with_files(MAP) == MAP, "run 'python -m tools.structure'"


def test_kvrag_imports_nothing_of_what_is_beside_it() -> None:
    beside = {name for name in GRAPH if name.startswith("kvrag_")}
    assert beside
    for name in set(GRAPH) - beside:
        assert not GRAPH[name] & beside, name


def test_files_and_packages_of_the_map_exist() -> None:
    for name in re.findall(r"`((?:kvrag|bench|tests|cuda)/[\w/.]*)`", MAP):
        assert "NAME" in name or (ROOT / name).exists(), name
    assert {name for name in package_graph(GRAPH) if f"kvrag.{name}" not in GRAPH} == {
        "kvrag_bench",
        "kvrag_corpus",
        "kvrag_train",
    }


def test_every_package_is_on_the_map() -> None:
    for name in package_graph(GRAPH):
        assert f"`{name}`" in MAP, name


def test_the_glossary_stays_short() -> None:
    words = MAP.partition("## Words")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| (?!word|---)", words, re.MULTILINE)) <= 30


def test_the_map_names_files_that_exist() -> None:
    named = re.findall(r"`((?:kvrag|bench|cuda|tests)/[\w./]*)`", MAP)
    assert len(named) > 40
    assert [one for one in named if "NAME" not in one and not (ROOT / one).exists()] == []


def test_the_tree_of_exceptions_is_whole() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.KVRagError)
    }
    drawn = set(re.findall(r"\b\w+Error\b", (errors.__doc__ or "").partition("::")[2]))
    assert drawn - {"ValueError"} == defined
