import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvrag.cli import checkup
from kvrag.cli.checkup import Finding
from kvrag.codec.names import PLAIN
from kvrag.fusion.policies.registry import POLICIES
from kvrag.native.kernels import REFERENCE
from kvrag.store.registry import REMOTE
from tests.cli.conftest import Run
from tests.support.distributions import installed


def findings(run: Run, *args: object) -> dict[str, Finding]:
    done = run("doctor", *args, "--json", code=(0, 1))
    return {row["name"]: Finding(**row) for row in done.json["findings"]}


def test_this_machine_is_sound(run: Run) -> None:
    done = run("doctor")
    for word in ("torch", "transformers", "lxml", "threads", "disk", "network"):
        assert word in done.out


def test_index_and_model(run: Run, index_folder: Path) -> None:
    found = findings(run, "--index", index_folder)
    assert found["index"].status == "ok"
    assert "3 documents" in found["index"].detail
    assert found["embedding"].detail == "hashing-2 reads all of a text"
    assert found["model"].status == "ok"
    assert "llama" in found["model"].detail
    assert found["compute"].detail.startswith("float32; --compute auto would take ")
    for name in ("float32", "bfloat16", "int8"):
        assert f"{name} 0." in found["compute"].detail.partition("(a layer: ")[2]


@pytest.mark.parametrize(
    ("changed", "name", "status", "remedy"),
    [
        (("torch.get_num_threads", lambda: 1000), "threads", "warning", "set OMP_NUM_THREADS="),
        (
            ("kvrag.native.kernels.instruction_set", lambda: REFERENCE),
            "kernels",
            "warning",
            "C++ compiler",
        ),
        (
            ("kvrag.cli.checkup.metadata.requires", lambda _: ["numpy<100,>=99.0"]),
            "numpy",
            "problem",
            "pip install 'numpy>=99.0'",
        ),
    ],
)
def test_what_is_wrong_has_a_remedy(
    run: Run, monkeypatch: pytest.MonkeyPatch, changed: Any, name: str, status: str, remedy: str
) -> None:
    monkeypatch.setattr(*changed)
    found = findings(run)[name]
    assert found.status == status
    assert remedy in found.remedy


def test_without_torch_the_rest_is_still_checked(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.argv = ['kvrag', 'doctor', '--json', '--index', {str(tmp_path)!r}]\n"
        "from kvrag.cli.main import run; run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == ""
    found = {row["name"]: row for row in json.loads(done.stdout)["findings"]}
    for name in ("plugins", "index"):
        assert found[name]["status"] == "problem"
        assert "torch" in found[name]["detail"]
    assert found["numpy"]["status"] == "ok"


def test_what_other_distributions_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (REMOTE, POLICIES, PLAIN):
        monkeypatch.setattr(table, "_registered", {})
    module = """
from kvrag.codec.raw import RawCodec


class Mirror(RawCodec):
    name = label = "mirror"
"""
    points = {
        "kvrag.codecs: mirror": "mirror_codec:Mirror",
        "kvrag.policies: last": "mirror_codec:Last",
        "kvrag.stores: redis": "mirror_codec:Redis",
    }
    assert list(checkup._plugins()) == []
    with installed(tmp_path, "mirror_codec", module, points):
        store, policy, codec = checkup._plugins()
    assert (store.status, policy.status, codec.status) == ("warning", "problem", "ok")
    assert "'kvrag.stores: redis = mirror_codec:Redis' of mirror_codec 1.5" in store.detail
    assert "is ignored" in store.detail
    assert "AttributeError" in policy.detail
    assert codec.detail == "'kvrag.codecs: mirror = mirror_codec:Mirror' of mirror_codec 1.5"
