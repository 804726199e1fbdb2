"""A release is prepared in a clone: the checkout stays as it was until all is made."""

from __future__ import annotations

import re
import subprocess
import sys
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
    described = release.provenance(clone, "77.8.9") if has_tools() else None
    take_over(checkout, clone, "77.8.9")
    assert git(checkout, "describe", "--exact-match") == "v77.8.9"
    assert current_version(checkout) == "77.8.9"
    assert (checkout / "dist" / "kvrag.whl").read_bytes() == b"wheel"
    if described is not None:
        assert described["commit"] == git(checkout, "rev-parse", "HEAD")


def has_tools() -> bool:
    try:
        return all(release.metadata.version(name) for name in release._TOOLS)
    except release.metadata.PackageNotFoundError:
        return False


def test_no_release_of_what_is_not_ready(checkout: Path, tmp_path: Path) -> None:
    def refused(version: str, match: str) -> None:
        with pytest.raises(ReleaseError, match=match):
            prepare(checkout, version, tmp_path / "clone")
        assert not (tmp_path / "clone").exists()

    refused("1.0", "expected three numbers")
    refused("0.0.1", "expected one after")
    git(checkout, "tag", "v77.0.0")
    refused("77.0.0", "the tag v77.0.0 exists")
    (checkout / "CHANGELOG.md").write_text(LOG + "more")
    refused("77.0.1", "the checkout has changes")


def test_a_changelog_without_changes_is_refused(checkout: Path, tmp_path: Path) -> None:
    (checkout / "CHANGELOG.md").write_text(LOG.replace("- A thing.\n", ""))
    git(checkout, "commit", "--quiet", "-am", "nothing")
    with pytest.raises(ReleaseError, match="found none"):
        prepare(checkout, "77.0.0", tmp_path / "clone")


def test_it_needs_a_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.release"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "version" in done.stderr
