"""A release is prepared in a clone: the checkout stays as it was until all is made."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    take_over(checkout, clone, "77.8.9")
    assert git(checkout, "describe", "--exact-match") == "v77.8.9"
    assert current_version(checkout) == "77.8.9"
    assert (checkout / "dist" / "kvrag.whl").read_bytes() == b"wheel"


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


def test_the_checkout_stays_without_the_tag_if_it_changed_meanwhile(
    checkout: Path, tmp_path: Path
) -> None:
    clone = prepare(checkout, "77.0.0", tmp_path / "clone")
    git(checkout, "commit", "--quiet", "--allow-empty", "-m", "meanwhile")
    before = git(checkout, "rev-parse", "HEAD")
    with pytest.raises(ReleaseError, match="changed meanwhile"):
        take_over(checkout, clone, "77.0.0")
    assert git(checkout, "rev-parse", "HEAD") == before
    assert not git(checkout, "tag")
    assert not git(checkout, "status", "--porcelain")
    again = prepare(checkout, "77.0.0", tmp_path / "again")
    take_over(checkout, again, "77.0.0")
    assert git(checkout, "describe", "--exact-match") == "v77.0.0"


def test_without_a_name_in_git_it_says_how_to_set_one(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    git(checkout, "config", "--unset", "user.email")
    with pytest.raises(ReleaseError, match=r"git config --global user\.email"):
        prepare(checkout, "77.0.0", tmp_path / "clone")
    assert not (tmp_path / "clone").exists()


def test_it_says_which_wheels_are_missing() -> None:
    whole = release.closing("77.0.0", None)
    assert "twine upload" in whole
    assert "INCOMPLETE" not in whole
    lacking = release.closing("77.0.0", "3.12")
    assert "Python 3.12 and newer would get the wheel without compiled kernels" in lacking
    # Before the commands that publish.
    assert lacking.index("ADD=/path/to/python3.12") < lacking.index("git push")
    assert "3.11 and newer" not in release.closing("77.0.0", "3.11")


def made_with(monkeypatch: pytest.MonkeyPatch, *wheels: str) -> None:
    """Let another interpreter make files of these names."""

    def run(folder: Path, *command: str) -> str:
        if command[1:3] == ("-m", "tools.wheels"):
            beside = Path(command[-1])
            beside.mkdir(parents=True)
            for name in (*wheels, "kvrag-77.0.0-py3-none-any.whl"):
                (beside / name).write_bytes(b"other")
            return ""
        return "3.12.1\n" if command[1] == "-c" else real(folder, *command)

    real = release._run
    monkeypatch.setattr(release, "UV", ("true",))
    monkeypatch.setattr(release, "_run", run)
    monkeypatch.setattr(release, "_TOOLS", ())


@pytest.fixture
def released(checkout: Path, tmp_path: Path) -> Path:
    """Return a checkout with a release that one interpreter made."""
    clone = prepare(checkout, "77.0.0", tmp_path / "clone")
    dist = clone / "dist"
    dist.mkdir()
    for name in ("kvrag-77.0.0-py3-none-any.whl", "kvrag-77.0.0-cp311-cp311-manylinux_2_24_x.whl"):
        (dist / name).write_bytes(b"first")
    (dist / "provenance.json").write_text('{"version": "77.0.0", "python": "3.11.7"}')
    take_over(checkout, clone, "77.0.0")
    return checkout


STABLE = "kvrag-77.0.0-cp312-abi3-manylinux_2_24_x.whl"


def test_wheels_of_a_second_interpreter_are_added_and_described(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_with(monkeypatch, STABLE)
    release.add(released, "77.0.0", "python3.12", tmp_path / "adding")
    described = json.loads((released / "dist" / "provenance.json").read_text())
    assert described["python"] == "3.11.7, 3.12.1"
    assert described["commit"] == git(released, "rev-parse", "HEAD")
    assert described["sha256"].keys() == {path.name for path in (released / "dist").glob("*.whl")}
    assert described["sha256"][STABLE] == hashlib.sha256(b"other").hexdigest()
    # Only compiled wheels come from there.
    assert (released / "dist" / "kvrag-77.0.0-py3-none-any.whl").read_bytes() == b"first"


def test_nothing_is_added_to_another_release_nor_twice(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ReleaseError, match=r"expected the files of 77\.0\.1, found 77\.0\.0"):
        release.add(released, "77.0.1", "python3.12", tmp_path / "wrong")
    made_with(monkeypatch, "kvrag-77.0.0-cp311-cp311-manylinux_2_24_x.whl")
    with pytest.raises(ReleaseError, match="name a Python that makes another wheel"):
        release.add(released, "77.0.0", "python3.11", tmp_path / "same")


def bill(**changes: object) -> dict[str, Any]:
    """Return a list of components, as cyclonedx writes it."""
    product = {"name": "kvrag", "version": "77.0.0", "licenses": [{"license": {}}]}
    one = {"name": "rich", "version": "15", "externalReferences": [{"hashes": [{"content": "0"}]}]}
    return {"metadata": {"component": product}, "components": [one], **changes}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"metadata": {}}, r"expected kvrag 77\.0\.0"),
        ({"components": []}, "expected components"),
        ({"components": [{"name": "rich", "version": "15"}]}, "hashes of rich"),
        ({"components": [{**bill()["components"][0], "version": ""}]}, "a version and"),
    ],
)
def test_the_list_of_components_is_checked(changes: dict[str, Any], found: str) -> None:
    release.check_sbom(bill(), "77.0.0")
    with pytest.raises(ReleaseError, match=found):
        release.check_sbom(bill(**changes), "77.0.0")
    with pytest.raises(ReleaseError, match=r"expected kvrag 77\.0\.1"):
        release.check_sbom(bill(), "77.0.1")


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
