"""kvrag.toml and `kvrag config`: what wins, what is refused, what --help leaves out."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvrag.cli import settings
from kvrag.cli.main import app
from kvrag.ingest.config import IndexConfig
from tests.cli.conftest import Run
from tests.support.folders import key_file
from tools import commands

QUESTION = "Who keeps the harbour ledger?"
COMMANDS = dict(commands.commands())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder of one's own, where no settings are yet."""
    monkeypatch.delenv(settings.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "kvrag.toml"
    path.write_text(text)
    return path


def refused(run: Run, *arguments: object) -> str:
    done = run(*arguments, code=1)
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    return done.err.removeprefix("error: ").rstrip("\n")


def rows(run: Run, *arguments: object) -> dict[str, tuple[object, str]]:
    done = run("config", *arguments, "--json")
    return {row["key"]: (row["value"], row["from"]) for row in done.json["settings"]}


class TestWhatWins:
    def test_a_file_stands_for_options(self, run: Run, folder: Path, index_folder: Path) -> None:
        write(folder, 'index = "index"\n[query]\nmax-tokens = 2\npolicy = "boundary"\nk = 1\n')
        done = run("query", QUESTION, "--json")
        assert done.json["report"]["policy"].startswith("boundary")
        assert len(done.json["sources"]) == 1
        assert done.err.startswith("kvrag.toml: index=index, k=1, max-tokens=2, policy=boundary\n")

    @pytest.mark.parametrize(
        ("file", "arguments", "taken"),
        [
            ('policy = "boundary"\nratio = 0.2', "--policy none", ("none", None, None)),
            ('policy = "boundary"\nratio = 0.2', "--boundary-tokens 3", ("boundary", None, 3)),
            ('policy = "boundary"\nboundary-tokens = 3', "--ratio 0.4", ("boundary", 0.4, None)),
            (
                'policy = "boundary"\nratio = 0.2',
                "--policy seam --boundary-tokens 3",
                ("seam", None, 3),
            ),
            ('policy = "boundary"\nratio = 0.2', "--policy boundary", ("boundary", 0.2, None)),
            ("ratio = 0.2", "--policy two_stage", ("two_stage", 0.2, None)),
        ],
    )
    def test_a_policys_parameters_belong_to_it(
        self,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
        file: str,
        arguments: str,
        taken: tuple[str, float | None, int | None],
    ) -> None:
        write(folder, f"[query]\n{file}\n")
        root: Any = get_command(app)
        above = root.make_context("kvrag", ["query"], resilient_parsing=True)
        query = root.get_command(above, "query")
        with query.make_context("query", ["x", *arguments.split()], parent=above) as context:
            options = context.params
        assert (options["policy"], options["ratio"], options["boundary_tokens"]) == taken
        # The line about the file names what is taken from it.
        from_file = file.split("\n")[-1].replace(" ", "")
        told = capsys.readouterr().err
        assert (bool(from_file) and from_file in told) == ("=0.2" in from_file and taken[1] == 0.2)

    def test_no_compression_is_as_ever(self, run: Run, folder: Path) -> None:
        write(folder, '[ingest]\ncompress = "none"\nchunk-tokens = 32\n')
        assert rows(run, "ingest")["chunk-tokens"] == (32, "kvrag.toml")
        write(folder, '[ingest]\ncompress = "drop:0.5"\n')
        assert "compress is gone. Compression by drop" in refused(run, "config", "ingest")

    def test_a_table_goes_before_what_holds_for_all(self, run: Run, folder: Path) -> None:
        path = write(folder, 'model = "a"\n[chat]\nmodel = "b"\n')
        assert rows(run, "query", "--config", path)["model"] == ("a", str(path))
        assert rows(run, "chat", "--config", path)["model"] == ("b", str(path))

    def test_which_file(self, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("found", "variable", "named"):
            (folder / name).mkdir()
            (folder / name / "kvrag.toml").write_text(f"[query]\nseed = {len(name)}\n")
        monkeypatch.chdir(folder / "found")
        assert rows(run, "query")["seed"] == (5, "kvrag.toml")
        monkeypatch.setenv(settings.VARIABLE, str(folder / "variable" / "kvrag.toml"))
        assert rows(run, "query")["seed"][0] == 8
        named = folder / "named" / "kvrag.toml"
        assert rows(run, "query", "--config", named)["seed"] == (5, str(named))
        assert rows(run, "query", "--config", os.devnull)["seed"] == (None, "default")
        monkeypatch.setenv(settings.VARIABLE, "kvrag.toml")
        assert "expected an absolute path" in refused(run, "config")

    def test_paths_lie_beside_the_file(
        self, run: Run, folder: Path, index_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(folder, 'index = "index"\n')
        monkeypatch.chdir("/")
        run("ls", "--config", path)
        assert run("ls", "--config", path).err == ""


class TestNothingIsPassedOver:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('indx = "x"', "'indx' is no key for all commands (is it 'index'?)"),
            ('index = " "', "index = ' ': expected a folder, found an empty path"),
            ("[qury]\nk = 1", "there is no command 'kvrag qury' (is it 'query'?)"),
            ("[pml.rn]\nk = 1", "there is no command 'kvrag pml rn' (is it 'run'?)"),
            (
                "[pml]\nratio = 1",
                "'pml' is a group of commands: expected tables such as [pml.",
            ),
            ("[query]\npolcy = 1", "'kvrag query' has no option 'polcy' (is it 'pol"),
            ("[query]\n'' = 1", "has no option ''; it has boundary-tokens, card-bytes, compute, "),
            ("[query]\nk = 1\nk = 2", "a value (at end of document), found 'k = 2'; name each"),
            ("[query]\nk = 1 2", "(at line 2, column 7), found 'k = 1 2'; name each key"),
            ("[query]\nk = true", "[query] k = True: expected a number"),
            ("[query]\nk = 0", "[query] k = 0: Input should be greater than or equal to 1"),
            ("[query]\nk = [1]", "[query] k = [1]: expected a number"),
            ("store = 3", "store = 3: expected text"),
            ("index = 3", "index 3: expected a path to a file or folder"),
            ("[query]\nfilter = {a = 1}", "[query] filter = {'a': 1}: expected text"),
            ("[query]\njson = 1", "[query] json = 1: expected true or false"),
            ("[ingest]\nloader = 'a'", "[ingest] loader = 'a': expected a list of texts"),
            ("[choose-store]\nloss = nan", "loss = nan: Input should be less than or equal to 1"),
            ("[pml]\nrun.seed = 1\nrun.sed = 1", "'kvrag pml run' has no option 'sed'"),
            ("[demo]\nquestions = ''", "[demo] questions = '': expected text"),
            ("[[query]]\nk = 1", "'query' is no key for all commands"),
            ("#\n" * 8_001, "at most 16,000 are read"),
            ('index = "\\u0000"', "index '\\x00': expected a path without zero bytes"),
            ('index = "~nosuchuser/x"', "index '~nosuchuser/x': expected the name of a user"),
            (f'index = "{"b" * 300}"', "...: expected a shorter name"),
            ('index = "loop"', "loop': expected no links that lead in a circle"),
            (f"[query]\n{'x' * 1900} = 1", f"has no option '{'x' * 196}...; it has boundary-"),
            ("[query]\nttft = 0", "[query] ttft = 0: expected a number above 0, found 0"),
            ("[query]\npolicy = 'x'", "[query] policy = 'x': unknown policy 'x'; known: none, "),
            ('"\\u001b[2J" = 1', "'\\x1b[2J' is no key for all commands"),
        ],
        ids=lambda text: text[:24],
    )
    def test_of_a_file(self, run: Run, folder: Path, text: str, said: str) -> None:
        (folder / "loop").symlink_to("loop")
        write(folder, text)
        # Also where it is said of another command.
        told = refused(run, "doctor")
        assert told.startswith("kvrag.toml")
        assert said in told

    def test_what_cannot_be_read(self, run: Run, folder: Path) -> None:
        said = refused(run, "ls", "-i", folder, "--config", "gone.toml")
        assert said.startswith("gone.toml cannot be read: No such file or directory; ")
        (folder / "kvrag.toml").write_bytes(b"\xff")
        assert "is not UTF-8" in refused(run, "ls", "-i", folder)
        (folder / "kvrag.toml").write_text("[query]\nk = 3\n", encoding="utf-8-sig")
        assert "query k = 3" in run("config").out

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda path: path.mkdir(), "not a regular file but a folder"),
            (lambda path: os.mkfifo(path), "not a regular file but a pipe"),
            (lambda path: path.symlink_to("kvrag.toml"), "it is a link to nothing"),
        ],
    )
    def test_what_has_the_name_but_is_no_file(
        self, run: Run, folder: Path, make: Callable[[Path], None], said: str
    ) -> None:
        make(folder / "kvrag.toml")
        expected = f"kvrag.toml cannot be read: {said}; name another with --config, or "
        assert refused(run, "ls", "-i", folder) == f"{expected}{os.devnull} for none"
        run("config", "--config", os.devnull)

    def test_help_is_shown_whatever_the_file_says(self, run: Run, folder: Path) -> None:
        write(folder, "nonsense = 1")
        run("query", "--help")
        run("--help")

    @pytest.mark.parametrize("given", [("--set", "ratio=1"), ("--set=ratio=1",)])
    @pytest.mark.parametrize("command", ["query x", "serve --show", "pml run x"])
    def test_what_set_gave_is_an_option(
        self, run: Run, folder: Path, command: str, given: tuple[str, ...]
    ) -> None:
        # That of serve is not handed on to vLLM, as unknown ones are.
        done = run(*command.split(), *given, code=2)
        said = " ".join(re.sub("[\u2500-\u257f]", " ", done.err).split())
        place = command.removesuffix(" x").removesuffix(" --show")
        assert "--set KEY=VALUE is gone: give the option --KEY VALUE" in said
        assert f"'kvrag config {place}' lists all" in said
        assert f"[{place.replace(' ', '.')}] in kvrag.toml" in said

    def test_what_help_leaves_out_is_an_option_all_the_same(
        self, run: Run, index_folder: Path
    ) -> None:
        asked = ("query", QUESTION, "-i", index_folder, "--json", "--max-tokens", 4)
        sampled = ("--temperature", 1.5, "--seed", 3, "--top-p", 0.9, "--boundary-tokens", 2)
        one, same = (run(*asked, "--policy", "boundary", *sampled) for _ in range(2))
        assert one.json["answer"] == same.json["answer"]
        assert "tokens=2" in one.json["report"]["policy"]


