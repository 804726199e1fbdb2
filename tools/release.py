"""Makes a release, all but its upload: ``make release VERSION=x.y.z``.

    python -m tools.release VERSION

Works in a clone of this checkout's commit: writes the version and the changelog's section, commits
and tags, builds and checks the wheels, and writes what they are made of (``sbom.json``) and how
(``provenance.json``). Only then do commit and tag come to the checkout, and the files to ``dist``;
where a step fails, the checkout stays as it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
_UNRELEASED = "## [Unreleased]\n"
_TOOLS = ("abi3audit", "auditwheel", "build", "cyclonedx-bom", "nanobind", "scikit-build-core")
_TOOLS += ("twine", "uv", "ziglang")

# Where the version stands, and a pattern of what stands around it.
PLACES: Mapping[str, tuple[str, ...]] = {
    "kvrag/__init__.py": (r'^(__version__ = ")[^"]+(")',),
    "pyproject.toml": (r'^(version = ")[^"]+(")', r'("kvrag-bench==)[^"]+(")'),
    "bench/pyproject.toml": (r'^(version = ")[^"]+(")', r'("kvrag\[embed\]==)[^"]+(")'),
}


class ReleaseError(Exception):
    """Why there is no release: what was expected and found, and what to do."""


def main() -> None:
    """Parse the arguments and make the release."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="the new version, such as 0.2.0")
    version = parser.parse_args().version
    try:
        with tempfile.TemporaryDirectory(prefix="kvrag-release-") as scratch:
            clone = prepare(ROOT, version, Path(scratch) / "kvrag")
            build(clone, version)
            take_over(ROOT, clone, version)
    except ReleaseError as error:
        sys.exit(f"no release: {error}")
    print(
        f"kvrag {version} is committed and tagged here, and its files are in dist. To publish it:\n"
        f"  git push origin HEAD v{version}\n"
        "  python -m twine upload dist/*.whl dist/*.tar.gz"
    )


def prepare(root: Path, version: str, clone: Path) -> Path:
    """Return a clone of the checkout `root` whose last commit is the release, tagged.

    Raises
    ------
    ReleaseError
        If the version is no later one, the checkout has changes, the tag exists, or the changelog
        has nothing to release.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"version: expected three numbers, such as 0.2.0, found {version!r}")
    before = current_version(root)
    if _numbers(version) <= _numbers(before):
        raise ReleaseError(f"version: expected one after {before}, found {version}")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    if changed:
        raise ReleaseError(f"the checkout has changes: commit them or put them aside\n{changed}")
    if _git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists: name another version")
    _git(root, "clone", "--quiet", "--no-hardlinks", str(root), str(clone))
    _write_version(clone, version)
    log = clone / "CHANGELOG.md"
    log.write_text(dated(log.read_text("utf-8"), version), "utf-8")
    for setting in ("user.name", "user.email"):
        _git(clone, "config", setting, _git(root, "config", setting))
    _git(clone, "commit", "--quiet", "--all", "--message", f"Version {version}")
    _git(clone, "tag", "--annotate", f"v{version}", "--message", f"kvrag {version}")
    return clone


def build(clone: Path, version: str) -> None:
    """Build and check the files in the clone's ``dist``, and describe them there."""
    dist = clone / "dist"
    _run(clone, sys.executable, "-m", "tools.wheels", "--out", str(dist))
    wanted = clone / "build" / "requirements.txt"
    wanted.parent.mkdir(exist_ok=True)
    compiled = ("pip", "compile", "--quiet", "--no-header", "--output-file", str(wanted))
    _run(clone, sys.executable, "-m", "uv", *compiled, "pyproject.toml")
    sbom = ("--output-reproducible", "--output-file", str(dist / "sbom.json"), str(wanted))
    _run(clone, sys.executable, "-m", "cyclonedx_py", "requirements", *sbom)
    described = json.dumps(provenance(clone, version), indent=2) + "\n"
    (dist / "provenance.json").write_text(described)


def provenance(clone: Path, version: str) -> dict[str, object]:
    """Return what the files of ``dist`` are, and from what and by what they were made."""
    return {
        "version": version,
        "commit": _git(clone, "rev-parse", "HEAD"),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "tools": {name: metadata.version(name) for name in _TOOLS},
        "sha256": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((clone / "dist").iterdir())
            if path.name != "provenance.json"
        },
    }


def take_over(root: Path, clone: Path, version: str) -> None:
    """Bring the clone's commit, tag and files to the checkout."""
    _git(root, "fetch", "--quiet", str(clone), f"refs/tags/v{version}:refs/tags/v{version}")
    _git(root, "merge", "--quiet", "--ff-only", f"v{version}")
    if (clone / "dist").is_dir():
        shutil.rmtree(root / "dist", ignore_errors=True)
        shutil.copytree(clone / "dist", root / "dist")


def current_version(root: Path) -> str:
    """Return the version of a checkout."""
    text = (root / "kvrag/__init__.py").read_text("utf-8")
    (found,) = re.findall(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    return str(found)


def dated(log: str, version: str) -> str:
    """Return a changelog whose unreleased section has become the version's, dated today.

    Raises
    ------
    ReleaseError
        If there is no such section, or nothing in it.
    """
    before, marker, after = log.partition(_UNRELEASED)
    section = re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0]
    if not marker or not re.search(r"^- ", section, re.MULTILINE):
        raise ReleaseError("CHANGELOG.md: expected changes under '## [Unreleased]', found none")
    today = datetime.now(UTC).date().isoformat()
    return f"{before}{marker}\n## [{version}] - {today}\n{after}"


def _write_version(clone: Path, version: str) -> None:
    for name, patterns in PLACES.items():
        path = clone / name
        text = path.read_text("utf-8")
        for pattern in patterns:
            text, count = re.subn(pattern, rf"\g<1>{version}\g<2>", text, flags=re.MULTILINE)
            if not count:
                raise ReleaseError(f"{name}: expected a version as in {pattern}, found none")
        path.write_text(text, "utf-8")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _git(folder: Path, *arguments: str) -> str:
    return _run(folder, "git", *arguments).strip()


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
