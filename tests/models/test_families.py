"""Families that are known by their structure equal plain Transformers, number by number."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import ModelLoadError, UnsupportedModelError
from kvrag.eviction.cache import check_evictable
from kvrag.fusion.decoding import make_decoder, step_all
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.fusion.policies.two_stage import TwoStagePolicy
from kvrag.ingest.index import Index
from kvrag.kvcache import FusedKV, packed
from kvrag.models import proof
from kvrag.models.attention import attend_densely
from kvrag.models.families import SEES, TESTED
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import Attending, RowPass, RowRunner
from kvrag.native.attention import Scores
from kvrag_testing.bench_top import TEXTS, Bench, bench_of, relative_difference
from tests.support.models import (
    ENDS,
    FAMILIES,
    LEARNED_POSITIONS,
    MORE_FAMILIES,
    OTHER_POSITIONS,
    SMALL,
    make_model,
    make_tokenizer,
    spread,
)

_ALL = DeviationPolicy(ratio=1.0)
_TOKENS = [7, 40, 99, 5]


@functools.cache
def bench_with(family: str) -> Bench:
    return bench_of(KVModel(make_model(family), make_tokenizer()))


@pytest.fixture(params=MORE_FAMILIES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return bench_with(request.param)


def off(bench: Bench, prompt: str, ratio: float) -> float:
    fused = bench.fuse(prompt, TwoStagePolicy(ratio=ratio))
    return relative_difference(fused.logits, bench.plain_logits(prompt))


def test_ratio_one_is_full_prefill_and_less_is_not(bench: Bench) -> None:
    prompt = bench.prompt(2, 0, 3, 1)
    assert len(bench.lay_out(prompt).token_ids) > 24 + 1  # the windows
    assert off(bench, prompt, 1.0) < 1e-4
    assert off(bench, prompt, 0.5) > 1e-4


@torch.no_grad()
def test_keys_move_to_other_places(bench: Bench) -> None:
    """The first layer's K/V depend on no other token, so a moved chunk's are full prefill's."""
    model = bench.model
    one, other = (bench.chunks[f"chunk-{number}"].token_ids for number in (0, 1))
    parts = model.prefill(bench.prefix_ids, [one, other])
    for order in (parts, parts[::-1]):
        ids = [one, other] if order is parts else [other, one]
        start = len(bench.prefix_ids)
        joined = (*bench.prefix_ids, *ids[0], *ids[1])
        cache, _ = model._capture((), [joined], None)
        tables = model.tables(len(joined))
        for part in order:
            rows = slice(start, start := start + part.keys.shape[2])
            placed = torch.empty_like(part.keys[0])
            tables[0].place(part.keys[0], rows, placed)
            found = cache.layers[0]
            keys, values = packed(model.spec.latent, found.keys[0], found.values[0])
            torch.testing.assert_close(placed, keys[:, rows], rtol=0, atol=1e-4)
            torch.testing.assert_close(part.values[0], values[:, rows])


@torch.no_grad()
def test_answers_that_are_written_together_go_on_as_transformers_does(bench: Bench) -> None:
    prompts = [bench.prompt(2, 0), bench.prompt(1, 3, 0)]
    decoders = [make_decoder(bench.model, bench.fuse(one, _ALL), None) for one in prompts]
    for token in _TOKENS:
        logits = step_all([(one, token) for one in decoders])
    for prompt, found in zip(prompts, logits, strict=True):
        assert isinstance(found, torch.Tensor)
        ids = torch.tensor([[*bench.lay_out(prompt).token_ids, *_TOKENS]])
        expected = bench.model.hf(ids).logits[0, -1]
        assert relative_difference(found, expected) < 1e-4


@pytest.mark.parametrize("family", ["deepseek-v3", "ministral3", "llama4"])
def test_long_answers_end_where_transformers_ends_them(family: str, tmp_path: Path) -> None:
    hf, tokenizer = make_model(family, seed=2), make_tokenizer()
    prompt = "Context:\n" + "\n".join(TEXTS[number] for number in (2, 0, 3, 1)) + "\nWho? "
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    expected = hf.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :].tolist()
    with Index.create(
        tmp_path / "index", model=KVModel(hf, tokenizer), embedding="hashing"
    ) as index:
        index.add([Document(source=str(number), text=one) for number, one in enumerate(TEXTS)])
        given: dict[str, Any] = {"policy": "deviation", "ratio": 1.0, "temperature": 0.0}
        answer = KVEngine(index).generate(prompt, max_tokens=64, logprobs=0, **given)
    assert answer.report.num_recomputed > 100
    found = [one.token_id for one in answer.logprobs]
    assert (found, answer.finish_reason) == (
        (expected[:-1], "stop") if expected[-1] == ENDS["eos_token_id"] else (expected, "length")
    )


