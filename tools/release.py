"""Makes a release, all but its upload: ``make release VERSION=x.y.z``.

    python -m tools.release VERSION [--also PYTHON]

Works in a clone of this checkout's commit: writes the version and the changelog's section, commits
and tags, builds and checks the wheels, and writes what they are made of (``sbom.json``) and how
(``provenance.json``). Only then do commit and tag come to the checkout, and the files to ``dist``;
where a step fails, the checkout stays as it was.

Python 3.11 makes wheels for itself alone, and 3.12 those for all later versions. Hence a second
interpreter builds too: the one named, or what is found of these two. Where there is none,
``--add PYTHON`` adds its wheels to a release that is made; ``dist`` changes as a whole, or not at
all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tools import interpreters
from tools.interpreters import UV

ROOT = Path(__file__).parent.parent
_UNRELEASED = "## [Unreleased]\n"
_TOOLS = ("abi3audit", "auditwheel", "build", "cyclonedx-bom", "nanobind", "scikit-build-core")
_TOOLS += ("twine", "uv", "ziglang")
_VERSION = re.compile(r"(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*)){2}")

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
    for option, text in (
        ("--also", "a second interpreter, which builds too"),
        ("--add", "add an interpreter's wheels to this release, already made"),
    ):
        parser.add_argument(option, metavar="PYTHON", type=interpreters.named, help=text)
    given = parser.parse_args()
    version = given.version
    other = "3.12" if sys.version_info < (3, 12) else "3.11"
    also = given.also or interpreters.find(other)
    lacking = None if also or given.add else other
    try:
        with tempfile.TemporaryDirectory(prefix="kvrag-release-") as scratch:
            clone = Path(scratch) / "kvrag"
            if given.add:
                add(ROOT, version, given.add, clone)
            else:
                prepare(ROOT, version, clone)
                build(clone, version, also)
                take_over(ROOT, clone, version)
    except (ReleaseError, OSError) as error:
        sys.exit(f"no release: {error}")
    print(closing(version, lacking))


def closing(version: str, lacking: str | None) -> str:
    """Say what to do with a release, and first what it lacks: a version of Python."""
    lines = [f"kvrag {version} is committed and tagged here, and its files are in dist."]
    if lacking:
        served = "3.12 and newer" if lacking == "3.12" else lacking
        lines += [
            f"INCOMPLETE: no Python {lacking} was found to build with, so Python {served} would get"
            " the wheel without compiled kernels. Add those first, which describes dist anew:",
            f"  make release VERSION={version} ADD=/path/to/python{lacking}",
        ]
    lines += [
        "To publish it:",
        f"  git push origin HEAD v{version}",
        # Only this interpreter's environment has twine.
        f"  {shlex.quote(sys.executable)} -m twine upload dist/*.whl dist/*.tar.gz",
    ]
    return "\n".join(lines)


def prepare(root: Path, version: str, clone: Path) -> Path:
    """Return a clone of the checkout `root` whose last commit is the release, tagged.

    Raises
    ------
    ReleaseError
        If the version is no later one, the checkout has changes or no branch, the tag exists, git
        does not know who commits, or the changelog has nothing to release.
    """
    if not _VERSION.fullmatch(version):
        raise ReleaseError(f"version: expected three numbers, such as 0.2.0, found {version!r}")
    before = current_version(root)
    if _numbers(version) <= _numbers(before):
        raise ReleaseError(f"version: expected one after {before}, found {version}")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    if changed:
        raise ReleaseError(f"the checkout has changes: commit them or put them aside\n{changed}")
    if not _branch(root):
        raise ReleaseError("no branch is checked out to commit the release to: git switch BRANCH")
    if _git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists: name another version")
    identity = {setting: _setting(root, setting) for setting in ("user.name", "user.email")}
    _git(root, "clone", "--quiet", "--no-hardlinks", str(root), str(clone))
    _write_version(clone, version)
    log = clone / "CHANGELOG.md"
    log.write_text(dated(log.read_text("utf-8"), version), "utf-8")
    for setting, value in identity.items():
        _git(clone, "config", setting, value)
    _git(clone, "commit", "--quiet", "--all", "--message", f"Version {version}")
    _git(clone, "tag", "--annotate", f"v{version}", "--message", f"kvrag {version}")
    return clone


def build(clone: Path, version: str, also: str | None) -> None:
    """Build and check the files in the clone's ``dist``, and describe them there."""
    dist = clone / "dist"
    python = platform.python_version()
    if also:
        python = with_other(python, also)
    _run(clone, sys.executable, "-m", "tools.wheels", "--out", str(dist))
    if also:
        _build_with(also, clone)
    _write_sbom(clone, dist / "sbom.json")
    _write_provenance(clone, version, python)


