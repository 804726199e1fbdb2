from __future__ import annotations

import pytest

from tests.cli.conftest import Run

SMALL = (
    *("bench", "eviction", "--random-shape", "test", "--tokens", "120", "--steps", "2"),
    *("--eviction", "corm:window=8:recent=8,streaming:share=0.25"),
)


def test_table_for_a_person(run: Run) -> None:
    done = run(*SMALL)
    assert done.code == 0, done.err
    assert "full cache" in done.out
    assert "streaming(sinks=4, share=0.25)" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--eviction", "lru"), "unknown eviction 'lru'"),
        (("--eviction", ","), "--eviction is empty"),
        (("--eviction", "none"), "leave it out"),
        (("--sharpness", "-1"), "sharpness -1.0"),
        (("--tokens", "50000", "--random-shape", "test"), "holds 40960"),
    ],
)
def test_what_cannot_be_measured(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("bench", "eviction", *arguments)
    assert done.code == 1
    assert message in done.err