@pytest.mark.parametrize("family", ["ministral3", "gpt-oss"])
def test_gaps_in_positions(family: str) -> None:
    """Rows behind a gap are at their positions, whatever a layer does with those."""
    model, ids = KVModel(make_model(family), make_tokenizer()), torch.arange(10, 90)
    positions = [*range(40), *range(100, 140)]
    fused = FusedKV(model.spec, 80, 80, model.device)
    tables, rows = model.tables(80, positions), torch.arange(80)
    with model.computing_rows():
        hidden = model.embed(ids, torch.tensor(positions))
        windows = [None if window is None else 1 for window in model.windows]
        visible = torch.ones(80, 80).tril().bool()
        of = RowPass(rows, fused, tables)
        for index in range(len(tables)):
            attending = Attending(visible=visible if windows[index] is None else torch.eye(80) > 0)
            model.rows.forward(index, hidden, of, attending=attending)
        found = model.logits(hidden[-1:])[0]
    model.hf.set_attn_implementation("eager")
    additive = {
        kind: torch.zeros(80, 80).masked_fill(~allowed, -1e30)[None, None]
        for kind, allowed in (("full_attention", visible), ("sliding_attention", torch.eye(80) > 0))
    }
    mask: Any = additive if family == "gpt-oss" else additive["full_attention"]
    with torch.no_grad():
        given = {"attention_mask": mask, "position_ids": torch.tensor([positions])}
        expected = model.hf(ids[None], **given).logits[0, -1]
    assert relative_difference(found, expected) < 1e-4


@pytest.mark.parametrize("family", ["smollm3", "cohere2", "gpt-oss", "qwen3-moe"])
def test_half_precision(family: str) -> None:
    bench = Bench(KVModel(make_model(family, dtype=torch.bfloat16), make_tokenizer()))
    prompt = bench.prompt(2, 0, 1)
    fused = bench.fuse(prompt, _ALL)
    assert relative_difference(fused.logits, bench.plain_logits(prompt)) < 0.3


def test_what_is_listed_as_tested_is() -> None:
    configs = {**FAMILIES, **OTHER_POSITIONS, **LEARNED_POSITIONS, **MORE_FAMILIES}
    assert {make().model_type for make in configs.values()} == set(TESTED)


@pytest.mark.parametrize("family", ["gpt-oss", "llama4", "deepseek-v3"])
def test_keys_are_not_evicted_where_that_would_be_wrong(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="leave eviction out"):
        check_evictable(make_model(family))


def test_longrope_ends_where_its_frequencies_change() -> None:
    assert bench_with("phi3-longrope").model.max_positions == 512
    hf = make_model("phi3-longrope", max_position_embeddings=300)
    assert KVModel(hf, make_tokenizer()).max_positions == 300


def test_a_window_of_no_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'mistral' with a sliding_window of 0 in its"):
        KVModel(make_model("mistral-sliding", sliding_window=0), make_tokenizer())


@pytest.mark.parametrize("at_once", [(1, 32), (2, 2)])
def test_sinks_take_their_share(at_once: tuple[int, int]) -> None:
    query, key, value = torch.randn(1, 4, 5, 8), *torch.randn(2, 1, 2, 5, 8)
    sinks, allowed = torch.randn(4), torch.ones(5, 5).tril().bool()
    seen = torch.zeros(2, 2, 5, 5)

    def observe(heads: slice, rows: slice, weights: torch.Tensor, _: torch.Tensor) -> None:
        seen[heads, :, rows] = weights

    given = query, key, value, allowed, Scores(8**-0.5)
    output = attend_densely(*given, sinks=sinks, observe=observe, at_once=at_once)
    module: Any = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    mask = torch.zeros(5, 5).masked_fill(~allowed, float("-inf"))[None, None]
    expected, weights = eager_attention_forward(module, query, key, value, mask, 8**-0.5)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(seen.flatten(0, 1), weights[0])


