"""Modules do not import one another in circles, and the map in the docs is the house's."""

import ast
import functools
import re
from pathlib import Path

from kvrag import errors
from kvrag.models.families import TESTED
from tools import models, structure
from tools.structure import PICTURE, ROOT, circles, draw, package_graph, reached_from

MAP = (ROOT / "docs" / "structure.md").read_text()
WORDS = (ROOT / "docs" / "explanation" / "words.md").read_text()

# Not where it is imported: each worker would read all modules.
module_graph = functools.cache(structure.module_graph)


def parts() -> structure.Graph:
    return package_graph(module_graph())


def names(text: str, ending: str = "") -> list[str]:
    """Return what a text names in backticks, if it ends so."""
    return re.findall(rf"`([\w/.]+{ending})`", text)


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def test_no_modules_import_one_another() -> None:
    assert circles(module_graph()) == []
    assert circles(parts()) == []


def test_imports_for_typing_and_inside_functions_count() -> None:
    used = module_graph()["kvrag.ingest.encoders"]
    assert {"kvrag.models.kv_model", "kvrag.models.loading"} <= used


def test_the_picture_is_current() -> None:
    assert PICTURE.read_text() == draw(parts()), "run 'python -m tools.structure'"


def test_the_page_of_models_is_current() -> None:
    page = models.PAGE.read_text()
    assert models.with_tables(page) == page, "run 'python -m tools.models'"
    assert all(f"`{name}`" in page for name in TESTED)


def test_kvrag_imports_nothing_of_what_is_beside_it() -> None:
    graph = module_graph()
    beside = {name for name in graph if name.startswith("kvrag_")}
    assert beside
    for name in set(graph) - beside:
        assert not graph[name] & beside, name


def test_the_map_has_every_package_and_names_files_that_exist() -> None:
    for name in parts():
        assert f"`{name}`" in MAP, name
    named = [name for name in names(MAP) if "/" in name or name.endswith(".py")]
    assert len(named) > 40
    assert [
        one for one in named if not (ROOT / one).exists() and not (ROOT / "kvrag" / one).exists()
    ] == []


def test_the_map_fits_two_screens() -> None:
    assert len(MAP.splitlines()) <= 130


def test_a_package_says_in_ten_lines_what_it_is() -> None:
    found = [*(ROOT / "kvrag").rglob("__init__.py")]
    for path in [*found, *(ROOT / "bench").rglob("kvrag_*/**/__init__.py")]:
        says = docstring(path)
        assert 1 <= len(says.splitlines()) <= 10, path
        for name in names(says, r"\.py"):
            assert (path.parent / name).exists() or (ROOT / name).exists(), (path, name)


def test_a_package_says_what_it_may_import_and_where_to_begin() -> None:
    graph = parts()
    reached = reached_from(graph)
    for part, used in graph.items():
        folder = ROOT / "kvrag" / part
        says = docstring((folder if folder.exists() else ROOT / "bench" / part) / "__init__.py")
        assert re.search(r"^Begin with `\w[\w/]*\.py`", says, re.MULTILINE), part
        imports = re.search(r"^Imports (.*?)\.(?:\s|$)", says, re.DOTALL | re.MULTILINE)
        assert imports, part
        allowed = set(names(imports[1])) & set(graph)
        if "below" in imports[1]:
            allowed = allowed.union(*(reached[one] for one in allowed))
        assert used <= allowed, part


def test_the_glossary_stays_short() -> None:
    assert len(re.findall(r"^\| (?!word|---)", WORDS, re.MULTILINE)) <= 30


def test_the_tree_of_exceptions_is_whole() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.KVRagError)
    }
    drawn = set(re.findall(r"\b\w+Error\b", (errors.__doc__ or "").partition("::")[2]))
    assert drawn - {"ValueError"} == defined
