"""Runs a stage of ``tools/gpu_report.sh``, given its name, seconds, the report and a command.

The command's output is one JSON document, and part of a line of the report, whatever happens. When
three quarters of the time are over, or all but ten seconds of it, the command is interrupted, and
tells what it has; when all of it is, it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_SAID = 2000


def run(name: str, seconds: float, command: list[str]) -> dict[str, Any]:
    """Return a stage's line."""
    began, grace = time.monotonic(), min(10.0, seconds / 4)
    # A shell that runs the script in the background ignores interrupts, and its children do, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as said:
        running = subprocess.Popen(command, stdout=told, stderr=said, start_new_session=True)
        is_cut = False
        try:
            for limit, end in ((seconds - grace, signal.SIGINT), (grace, signal.SIGKILL)):
                try:
                    running.wait(limit)
                except subprocess.TimeoutExpired:
                    is_cut = True
                    os.killpg(running.pid, end)
            status = running.wait()
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
        texts = []
        for one in (told, said):
            one.seek(0)
            texts.append(one.read())
    print(f"== {name}: {' '.join(command)}\n{texts[1]}{texts[0]}", file=sys.stderr)
    try:
        found = json.loads(texts[0])
    except ValueError:
        found = texts[0][-_SAID:]
    line = {"stage": name, "exit": status, "seconds": round(time.monotonic() - began, 1)}
    if is_cut or status:
        line |= {"cut": is_cut, "said": texts[1][-_SAID:]}
    return line | {"found": found}


def main() -> None:
    """Run a stage, and write its line."""
    name, seconds, report, *command = sys.argv[1:]
    line = run(name, float(seconds), command)
    with Path(report).open("a") as file:
        file.write(json.dumps(line) + "\n")
    cut = ", cut" if line.get("cut") else ""
    print(f"{name}: exit {line['exit']}, {line['seconds']:.0f} s{cut}")


if __name__ == "__main__":
    main()