def test_a_way_of_turning_keys_that_nobody_knows_is_refused() -> None:
    hf = make_model("seed-oss")

    def wrong(module: torch.nn.Module, _: object, made: torch.Tensor) -> torch.Tensor:
        return made * (1 + torch.arange(made.shape[1])[None, :, None])

    hf.get_submodule("model.layers.2.self_attn.k_proj").register_forward_hook(wrong)
    with pytest.raises(UnsupportedModelError, match=r"layer 2 of 'seed_oss'.*off by"):
        KVModel(hf, make_tokenizer())


# -- what a configuration alone tells -----------------------------------------------------------


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("jamba", "'jamba' is not supported.*state of a whole prompt"),
        ("minimax", "take a model whose layers all attend"),
        ("falcon_mamba", "no test has shown that Transformers continues it"),
        ("opt", "learned positions begin at 2; take a model with rotary"),
        ("gemma4_unified_text", "in one shape; take gemma4_text"),
        ("zaya", "'zaya' is not supported.*state of a whole prompt"),
        ("deepseek_v32", "rows see keys by a rule that kvrag does.*'indexed_att"),
        ("bert", "'bert' is not supported: it encodes texts"),
        ("t5", "'t5' is not supported: it encodes texts"),
        ("whisper", "'whisper' is not supported: it encodes texts"),
        ("clip", "'clip_text_model' is not supported: Transformers has no"),
        ("rwkv", "'rwkv' is not supported: it is not a stack"),
        ("mamba", "'mamba' is not supported: layers of it keep the state"),
    ],
)
def test_a_model_is_refused_before_its_weights_are_looked_for(
    tmp_path: Path, family: str, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        KVModel.load(folder_of(tmp_path, {"model_type": family}))


def test_eight_bit_floats_without_their_scales_are_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"{name} has numbers of type F8_E4M3, .*scales"):
        KVModel.load(tmp_path)


_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
_SECTIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
_SEES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", {"head_dim": 16, "sliding_window": 24}, {"num_attention_heads": 2}),
    "mistral3": ("Mistral3Config", {"model_type": "mistral"}, {"model_type": "pixtral"}),
    "qwen2_vl": ("Qwen2VLConfig", _SECTIONS, {"depth": 1, "embed_dim": 32, "num_heads": 2}),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", _SECTIONS, {"depth": 1, "num_heads": 2}),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {"head_dim": 16, **_SECTIONS},
        {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": []},
    ),
}