def add(root: Path, version: str, python: str, clone: Path) -> None:
    """Build with one more interpreter for the release in `root`, and describe its files anew.

    Raises
    ------
    ReleaseError
        If ``dist`` has the files of another release or of none, or those of this interpreter.
    """
    try:
        before = json.loads((root / "dist" / "provenance.json").read_text("utf-8"))
    except FileNotFoundError:
        before = {"version": "none"}
    if before["version"] != version:
        raise ReleaseError(f"dist: expected the files of {version}, found {before['version']}")
    built = with_other(before["python"], python)
    tag = f"v{version}"
    _git(root, "clone", "--quiet", "--no-hardlinks", "--branch", tag, str(root), str(clone))
    shutil.copytree(root / "dist", clone / "dist")
    _build_with(python, clone)
    _write_provenance(clone, version, built)
    with _taken(clone / "dist", root / "dist"):
        pass


def with_other(built: str, python: str) -> str:
    """Return the versions of Python that build: those that `built` lists, and an interpreter's.

    Raises
    ------
    ReleaseError
        If it adds nothing, or kvrag does not run there.
    """
    version = _run(ROOT, python, "-c", "import platform; print(platform.python_version())").strip()
    if _numbers(version) < interpreters.OLDEST or _tag(version) in map(_tag, built.split(", ")):
        oldest = ".".join(map(str, interpreters.OLDEST))
        raise ReleaseError(
            f"{python} is Python {version}: expected {oldest} or newer, and one that makes other"
            f" wheels than {built}"
        )
    return f"{built}, {version}"


def _tag(version: str) -> str:
    """Return what the compiled wheels of a version of Python are tagged with."""
    major, minor, *_ = _numbers(version)
    return "cp312-abi3" if (major, minor) >= (3, 12) else f"cp{major}{minor}"


def _build_with(python: str, clone: Path) -> None:
    """Add to the clone's ``dist`` the compiled wheels that another interpreter makes."""
    environment = clone / "build" / "python"
    own = str(environment / "bin" / "python")
    _run(clone, *UV, "venv", "--quiet", "--python", python, str(environment))
    wanted = ("--python", own, "-r", "tools/release-requirements.txt")
    _run(clone, *UV, "pip", "install", "--quiet", *wanted)
    beside = clone / "build" / "dist"
    _run(clone, own, "-m", "tools.wheels", "--out", str(beside))
    for wheel in beside.glob("*manylinux*.whl"):
        shutil.copy(wheel, clone / "dist")


def _write_sbom(clone: Path, path: Path) -> None:
    """Write what an installation of kvrag without extras brings."""
    wanted = clone / "build" / "requirements.txt"
    wanted.parent.mkdir(exist_ok=True)
    resolved = ("--generate-hashes", "--no-header", "--output-file", str(wanted), "pyproject.toml")
    _run(clone, *UV, "pip", "compile", "--quiet", *resolved)
    described = ("--pyproject", "pyproject.toml", "--mc-type", "library", "--output-reproducible")
    into = ("--output-file", str(path), str(wanted))
    _run(clone, sys.executable, "-m", "cyclonedx_py", "requirements", *described, *into)
    check_sbom(json.loads(path.read_text("utf-8")), current_version(clone))


