"""Each Python block of README.md and of docs/ runs as printed; so does docs/pml.md's markup.

The pages of docs/notebooks/ run whole: `tests/test_notebooks.py`.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager
from llama_index.core import Document as LlamaIndexDocument
from transformers import PreTrainedTokenizerFast

import kvrag
from kvrag.pml.engine import PMLEngine
from tests.llms.conftest import own_event_loop
from tests.support.api_server import serving
from tests.support.models import make_model, make_tokenizer

__all__ = ["own_event_loop"]

ROOT = Path(kvrag.__file__).parent.parent
PAGES = [
    "README.md",
    *(
        str(page.relative_to(ROOT))
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.parent.name != "notebooks"
    ),
]
LEASE = "Ines Varga signed the lease of the harbour house in 2019."
# What a block may use without saying where it comes from: the text around it does.
SERVER = "http://127.0.0.1:8000/v1"
# Names that blocks define and the reader calls.
LATER = {"load": "assert list(load('a', b''))"}


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


BLOCKS = [(page, n, one) for page in PAGES for n, one in enumerate(blocks(page, "python"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the pages' examples open."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "docs").mkdir()
    (folder / "docs" / "lease.txt").write_text(LEASE)
    (folder / "travel.xml").write_text(
        '<schema name="travel"><module name="city">Varn is by the sea.</module></schema>'
    )
    with kvrag.Index.create(folder / "my-index", model="kvrag-tiny", embedding="hashing") as index:
        index.add(kvrag.Document("lease", LEASE))
    # The commands' default, which the tutorials use.
    shutil.copytree(folder / "my-index", folder / "kvrag-index")
    return folder


@pytest.fixture
def given(folder: Path) -> Iterator[dict[str, Any]]:
    """The names that the text around the blocks gives."""
    with kvrag.Index.open(folder / "my-index") as index:
        documents = [Document(LEASE, metadata={"source": "lease.pdf"})]
        manager = InMemoryRecordManager("kvrag")
        manager.create_schema()
        model = make_model()
        tokenizer: PreTrainedTokenizerFast = make_tokenizer()
        yield {
            "Path": Path,
            "kvrag": kvrag,
            "index": index,
            "prompt": f"{LEASE}\n\nWho signed the lease?",
            "prompts": ["<prompt schema='travel'>Where?</prompt>"],
            "chunks": LEASE,
            "documents": documents,
            "record_manager": manager,
            "texts_of_slides": lambda content: ["one"],
            "model": model,
            "inputs": {
                **tokenizer("The quick brown fox", return_tensors="pt"),
                "max_new_tokens": 4,
            },
        }


@pytest.mark.usefixtures("own_event_loop")
# Frameworks that leave their own warnings to the reader.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("page", "number", "block"), BLOCKS, ids=[f"{page}-{number}" for page, number, _ in BLOCKS]
)
def test_python(
    folder: Path,
    given: dict[str, Any],
    page: str,
    number: int,
    block: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    if "from llama_index.core.ingestion" in block:
        given["documents"] = [LlamaIndexDocument(text=LEASE, id_="a")]
    for name in ("vllm", "langchain_community"):
        if f"from {name}" in block and find_spec(name) is None:
            pytest.skip(f"needs {name}")
    if SERVER in block and "OpenAI(" in block:
        given["index"].close()
        name = "kvrag-index" if "rag:kvrag-index" in block else "my-index"
        with kvrag.Index.open(folder / name) as index, serving(index) as served:
            exec(block.replace(SERVER, served.url), given)
    elif "ChatEngine" in block:
        # LlamaIndex's memory of a chat has a thread and a database that nothing closes.
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", block], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        print(done.stdout)
    else:
        exec(compile(block, f"{page}, block {number}", "exec"), given)
    if "print(" in block:
        assert capsys.readouterr().out.strip()
    for name, check in LATER.items():
        if f"def {name}(" in block:
            exec(check, given)


def test_markup(folder: Path) -> None:
    schema, prompt = blocks("docs/pml.md", "xml")[:2]
    (folder / "schema.xml").write_text(schema)
    (folder / "rules.txt").write_text("Be kind. Pay cash.")
    with kvrag.Index.open(folder / "my-index") as index:
        engine = PMLEngine(kvrag.KVEngine(index))
        engine.add(folder / "schema.xml")
        engine.place(prompt)


def test_blocks_are_found() -> None:
    assert len(blocks("README.md", "python")) == 2
    assert {"docs/ingest.md", "docs/tools.md", "docs/vllm.md"} <= {page for page, _, _ in BLOCKS}
