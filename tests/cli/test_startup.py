"""What needs no model loads nothing of a model's libraries, and every command is described."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import kvrag
import kvrag_bench.cli
import kvrag_train.cli
from kvrag.cli import main
from tests.cli.conftest import Run

HEAVY = [
    *("torch", "transformers", "tokenizers", "safetensors", "sentence_transformers", "faiss"),
    *(
        "numpy",
        "scipy",
        "sklearn",
        "langchain_core",
        "llama_index",
        "lxml",
        "kvrag.models.kv_model",
    ),
]
GROUPS = {
    (): main._COMMANDS,
    ("bench",): kvrag_bench.cli.COMMANDS,
    ("pml",): main._PML_COMMANDS,
    ("train",): kvrag_train.cli.COMMANDS,
}

# In one process; what is loaded is told after each command, whatever it did.
PROBE = """
import json, sys
class Absent:
    def find_spec(name, path=None, target=None):
        if name in {absent!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Absent)
from kvrag.cli.main import run
for arguments in {commands!r}:
    sys.argv, code = ["kvrag", *arguments], 0
    try:
        run()
    except SystemExit as end:
        code = end.code or 0
    print("\\n|" + json.dumps([code, [name for name in {heavy!r} if name in sys.modules]]))
"""


def probed(
    *commands: Sequence[object], absent: Sequence[str] = (), folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    given = [[str(one) for one in command] for command in commands]
    code = PROBE.format(commands=given, heavy=HEAVY, absent=absent)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder or Path(kvrag.__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    return done


def check(folder: Path | None, expected: Sequence[tuple[Sequence[object], int]]) -> None:
    """Run commands one after another: each has its exit code, and none loads what is heavy."""
    told = probed(*(command for command, _ in expected), folder=folder).stdout.splitlines()
    found = [json.loads(line[1:]) for line in told if line.startswith("|[")]
    for (command, code), one in zip(expected, found, strict=True):
        assert one == [code, []], command


def test_what_needs_no_model_loads_none(index_folder: Path) -> None:
    at = ("--index", index_folder)
    check(
        None,
        [
            (["ls", *at], 0),
            (["gc", *at], 0),
            (["search", "--sparse", "harbour", *at], 0),
            (["rm", "harbour.txt", *at], 1),
        ],
    )


def test_help_and_wrong_arguments_load_no_model(tmp_path: Path) -> None:
    # The folder is empty: there is no index in ./kvrag-index.
    check(
        tmp_path,
        [
            (["--version"], 0),
            (["--help"], 0),
            (["query", "--help"], 0),
            *(([name], 1) for name in ("ls", "chat")),
            (["query", "who?"], 1),
            (["explain", kvrag.__file__], 1),
            (["ingset"], 2),
            (["query", "who?", "--ratio", "7"], 2),
            (["query", "who?", "--policy", "nonsense"], 2),
            (["ingest", "README.md", "--codec", "nonsense"], 1),
            (["ingest", "README.md", "--store", "s4://x"], 1),
        ],
    )


def test_an_answer_needs_no_operators_for_tensors_without_numbers(index_folder: Path) -> None:
    code = (
        "import sys; from kvrag.cli.main import run\n"
        f"sys.argv = ['kvrag', 'query', '--no-server', '--index', {str(index_folder)!r},\n"
        "  '--max-tokens', '2', 'When does the harbour open?']\n"
        "try: run()\n"
        "except SystemExit as end: assert not end.code\n"
        "import torch\n"
        "print('|', torch.__version__.startswith('2.13.'), 'torch._prims' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] in ("| True False", "| False True"), done.stderr


ABSENT = ("kvrag_bench", "kvrag_corpus", "kvrag_testing", "kvrag_train")


def test_what_another_distribution_brings_says_so_and_is_listed() -> None:
    commands = {
        "bench --help": "bench",
        "bench ttft --repeats 1": "bench",
        "train links --out run": "train",
        "inspect -h": "bench",
    }
    done = probed(*(command.split() for command in commands), absent=ABSENT)
    assert done.stderr.splitlines() == [
        f"error: 'kvrag {command.split()[0]}' is not installed: pip install 'kvrag[{extra}]'"
        for command, extra in commands.items()
    ]
    assert done.stdout.split() == ["|[2,", "[]]"] * len(commands)
    shown = probed(["--help"], absent=ABSENT).stdout
    for name, extra in (("bench", "bench"), ("train", "train"), ("inspect", "bench")):
        assert re.search(rf"{name} +Not installed: pip install 'kvrag\[{extra}\]'", shown), name


@pytest.mark.parametrize("group", GROUPS)
def test_every_command_is_there_and_described(run: Run, group: tuple[str, ...]) -> None:
    rows = run(*group, "--help").out.splitlines()
    for name in GROUPS[group]:
        shown = run(*group, name, "--help")
        # A description's second line may begin with the word too, but further right.
        listed = next(row for row in rows if row.startswith(f"│ {name} ")).strip(" │")
        # The first words of what the command says of itself stand in the list.
        words = listed.split()[1:4]
        assert words, name
        assert " ".join(words) in " ".join(shown.out.split())
