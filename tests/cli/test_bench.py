"""`kvrag bench`, `inspect` and `train`: small runs, and what they refuse before any work."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrag.fusion.links import FILE_NAME as LINKS_NAME
from kvrag.fusion.links import LinkTokens
from kvrag.models.kv_model import KVModel
from kvrag_bench.exact import ExactRow
from kvrag_bench.peers import run as measuring
from kvrag_bench.peers.workload import VISITS
from tests.cli.conftest import Run

CONTEXTS = [
    {"title": "", "text": "Ines keeps the harbour ledger. She writes down every boat."},
    {"title": "", "text": "Tomas repairs the tall clock of Varn, near the old river bank."},
]
EVICTION = (
    *("eviction", "--random-shape", "test", "--tokens", "120", "--steps", "2"),
    *("--eviction", "corm:window=8:recent=8,streaming:share=0.25"),
)
LOAD = (
    *("load", "--random-shape", "test", "--chunks", "2", "--chunk-tokens", "20"),
    *("--question-tokens", "5", "--speeds", "1", "--ratios", "0.5", "--repeats", "1"),
)
TTFT = (
    *("ttft", "--random-shape", "test", "--chunks", "2", "--chunk-tokens", "20"),
    *("--question-tokens", "5", "--repeats", "1"),
)
CODEC = (
    *("codec", "--parts", "decode", "--random-shape", "test", "--repeats", "1"),
    *("--decode-codecs", "transform:1,raw", "--context-chunks", "2", "--context-tokens", "30"),
)
TRAIN = ("--steps", 2, "--rows", 2, "--evaluate-questions", 2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "set.json"
    asked: dict[str, Any] = {"answers": ["Tomas"], "ctxs": CONTEXTS}
    path.write_text(json.dumps([{**asked, "question": f"Who repairs {i}?"} for i in range(4)]))
    return path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("ttft --chunk-tokens many", "--chunk-tokens"),
        ("ttft --policies ,", "--policies"),
        ("codec --parts weight", "weight"),
        ("codec --sources minilm", "--data"),
        (f"codec --sources nothing --data {__file__}", "nothing"),
        ("codec --codecs zip", "zip"),
        ("codec --group-layers -1", "--group-layers"),
        ("codec --random-shape gpt-9", "gpt-9"),
        ("eviction --random-shape test --eviction lru", "unknown eviction 'lru'"),
        ("eviction --random-shape test --eviction none", "leave it out"),
        ("eviction --random-shape test --tokens 50000", "holds 40960"),
        *((f"load --speeds={speeds}", "--speeds") for speeds in ("", "0", "-1", "inf", "fast")),
        ("load --parts tiers", "--parts 'tiers'"),
        ("quality --policies best", "unknown policy 'best'"),
        ("quality --codecs zip", "no codec 'zip'"),
        ("quality --ratios 0.1,many", "--ratios '0.1,many'"),
        ("quality --data absent.json", "no data set at 'absent.json'"),
        ("quality --picture quality.jpg", "ends in .png"),
        ("quality --model ./absent", "no model at './absent'"),
        ("vllm --parts magic", "--parts"),
        ("vllm --context-tokens x", "--context-tokens"),
    ],
)
def test_what_cannot_be_measured_is_named_before_any_work(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, said: str
) -> None:
    if command != "eviction --random-shape test --tokens 50000":
        monkeypatch.setattr(KVModel, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    done = run("bench", *command.split(), code=(1, 2))
    assert said in done.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (EVICTION, ("full cache", "streaming(sinks=4, share=0.25)")),
        (TTFT, ("two_stage 15%", "similar:512")),
        (CODEC, ("transform:1, 3 layers", "entropy decode")),
        (LOAD, ("deviation 50%", "one by one", "boundary ")),
        (("pml", "--random-shape", "test", "--modules", 2, "--module-tokens", 20), ("floor",)),
    ],
)
def test_tables_of_small_runs(
    run: Run, arguments: tuple[object, ...], expected: tuple[str, ...]
) -> None:
    small = ("--text-tokens", 5, "--repeats", 1) if arguments[0] == "pml" else ()
    done = run("bench", *arguments, *small)
    for one in expected:
        assert one in done.out


def test_exact_fails_where_something_differs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ExactRow("m", "float32", 9, "x, ratio 1.0", "y", 0, 0, 9, 1e-6, 1e-7, 4, 4, 1e-4)
    rows = [right]
    monkeypatch.setattr("kvrag_bench.exact.run_exact_bench", lambda options, on_progress: rows)
    assert run("bench", "exact", "--json").json[0]["by_deviation"] == 1e-6
    rows.append(replace(right, by_deviation=0.5, num_equal=1))
    done = run("bench", "exact", code=1)
    assert "1 of 4 answer tokens" in done.err
    assert "5.0e-01" in done.out


@pytest.mark.parametrize("failure", ["", "it broke"])
def test_peers_have_an_exit_code_and_a_picture(
    run: Run, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"ttft_seconds": 1.0, "seconds_per_token": 0.0, "text": "a", "full_text": "a"}
    answer["full_seconds"] = 1.0
    result: dict[str, Any] = {"failure": failure}
    if not failure:
        answers = [{"visit": visit, **answer} for visit in VISITS]
        result = {"settings": "s", "version": "1", "peak_bytes": 5, "answers": answers}
    monkeypatch.setattr(measuring, "_in_a_process", lambda *_: result)
    picture = tmp_path / "rows.png"
    asked = ("bench", "peers", "--model", "kvrag-tiny", "--peers", "transformers")
    code = int(bool(failure))
    run(*asked, "--picture", picture, code=code)
    assert picture.exists() is not bool(failure)
    run(*asked, "--json", code=code)


def test_quality(run: Run, model_folder: Path, data: Path, tmp_path: Path) -> None:
    done = run(
        *("bench", "quality", "--model", model_folder, "--data", data, "--questions", 1),
        *("--policies", "boundary", "--ratios", "1", "--max-tokens", 3, "--no-chat"),
    )
    # The policy, and the question without its documents.
    for expected in (
        *("overall, 1 questions", "full prefill", "boundary 100%", "+0.0 (+0.0 to +0.0)"),
        "2.0 contestants a question took",
    ):
        assert expected in done.out
    one = {"question": "Who keeps it?", "answers": ["unknown"], "document_answers": ["Ines"]}
    one["ctxs"] = [{**CONTEXTS[1], "before": [CONTEXTS[0]["text"]]}]
    data.write_text(json.dumps([one]))
    common = ("bench", "quality", "--model", model_folder, "--data", data, "--policies", "none")
    done = run(*common, "--context", "none,document", "--max-tokens", 2)
    assert "none, document" in done.out
    assert "by documents" in done.out
    refused = run(*common, "--eviction", "none,corm", "--picture", tmp_path / "p.png", code=1)
    assert "--picture shows one eviction" in refused.err


# -- inspect ---------------------------------------------------------------------------------


def test_pictures_and_numbers(run: Run, model_folder: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("inspect", "--model", model_folder, "--data", data, "--out", tmp_path / "out")
    assert len(run(*arguments, "--json").json["spans"]) == 2
    assert len(list((tmp_path / "out").glob("*.png"))) == 3
    assert "deviation computes again:" in run(*arguments, "--policies", "deviation").out


@pytest.mark.slow
def test_what_eviction_keeps(run: Run, model_folder: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("inspect", "--model", model_folder, "--data", data)
    picture = tmp_path / "kept.png"
    policy = ("--eviction-policy", "corm:window=4:recent=3")
    done = run(*arguments, "--eviction", picture, *policy)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "corm(window=4, recent=3, threshold=1.0) keeps" in done.out
    assert "with the full cache:" in done.out
    found = run(*arguments, "--eviction", picture, *policy, "--json").json["eviction"]
    last = list(range(len(found["tokens"]) - 3, len(found["tokens"])))
    assert [len(layer) for layer in found["kept"]] == [2] * 4
    assert all(head[-3:] == last for layer in found["kept"] for head in layer)
    both = run(*arguments, "--eviction", picture, "--out", tmp_path / "out", "--json").json
    assert both["spans"]
    assert both["eviction"]["policy"] == "corm(window=16, recent=16, threshold=1.0)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "give --out DIR, or --eviction FILE.png"),
        ("--eviction kept.jpg", "expected a name that ends in .png"),
        ("--eviction k.png --eviction-policy none", "forgets nothing"),
        ("--eviction k.png --eviction-policy lru", "unknown eviction 'lru'"),
        ("--eviction nowhere/k.png", "there is no folder"),
        ("--out . --question 5", "has 4, from 0"),
        ("--out . --policies best", "unknown policy 'best'"),
    ],
)
def test_what_cannot_be_inspected(
    run: Run, model_folder: Path, data: Path, options: str, message: str
) -> None:
    done = run("inspect", "--model", model_folder, "--data", data, *options.split(), code=1)
    assert message in done.err


# -- train -----------------------------------------------------------------------------------


class Trained:
    """Trains over `data`, and answers over documents with what came of it."""

    def __init__(self, run: Run, documents: Path, data: Path, folder: Path) -> None:
        self.run, self.documents, self.data, self.folder = run, documents, data, folder

    def train(self, what: str, model: Path, name: str, *options: object) -> Any:
        out = self.folder / name
        of_links = ("--links", 2) if what == "links" else ()
        done = self.run(
            *("train", what, "--model", model, "--data", self.data, "--out", out, "--json"),
            *(*TRAIN, *of_links, *options),
        )
        return done.json

    def index(self, model: Path, name: str, *options: object) -> Path:
        made = ("ingest", self.documents, "--index", self.folder / name, "--model", model)
        self.run(*made, "--embedding", "hashing", *options)
        return self.folder / name

    def report(self, index: Path, *options: object) -> Any:
        ask = ("query", "Who repairs the clock?", "--index", index, "--max-tokens", 2, "--json")
        return self.run(*ask, *options).json["report"]


@pytest.fixture
def trained(run: Run, documents: Path, data: Path, tmp_path: Path) -> Trained:
    return Trained(run, documents, data, tmp_path)


def test_links(trained: Trained, model_folder: Path, index_folder: Path) -> None:
    told = trained.train("links", model_folder, "tuned")
    assert told["steps"] == 2
    assert {"linked/overall", "plain/overall"} <= told["scores"].keys()
    index = trained.index(trained.folder / "tuned", "of-tuned")
    assert trained.report(index)["num_links"] > 0
    assert trained.report(index, "--links", "off")["num_links"] == 0
    # Frozen ones serve an index that was there before.
    frozen = ("--mode", "frozen", "--loss", "distill", "--rank", 2)
    trained.train("links", model_folder, "frozen", *frozen)
    links = trained.folder / "frozen" / LINKS_NAME
    assert LinkTokens.load(links).header.way == "adapter"
    assert trained.report(index_folder, "--links", links)["num_links"] > 0
    assert trained.report(index_folder)["num_links"] == 0


def test_writer(trained: Trained, model_folder: Path, run: Run) -> None:
    told = trained.train("writer", model_folder, "written", "--context", "filler:24", "--rank", 2)
    assert {"KL/written", "KL/plain"} == told["scores"].keys()
    writer = trained.folder / "written" / "writer.safetensors"
    assert told["writer"] == str(writer)
    made = ("--context", "filler:24", "--writer", writer)
    index = trained.index(model_folder, "of-written", *made)
    assert trained.report(index)["num_in_context"] > 0
    trained.index(model_folder, "of-written", *made)  # again: the same
    other = writer.with_name("other")
    other.write_bytes(writer.read_bytes() + b" ")
    done = run("ingest", trained.documents, "--index", index, "--writer", other, code=1)
    assert "was made with writer=" in done.err
    other.unlink()
    done = run("ingest", trained.documents, "--index", index, "--writer", other, code=1)
    assert "leave it out for an index that is there, which keeps a copy" in done.err
    plain = trained.index(model_folder, "of-none", "--context", "filler:24")
    done = run("ingest", trained.documents, "--index", plain, "--writer", other, code=1)
    assert "was made with writer=none, asked for" in done.err
    judged = ("bench", "quality", "--model", model_folder, "--data", trained.data, "--json")
    asked = ("--policies", "none", "--context", "filler:24", "--questions", 2, "--links", "off")
    rows = run(*judged, *asked, "--writer", writer).json
    assert {"none", "none + writer"} <= {row["policy"] for row in rows}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("links --way kv", "way 'kv': expected one of embeddings, adapter"),
        ("links --rank 4", "--rank 4 is of --way adapter"),
        ("links --mode frozen --plain-share 0.5", "--plain-share 0.5 is of --mode tuned"),
        (
            "links --mode frozen --way embeddings --learning-rate 0.1",
            "--learning-rate 0.1 is of --mode tuned and --way adapter",
        ),
        ("links --device toaster", "device 'toaster' cannot be used"),
        ("links --data absent.json", "no data set at 'absent.json'"),
        ("links --model ./absent", "no model at './absent'"),
        ("links --plain-share 2", "error: training: plain_share 2.0"),
        ("links --learning-rate nan", "learning_rate nan"),
    ],
)
def test_what_cannot_be_trained_is_named(
    run: Run, model_folder: Path, tmp_path: Path, options: str, message: str
) -> None:
    what, *given = options.split()
    out = tmp_path / "out"
    done = run("train", what, "--model", model_folder, "--out", out, *TRAIN, *given, code=1)
    assert message in done.err
    assert not out.exists()
