"""Two raylets give the index that one process gives."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrag.errors import ClusterError, KVRagError, ParameterError
from kvrag.ingest.index import Index
from kvrag.ingest.ray import RayOptions, RayRunner, ingest
from kvrag.ingest.ray.driver import connected
from kvrag.models.kv_model import KVModel
from tests.ingest.ray.conftest import content
from tests.support.models import make_model, make_tokenizer
from tests.support.servers import free_port

# Ray warns of its own settings, and leaves sockets to the garbage collector.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

# A worker's start takes longest: one actor of each kind, and large packets.
FEW: dict[str, Any] = {"max_actors": 1, "cpus": 0.5, "batch_tokens": 2048}


def write_docs(folder: Path) -> Path:
    folder.mkdir()
    for number in range(12):
        text = f"# Page {number}\n\n" + f"The keeper of light {number} wrote a book. " * 20
        (folder / f"{number}.md").write_text(text)
    rows = [{"text": f"Row {number} is about ships.", "year": number} for number in range(9)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "twin.txt").write_text((folder / "3.md").read_text())
    (folder / "bad.txt").write_bytes(b"\xff\xfe\xff")
    (folder / "empty.txt").write_text("")
    return folder


def make(folder: Path, **settings: Any) -> Index:
    chosen = {"model": "kvrag-tiny", "embedding": "minilm", "store": f"file:{folder}-kv"}
    return Index.create(folder, **{**chosen, "chunk_tokens": 64, **settings})


@pytest.mark.parametrize("context", ["document:32", "similar:48"])
def test_a_cluster_gives_the_same_index_and_goes_on_where_it_was(
    cluster: Any, tmp_path: Path, context: str
) -> None:
    import ray

    docs = write_docs(tmp_path / "docs")
    settings = {"codec": "cachegen", "context": context}
    with (
        ray.init(cluster.address, log_to_driver=False),
        make(tmp_path / "one", **settings) as one,
        make(tmp_path / "many", **settings) as many,
    ):
        runner = RayRunner(RayOptions(**FEW))
        foreseen = many.add(docs, dry_run=True, runner=runner)
        assert content(many)["documents"] == []
        expected = one.add(docs)
        found = many.add(docs, runner=runner)
        for name in ("added", "failed", "num_chunks", "num_tokens", "num_records", "size_bytes"):
            assert getattr(found, name) == getattr(expected, name), name
        assert len(found.failed) == 2
        assert foreseen.num_records == found.num_records
        assert foreseen.num_tokens_computed == found.num_tokens_computed
        assert many.config.profile == one.config.profile != ""
        assert content(many) == content(one)

        # What changed is done, and nothing else.
        (docs / "3.md").write_text("# Other\n\nA text about foxes.")
        (docs / "4.md").unlink()
        (docs / "rows.jsonl").write_text('{"text": "Row 0 is about ships.", "year": 0}\n')
        expected, found = one.add(docs), many.add(docs, runner=runner)
        for name in ("added", "changed", "removed", "unchanged"):
            assert sorted(getattr(found, name)) == sorted(getattr(expected, name)), name
        assert found.num_records == expected.num_records
        if context != "similar:48":  # which changes what others were encoded after
            assert found.num_records == 1
        assert content(many) == content(one)


def test_datasets_of_ray_are_read_and_one_bad_row_costs_itself(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    rows = [{"text": f"Text {number} about ships.", "id": number} for number in range(20)]
    rows[7]["text"] = ""
    rows.append({"text": "Another text.", "id": 3})
    with (
        ray.init(cluster.address, log_to_driver=False),
        make(tmp_path / "index", embedding="hashing") as index,
    ):
        dataset = ray.data.from_items(rows, override_num_blocks=3)
        report = ingest(dataset, index, RayOptions(**FEW))
        assert len(report.added) == 19
        assert {failed.source for failed in report.failed} == {"7", "3"}
        assert index.search("Text 3 about ships", 1)[0].chunk.metadata == {"id": 3}
        again = ingest(dataset, index, RayOptions(**FEW))
        assert (again.num_records, len(again.unchanged)) == (0, 19)
        assert dataset.context.execution_options.preserve_order is False
        # An error that ends a run arrives as what it is.
        wrong = RayOptions(**FEW, store="redis://127.0.0.1:1/0")
        with pytest.raises(KVRagError, match=r"127\.0\.0\.1"):
            ingest(ray.data.from_items([{"text": "More."}]), index, wrong)
        (tmp_path / "only_here.py").write_text("def load(path, content): return []")
        monkeypatch.syspath_prepend(tmp_path)
        file = ray.data.from_items([{"path": "a.odp", "bytes": b"x"}])
        with pytest.raises(ClusterError, match=r"failed \(loader .odp.* no module 'only_here'"):
            ingest(file, index, RayOptions(**FEW), loaders={".odp": "only_here:load"})


def test_the_command_reads_parquet_and_says_what_a_run_takes(cluster: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"Text {number} about ships and harbours." for number in range(6)]
    pq.write_table(pa.table({"text": texts, "id": list("abcdef")}), tmp_path / "rows.parquet")

    def run(*more: str) -> str:
        command = [
            *(sys.executable, "-m", "kvrag", "ingest", str(tmp_path / "rows.parquet")),
            *("--index", str(tmp_path / "index")),
            *("--embedding", "hashing", "--model", "kvrag-tiny"),
            *("--ray", cluster.address, "--ray-actors", "1:1", "--ray-cpus", "0.5", *more),
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "tokens to compute; KV by codec, at most: raw" in run("--dry-run")
    assert "documents: 6 new" in run()


@pytest.mark.parametrize("place", ["{}", "ray://{}", "RAY_ADDRESS", "file"])
def test_a_cluster_that_does_not_answer_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    pytest.importorskip("ray.data", reason="kvrag[ray] is not installed")
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    if place == "RAY_ADDRESS":
        monkeypatch.setenv(place, address)
    elif place == "file":  # of a cluster that was killed
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    given = place.format(address) if "{}" in place else None
    began = time.monotonic()
    with (
        pytest.raises(ClusterError, match=rf"{address} cannot .*refused.*ray start --head"),
        connected(RayOptions(given)),
    ):
        pass
    assert time.monotonic() - began < 30  # Ray itself tries for minutes.


def test_an_index_that_a_cluster_cannot_fill_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.data", reason="kvrag[ray] is not installed")
    model = KVModel.load(make_model("llama", num_hidden_layers=2), tokenizer=make_tokenizer())

    @contextlib.contextmanager
    def no_cluster(_: RayOptions) -> Any:
        yield SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0})

    monkeypatch.setattr("kvrag.ingest.ray.driver.connected", no_cluster)
    for number, (options, dataset, message) in enumerate(
        (
            ({"min_actors": 8}, None, r"take 8\.25 processors, and this machine has 2"),
            ({"gpus": 1}, None, r"take 1 graphics cards, and this machine has 0"),
            ({}, object(), r"take 2\.25 processors, and this machine has 2"),
        )
    ):
        with (
            make(tmp_path / f"{number}", embedding="hashing") as index,
            pytest.raises(ParameterError, match=message),
        ):
            index.add((), runner=RayRunner(RayOptions("local", **options), dataset))
    with (
        make(tmp_path / "index", model=model, embedding="hashing") as index,
        pytest.raises(ParameterError, match="built in memory"),
    ):
        index.add((), runner=RayRunner())
