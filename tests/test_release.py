"""A release is prepared in a clone: the checkout stays as it was until all is made."""

import hashlib
import json
import re
import subprocess
from pathlib import Path

import pytest

from tools import release
from tools.release import PLACES, ReleaseError, current_version, prepare, take_over

ROOT = Path(__file__).parents[1]
LOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0]\n\n- All.\n"


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=A", "-c", "user.email=a@b", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository with the files that a release writes, as they are here."""
    root = tmp_path / "checkout"
    for name in PLACES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    (root / "CHANGELOG.md").write_text(LOG)
    git(tmp_path, "init", "--quiet", str(root))
    for setting, value in (("user.name", "A"), ("user.email", "a@b")):
        git(root, "config", setting, value)
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    return root


def ready(checkout: Path, clone: Path, version: str = "77.0.0", wheel: str = "x.whl") -> Path:
    """Return a clone with a release that is built, as far as `take_over` can see."""
    prepare(checkout, version, clone)
    (clone / "dist").mkdir()
    (clone / "dist" / wheel).write_bytes(b"first")
    return clone


def state(checkout: Path) -> tuple[object, ...]:
    """Return what a release changes in a checkout."""
    listed = sorted((path.name, path.read_bytes()) for path in (checkout / "dist").glob("*"))
    git(checkout, "diff", "--exit-code")
    beside = sorted(path.name for path in checkout.iterdir())
    return git(checkout, "rev-parse", "HEAD"), git(checkout, "tag"), listed, beside


def test_version_and_changelog_are_committed_and_tagged(checkout: Path, tmp_path: Path) -> None:
    before = git(checkout, "rev-parse", "HEAD")
    clone = prepare(checkout, "77.8.9", tmp_path / "clone")
    assert git(checkout, "rev-parse", "HEAD") == before
    assert not git(checkout, "tag")
    for name in PLACES:
        text = (clone / name).read_text()
        assert "77.8.9" in text
        assert current_version(checkout) not in re.findall(r'(?:embed\]|bench)==([^"]+)"', text)
    log = (clone / "CHANGELOG.md").read_text()
    assert re.search(r"## \[Unreleased\]\n\n## \[77\.8\.9\] - \d{4}-\d\d-\d\d\n\n### Added", log)
    (clone / "dist").mkdir()
    (clone / "dist" / "kvrag.whl").write_bytes(b"wheel")
    (checkout / "dist").mkdir()
    (checkout / "dist" / "earlier.whl").touch()
    take_over(checkout, clone, "77.8.9")
    assert git(checkout, "describe", "--exact-match") == "v77.8.9"
    assert current_version(checkout) == "77.8.9"
    assert state(checkout)[2:] == (
        [("kvrag.whl", b"wheel")],
        [".git", "CHANGELOG.md", "bench", "dist", "kvrag", "pyproject.toml"],
    )


def test_no_release_of_what_is_not_ready(checkout: Path, tmp_path: Path) -> None:
    def refused(version: str, match: str) -> None:
        with pytest.raises(ReleaseError, match=match):
            prepare(checkout, version, tmp_path / "clone")
        assert not (tmp_path / "clone").exists()

    for version in ("1.0", "77.03.0", "77.0.\u0663", "77.0.0rc1"):
        refused(version, "expected three numbers")
    refused("0.0.1", "expected one after")
    git(checkout, "tag", "v77.0.0")
    refused("77.0.0", "the tag v77.0.0 exists")
    (checkout / "CHANGELOG.md").write_text(LOG + "more")
    refused("77.0.1", "the checkout has changes")
    git(checkout, "checkout", "--quiet", "--force", "--detach")
    refused("77.0.1", "no branch is checked out")


@pytest.mark.parametrize(
    ("meanwhile", "error"),
    [
        (("commit", "--quiet", "--allow-empty", "-m", "meanwhile"), "changed meanwhile"),
        (("tag", "v77.0.0"), "would clobber existing tag"),
        (("checkout", "--quiet", "--detach"), "meanwhile, to another branch"),
    ],
    ids=lambda case: case[0] if isinstance(case, tuple) else None,
)
def test_the_checkout_stays_as_it_is_if_it_changed_meanwhile(
    checkout: Path, tmp_path: Path, meanwhile: tuple[str, ...], error: str
) -> None:
    clone = ready(checkout, tmp_path / "clone")
    (checkout / "dist").mkdir()
    (checkout / "dist" / "earlier.whl").touch()
    git(checkout, *meanwhile)
    before = state(checkout)
    with pytest.raises(ReleaseError, match=error):
        take_over(checkout, clone, "77.0.0")
    assert state(checkout) == before


def made_with(monkeypatch: pytest.MonkeyPatch, version: str, *wheels: str) -> None:
    """Let another interpreter have a version, and make files of these names."""

    def run(folder: Path, *command: str) -> str:
        if command[1:3] == ("-m", "tools.wheels"):
            beside = Path(command[-1])
            beside.mkdir(parents=True)
            for name in (*wheels, "kvrag-77.0.0-py3-none-any.whl"):
                (beside / name).write_bytes(b"other")
            return ""
        return f"{version}\n" if command[1] == "-c" else real(folder, *command)

    real = release._run
    monkeypatch.setattr(release, "UV", ("true",))
    monkeypatch.setattr(release, "_run", run)
    monkeypatch.setattr(release, "_TOOLS", ())


@pytest.fixture
def released(checkout: Path, tmp_path: Path) -> Path:
    """Return a checkout with a release that one interpreter made."""
    clone = ready(checkout, tmp_path / "clone", wheel="kvrag-77.0.0-py3-none-any.whl")
    dist = clone / "dist"
    (dist / "kvrag-77.0.0-cp311-cp311-manylinux_2_24_x.whl").write_bytes(b"first")
    (dist / "provenance.json").write_text('{"version": "77.0.0", "python": "3.11.7"}')
    take_over(checkout, clone, "77.0.0")
    return checkout


STABLE = "kvrag-77.0.0-cp312-abi3-manylinux_2_24_x.whl"


def test_wheels_of_a_second_interpreter_are_added_and_described(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_with(monkeypatch, "3.12.1", STABLE)
    release.add(released, "77.0.0", "python3.12", tmp_path / "adding")
    described = json.loads((released / "dist" / "provenance.json").read_text())
    assert described["python"] == "3.11.7, 3.12.1"
    assert described["commit"] == git(released, "rev-parse", "HEAD")
    assert described["sha256"].keys() == {path.name for path in (released / "dist").glob("*.whl")}
    assert described["sha256"][STABLE] == hashlib.sha256(b"other").hexdigest()
    # Only compiled wheels come from there.
    assert (released / "dist" / "kvrag-77.0.0-py3-none-any.whl").read_bytes() == b"first"