@pytest.mark.parametrize("kind", SEES)
def test_of_a_model_that_sees_the_text_part_is_loaded(tmp_path: Path, kind: str) -> None:
    name, text, vision = _SEES[kind]
    given = {"num_attention_heads": 2, **_VISION, **vision}
    config = getattr(transformers, name)(
        text_config=dict(SMALL) | text, vision_config=given, **{k: SMALL[k] for k in ENDS}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    whole.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = next(one for one in weights if "layers.1.mlp.up_proj.weight" in one and "vis" not in one)
    for wrong, message in (
        (weights[name].to(torch.int8), "has numbers of type I8, but config.json names no quantisa"),
        (weights[name].T.contiguous(), r"has the shape \[64, 96\], but config.json describes"),
    ):
        save_file(weights | {name: wrong}, path, {"format": "pt"})
        with pytest.raises(ModelLoadError, match=f"{name} {message}"):
            KVModel.load(tmp_path)
    save_file(weights, path, {"format": "pt"})
    model = KVModel.load(tmp_path)
    assert not any("vis" in name for name, _ in model.hf.named_parameters())
    ids = torch.arange(5, 60)[None]
    with torch.no_grad():
        found, expected = model.hf(ids).logits[0, -1], whole(ids).logits[0, -1]
    assert relative_difference(found, expected) < 1e-4


# -- types that no test knows -------------------------------------------------------------------


@pytest.fixture
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvrag" / "proofs"


def unknown(name: str, **more: Any) -> transformers.PreTrainedModel:
    return spread(getattr(transformers, name)(**SMALL | more))


@pytest.mark.parametrize("compute", ["int8", "int4"])
def test_what_answers_compute_in_hides_nothing_from_the_self_test(
    proofs: Path, compute: str
) -> None:
    model = KVModel(unknown("ArceeConfig"), make_tokenizer(), compute=compute)
    assert model.compute == compute
    (kept,) = proofs.iterdir()
    assert max(one["figure"] for one in json.loads(kept.read_text())["checks"]) < 1e-4


def test_a_type_that_no_test_knows_proves_itself_once(
    proofs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = unknown("ArceeConfig", sliding_window=24)
    assert hf.config.model_type not in TESTED
    bench = Bench(KVModel(hf, make_tokenizer()))
    prompt = bench.prompt(1, 0)
    assert relative_difference(bench.fuse(prompt, _ALL).logits, bench.plain_logits(prompt)) < 1e-4
    (kept,) = proofs.iterdir()
    checks = json.loads(kept.read_text())["checks"]
    assert {one["model"] for one in checks} == {"small", "loaded"}
    assert len(checks) == 8
    monkeypatch.setattr(proof, "prove", None)
    KVModel(hf, make_tokenizer())


def test_what_changes_proves_itself_again(proofs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf, number = unknown("ArceeConfig"), 1
    seen = []
    monkeypatch.setattr(proof, "_checks", lambda *_: seen.append(1) or [])

    def load() -> None:
        for _ in range(2):
            KVModel(hf, make_tokenizer())
        assert len(list(proofs.iterdir())) == len(seen) // 2 == number  # small and loaded

    load()
    with torch.no_grad():
        hf.model.norm.weight[3] += 1
    number = 2
    load()
    hf, number = hf.bfloat16(), 3
    load()
    monkeypatch.setattr(proof, "_version", lambda name: f"another of {name}")
    number = 4
    load()


def test_weights_in_sixteen_bits_prove_themselves(proofs: Path) -> None:
    KVModel(unknown("ArceeConfig").bfloat16(), make_tokenizer())
    (kept,) = proofs.iterdir()
    figures = [one["figure"] for one in json.loads(kept.read_text())["checks"]]
    assert max(figures[:4]) < 1e-4 < max(figures[4:])


def test_a_place_where_layers_change_is_crossed() -> None:
    """A window that the layers have and kvrag does not know of shows behind 100 tokens only."""
    hf = make_model("starcoder2", sliding_window=100)
    model = KVModel(hf, make_tokenizer(), proves=False)
    assert all(one.is_good for one in proof._checks(model, "loaded"))
    model.rows._windows = [None] * model.spec.num_layers
    first, *_ = proof._checks(model, "loaded")
    assert (first.what, first.is_good) == ("full prefill, a window crossed", False)
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 512
    hf = unknown("ArceeConfig", rope_parameters=rope)
    assert proof._num_tokens(KVModel(hf, make_tokenizer(), proves=False)) > 512
    kept = proof.small_model(hf.config).config.rope_parameters["original_max_position_embeddings"]
    assert kept < 64


def test_one_that_fails_is_refused_with_figure_and_layer(
    proofs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = unknown("ArceeConfig")

    def forward(self: RowRunner, layer_index: int, hidden: torch.Tensor, *rest: Any, **more: Any):  # type: ignore[no-untyped-def]
        if layer_index == 1:
            hidden += 0.5
        return of_runner(self, layer_index, hidden, *rest, **more)

    of_runner = RowRunner.forward
    monkeypatch.setattr(RowRunner, "forward", forward)
    with pytest.raises(UnsupportedModelError, match=r"'arcee'.*self-test failed.*small.*layer 1"):
        KVModel(hf, make_tokenizer())
    assert not proofs.exists()


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("JetMoeConfig", {"kv_channels": 16}, "other keys and values than it keeps"),
        ("NanoChatConfig", {"head_dim": 16}, "turns keys in a way"),
        ("BertConfig", {"is_decoder": True}, "not a stack of decoder layers"),
        ("CodeGenConfig", {"rotary_dim": 8}, "does not say how it makes its frequencies"),
    ],
)
def test_other_structures_are_refused(
    proofs: Path, name: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        KVModel(unknown(name, **more), make_tokenizer())
