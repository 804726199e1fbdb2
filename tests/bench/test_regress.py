"""`kvrag bench regress`: what counts as a change, the files of releases, and their pictures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrag.errors import ParameterError
from kvrag_bench import shapes
from kvrag_bench.regress import quality, speed
from kvrag_bench.regress import results as r
from kvrag_bench.regress.compare import Verdict, compare
from tests.cli.conftest import Run, run
from tools.releases import PICTURES, RELEASES

__all__ = ["run"]

TIMED = r.Entry(r.SPEED, "fused", "of plain prefill's time", (0.10, 0.11, 0.12, 0.10, 0.11, 0.12))
LOST = r.Entry(r.QUALITY, "tiny, none", "nats", tuple(0.01 * n for n in range(1, 21)))


def results(*entries: r.Entry, version: str = "0.2.0", processor: str = "fast") -> r.Results:
    return r.Results(version, processor, {"torch": "2.9"}, entries)


def verdict(before: r.Entry, now: r.Entry, processor: str = "fast") -> Verdict:
    (change,) = compare(results(before), results(now, processor=processor))
    return change.verdict


def scaled(entry: r.Entry, factor: float) -> r.Entry:
    return replace(entry, values=tuple(factor * value for value in entry.values))


class TestCompare:
    @pytest.mark.parametrize(
        ("before", "factor", "processor", "expected"),
        [
            # Timings change if all are greater or less, on the same processor.
            *((TIMED, factor, "fast", Verdict.SAME) for factor in (1, 1.15)),
            (TIMED, 1.3, "fast", Verdict.WORSE),
            (TIMED, 0.7, "fast", Verdict.BETTER),
            (TIMED, 3, "slow", Verdict.OTHER_MACHINE),
            # Cases are paired: the two means' intervals overlap widely, the differences' do not.
            (LOST, 1.004, "slow", Verdict.SAME),
            (LOST, 1.02, "slow", Verdict.WORSE),
            (LOST, 0.98, "slow", Verdict.BETTER),
        ],
    )
    def test_verdicts(
        self, before: r.Entry, factor: float, processor: str, expected: Verdict
    ) -> None:
        assert verdict(before, scaled(before, factor), processor) == expected

    def test_noise(self) -> None:
        slow = replace(TIMED, values=(*TIMED.values[:5], 9.0))
        assert verdict(TIMED, slow) == Verdict.SAME
        moved = (value + (0.06 if n % 2 else -0.05) for n, value in enumerate(LOST.values))
        assert verdict(LOST, replace(LOST, values=tuple(moved))) == Verdict.SAME

    def test_other_cases_are_not_compared(self) -> None:
        (change,) = compare(results(LOST), results(replace(LOST, values=LOST.values[:9])))
        assert (change.verdict, change.share) == (Verdict.OTHER_CASES, None)

    def test_figures_that_one_run_lacks(self) -> None:
        changes = compare(results(TIMED), results(LOST))
        assert [(one.before, one.now, one.verdict) for one in changes] == [
            (None, LOST, Verdict.NEW),
            (TIMED, None, Verdict.GONE),
        ]
        assert [one.verdict for one in compare(None, results(LOST))] == [Verdict.NEW]


class TestFiles:
    def test_results_come_back_in_the_order_of_releases(self, tmp_path: Path) -> None:
        for version in ("0.10.0", "0.2.0", "0.9.1"):
            r.write_results(results(TIMED, LOST, version=version), tmp_path / f"{version}.json")
        found = r.read_releases(tmp_path)
        assert [one.version for one in found] == ["0.2.0", "0.9.1", "0.10.0"]
        assert found[0] == results(TIMED, LOST)
        assert r.last_before(found, None) == found[2]
        assert r.last_before(found, "0.10.0") == found[1]
        assert r.last_before(found, "0.2.0") is None

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (lambda said: said.update(format=9), "format 9"),
            (lambda said: said.update(version="0.3.0"), "0.3.0"),
            (lambda said: said.pop("processor"), "processor"),
            (lambda said: said["entries"][0].update(values=[]), "at least one"),
            (lambda said: said["entries"][0].update(values=["nan"]), "finite"),
            (lambda said: said["entries"][0].update(group="taste"), "taste"),
            (lambda said: said["entries"][0].update(more=1), "more"),
        ],
    )
    def test_a_file_that_is_no_results(self, tmp_path: Path, change: Any, expected: str) -> None:
        path = tmp_path / "0.2.0.json"
        r.write_results(results(TIMED), path)
        said = json.loads(path.read_text())
        change(said)
        path.write_text(json.dumps(said))
        with pytest.raises(ParameterError, match=rf"0\.2\.0\.json.*{expected}.*--save 0\.2\.0"):
            r.read_releases(tmp_path)


class TestCommand:
    @pytest.fixture(autouse=True)
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[r.Entry]:
        """Stand in for minutes of measuring; return what is found instead."""
        found = [TIMED, LOST]
        monkeypatch.setattr(speed, "speed_entries", lambda options, say: found[:1])
        monkeypatch.setattr(quality, "rate_entries", lambda say: [])
        monkeypatch.setattr(quality, "tiny_entries", lambda say: found[1:])
        monkeypatch.setattr(quality, "smollm2_entries", lambda say: [])
        return found

    def test_a_run_is_compared_with_the_last_release(
        self, run: Run, tmp_path: Path, measured: list[r.Entry]
    ) -> None:
        first = run("bench", "regress", "--releases", tmp_path, "--save", "0.2.0")
        assert (first.code, [path.name for path in tmp_path.iterdir()]) == (0, ["0.2.0.json"])
        assert "no earlier release" in first.out
        assert r.read_releases(tmp_path)[0].version == "0.2.0"
        assert run("bench", "regress", "--releases", tmp_path).out.count("within noise") == 2
        measured[0] = scaled(TIMED, 1.5)
        done = run("bench", "regress", "--releases", tmp_path, code=1)
        assert "+50.0%" in done.out
        assert "worse" in done.out


@pytest.mark.slow
def test_speed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    tiny = {**shapes.SHAPES["smollm2-135m"], "hidden_size": 64, "intermediate_size": 64, **heads}
    monkeypatch.setitem(shapes.SHAPES, "little", tiny)
    options = speed.SpeedOptions("little", 2, 70, 300, 4, rounds=2)
    entries = list(speed.speed_entries(options, lambda _: None))
    assert len({entry.name for entry in entries}) == len(entries) == 9
    for entry in entries:
        assert (entry.group, len(entry.values)) == (r.SPEED, 2)
        assert min(entry.values) > 0
    starts = [entry.value for entry in entries if entry.name.startswith("start-up")]
    assert min(starts) > 1  # kvrag takes longer than Python alone


@pytest.mark.slow
def test_quality_is_measured() -> None:
    said: list[str] = []
    entries = [
        *quality.rate_entries(said.append),
        *quality.tiny_entries(said.append, num_questions=2),
    ]
    found = {entry.name: entry for entry in entries}
    assert list(found) == [
        "rate of transform:1",
        "error of transform:1",
        "kvrag-tiny, none",
        "kvrag-tiny, two_stage",
        "kvrag-tiny, none, transform:1",
        "kvrag-tiny, two_stage, transform:1",
    ]
    assert 0.5 < found["rate of transform:1"].value < 2
    assert len(found["kvrag-tiny, none"].values) == 2


def test_the_pictures_show_every_release() -> None:
    releases = r.read_releases(RELEASES)
    assert releases
    for group, path in PICTURES.items():
        picture = path.read_text()
        for entry in releases[-1].entries:
            assert (f">{entry.name}<" in picture) == (entry.group == group), entry.name
        for release in releases:
            assert f">{release.version}<" in picture, "run 'python -m tools.releases'"
