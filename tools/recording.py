"""Run a command on a terminal and draw what it printed: `python -m tools.recording SVG -- COMMAND`.

The picture scrolls as the terminal did, at the command's own speed, and shows its end where
nothing is animated. Only stdout is recorded; progress on stderr is not.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import os
import pty
import shlex
import subprocess
import time
from pathlib import Path
from string import Template

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

COLUMNS = 80
ROWS = 24
_PAUSE_SECONDS = 8.0  # at the end, before it begins again
_LINE_PIXELS = 24.4  # as Rich draws them

# What Rich fills in has braces; the rest is filled in before. Rich's own format embeds a font
# from the network, and draws all lines at once.
_FORMAT = Template(
    """\
<svg viewBox="-12 -12 {width} $outer" xmlns="http://www.w3.org/2000/svg" \
xml:space="preserve">
<style>
.{unique_id}-matrix {{ font-family: "Fira Code", Menlo, Consolas, monospace; \
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
.scroll {{ transform: translateY(${end}px); animation: scroll ${seconds}s step-end infinite; }}
@keyframes scroll {{
$frames
}}
</style>
<defs>
<clipPath id="screen"><rect width="{terminal_width}" height="$height"/></clipPath>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" \
height="{terminal_height}"/></clipPath>
{lines}
</defs>
<rect x="-12" y="-12" width="{width}" height="$outer" rx="8" fill="#191919"/>
<g clip-path="url(#screen)"><g class="scroll">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g></g>
</svg>
"""
)


Pieces = list[tuple[float, str]]
"""What a command printed, in pieces, each with its seconds since the command began."""


def record(command: list[str]) -> Pieces:
    """Run a command with stdout on a terminal, and return what it prints; show it as well.

    Raises
    ------
    SystemExit
        When the command fails.
    """
    terminal, end = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
    pieces: Pieces = []
    decode = codecs.getincrementaldecoder("utf-8")().decode
    started = time.monotonic()
    with subprocess.Popen(command, stdout=end, env=os.environ | size) as process:
        os.close(end)
        with contextlib.suppress(OSError):  # how Linux says that the command has closed its end
            while data := os.read(terminal, 1 << 16):
                text = decode(data).replace("\r\n", "\n")
                pieces.append((time.monotonic() - started, text))
                print(text, end="", flush=True)
    os.close(terminal)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with exit code {process.returncode}")
    return pieces


def draw(command: str, pieces: Pieces) -> str:
    """Return the picture of a recording, as SVG."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        color_system="truecolor",
        force_terminal=True,
    )
    shown = [(0.0, f"$ {command}\n"), *pieces]
    console.print(Text.from_ansi("".join(text for _, text in shown)), soft_wrap=False)
    height = ROWS * _LINE_PIXELS
    scrolled = [
        (seconds, height - num_lines * _LINE_PIXELS) for seconds, num_lines in _lines_by_time(shown)
    ]
    total = scrolled[-1][0] + _PAUSE_SECONDS
    frames = "\n".join(
        f"{100 * seconds / total:.2f}% {{{{ transform: translateY({y:.1f}px); }}}}"
        for seconds, y in scrolled
    )
    template = _FORMAT.substitute(
        height=f"{height:.0f}",
        outer=f"{height + 24:.0f}",
        end=f"{scrolled[-1][1]:.1f}",
        seconds=f"{total:.1f}",
        frames=frames,
    )
    return console.export_svg(theme=DIMMED_MONOKAI, code_format=template, unique_id="demo")


def _lines_by_time(pieces: Pieces) -> list[tuple[float, int]]:
    """Return how many lines of the terminal were filled at each time at which there were more."""
    counts: list[tuple[float, int]] = []
    text = ""
    for seconds, piece in pieces:
        text += piece
        lines = Text.from_ansi(text).wrap(Console(width=COLUMNS), COLUMNS)
        if not counts or len(lines) > counts[-1][1]:
            counts.append((seconds, len(lines)))
    return counts


def main() -> None:
    """Record the command that is named, and write its picture."""
    parser = argparse.ArgumentParser(prog="python -m tools.recording", description=__doc__)
    parser.add_argument("svg", type=Path, help="file to write")
    parser.add_argument("command", nargs="+", help="command to run, after --")
    named = parser.parse_args()
    program, *arguments = named.command
    told = shlex.join([Path(program).name, *arguments])
    named.svg.write_text(draw(told, record(named.command)), encoding="utf-8")


if __name__ == "__main__":
    main()
