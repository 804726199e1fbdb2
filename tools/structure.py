"""The imports of kvrag as a graph: checked for circles, and drawn for `docs/structure.md`.

``python -m tools.structure`` writes ``docs/structure.svg``. Imports for typing and imports inside
functions count like all others.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "structure.svg"
# Import packages, and the folders that they lie in.
_FOLDERS = {
    "kvrag": ROOT,
    "kvrag_bench": ROOT / "bench",
    "kvrag_corpus": ROOT / "bench",
    "kvrag_testing": ROOT / "bench",
    "kvrag_train": ROOT / "bench",
}

Graph = Mapping[str, frozenset[str]]
"""From a module to the modules that it imports."""

# What each box says, below its name.
_SAYS = {
    "kvrag_train": "link tokens",
    "kvrag_bench": "measuring",
    "kvrag_corpus": "generated documents",
    "kvrag_testing": "suites to subclass",
    "cli": "commands",
    "server": "OpenAI-compatible API",
    "tune": "calibrating, choosing stores",
    "retrievers": "LangChain, LlamaIndex",
    "llms": "LangChain, LlamaIndex, vLLM",
    "pml": "prompt markup",
    "engine": "prompts in, answers out",
    "ingest": "documents to an index",
    "fusion": "stored KV into a prompt",
    "loading": "reading beside computing",
    "codec": "KV to bytes and back",
    "store": "where bytes are kept",
    "eviction": "forgetting while answering",
    "models": "Hugging Face decoders",
    "weights": "GGUF files, models by name",
    "positions": "rotary and other positions",
    "native": "compiled kernels",
}


@functools.cache
def module_graph() -> Graph:
    """Return which modules of all packages import which others of them."""
    files = {
        _name(path.relative_to(folder)): path
        for package, folder in _FOLDERS.items()
        for path in sorted((folder / package).rglob("*.py"))
    }
    graph = {name: frozenset(_imports(name, path, files)) for name, path in files.items()}
    return {name: used - {name} for name, used in graph.items()}


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that import one another, each sorted; none is what we want."""
    reached = reached_from(graph)
    groups = []
    for module in sorted(graph):
        mutual = sorted(one for one in reached[module] if module in reached[one])
        if mutual and mutual[0] == module:
            groups.append(mutual)
    return groups


def package_graph(graph: Graph) -> Graph:
    """Return the graph of the packages directly below `kvrag`, and of those beside it.

    Single modules are left out.
    """
    edges: dict[str, set[str]] = {}
    for module, used in graph.items():
        part = _package(module)
        if part:
            others = {_package(one) for one in used} - {"", part}
            edges.setdefault(part, set()).update(others)
    return {part: frozenset(used) for part, used in edges.items()}


def without_implied(graph: Graph) -> Graph:
    """Return a graph without the arrows that follow from others."""
    reached = reached_from(graph)
    return {
        part: frozenset(
            one for one in used if not any(one in reached[other] for other in used - {one})
        )
        for part, used in graph.items()
    }


def draw(graph: Graph) -> str:
    """Return the packages as an SVG picture, those that import others above them."""
    rows = _rows(graph)
    width, box_width, box_height, gap = 940, 200, 46, 34
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        space = (width - len(row) * box_width) / (len(row) + 1)
        for column, part in enumerate(row):
            x = space + column * (box_width + space)
            places[part] = (x, 16 + number * (box_height + gap))
    height = 16 + len(rows) * (box_height + gap)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" role="img">',
        "<title>The packages of kvrag: an arrow leads to what is imported</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#64748b"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    arrows = without_implied(graph)
    for part in sorted(graph):
        x, y = places[part]
        for other in sorted(arrows[part]):
            to_x, to_y = places[other]
            start = f"{x + box_width / 2:.0f} {y + box_height:.0f}"
            end = f"{to_x + box_width / 2:.0f} {to_y:.0f}"
            middle = (y + box_height + to_y) / 2
            curve = f"{x + box_width / 2:.0f} {middle:.0f} {to_x + box_width / 2:.0f} {middle:.0f}"
            lines.append(
                f'<path d="M{start} C{curve} {end}" fill="none" stroke="#94a3b8" '
                'stroke-width="1.3" marker-end="url(#tip)"/>'
            )
    for part, (x, y) in places.items():
        lines += [
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{box_width}" height="{box_height}" rx="7" '
            'fill="#f1f5f9" stroke="#475569"/>',
            f'<text x="{x + box_width / 2:.0f}" y="{y + 20:.0f}" text-anchor="middle" '
            f'font-size="15" font-weight="600" fill="#0f172a">{part}</text>',
            f'<text x="{x + box_width / 2:.0f}" y="{y + 36:.0f}" text-anchor="middle" '
            f'font-size="12" fill="#475569">{_SAYS.get(part, "")}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def _rows(graph: Graph) -> list[list[str]]:
    """Return the packages by layer, the highest first, as the contract of layers names them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (layers,) = (
        contract["layers"]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    )
    named = [[one.strip().removeprefix("kvrag.") for one in row.split("|")] for row in layers]
    return [row for row in ([one for one in row if one in graph] for row in named) if row]


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package(module: str) -> str:
    """Return the package that a module is in, "" for a single module of `kvrag`."""
    top, *below = module.split(".")
    if top != "kvrag":
        return top
    return below[0] if below and (ROOT / "kvrag" / below[0]).is_dir() else ""


def _imports(module: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in known:
                    yield whole
                # What a package's face hands on is not counted against its modules.
                elif node.module in known and not module.startswith(f"{node.module}."):
                    yield node.module


def reached_from(graph: Graph) -> Graph:
    """Return for each node all that it imports, straight or through others."""
    reached = {}
    for node in graph:
        seen: set[str] = set()
        waiting = list(graph[node])
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting += graph.get(one, ())
        reached[node] = frozenset(seen)
    return reached


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(draw(package_graph(module_graph())))
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
