"""Loading, identity and good neighbourship of models."""

from __future__ import annotations

import copy
import gc
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen3NextConfig,
)

from kvrag.errors import ModelLoadError, ParameterError, UnsupportedModelError
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.kvcache import FusedKV
from kvrag.models import attention
from kvrag.models.families import refuse_config
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import model_fingerprint
from kvrag.models.rows import RowPass
from kvrag.models.tokens import tokenizer_fingerprint
from kvrag_testing.bench_top import Bench, relative_difference
from tests.fusion.test_links import make_links
from tests.support.models import FAMILIES, LEARNED_POSITIONS, make_model, make_tokenizer
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def test_a_path_is_loaded_once_while_anyone_holds_it(folder: Path) -> None:
    model = KVModel.load(folder)
    assert KVModel.load(str(folder)) is model
    assert KVModel.load(folder, dtype="float32") is model
    assert KVModel.load(folder, dtype=torch.bfloat16) is not model
    assert KVModel.load(model) is model


def test_a_tokenizer_of_ones_own_is_used_and_shared_with_nobody(folder: Path) -> None:
    shared = KVModel.load(folder)
    own = make_tokenizer()
    model = KVModel.load(folder, tokenizer=own)
    assert model is not shared
    assert model.tokenizer is not own
    assert KVModel.load(folder) is shared


def test_a_folder_and_the_object_loaded_from_it_are_the_same_model(folder: Path) -> None:
    model = KVModel.load(folder)
    rebuilt = KVModel.load(make_model(), tokenizer=make_tokenizer())
    assert rebuilt.fingerprint == model.fingerprint
    assert rebuilt.tokenizer_fingerprint == model.tokenizer_fingerprint


def test_one_weight_makes_another_model() -> None:
    model = make_model()
    before = model_fingerprint(model)
    with torch.no_grad():
        model.base_model.layers[2].mlp.up_proj.weight[3, 5] += 1e-3
    assert model_fingerprint(model) != before


@pytest.mark.parametrize(
    ("name", "value", "changes"),
    [("rms_norm_eps", 1e-3, True), ("pad_token_id", 1, False), ("use_cache", False, False)],
)
def test_settings_count_when_they_change_kv(name: str, value: object, changes: bool) -> None:
    model = make_model()
    before = model_fingerprint(model)
    setattr(model.config, name, value)
    assert (model_fingerprint(model) != before) == changes


