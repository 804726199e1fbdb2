"""Results of `kvrag bench regress` in JSON files, one for each release."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kvrag.errors import ParameterError
from kvrag.ingest.config import write_atomically
from kvrag.native.kernels import instruction_set
from kvrag.regularfile import read_regular
from kvrag.tune.calibrate import mean_interval

SPEED = "speed"
QUALITY = "quality"

_FORMAT = 1
_LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True)
class Entry:
    """One figure, measured several times. Less is better.

    Attributes
    ----------
    group
        `SPEED`: values are repeated timings. `QUALITY`: each value is of one case (a question, a
        chunk), and the same case of another release can be compared with it.
    name
        What was measured; releases are compared by it.
    unit
        What a value of 1 is.
    values
        At least one finite number.
    """

    group: str
    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median of timings, the mean of cases."""
        return median(self.values) if self.group == SPEED else fmean(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """The least and the greatest timing; for cases the 95 % interval of the mean.

        Six timings enclose the median of all possible ones in 97 of 100 runs, however they are
        distributed.
        """
        if self.group == SPEED:
            return min(self.values), max(self.values)
        return mean_interval(self.values)


@dataclass(frozen=True)
class Results:
    """What one run measured.

    Attributes
    ----------
    version
        The release, or the version of kvrag that was measured.
    processor
        Name and instruction set. Timings of another one are not compared.
    libraries
        Versions of those that plain Transformers consists of.
    entries
        What was measured.
    """

    version: str
    processor: str
    libraries: dict[str, str]
    entries: tuple[Entry, ...]


def results_here(entries: Sequence[Entry]) -> Results:
    """Return results that were measured by this process."""
    libraries = {name: version(name) for name in _LIBRARIES}
    return Results(version("kvrag"), _processor(), libraries, tuple(entries))


def _processor() -> str:
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(found, name)}, {instruction_set()}"


def release_path(folder: Path, name: str) -> Path:
    """Return the file of a release's results.

    Raises
    ------
    ParameterError
        If `name` is no version, or there is no such folder.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", name):
        raise ParameterError(f"release {name!r}: expected three numbers, as in 0.2.0")
    if not folder.is_dir():
        raise ParameterError(f"there is no folder {folder} for the results of releases: create it")
    return folder / f"{name}.json"


def write_results(results: Results, path: Path) -> None:
    """Write results, replacing those that are there.

    Raises
    ------
    StoreError
        If the file cannot be written.
    """
    # A line for each figure, so that differences between versions of the file can be read.
    head = {name: value for name, value in asdict(results).items() if name != "entries"}
    lines = [json.dumps(asdict(entry), ensure_ascii=False) for entry in results.entries]
    said = json.dumps({"format": _FORMAT, **head}, ensure_ascii=False, indent=1)[:-2]
    text = f'{said},\n "entries": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
    write_atomically(path, text.encode())


def read_releases(folder: Path) -> list[Results]:
    """Return the results of all releases in a folder, the oldest first; none if it is not there.

    Raises
    ------
    ParameterError
        If a file cannot be read, or holds no such results.
    """
    found = [_read(release_path(folder, path.stem)) for path in folder.glob("*.json")]
    return sorted(found, key=lambda results: _order(results.version))


def last_before(releases: Sequence[Results], name: str | None) -> Results | None:
    """Return the newest release, or the newest one before the release of that name."""
    earlier = [one for one in releases if name is None or _order(one.version) < _order(name)]
    return earlier[-1] if earlier else None


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _read(path: Path) -> Results:
    try:
        said = json.loads(read_regular(path))
        if said["format"] != _FORMAT:
            raise ValueError(f"format {said['format']!r}, expected {_FORMAT}")
        values = {field.name: said[field.name] for field in fields(Results)}
        values["entries"] = tuple(_entry(one) for one in said["entries"])
        if values["version"] != path.stem:
            raise ValueError(f"version {values['version']!r}, expected that of the file's name")
        return Results(**values)
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ParameterError(
            f"{path}: no results of 'kvrag bench regress' ({error!r}): restore the file, or "
            f"measure that release again with --save {path.stem}"
        ) from error


def _entry(said: dict[str, Any]) -> Entry:
    entry = Entry(**{**said, "values": tuple(map(float, said["values"]))})
    if entry.group not in (SPEED, QUALITY):
        raise ValueError(f"{entry.name}: group {entry.group!r}")
    if not entry.values or not all(map(isfinite, entry.values)):
        raise ValueError(f"{entry.name}: expected finite values, at least one")
    return entry
