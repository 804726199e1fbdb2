"""Link tokens: laid out between the prompt's tokens, computed as a masked full prefill has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrag.errors import LinksError, ParameterError
from kvrag.fusion.fuser import FusedPrompt, fuse
from kvrag.fusion.layout import LINK, Layout, ReusedSpan
from kvrag.fusion.linked_rows import insert_links
from kvrag.fusion.links import FILE_NAME, LinksHeader, LinkTokens, find_links
from kvrag.fusion.policies.base import NonePolicy, RecomputePolicy
from kvrag.fusion.repair import make_repair
from kvrag.kvcache import FusedKV
from kvrag.models.adapter import RowAdapter, linear_layers
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import Bench, relative_difference
from tests.support.models import make_model, make_tokenizer

ORACLE_FAMILIES = ("llama", "llama-yarn", "mistral-sliding", "qwen3", "phi3", "gemma3", "gpt-neox")
ORDER = (2, 0, 3, 1)


def make_links(
    model: KVModel, way: str = "embeddings", num_links: int = 3, max_documents: int = 5
) -> LinkTokens:
    """Return random links of `model`, of the size of its own embeddings and KV."""
    header = LinksHeader("frozen", way, num_links, max_documents, model.fingerprint, 0.5)
    random = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    embeddings = 0.3 * normal(header.num_rows, model.hf.config.hidden_size)
    if way == "embeddings":
        return LinkTokens(header, embeddings)
    layers = linear_layers(model.hf)
    down = {name: 0.2 * normal(4, layer.in_features) for name, layer in layers.items()}
    up = {name: 0.2 * normal(layer.out_features, 4) for name, layer in layers.items()}
    return LinkTokens(header, embeddings, adapter=RowAdapter(down, up, header.scale))


def fuse_linked(
    bench: Bench, prompt: str, policy: RecomputePolicy, links: LinkTokens
) -> FusedPrompt:
    layout = insert_links(bench.lay_out(prompt), links.header)
    num_tokens = len(layout.token_ids)
    buffer = FusedKV(bench.model.spec, num_tokens, num_tokens + 8)
    return fuse(bench.model, layout, bench.open_kv, policy, buffer, links.on(bench.model))


@torch.no_grad()
def masked_prefill(bench: Bench, prompt: str, links: LinkTokens) -> torch.Tensor:
    """Return the last logits of Transformers' own forward over the whole linked sequence.

    Document tokens see the prefix and their own document; links, separators and question see all
    before them. Each document has the prefix right before it, in rows that nobody else sees: so
    it was encoded.
    """
    model = bench.model.hf
    layout = insert_links(bench.lay_out(prompt), links.header)
    rows = {link.position: link.row for link in layout.links}
    prefix = bench.prefix_ids
    tokens, positions, owners, seen = [], [], [], []  # owner: the document, -1 outside
    span_of = {
        position: number
        for number, span in enumerate(layout.spans)
        for position in range(span.prompt_start, span.prompt_end)
    }
    for number, span in enumerate(layout.spans):
        chunk = bench.chunks[span.chunk_id].token_ids
        first = span.prompt_start - span.chunk_start
        hidden_part = [*prefix, *chunk[: span.chunk_start]]
        tokens += hidden_part
        positions += range(span.prompt_start - len(hidden_part), span.prompt_start)
        owners += [number] * len(hidden_part)
        seen += [False] * len(hidden_part)
        assert first >= len(prefix)
    for position, token in enumerate(layout.token_ids):
        tokens.append(max(token, 0))
        positions.append(position)
        owners.append(span_of.get(position, -1))
        seen.append(True)
    embeds = model.get_input_embeddings()(torch.tensor([tokens]))
    offset = len(tokens) - len(layout.token_ids)
    for position, row in rows.items():
        embeds[0, offset + position] = links.embeddings[row]
    where, owner = torch.tensor(positions), torch.tensor(owners)
    causal = where[None, :] <= where[:, None]
    own = owner[None, :] == owner[:, None]
    allowed = causal & torch.where((owner < 0)[:, None], torch.tensor(seen)[None, :], own)
    window = getattr(model.config, "sliding_window", None)
    masks: Any = allowed[None, None]
    if window is not None and model.config.model_type not in ("llama", "gpt_neox"):
        near = (allowed & (where[None, :] > where[:, None] - window))[None, None]
        masks = {"full_attention": masks, "sliding_attention": near}
        if model.config.model_type in ("mistral", "phi3"):
            masks = near
    output = model(
        inputs_embeds=embeds,
        position_ids=where[None],
        attention_mask=masks,
        use_cache=False,
    )
    return output.logits[0, -1]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(KVModel(make_model(), make_tokenizer()))


@pytest.mark.parametrize("family", ORACLE_FAMILIES)
def test_link_only_forward_equals_the_masked_full_prefill(family: str) -> None:
    bench = Bench(KVModel(make_model(family), make_tokenizer()))
    links = make_links(bench.model)
    prompt = "Context:\n" + bench.prompt(*ORDER)
    fused = fuse_linked(bench, prompt, NonePolicy(), links)
    assert fused.report.num_links == 4 * 3 + 2
    computed = fused.report.num_fresh + fused.report.num_links
    assert fused.report.rows_by_layer == (computed,) * bench.model.spec.num_layers
    assert relative_difference(fused.logits, masked_prefill(bench, prompt, links)) < 1e-4
    without = bench.fuse(prompt, NonePolicy()).logits
    assert relative_difference(fused.logits, without) > 1e-3


def test_an_adapter_of_zeros_changes_nothing_and_others_change_fresh_rows_only(
    bench: Bench,
) -> None:
    adapted = make_links(bench.model, "adapter")
    plain = LinkTokens(replace(adapted.header, way="embeddings"), adapted.embeddings)
    zeros = {name: torch.zeros_like(up) for name, up in adapted.adapter.up.items()}
    idle = replace(adapted, adapter=replace(adapted.adapter, up=zeros))
    prompt = bench.prompt(*ORDER)
    policy = make_repair("boundary", boundary_tokens=4)
    expected = fuse_linked(bench, prompt, policy, plain)
    # Rows with an adapter are computed by the model's modules, others by kernels.
    idle_logits = fuse_linked(bench, prompt, policy, idle).logits
    torch.testing.assert_close(idle_logits, expected.logits, rtol=0, atol=1e-5)
    fused = fuse_linked(bench, prompt, policy, adapted)
    assert relative_difference(fused.logits, expected.logits) > 1e-2
    # Of the first layer's K/V, which see no other row, only fresh rows' may differ.
    differs = (fused.kv.values[0] != expected.kv.values[0])[0].any(dim=(0, 2))
    layout = insert_links(bench.lay_out(prompt), adapted.header)
    stored = torch.zeros(len(layout.token_ids), dtype=torch.bool)
    for span in layout.spans:
        stored[span.prompt_start : span.prompt_end] = True
    assert not differs[: len(stored)][stored].any()
    assert differs[: len(stored)][~stored].all()
    # The model itself is as it was.
    assert torch.equal(
        bench.fuse(prompt, NonePolicy()).logits, bench.fuse(prompt, NonePolicy()).logits
    )


# -- layout -----------------------------------------------------------------------------------

LAYOUT = Layout(
    tuple(range(100, 120)), (ReusedSpan("a", 2, 0, 4), ReusedSpan("b", 7, 1, 5)), 1, True
)


def test_runs_of_one_chunk_share_its_links() -> None:
    spans = (
        ReusedSpan("a", 1, 4, 2),
        ReusedSpan("a", 4, 8, 2),  # goes on
        ReusedSpan("a", 6, 4, 2),  # the same text again
        ReusedSpan("b", 9, 7, 1),
    )
    layout = insert_links(Layout(tuple(range(12)), spans, 1, True), header(1))
    x = LINK
    assert layout.token_ids == (0, x, 1, 2, 3, 4, 5, x, 6, 7, x, 8, 9, x, x, 10, 11)
    assert [link.row for link in layout.links] == [40, 0, 1, 2, 41]
    assert [span.prompt_start for span in layout.spans] == [2, 5, 8, 12]


def header(num_links: int, max_documents: int = 40) -> LinksHeader:
    return LinksHeader("tuned", "embeddings", num_links, max_documents, "f")


def test_links_stand_behind_their_chunks() -> None:
    linked = insert_links(LAYOUT, header(2))
    assert linked.token_ids == (
        *(100, 101, LINK, 102, 103, 104, 105, LINK, LINK, 106),
        *(107, 108, 109, 110, 111, LINK, LINK, LINK, 112, 113, 114, 115, 116, 117, 118, 119),
    )
    assert [link.row for link in linked.links] == [80, 0, 1, 2, 3, 81]
    assert [(span.prompt_start, span.chunk_start, span.length) for span in linked.spans] == [
        (3, 0, 4),
        (10, 1, 5),
    ]
    assert linked.plain_token_ids == LAYOUT.token_ids
    assert all(linked.token_ids[link.position] == LINK for link in linked.links)
    assert insert_links(linked, header(2)) is linked


def test_chunks_past_the_last_go_without_and_are_counted() -> None:
    linked = insert_links(LAYOUT, header(1, max_documents=1))
    assert [link.row for link in linked.links] == [1, 0, 2]
    assert linked.num_unlinked == 1


# -- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["embeddings", "adapter"])
def test_what_is_written_is_read(bench: Bench, tmp_path: Path, way: str) -> None:
    links = make_links(bench.model, way)
    links.save(tmp_path / FILE_NAME)
    read = find_links(tmp_path)
    assert read.header == links.header
    prompt = bench.prompt(*ORDER)
    expected = fuse_linked(bench, prompt, NonePolicy(), links)
    assert torch.equal(fuse_linked(bench, prompt, NonePolicy(), read).logits, expected.logits)
    assert find_links(tmp_path / "elsewhere") is None


def test_links_of_another_model_are_refused(bench: Bench) -> None:
    other = KVModel(make_model(seed=1), make_tokenizer())
    with pytest.raises(LinksError, match="links of another model"):
        make_links(other).on(bench.model)


def damaged(path: Path, **changed: Any) -> None:
    """Write the file anew with other fields in its header, or without a header."""
    tensors = load_file(path)
    fields = changed.pop("fields", None)
    for name, tensor in changed.items():
        tensors[name] = tensor
    metadata = None if fields is None else {"kvrag-links": fields}
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "not a file of links"),
        ({"fields": "{"}, "damaged header"),
        ({"fields": {"version": 9}}, "of format 9, expected 1"),
        ({"fields": {"version": 1}}, "damaged header"),
        ({"fields": {"num_links": -1}}, "num_links -1"),
        ({"fields": {"max_documents": 10**9}}, "max_documents 1000000000"),
        ({"fields": "[" * 100_000}, "damaged header"),
        *(
            ({"fields": {"scale": scale}}, "scale .* expected a number")
            for scale in (float("nan"), float("inf"), -1e300, True, "1")
        ),
        ({"fields": {"way": "kv"}}, "of way 'kv', which kvrag 0.2 had, are gone: .* --way adapter"),
        ({"fields": {"way": "adapter"}}, "adapter's tensors"),
        ({"fields": {}, "embeddings": torch.full((17, 64), float("nan"))}, "finite"),
        ({"fields": {}, "surplus": torch.zeros(1)}, "expected the tensor"),
    ],
)
def test_damaged_files_are_named(
    bench: Bench, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / FILE_NAME
    links = make_links(bench.model)
    links.save(path)
    fields = change.get("fields")
    if isinstance(fields, dict):
        whole = fields if fields == {"version": 1} else {**vars(links.header), **fields}
        change = {**change, "fields": json.dumps(whole)}
    damaged(path, **change)
    with pytest.raises(LinksError, match=message):
        LinkTokens.load(path)


def test_what_is_no_file_of_links_is_named(tmp_path: Path) -> None:
    with pytest.raises(LinksError, match="no links at"):
        LinkTokens.load(tmp_path / "absent")
    with pytest.raises(ParameterError, match="links '~nobody-of-that-name/links': expected"):
        LinkTokens.load("~nobody-of-that-name/links")
    (tmp_path / "text").write_text("not safetensors")
    with pytest.raises(LinksError, match="not a readable safetensors file"):
        LinkTokens.load(tmp_path / "text")


def test_a_wrong_shape_is_refused(bench: Bench) -> None:
    links = make_links(bench.model)
    with pytest.raises(LinksError, match="embeddings of shape"):
        replace(links, embeddings=links.embeddings[:, :3]).check(bench.model)
    adapted = make_links(bench.model, "adapter")
    assert adapted.adapter is not None
    foreign = RowAdapter({"lm_head": torch.zeros(2, 64)}, {"lm_head": torch.zeros(9, 2)}, 1.0)
    with pytest.raises(LinksError, match="adapter for 'lm_head'"):
        replace(adapted, adapter=foreign).check(bench.model)
