"""`python -m kvrag.cli`, the same as the installed `kvrag`."""

from __future__ import annotations

from kvrag.cli.main import run

run()
