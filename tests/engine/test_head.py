"""The head of chat prompts, which chunks are encoded after: prompts with it, and with others."""

from collections.abc import Iterator

import pytest
import torch

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Prompt
from kvrag.fusion.layout import Layout
from kvrag.ingest.index import Index
from kvrag.llms.vllm.plan import TokenFinder
from kvrag.models.caches import CaptureCache
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag_testing.bench_top import TEXTS
from tests.support.models import make_model, make_tokenizer
from tests.support.rag import text_index

CONTENT = "\n\n".join([*TEXTS, "Question: who keeps it?"])
USER = [{"role": "user", "content": CONTENT}]
OWN_SYSTEM = [{"role": "system", "content": "Answer in one word."}, *USER]
WITH_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}<|system|>\nBe kind.\n{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "<|assistant|>\n"
)
HEAD = "<bos><|system|>\nBe kind.\n<|user|>\n"


@pytest.fixture(scope="module")
def model() -> KVModel:
    tokenizer = make_tokenizer.__wrapped__()
    tokenizer.chat_template = WITH_SYSTEM
    return KVModel(make_model(), tokenizer)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, model: KVModel) -> Iterator[Index]:
    with text_index(tmp_path_factory.mktemp("head") / "index", model) as index:
        yield index


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory, model: KVModel) -> Iterator[Index]:
    """Yield an index from before the whole head was the prefix."""
    with pytest.MonkeyPatch.context() as patched:
        bos = model.tokenizer.bos_token_id
        patched.setattr(KVModel, "default_prefix_ids", lambda _: (bos,))
        made = text_index(tmp_path_factory.mktemp("older") / "index", model)
    with made:
        yield made


def num_exact(layout: Layout) -> int:
    return sum(span.length for span in layout.spans if layout.is_exact(span))


def check_repaired(index: Index, prompt: Prompt) -> None:
    """Check that a prompt that is recomputed whole is full prefill."""
    engine = KVEngine(index)
    fused = engine.fuse(prompt, policy="deviation", ratio=1.0)
    with torch.no_grad():
        plain = index.model.hf(torch.tensor([engine.prompt_ids(prompt)])).logits[0, -1]
    torch.testing.assert_close(fused.logits, plain, rtol=1e-4, atol=1e-4)
    assert fused.report.num_chunks == len(TEXTS)


@pytest.mark.parametrize("policy", ["boundary", "deviation", "query", "two_stage"])
def test_the_first_chunk_is_exact_and_never_recomputed(index: Index, policy: str) -> None:
    engine = KVEngine(index)
    fused = engine.fuse(USER, policy=policy, ratio=0.3)
    first, *others = fused.layout.spans
    assert first.prompt_start == len(index.prefix_ids)
    assert fused.report.num_exact == first.length
    assert not {row for picks in fused.picks for row in picks.tolist()} & set(
        range(first.prompt_start, first.prompt_end)
    )
    assert fused.report.num_recomputed == pytest.approx(
        0.3 * sum(span.length for span in others), abs=len(others) + 1
    )
    cache = CaptureCache(index.model.spec.num_layers)
    with torch.no_grad():
        index.model.hf.model(torch.tensor([engine.prompt_ids(USER)]), **{CACHE_ARGUMENT: cache})
    rows = slice(0, first.prompt_end)
    for layer_index, plain in enumerate(cache.layers):
        for given, expected in (
            (fused.kv.keys[layer_index], plain.keys),
            (fused.kv.values[layer_index], plain.values),
        ):
            torch.testing.assert_close(
                given[:, :, rows], expected[:, :, rows], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("prompt", [OWN_SYSTEM, CONTENT], ids=["system", "string"])
def test_another_head_only_makes_no_chunk_exact(index: Index, prompt: Prompt) -> None:
    engine = KVEngine(index, policy="none")
    fused = engine.fuse(prompt)
    assert fused.report.num_exact == 0
    assert fused.report.num_reused == sum(span.length for span in fused.layout.spans)
    # What the head shares with the prefix, at least the attention sink, was seen when encoding.
    ids = engine.prompt_ids(prompt)
    shared = fused.layout.prefix_length
    assert 1 <= shared < len(index.prefix_ids)
    assert ids[:shared] == index.prefix_ids[:shared]
    assert ids[shared] != index.prefix_ids[shared]
    check_repaired(index, prompt)


def test_an_older_index_works_as_it_did(older: Index) -> None:
    assert len(older.prefix_ids) == 1
    path = older.path
    engine = KVEngine(older, policy="none")
    assert engine.fuse(USER).report.num_exact == 0
    assert engine.fuse(CONTENT).report.num_exact > 0
    check_repaired(older, USER)
    older.add(Document("late", "A later text of an older index, encoded after the same prefix."))
    assert older.upkeep.verify().ok
    assert older.config.load(path).prefix_ids == older.prefix_ids


@pytest.mark.parametrize("prompt", [USER, OWN_SYSTEM, CONTENT], ids=["user", "system", "string"])
@pytest.mark.parametrize("which", ["index", "older"])
def test_a_server_finds_the_same_from_token_ids(
    which: str, prompt: Prompt, request: pytest.FixtureRequest
) -> None:
    index: Index = request.getfixturevalue(which)
    engine = KVEngine(index, policy="none")
    layout = engine.fuse(prompt).layout
    found = TokenFinder(index).find(engine.prompt_ids(prompt))
    assert found.spans == layout.spans
    assert num_exact(found) == num_exact(layout)
    assert found.prefix_length == layout.prefix_length
