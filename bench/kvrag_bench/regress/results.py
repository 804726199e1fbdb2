"""Results of `kvrag bench regress` in JSON files, one for each release."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

from packaging.version import InvalidVersion, Version

from kvrag.errors import ParameterError
from kvrag.native import instruction_set
from kvrag.regularfile import read_regular
from kvrag.tune.bootstrap import mean_interval

_FORMAT = 1
_LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True)
class Entry:
    """One figure, measured several times.

    Attributes
    ----------
    group
        ``"speed"`` or ``"quality"``.
    name
        What was measured; releases are compared by it.
    unit
        What a value of 1 is.
    is_more_better
        Whether a greater value is the better one.
    is_timed
        Whether values are repeated timings. Otherwise each is of one case (a question, a chunk),
        and the same case of another release can be compared with it.
    values
        At least one finite number.
    """

    group: str
    name: str
    unit: str
    is_more_better: bool
    is_timed: bool
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median of timings, the mean of cases."""
        return median(self.values) if self.is_timed else fmean(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """The least and the greatest timing; for cases the 95 % interval of the mean.

        Six timings enclose the median of all possible ones in 97 of 100 runs, however they are
        distributed.
        """
        if self.is_timed:
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
    try:
        written = str(Version(name))
    except InvalidVersion:
        raise ParameterError(f"release {name!r}: expected a version, as in 0.2.0") from None
    if not folder.is_dir():
        raise ParameterError(f"there is no folder {folder} for the results of releases: create it")
    return folder / f"{written}.json"


def write_results(results: Results, path: Path) -> None:
    """Write results, replacing those that are there.

    Raises
    ------
    ParameterError
        If the file cannot be written.
    """
    # A line for each figure, so that differences between versions of the file can be read.
    head = {name: value for name, value in asdict(results).items() if name != "entries"}
    lines = [json.dumps(asdict(entry), ensure_ascii=False) for entry in results.entries]
    said = json.dumps({"format": _FORMAT, **head}, ensure_ascii=False, indent=1)[:-2]
    text = f'{said},\n "entries": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        written = Path(file.name)
        written.chmod(0o644)
        written.replace(path)
    except OSError as error:
        raise ParameterError(f"{path} cannot be written: {error.strerror}") from error


def read_releases(folder: Path) -> list[Results]:
    """Return the results of all releases in a folder, the oldest first; none if it is not there.

    Raises
    ------
    ParameterError
        If a file cannot be read, or is no results of this format; names it.
    """
    found = []
    for path in folder.glob("*.json"):
        release_path(folder, path.stem)
        found.append(_read(path))
    return sorted(found, key=lambda results: Version(results.version))


def last_before(releases: Sequence[Results], name: str | None) -> Results | None:
    """Return the newest release, or the newest one before the release of that name."""
    earlier = [one for one in releases if name is None or Version(one.version) < Version(name)]
    return earlier[-1] if earlier else None


def _read(path: Path) -> Results:
    try:
        said = json.loads(read_regular(path))
        if said["format"] != _FORMAT:
            raise ParameterError(
                f"{path}: format {said['format']!r}, expected {_FORMAT}: measure that release again"
            )
        values = {field.name: said[field.name] for field in fields(Results)}
        values["entries"] = tuple(_entry(one) for one in said["entries"])
        if values["version"] != path.stem:
            raise ParameterError(
                f"{path}: the results are of {values['version']!r}: rename the file"
            )
        return Results(**values)
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(
            f"{path}: no results of 'kvrag bench regress' ({error!r}): restore the file, or "
            "measure again with --save"
        ) from error


def _entry(said: dict[str, Any]) -> Entry:
    entry = Entry(**{**said, "values": tuple(map(float, said["values"]))})
    if not entry.values:
        raise ValueError(f"{entry.name}: no values")
    return entry
