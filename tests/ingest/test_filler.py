"""Chunks encoded after a fixed filler text: computed once, neither stored nor placed."""

import pytest
import torch

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.ingest.coding import read_all
from kvrag.ingest.contexts import filler_ids, filler_text
from kvrag.ingest.index import Index
from kvrag.llms.vllm.plan import TokenFinder
from kvrag.models.kv_model import EncodedPrefix, KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from tests.ingest.conftest import MakeIndex
from tests.support.models import HEAD, make_model, make_tokenizer

TEXTS = [
    "Ines keeps the harbour ledger of Varn, by the old river bank near the northern light.",
    "Tomas repairs the tall clock, and he said that the lazy dog jumps over the ledger.",
]
QUESTION = "Question: who keeps the ledger?\nAnswer:"
NUM_TOKENS = 40
FILLER = f"filler:{NUM_TOKENS}"


@pytest.fixture
def index(make_index: MakeIndex) -> Index:
    index = make_index(context=FILLER)
    index.add([Document(text[:5], text) for text in TEXTS])
    return index


def prompt_of(*texts: str) -> str:
    return "\n\n".join([*texts, QUESTION])


def test_every_chunk_is_encoded_after_the_end_of_the_filler(index: Index, model: KVModel) -> None:
    filler = filler_ids(model.tokenizer)[-NUM_TOKENS:]
    assert filler_text().endswith(model.tokenizer.decode(filler).strip())
    for text in TEXTS:
        (chunk_id,) = index.catalog.chunk_ids_of(text[:5])
        (chunk,) = index.get_chunks([chunk_id])
        assert chunk.contexts == (filler, ())
        record = index.open_kv(chunk_id)
        assert record.num_tokens == len(chunk.token_ids)
        kv = read_all(record, index.config.spec)
        (expected,) = model.prefill((*index.prefix_ids, *filler), [chunk.token_ids])
        torch.testing.assert_close(kv.keys, expected.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kv.values, expected.values, rtol=1e-4, atol=1e-5)
        (alone,) = model.prefill(index.prefix_ids, [chunk.token_ids])
        assert not torch.allclose(kv.values, alone.values, rtol=1e-2, atol=1e-3)
    stats = index.stats()
    assert (stats.context, stats.context_tokens) == ("filler", NUM_TOKENS)


def test_the_filler_is_computed_once(
    make_index: MakeIndex, model: KVModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode_prefix = KVModel.encode_prefix

    def noting(self: KVModel, ids: tuple[int, ...]) -> EncodedPrefix:
        encoded.append(len(ids))
        return encode_prefix(self, ids)

    monkeypatch.setattr(KVModel, "encode_prefix", noting)
    index = make_index(context=FILLER)
    reports = [index.add(Document(text[:5], text)) for text in TEXTS]
    assert encoded == [len(index.prefix_ids) + NUM_TOKENS]
    # The report counts it for each run, not for each chunk; without new chunks it is not needed.
    assert [report.num_context_tokens for report in reports] == [NUM_TOKENS] * 2
    assert index.add(Document(TEXTS[0][:5], TEXTS[0])).num_context_tokens == 0
    assert index.add([Document("x", TEXTS[0] + "x")], dry_run=True).num_context_tokens == NUM_TOKENS


def test_nothing_of_it_is_in_a_prompt(index: Index, model: KVModel) -> None:
    prompt = prompt_of(*TEXTS)
    fused = KVEngine(index, policy="none").fuse(prompt)
    ids = tuple(model.tokenizer(prompt)["input_ids"])
    assert fused.layout.token_ids == ids
    assert fused.kv.num_tokens == fused.report.num_tokens == len(ids)
    num_found = sum(len(model.tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS)
    assert fused.report.num_in_context == num_found
    # This prompt does not begin as the index's chunks were encoded: nothing is exact.
    assert (fused.report.num_exact, fused.report.num_reused) == (0, num_found)
    assert TokenFinder(index).find(ids).spans == fused.layout.spans
    whole = KVEngine(index, policy="deviation", ratio=1.0).fuse(prompt)
    plain = model.hf(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(whole.logits, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_stored", [False, True])
def test_the_chunk_that_stands_first_is_exact(
    index: Index, model: KVModel, is_stored: bool
) -> None:
    prompt = HEAD + prompt_of(*TEXTS)
    if is_stored:
        KVEngine(index).fuse(prompt)
        index.on_demand.flush()
    fused = KVEngine(index, policy="none").fuse(prompt)
    first, second = fused.layout.spans
    filler = filler_ids(model.tokenizer)[-NUM_TOKENS:]
    assert (first.context_ids, second.context_ids) == ((), filler)
    num_exact = first.length if is_stored else 0
    assert (fused.report.num_exact, fused.report.num_reused) == (num_exact, second.length)
    assert fused.report.num_made == first.length - num_exact
    assert fused.report.num_in_context == second.length
    ids = torch.tensor([fused.layout.token_ids])
    plain = getattr(model.hf(ids, use_cache=True), CACHE_ARGUMENT)
    for layer, exact in enumerate(plain.layers):
        found = fused.kv.keys[layer][:, :, : first.prompt_end]
        torch.testing.assert_close(
            found, exact.keys[:, :, : first.prompt_end], rtol=1e-4, atol=1e-4
        )
    assert TokenFinder(index).find(fused.layout.token_ids).spans == fused.layout.spans


def test_a_filler_that_does_not_fit_is_refused(make_index: MakeIndex, model: KVModel) -> None:
    room = model.max_positions - len(model.default_prefix_ids())
    most = room - 64
    with pytest.raises(ParameterError, match=f"filler:{most + 1} and .*at most filler:{most},"):
        make_index(context=f"filler:{most + 1}", chunk_tokens=64)
    with pytest.raises(ParameterError, match=r"exceed .* choose shorter chunks"):
        make_index(context="filler", chunk_tokens=room)
    index = make_index(context=f"filler:{most}", chunk_tokens=64)
    assert index.config.context_tokens == most


def test_a_filler_longer_than_its_text_is_refused(
    make_index: MakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrag.ingest.contexts.filler_text", lambda: "A short text.")
    with pytest.raises(ParameterError, match=r"the filler text has \d+ tokens .*filler:\d+"):
        make_index(context=FILLER)


def test_the_text_is_long_plain_prose() -> None:
    text = filler_text()
    assert len(text.split()) > 3_500  # 4,096 tokens and more for a vocabulary of 49,152
    assert text.isascii()
    assert not set(text) & set("<>|[]{}#*\t")
    assert all(" " in paragraph for paragraph in text.split("\n\n"))


@pytest.mark.parametrize(
    ("window", "chunk_tokens", "options", "context"),
    [
        (4096, 64, {}, "similar:512"),
        (2048, 64, {}, "none"),
        (4096, 3800, {}, "none"),
        (4096, 64, {"context": "none"}, "none"),
    ],
)
def test_models_of_long_prompts_get_a_context_by_default(
    make_index: MakeIndex, window: int, chunk_tokens: int, options: dict[str, str], context: str
) -> None:
    model = KVModel.load(
        make_model("llama", num_hidden_layers=1, max_position_embeddings=window),
        tokenizer=make_tokenizer(),
    )
    index = make_index(model=model, chunk_tokens=chunk_tokens, **options)
    assert str(index.config.chunk_context) == context