def test_the_tokenizer_may_be_a_folder(folder: Path) -> None:
    by_folder = KVModel(make_model(), folder)
    assert by_folder.tokenizer_fingerprint == KVModel.load(folder).tokenizer_fingerprint


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_two_wrappers_and_the_owner_share_one_model(family: str) -> None:
    """Forwards of others while rows are computed get ordinary attention, and all agree."""
    hf = make_model(family)
    benches = [Bench(KVModel(hf, make_tokenizer())) for _ in range(2)]
    prompt = benches[0].prompt(2, 0, 1)
    ids = benches[0].model.tokenizer(prompt, return_tensors="pt")["input_ids"]
    original = hf.config._attn_implementation
    with torch.no_grad():
        expected = hf(ids).logits[0, -1]

    def fused(bench: Bench) -> float:
        made = (bench.fuse(prompt, DeviationPolicy(ratio=1.0)).logits for _ in range(6))
        return max(relative_difference(logits, expected) for logits in made)

    def plain(_: Bench) -> float:
        with torch.no_grad():
            return max(relative_difference(hf(ids).logits[0, -1], expected) for _ in range(24))

    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(run, benches[number // 2])
            for number, run in enumerate((fused, plain, fused))
        ]
        assert max(run.result() for run in runs) < 1e-4
    assert hf.config._attn_implementation == original


def test_a_stray_window_in_a_config_that_ignores_it_means_nothing() -> None:
    hf = make_model()
    hf.config.sliding_window = 8
    bench = Bench(KVModel(hf, make_tokenizer()))
    prompt = bench.prompt(2, 0, 1)
    fused = bench.fuse(prompt, DeviationPolicy(ratio=1.0))
    assert relative_difference(fused.logits, bench.plain_logits(prompt)) < 1e-4


def test_one_layer_needs_no_recompute() -> None:
    bench = Bench(KVModel(make_model(num_hidden_layers=1), make_tokenizer()))
    prompt = bench.prompt(2, 0, 1)
    fused = bench.fuse(prompt, DeviationPolicy())
    assert fused.report.num_recomputed == 0
    assert relative_difference(fused.logits, bench.plain_logits(prompt)) < 1e-4


def test_a_batch_of_chunks_is_each_chunk_alone() -> None:
    model = KVModel(make_model(), make_tokenizer())
    chunks = [[5, 6, 7], [9], list(range(3, 60))]
    together = model.prefill([0], chunks)
    for chunk, kv in zip(chunks, together, strict=True):
        (alone,) = model.prefill([0], [chunk])
        assert kv.keys.shape == (4, 2, len(chunk), 16)
        torch.testing.assert_close(kv.keys, alone.keys, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(kv.values, alone.values, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_others_compute_between_the_layers_of_a_chunk(family: str) -> None:
    bench = Bench(KVModel(make_model(family), make_tokenizer()))
    model, prompt = bench.model, bench.prompt(2, 0, 1)
    chunk = list(range(3, 60))
    (alone,) = model.prefill([0], [chunk])
    expected = bench.fuse(prompt, DeviationPolicy()).logits
    found: list[tuple[int, torch.Tensor]] = []
    num_seen = 0

    def other() -> None:
        with model.lock:
            found.append((num_seen, bench.fuse(prompt, DeviationPolicy()).logits))

    def check() -> None:
        nonlocal num_seen
        num_seen += 1
        threading.Thread(target=other).start()
        wait_until(lambda: model.lock.is_wanted)

    (kv,) = model.prefill([0], [chunk], check=check)
    assert [number for number, _ in found] == list(range(1, model.spec.num_layers + 1))
    assert all(torch.equal(logits, expected) for _, logits in found)
    assert torch.equal(kv.keys, alone.keys)
    assert torch.equal(kv.values, alone.values)
    assert not model.lock.is_wanted


@pytest.mark.parametrize("family", [*FAMILIES, *LEARNED_POSITIONS])
def test_a_prefix_that_is_encoded_already_gives_the_same_kv(family: str) -> None:
    model = KVModel(make_model(family), make_tokenizer())
    prefix, chunks = list(range(3, 40)), [[5, 6, 7], list(range(3, 60))]
    starts = [50, 37]
    expected = model.prefill(prefix, chunks, starts)
    encoded = model.encode_prefix(prefix)
    for _ in range(2):  # the prefix serves many calls
        for kv, other in zip(model.prefill(encoded, chunks, starts), expected, strict=True):
            torch.testing.assert_close(kv.keys, other.keys, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(kv.values, other.values, atol=1e-5, rtol=1e-4)
    with pytest.raises(ParameterError, match="after a prefix of 37"):
        model.prefill(encoded, [[5] * 2012])


@pytest.mark.parametrize("family", [*FAMILIES, *LEARNED_POSITIONS])
def test_prefill_attends_in_the_kernel_as_pytorch_does(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KVModel(make_model(family), make_tokenizer())
    attend, asked = attention.attend, []

    def noting(*given: Any, **options: Any) -> torch.Tensor:
        asked.append(given[4].softcap)
        return attend(*given, **options)

    monkeypatch.setattr(attention, "attend", noting)
    # Longer than the windows, in a batch with padding, and after a prefix.
    chunks = [[5, 6, 7], list(range(3, 60))]
    prefix = model.encode_prefix(list(range(3, 40)))
    found = model.prefill(prefix, chunks)
    assert len(asked) == (1 + len(chunks)) * model.spec.num_layers
    assert all(bool(softcap) == (family == "gemma2") for softcap in asked)
    monkeypatch.setattr(attention, "ATTENTION_TYPES", ())
    for kv, other in zip(found, model.prefill(prefix.token_ids, chunks), strict=True):
        torch.testing.assert_close(kv.keys, other.keys, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(kv.values, other.values, atol=1e-5, rtol=1e-4)
    # Everyone else's passes are as they were.
    num_asked = len(asked)
    model.hf(torch.tensor([chunks[1]]))
    assert len(asked) == num_asked


@pytest.mark.parametrize("chunks", [[[]], [[5, 6], []], [[5] * 2048]])
def test_chunks_that_do_not_fit_are_refused(chunks: list[list[int]]) -> None:
    model = KVModel(make_model(), make_tokenizer())
    with pytest.raises(ParameterError, match="expected at least 1 token and at most 2048"):
        model.prefill([0], chunks)


@pytest.mark.parametrize("is_by_type", [False, True])
def test_positions_that_depend_on_the_length_are_refused(is_by_type: bool) -> None:
    """They are refused by the configuration, before weights are fetched."""
    rope: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    given = {"full_attention": rope} if is_by_type else rope
    config = SimpleNamespace(model_type="llama", rope_parameters=given)
    with pytest.raises(UnsupportedModelError, match=r"dynamic.*supported: default, linear"):
        refuse_config(config)


_SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 400}


def test_another_family_is_refused_by_name() -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(Qwen3NextConfig(**_SMALL, **heads))
    reason = "'qwen3_next' has no KV of chunks: layers of it keep the state"
    with pytest.raises(UnsupportedModelError, match=reason):
        KVModel(model, make_tokenizer())


def test_places_without_a_model_are_told_apart(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="no model at"):
        KVModel.load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match="could not load"):
        KVModel.load(tmp_path)
    with pytest.raises(ModelLoadError, match=r"'smolm2-135m' here \(is it 'smollm2-135m'"):
        KVModel.load("smolm2-135m")
    with pytest.raises(ParameterError, match="dtype 'int8': expected one of float32"):
        KVModel.load(folder, dtype="int8")
    with pytest.raises(ModelLoadError, match=r"carries no tokenizer: pass tokenizer="):
        KVModel.load(make_model())


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]().to_dict(), default=str))
    torch.save(make_model().state_dict(), tmp_path / "pytorch_model.bin")
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="pickled weights are not read"):
        KVModel.load(tmp_path)


