"""`kvrag explain`: show which parts of a prompt are reused, repaired and computed, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import DocumentError
from kvrag.fusion.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvrag.engine.prompt_reader import LaidOutPrompt
    from kvrag.fusion.fuser import FusedPrompt
    from kvrag.ingest.index import Index

EXACT, REUSED, REPAIRED, FRESH = "exact", "reused", "repaired", "fresh"
_STYLES = {EXACT: "bold green", REUSED: "green", REPAIRED: "yellow", FRESH: ""}


@dataclass(frozen=True)
class Part:
    """Tokens ``[start, end)`` of a prompt that are treated alike.

    Attributes
    ----------
    state
        ``exact``, ``reused``, ``repaired`` (found, but recomputed in most layers), or ``fresh``.
    why
        The source of a chunk, or the reason of fresh tokens.
    text
        The part's text.
    """

    start: int
    end: int
    state: str
    why: str
    text: str


def explain(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A text file with the whole prompt.")
    ],
    index: o.IndexOption = o.DEFAULT_INDEX,
    model: o.ModelOption = None,
    policy: o.PolicyOption = DEFAULT_POLICY,
    ratio: o.RatioOption = None,
    device: o.DeviceOption = None,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show which tokens of a prompt are reused, repaired and computed, and why.

    The prompt is fused, but not answered.
    """
    from kvrag.cli.opening import open_index
    from kvrag.engine.engine import KVEngine
    from kvrag.engine.prompt_reader import PromptReader
    from kvrag.engine.request import Request

    prompt = _read(file)
    with open_index(index, model, device, store) as opened:
        engine = KVEngine(opened, links="off")
        laid_out = PromptReader(opened).lay_out(Request(prompt))
        with console.working("loading the model"):
            fused = engine.fuse(prompt, policy=policy, ratio=ratio)
        parts = list(_parts(opened, prompt, laid_out, fused))
        report = fused.report
    if as_json:
        console.print_json({"parts": [asdict(one) for one in parts], "report": report.to_dict()})
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


def _parts(
    index: Index, prompt: str, laid_out: LaidOutPrompt, fused: FusedPrompt
) -> Iterator[Part]:
    """Yield the parts of a prompt in order."""
    from kvrag.fusion.fuser import MADE
    from kvrag.ingest.prompt_tokens import tokenise_prompt
    from kvrag.models.chat import PromptText

    layout = fused.layout
    num_tokens = len(layout.token_ids)
    states = [(FRESH, "")] * num_tokens
    for one in laid_out.fresh:
        states[one.start : one.end] = [(FRESH, one.reason)] * (one.end - one.start)
    # Only the first chunk can be exact without a stored record.
    made = (FRESH, MADE) if fused.report.num_made else None
    times = Counter(row for picked in fused.picks for row in picked.tolist())
    for span in layout.spans:
        chunk = laid_out.chunks[span.chunk_id]
        why = f"{chunk.source}, chunk {chunk.ordinal}"
        plain = EXACT if layout.is_exact(span) else REUSED
        for row in range(span.prompt_start, span.prompt_end):
            is_repaired = 2 * times[row] > len(fused.picks)
            states[row] = (REPAIRED if is_repaired else plain, why)
        if made is not None and plain == EXACT:
            states[span.prompt_start : span.prompt_end] = [made] * span.length
    offsets = tokenise_prompt(index, PromptText(prompt, True), ()).offsets
    written = 0
    for (state, why), rows in groupby(range(num_tokens), states.__getitem__):
        first, *_, last = (*rows,) * 2
        # Special tokens that the tokenizer adds have no text; bytes of one character share theirs.
        end = max(written, offsets[last][1]) if offsets else written
        end = len(prompt) if last == num_tokens - 1 else end
        yield Part(first, last + 1, state, why, prompt[written:end])
        written = end


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