class TestAFileNobodyNamed:
    @pytest.mark.parametrize(
        "text",
        [
            'store = "http://evil.example"',
            'model = "evil/model"',
            '[ingest]\nloader = [".txt=evil:load"]',
            '[ingest]\nprofile = "evil"',
            '[ingest]\nparse-memory = "1TB"',
            '[ingest]\ncontrol-tokens = "keep"',
            '[ingest]\ncontext = "document"',
            '[query]\nlinks = "evil"',
            "[query]\nno-chat = true",
            '[ls]\nstore = "file:kv?key_file=/home/other/key"',
            '[profile]\nout = "/home/other/.bashrc"',
            "[gc]\nshared = true",
            "[choose-store]\nmove = true",
            '[serve]\nhost = "0.0.0.0"',
            'index = "s3://bucket/index"',
        ],
    )
    def test_names_no_place_no_code_and_lifts_no_guard(
        self, run: Run, folder: Path, text: str
    ) -> None:
        path = write(folder, text)
        assert "kvrag.toml was found, not named: if you trust it" in refused(run, "config")
        run("config", "--config", path)

    def test_leads_to_no_index_elsewhere(
        self, run: Run, folder: Path, index_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inner = folder / "inner"
        inner.mkdir()
        (inner / "link").symlink_to(index_folder)
        monkeypatch.chdir(inner)
        for place in ("../index", str(index_folder), "link"):
            path = write(inner, f"index = {json.dumps(place)}")
            assert "expected a folder in" in refused(run, "ls")
            run("ls", "--config", path)
        monkeypatch.chdir(folder)
        path = write(folder, '[ls]\nindex = "index"')
        run("ls")
        config = IndexConfig.load(index_folder)
        for change, said in (
            ({"store": f"file:{folder / 'kv'}"}, "its KV is elsewhere"),
            ({"embedding": str(folder)}, "its embedding is in"),
        ):
            replace(config, **change).save(index_folder)
            assert said in refused(run, "ls")
            assert "found, not named" not in run("ls", "--config", path).err

    def test_harmless_keys_are_keys(self) -> None:
        known = {name for command in COMMANDS.values() for name in command.keys}
        assert known >= settings.HARMLESS
        assert known >= set(settings.COMMON)


class TestConfig:
    def test_what_is_in_force(self, run: Run, folder: Path) -> None:
        write(folder, 'index = "idx"\n\n[query]\nseed = 7\ndevice = "cuda"\n')
        done = run("config")
        assert done.out.splitlines() == [
            str(folder / "kvrag.toml"),
            "  index = idx",
            "  query seed = 7",
            "  query device = cuda",
        ]
        found = rows(run, "query")
        assert found["index"] == ("idx", "kvrag.toml")
        assert found["seed"] == (7, "kvrag.toml")
        assert found["policy"] == ("two_stage", "default")
        shown = run("config", "query").out
        assert "Makes sampled answers repeatable" in shown

    def test_without_a_file(self, run: Run, folder: Path) -> None:
        done = run("config")
        assert "no kvrag.toml is in this folder" in done.err
        assert run("config", "--json").json == {"file": None, "settings": []}

    def test_no_such_command(self, run: Run, folder: Path) -> None:
        assert "there is no command 'kvrag qury' (is it 'query'?)" in refused(run, "config", "qury")
        assert "is a group of commands: add one of check" in refused(run, "config", "pml")
        assert "no command 'kvrag ls x'" in refused(run, "config", "ls", "x")


class TestHelp:
    @pytest.mark.parametrize("name", list(COMMANDS))
    def test_help_shows_at_most_twelve_options(self, run: Run, name: str) -> None:
        shown = run(*name.split(), "--help").out
        keys = COMMANDS[name].keys.values()
        for key_name, key in COMMANDS[name].keys.items():
            assert (f"--{key_name} " in shown) == (not key.hidden and key_name != "k")
        assert sum(not key.hidden for key in keys) + len(("--config", "--help")) <= 12
        num_more = sum(key.hidden for key in keys)
        if num_more:
            said = f"'kvrag config {name}' lists all options, {num_more} more than these."
            assert said in " ".join(shown.split())
        for shared in ("--config", "--help"):
            assert shared in shown

    def test_the_page_says_what_the_commands_say(self) -> None:
        page = commands.PAGE.read_text()
        assert page == commands.written(page), "run: python -m tools.commands"

    def test_the_reference_lists_every_option_and_key_of_every_command(self) -> None:
        shared, *sections = commands.reference().split("\n## `kvrag ")
        by_name = {section.partition("`")[0]: section for section in sections}
        found = dict(commands.commands(apart=()))
        assert by_name.keys() == found.keys()
        assert {"query", "pml run", "bench ttft", "train links"} <= found.keys()
        for name, command in found.items():
            for parameter in command.params:
                shown = max(parameter.opts, key=len) if parameter.hidden else parameter.opts[0]
                listed = set(re.findall(r"[\w-]+", shared + by_name[name]))
                if parameter.param_type_name == "option":
                    assert shown in listed, f"kvrag {name}: {shown}"


def test_a_moved_key_can_be_named_everywhere(
    run: Run, tmp_path: Path, documents: Path, model_folder: Path
) -> None:
    pytest.importorskip("cryptography")
    key, index = key_file(tmp_path / "key"), tmp_path / "index"
    url = f"file:{tmp_path / 'kv'}?key_file="
    asked = ("ingest", documents, "-i", index, "-m", model_folder, "--embedding", "hashing")
    run(*asked, "--store", f"{url}{key}")
    key.rename(tmp_path / "moved")
    store = f"{url}{tmp_path / 'moved'}"
    for command in (["ls"], ["stats"], ["gc"], ["verify"], ["search", "--sparse", "ledger"]):
        run(*command, "-i", index, code=1)
        run(*command, "-i", index, "--store", store)
    run("rm", documents / "river.md", "-i", index, "--store", store)
    assert run("doctor", "-i", index, "--store", store, "--json").json["ok"]