@pytest.mark.parametrize(
    ("bos_first", "template", "expected"),
    [
        (True, None, "<bos>"),
        (False, "{{ bos_token }}{{ messages[0]['content'] }}", "<bos>"),
        (False, "User: {{ messages[0]['content'] }}", "User: "),
        (True, "{{ bos_token }}User: {{ messages[0]['content'] }}", "<bos>User: "),
        (True, "{{ messages[0]['content'] }}", "<bos>"),
        (True, "{{ raise_exception('a system turn, please') }}", "<bos>"),
        (False, "{{ raise_exception('a system turn, please') }}", ""),
        (False, None, ""),
    ],
)
def test_the_shared_prefix(bos_first: bool, template: str | None, expected: str) -> None:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = template
    if not bos_first:
        tokenizer.backend_tokenizer.post_processor = None
    model = KVModel(make_model(), tokenizer)
    ids = tokenizer.backend_tokenizer.encode(expected, add_special_tokens=False).ids
    if expected.endswith(" "):
        # The template's last token may merge with what follows it.
        assert list(model.default_prefix_ids()) in (ids, ids[:-1])
    else:
        assert list(model.default_prefix_ids()) == ids


def test_truncation_of_the_last_call_is_not_part_of_the_tokenizer() -> None:
    tokenizer = copy.deepcopy(make_tokenizer())
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before


