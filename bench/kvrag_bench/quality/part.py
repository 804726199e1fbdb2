"""One of several processes of `kvrag bench quality --jobs`: ``python -m kvrag_bench.quality.part``.

Its argument is a JSON list: the options, and the number of its part.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from kvrag.cli.opening import quiet_libraries
from kvrag_bench.quality.contest import judge_part
from kvrag_bench.quality.entrants import QualityOptions

if __name__ == "__main__":
    # An interrupt ends the first process, which ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet_libraries()
    given, part = json.loads(sys.argv[1])
    judge_part(QualityOptions(**{**given, "out": Path(given["out"])}), part)
