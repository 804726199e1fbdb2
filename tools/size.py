"""How large the house is, and a gate that keeps it from growing: `python -m tools.size`.

It prints each number beside the one in `tools/size.json`, and fails if one is larger there than
recorded. `--save` records smaller numbers; larger ones only with `--reason TEXT`, which is kept
beside the number. `--seconds N` records how long `make test` took, which is never compared.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from pathlib import Path

import typer

from tools.commands import commands

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tools" / "size.json"
MAX_METHODS, MAX_PARAMETERS = 12, 6
# Commands of another distribution.
_APART = ("bench", "train", "inspect")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """Return the number of lines with code: no docstrings, comments or blank lines."""
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - texts)


def wide_classes(source: str) -> list[str]:
    """Return the names of classes with more than `MAX_METHODS` public methods."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(one, _Function) and one.name[0] != "_" for one in node.body)
        > MAX_METHODS
    ]


def wide_functions(source: str) -> list[str]:
    """Return the names of functions with more than `MAX_PARAMETERS`, `self` not counted."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, _Function) and _num_parameters(node.args) > MAX_PARAMETERS
    ]


def _num_parameters(arguments: ast.arguments) -> int:
    names = [one.arg for one in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def shown_options() -> list[int]:
    """Return how many options the help of each command shows."""
    return [
        sum(
            parameter.param_type_name == "option" and not parameter.hidden
            for parameter in command.get_params(typer.Context(command))
        )
        for _, command in commands(apart=_APART)
    ]


def measure() -> dict[str, int]:
    """Return each number by its name."""
    package = {path: path.read_text("utf-8") for path in sorted((ROOT / "kvrag").rglob("*.py"))}
    outside = [text for path, text in package.items() if "cli" not in path.parts]
    options = shown_options()
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    words = {path: len(path.read_text("utf-8").split()) for path in pages}
    return {
        "lines of code": sum(map(code_lines, package.values())),
        "modules": len(package),
        "classes with more than 12 public methods": sum(
            map(len, map(wide_classes, package.values()))
        ),
        "functions with more than 6 parameters outside the command line": sum(
            map(len, map(wide_functions, outside))
        ),
        "options": sum(options),
        "options of the largest command": max(options),
        "lines of code in tests": sum(
            code_lines(path.read_text("utf-8")) for path in (ROOT / "tests").rglob("*.py")
        ),
        "words of README": words[ROOT / "README.md"],
        "words of README and docs": sum(
            number for path, number in words.items() if path.name != "CHANGELOG.md"
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="record today's numbers")
    parser.add_argument("--reason", help="why a number rises; kept beside it")
    parser.add_argument("--seconds", type=int, help="record how long `make test` took")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    numbers = measure()
    risen = []
    for name, number in numbers.items():
        old = record.get(name, {"number": number})
        print(
            f"{number:>8,}  {name}" + (f" ({old['number']:,})" if old["number"] != number else "")
        )
        if number > old["number"] and not (arguments.save and arguments.reason):
            risen.append(name)
        elif arguments.save:
            reason = arguments.reason if number > old["number"] else old.get("reason")
            record[name] = {"number": number} | ({"reason": reason} if reason else {})
    if arguments.seconds is not None:
        record["seconds of make test"] = {"number": arguments.seconds}
    if risen:
        raise SystemExit(
            f"Larger than tools/size.json says: {', '.join(risen)}. Make the change smaller, or "
            "record why it is worth it: make size REASON='...'"
        )
    if arguments.save or arguments.seconds is not None:
        RECORD.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