def fused_alone(model: KVModel, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last row's logits, and all KV, of a prompt that is computed row by row."""
    num_tokens = len(token_ids)
    fused = FusedKV(model.spec, num_tokens, num_tokens, model.device)
    with model.lock:
        compiled = model.compile()
    rows = torch.arange(num_tokens)
    of = RowPass(rows, fused, model.tables(num_tokens), compiled)
    with model.computing_rows():
        hidden = model.embed(torch.tensor(token_ids), rows)
        for layer_index in range(model.spec.num_layers):
            model.rows.forward(layer_index, hidden, of)
        return model.logits(hidden[-1:]), fused.storage.clone()


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twins_compute_the_same_at_the_same_time(name: str, dtype: torch.dtype) -> None:
    hf = make_model(name).to(dtype)
    model = KVModel(hf, make_tokenizer())
    twins = [model.twin(number) for number in range(3)]
    assert all(one is not None and one.lock is not model.lock for one in twins)
    assert model.twin(1) is twins[1]
    models = [model, *(one for one in twins if one is not None)]
    prompts = [[(7 * i + 3 * j) % 250 + 4 for j in range(90 + 10 * i)] for i in range(4)]
    expected = [fused_alone(model, prompt) for prompt in prompts]
    start = threading.Barrier(4, timeout=60)

    def run(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        start.wait()
        return [fused_alone(models[number], prompt) for prompt in prompts * 3]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(4)):
            for pair, other in zip(found, expected * 3, strict=True):
                assert all(torch.equal(*both) for both in zip(pair, other, strict=True))


@pytest.mark.parametrize("place", ["model.layers.0.mlp.down_proj", "lm_head"])
def test_a_changed_model_has_other_twins(place: str) -> None:
    hf = make_model("llama")
    model, token_ids = KVModel(hf, make_tokenizer()), list(range(5, 60))
    before = model.twin(0)
    changed = copy.deepcopy(hf.get_submodule(place))
    changed.weight = torch.nn.Parameter(2 * changed.weight.detach(), requires_grad=False)
    hf.set_submodule(place, changed)
    after = model.twin(0)
    assert after is not None
    assert after is not before
    assert torch.equal(fused_alone(after, token_ids)[0], fused_alone(model, token_ids)[0])
    hf.model.norm.register_forward_hook(lambda *_: None)
    assert model.twin(0) is None


def test_no_twin_where_modules_compute() -> None:
    """A hook is the user's own code, which may not stand several threads."""
    hf = make_model("llama")
    hf.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert KVModel(hf, make_tokenizer()).twin(0) is None
    assert KVModel(make_model("bloom"), make_tokenizer()).twin(0) is None


def test_an_adapter_that_acts_on_a_model_is_none_of_its_twins() -> None:
    """Prompts of an engine with link tokens, beside those that have none."""
    model = KVModel(make_model("llama"), make_tokenizer())
    twin, token_ids = model.twin(0), list(range(5, 60))
    assert twin is not None
    alone = fused_alone(twin, token_ids)
    with make_links(model, "adapter").answering(model):
        assert twin.compile() is not None
        assert torch.equal(fused_alone(twin, token_ids)[0], alone[0])


def test_twins_are_freed_with_their_model() -> None:
    """At once: weights are not kept until garbage is collected."""
    gc.collect()
    gc.disable()
    try:
        model = KVModel(make_model("llama"), make_tokenizer())
        twins = [model.twin(number) for number in range(2)]
        fused_alone(cast("KVModel", twins[1]), list(range(5, 60)))
        weight = weakref.ref(model.decoder.get_input_embeddings().weight)
        refs = [weakref.ref(one) for one in twins] + [
            weakref.ref(cast("KVModel", twins[0]).decoder)
        ]
        model.decoder.model.layers[0] = make_model("llama").model.layers[0]
        model.twin(0)
        twins.clear()
        assert [one() for one in refs] == [None] * 3
        del model
        assert weight() is None
    finally:
        gc.enable()
