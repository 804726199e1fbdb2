"""`ingest --codec`, `profile` and `recode`."""

from pathlib import Path

import pytest

from tests.cli.conftest import Run

LINES = [
    f"Ines keeps ledger {n} of the harbour and Tomas repairs clock {n} of Varn." for n in range(40)
]


@pytest.fixture
def documents(documents: Path) -> Path:
    """Enough text to fit a codec to."""
    (documents / "ledgers.txt").write_text("\n\n".join(LINES))
    return documents


@pytest.fixture
def index_folder(run: Run, documents: Path, model_folder: Path, tmp_path: Path) -> Path:
    made = ("ingest", documents, "--index", tmp_path / "index", "--model", model_folder)
    run(*made, "--embedding", "hashing")
    return tmp_path / "index"


def test_ingest_with_a_codec(run: Run, documents: Path, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    options = ("--index", folder, "--model", model_folder, "--embedding", "hashing")
    run("ingest", documents, *options, "--codec", "transform:1", "--json")
    stats = run("stats", "--index", folder, "--json").json
    assert stats["codec"] == "transform:1"
    assert stats["size_bytes"] < 0.5 * stats["num_tokens"] * stats["bytes_per_token"]
    run("verify", "--index", folder)
    asked = run("query", "--index", folder, "Who keeps the ledger?", "--max-tokens", 2, "--json")
    assert asked.json["report"]["num_reused"] > 0
    run("ingest", documents, "--index", folder, "--codec", "transform:1.0")
    other = run("ingest", documents, "--index", folder, "--codec", "raw", code=1)
    assert "transform:1" in other.err


def test_profile_then_recode(run: Run, index_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "fitted.safetensors"
    fitted = run("profile", "--index", index_folder, "--out", path, "--json")
    assert [level["level"] for level in fitted.json["levels"]] == ["4", "2", "1", "0.5"]
    assert path.stat().st_size == fitted.json["size_bytes"]
    shown = run("profile", "--index", index_folder, "--codec", "cachegen")
    assert "bits per element" in shown.out
    before = run("stats", "--index", index_folder, "--json").json["size_bytes"]
    recoded = run(
        "recode", "--index", index_folder, "--codec", "transform:2", "--profile", path, "--json"
    )
    assert recoded.json["size_bytes"] < recoded.json["size_bytes_before"] == before
    told = run("recode", "--index", index_folder, "--codec", "raw")
    assert "computed again" in told.out
    run("verify", "--index", index_folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--codec", "zip"), "there is no codec 'zip'; known codecs: raw, raw-heads, lossless"),
        (("--codec", "transform:many"), "a number of bits"),
        (("--codec", "transform:2", "--profile", "nowhere"), "cannot read the codec profile"),
        (("--codec", "transform:2", "--profile", __file__), "not a codec profile"),
    ],
)
def test_bad_codecs(run: Run, index_folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run("recode", "--index", index_folder, *arguments, code=1)
    assert message in " ".join(done.err.split())
