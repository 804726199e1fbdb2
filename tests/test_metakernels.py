"""PyTorch is imported without its operators for tensors that hold no numbers, until needed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag import metakernels

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(metakernels._TRIED), reason="imported as it is"
)

# What is registered is told as a digest for each kind of kernel.
PROBE = """
import hashlib, json, sys
from kvrag import metakernels
def told():
    kinds = "CPU", "CompositeImplicitAutograd", "Meta", "Autograd", "Python"
    found = (torch._C._dispatch_get_registrations_for_dispatch_key(kind) for kind in kinds)
    return [hashlib.md5(repr(sorted(one)).encode()).hexdigest() for one in found]
without = None
{before}
import torch
has_begun_without = "torch._prims" not in sys.modules
drawn = torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
{after}
print(json.dumps([has_begun_without, "torch._prims" in sys.modules, drawn, told(), without]))
"""


AT_ONCE = """
import threading
failed, begins = [], threading.Barrier(9)
def use(number):
    begins.wait()
    try:
        exec(["torch._meta_registrations.aten", "import transformers",
              "metakernels.need()"][number % 3], globals())
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=use, args=[number], daemon=True) for number in range(9)]
for one in threads: one.start()
for one in threads: one.join(10)
assert not failed and not any(one.is_alive() for one in threads), failed
try: torch._meta_registrations.nothing
except AttributeError as error: assert "nothing" in str(error)
"""


def probed(before: str, after: str, folder: Path | None = None) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(before=before, after=after)],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def whole() -> list[Any]:
    return probed("", "")


@pytest.mark.parametrize(
    "need",
    [
        "metakernels.need(); metakernels.need()",
        "import transformers",
        "assert torch._meta_registrations.aten",
        AT_ONCE,
        "from kvrag.cli.opening import load_object; load_object('mine:embedding', '--embedding')",
    ],
)
def test_whatever_needs_them_brings_them_all(need: str, whole: list[Any], tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("import torch")
    (tmp_path / "mine.py").write_text("embedding = 1")
    after = f"without = told(); sys.path.insert(0, {str(tmp_path)!r})\n{need}"
    begun, ended, drawn, found, without = probed("metakernels.postpone()", after)
    assert (begun, ended, drawn, found) == (True, *whole[1:4])
    # Numbers are computed as ever.
    assert without[:2] == found[:2]
    assert without[2] != found[2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "metakernels.need()"),
        ("", "metakernels._TRIED = ('0.',)"),
        # It imports PyTorch only when something of it is used.
        ("sys.modules['transformers'] = sys", ""),
    ],
)
def test_otherwise_pytorch_is_imported_as_it_is(before: str, after: str, whole: list[Any]) -> None:
    assert probed(f"{before}\nmetakernels.postpone(); {after}", "") == whole
    assert whole[:2] == [False, True]


@pytest.mark.parametrize(("command", "postponed"), [("query", [True]), ("serve", [])])
def test_a_server_has_them_before_its_threads(
    command: str, postponed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvrag.cli import main

    seen: list[bool] = []
    monkeypatch.setattr(sys, "argv", ["kvrag", command])
    monkeypatch.setattr(main, "app", lambda: None)
    monkeypatch.setattr(main.metakernels, "postpone", lambda: seen.append(True))
    monkeypatch.setattr(main.gc, "freeze", lambda: None)
    main.run()
    assert seen == postponed