def check_sbom(sbom: dict[str, Any], version: str) -> None:
    """Check that a list of components is kvrag's, and that each component can be recognised.

    Raises
    ------
    ReleaseError
        If it names another product, or a component has no version or no hash.
    """
    product = sbom.get("metadata", {}).get("component", {})
    found = (product.get("name"), product.get("version"), bool(product.get("licenses")))
    if found != ("kvrag", version, True):
        raise ReleaseError(f"sbom.json: expected kvrag {version} and its licence, found {product}")
    if not sbom.get("components"):
        raise ReleaseError("sbom.json: expected components, found none")
    for one in sbom["components"]:
        files = one.get("externalReferences", ())
        if not one.get("version") or not any(file.get("hashes") for file in files):
            raise ReleaseError(f"sbom.json: expected a version and hashes of {one['name']}")


def _write_provenance(clone: Path, version: str, python: str) -> None:
    described = json.dumps(provenance(clone, version, python), indent=2) + "\n"
    (clone / "dist" / "provenance.json").write_text(described)


def provenance(clone: Path, version: str, python: str) -> dict[str, object]:
    """Return what the files of ``dist`` are, and from what and by what they were made."""
    return {
        "version": version,
        "commit": _git(clone, "rev-parse", f"v{version}^{{commit}}"),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": python,
        "system": platform.platform(),
        "tools": {name: metadata.version(name) for name in _TOOLS},
        "sha256": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((clone / "dist").iterdir())
            if path.name != "provenance.json"
        },
    }


def take_over(root: Path, clone: Path, version: str) -> None:
    """Bring the clone's commit, tag and files to the checkout: all of them, or none.

    Raises
    ------
    ReleaseError
        If the checkout has changed since it was cloned.
    """
    if _branch(root) != _branch(clone):
        raise ReleaseError("the checkout changed meanwhile, to another branch: make it again")
    tag = f"refs/tags/v{version}"
    with _taken(clone / "dist", root / "dist"), ExitStack() as undo:
        # Fails if the tag has appeared.
        _git(root, "fetch", "--no-tags", str(clone), f"{tag}:{tag}")
        undo.callback(_git, root, "tag", "--delete", f"v{version}")
        try:
            _git(root, "merge", "--quiet", "--ff-only", tag)
        except ReleaseError as error:
            raise ReleaseError(f"the checkout changed meanwhile: make it again\n{error}") from error
        undo.pop_all()


@contextmanager
def _taken(new: Path, dist: Path) -> Iterator[None]:
    """Put a copy of a folder in the place of `dist`, which comes back if the block fails.

    A link stays one: its target is replaced.
    """
    dist = dist.resolve()
    scratch = tempfile.TemporaryDirectory(
        prefix=".dist-", dir=dist.parent, ignore_cleanup_errors=True
    )
    with scratch as beside, ExitStack() as undo:
        copied, old = Path(beside, "new"), Path(beside, "old")
        shutil.copytree(new, copied)
        if dist.exists():
            dist.rename(old)
            undo.callback(old.rename, dist)
        copied.rename(dist)
        undo.callback(dist.rename, copied)
        yield
        undo.pop_all()


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


def _branch(root: Path) -> str:
    return _git(root, "branch", "--show-current")


def _setting(root: Path, name: str) -> str:
    try:
        return _git(root, "config", name)
    except ReleaseError:
        remedy = f'git config --global {name} "..."'
        raise ReleaseError(f"git's {name} is not set, and a commit needs it: {remedy}") from None


def _git(folder: Path, *arguments: str) -> str:
    return _run(folder, "git", *arguments).strip()


def _run(folder: Path, *command: str) -> str:
    environment = interpreters.environment()
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
