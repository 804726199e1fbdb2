"""What the package promises to whoever installs or imports it."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kvrag

ROOT = Path(__file__).parent.parent
FRAMEWORKS = (
    *("langchain_core", "llama_index", "sentence_transformers", "faiss"),
    *("pypdfium2", "lxml", "ray", "pyarrow"),
)
HEAVY = (*FRAMEWORKS, "torch", "transformers", "numpy")
EXTRAS = ("redis", "obstore", "cryptography", "prometheus_client", "boto3")


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def project_of(folder: Path) -> dict[str, Any]:
    """Return what a distribution's pyproject.toml says of it."""
    return dict(tomllib.loads((folder / "pyproject.toml").read_text())["project"])


def loaded_after(code: str, packages: tuple[str, ...]) -> list[str]:
    """Return the packages that are loaded once `code` has run."""
    probe = f"\nimport sys; print('|', *[m for m in {packages!r} if m in sys.modules])"
    return run_python(code + probe).rpartition("|")[2].split()


@pytest.mark.parametrize(
    ("code", "packages"),
    [
        ("import kvrag", HEAVY),
        ("import kvrag.store.registry", (*HEAVY, *EXTRAS)),
        (
            "from kvrag.weights.sources import find_gguf; find_gguf('org/name'); "
            "import kvrag.weights.cache",
            ("torch", "gguf"),
        ),
        ("import kvrag.ingest.index, kvrag.ingest.ray, kvrag.cli.ingest", FRAMEWORKS),
    ],
)
def test_imports_load_no_heavy_package(code: str, packages: tuple[str, ...]) -> None:
    assert loaded_after(code, packages) == []


def test_version_is_the_same_everywhere() -> None:
    project, beside = (project_of(folder) for folder in (ROOT, ROOT / "bench"))
    assert kvrag.__version__ == project["version"] == beside["version"]
    # Each of the two asks for the other as it is in the same commit.
    assert f"kvrag[embed]=={kvrag.__version__}" in beside["dependencies"]
    for extra in ("bench", "train"):
        assert project["optional-dependencies"][extra] == [f"kvrag-bench=={kvrag.__version__}"]


def commands_of_ci(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", checkout / ".ci" / "run", "--commands"],
        capture_output=True,
        text=True,
        check=False,
    )


def test_ci_runs_the_first_block_of_the_readme(tmp_path: Path) -> None:
    assert commands_of_ci(ROOT).stdout.split("\n") == ["make demo", "make test", ""]
    copied = tmp_path / ".ci" / "run"
    copied.parent.mkdir()
    copied.write_bytes((ROOT / ".ci" / "run").read_bytes())
    page, block = tmp_path / "README.md", "```sh\nmake a  # shows\n\n# more\nmake b X=1 # it\n```\n"
    page.write_text(f"# Title\n\n```python\nmake = 1\n```\n{block}\n```sh\nmake c\n```\n")
    assert commands_of_ci(tmp_path).stdout == "make a\nmake b X=1\n"
    for other in ("", "make a", "make a\nmake b\nmake c", "make a\npip install x", "make\nmake b"):
        page.write_text(f"```sh\n{other}\n```\n{block}")
        done = commands_of_ci(tmp_path)
        assert done.returncode == 1
        assert done.stdout == ""
        assert "README.md: expected two lines in its first ```sh block" in done.stderr


def test_dependencies_are_bounded_on_both_sides() -> None:
    listed = []
    for project in (project_of(ROOT), project_of(ROOT / "bench")):
        listed += project["dependencies"]
        for extra in project.get("optional-dependencies", {}).values():
            listed += extra
    foreign = [name for name in listed if not name.startswith("kvrag")]
    assert foreign
    assert [name for name in foreign if ">=" not in name or "<" not in name] == []
