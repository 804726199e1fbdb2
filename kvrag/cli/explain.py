"""`kvrag explain`: show which parts of a prompt are reused, repaired and computed, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import DocumentError
from kvrag.fusion.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvrag.engine.answer import Part

_STYLES = {
    "kept": "cyan",
    "exact": "bold green",
    "reused": "green",
    "repaired": "yellow",
    "fresh": "",
}


def explain(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A text file with the whole prompt.")
    ],
    opening: o.Opening,
    policy: o.PolicyOption = DEFAULT_POLICY,
    ratio: o.RatioOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show which tokens of a prompt are reused, repaired and computed, and why.

    The prompt is fused, but not answered.
    """
    prompt = _read(file)
    with opening.open() as opened:
        from kvrag.engine.engine import KVEngine
        from kvrag.engine.prompt_reader import PromptReader, prompt_parts
        from kvrag.engine.request import Request

        engine = KVEngine(opened, links="off")
        laid_out = PromptReader(opened).lay_out(Request(prompt))
        with console.working("loading the model"):
            fused = engine.fuse(prompt, policy=policy, ratio=ratio)
        parts = prompt_parts(laid_out, fused)
        report = fused.report
    if as_json:
        console.print_json({"parts": parts, "report": report})
        return
    _print(parts)
    console.out().print(f"\n{report.one_line()}", style="dim", markup=False)


def _read(file: Path) -> str:
    from kvrag.regularfile import read_regular

    try:
        return read_regular(file).decode("utf-8")
    except OSError as error:
        raise DocumentError(f"cannot read {file}: {error}; give a text file") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{file} is not UTF-8 text: {error}; give a text file") from error


def _print(parts: Sequence[Part]) -> None:
    from rich.text import Text

    text = Text()
    for part in parts:
        text.append(console.harmless(part.text), style=_STYLES[part.state])
    out = console.out()
    out.print(text)
    out.print()
    numbers: Counter[tuple[str, str]] = Counter()
    for part in parts:
        numbers[part.state, part.why] += part.end - part.start
    for (state, why), number in sorted(numbers.items(), key=lambda one: -one[1]):
        line = f"{number:>7,} tokens {state:<9} {console.one_line(why)}"
        out.print(Text(line, style=_STYLES[state]))
