"""kvrag's own decoders and tokenizers compute what Transformers' do, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedModel

from kvrag.errors import ModelLoadError
from kvrag.kvcache import FusedKV
from kvrag.models import templates
from kvrag.models.batch import BatchRow
from kvrag.models.decoders import Decoder
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer, model_fingerprint
from kvrag.models.pretrained import load_weights
from kvrag.models.references import resolve_model
from kvrag.models.rows import ALL_BEFORE, Attending, RowPass
from kvrag.models.tokens import Tokenizer, encode
from tests.support.models import make_model, make_tokenizer, needs_named_model
from tests.support.properties import in_turn

KNOWN = ("llama", "llama-llama3", "llama-yarn", "mistral-sliding", "qwen2", "qwen3", "gemma3")
NAMED = [
    "kvrag-tiny",
    *(
        pytest.param(name, marks=[pytest.mark.slow, needs_named_model(name)])
        for name in ("smollm2-135m", "gemma-3-270m")
    ),
]
NUM_ROWS = 90
TEXTS = ("", "The quick  brown fox.\n", "Ünïcödé 漢字 \U0001f600", "<bos><|im_end|> <eos>", " a")


def _saved(folder: Path, model: PreTrainedModel) -> str:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def _computed(model: KVModel, *, compiled: bool) -> list[torch.Tensor]:
    """Return all that a model computes: chunks, rows of a prompt, and rows of several prompts."""
    ids = [(7 * number) % 300 + 3 for number in range(NUM_ROWS)]
    found = []
    for chunk in model.prefill(ids[:4], [ids[4:80], ids[10:30]]):
        found += [chunk.keys, chunk.values]
    fused = FusedKV(model.spec, NUM_ROWS, NUM_ROWS + 4)
    shown: list[torch.Tensor] = []
    watching = Attending(observer=lambda _mask, _rows, weights, _value: shown.append(weights))
    some = torch.tensor([5, 40, 41, NUM_ROWS - 1])
    for rows, attending in (
        (torch.arange(NUM_ROWS), ALL_BEFORE),
        (some, ALL_BEFORE),
        (some, watching),
    ):
        with model.computing_rows():
            hidden = model.embed(torch.tensor(ids)[rows], rows)
            layers = model.compile() if compiled else None
            of = RowPass(rows, fused, model.tables(NUM_ROWS), layers)
            for index in range(model.spec.num_layers):
                model.rows.forward(index, hidden, of, attending=attending)
            found.append(model.logits(hidden))
    if compiled:
        model.begin_answer()
    with model.computing_rows():
        row = BatchRow(fused, fused.addresses, NUM_ROWS, NUM_ROWS)
        found.append(model.forward_each([9], [row]))
    written = slice(NUM_ROWS + 1)
    return [*found, *shown, *(one[:, :, written] for one in (*fused.keys, *fused.values))]


@pytest.mark.parametrize(("family", "is_half"), in_turn(KNOWN))
def test_own_decoders_compute_what_those_of_transformers_do(
    family: str, is_half: bool, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if is_half else torch.float32
    folder = _saved(tmp_path, make_model(family, dtype=dtype))
    _compare(folder, dtype)


@pytest.mark.parametrize("name", NAMED)
def test_named_models_compute_what_those_of_transformers_do(name: str) -> None:
    _compare(resolve_model(name), None)


def _compare(folder: str, dtype: torch.dtype | None) -> None:
    # Named, so that weights stay as they are on any processor.
    compute = None if dtype == torch.float32 else "bfloat16"
    own = KVModel.load(folder, dtype=dtype, compute=compute)
    assert isinstance(own.decoder, Decoder)
    whole = load_weights(folder, own.decoder.dtype, None)
    other = KVModel(whole, AutoTokenizer.from_pretrained(folder), compute=own.compute)
    assert own.fingerprint == other.fingerprint == model_fingerprint(whole)
    assert own.spec == other.spec
    assert own.windows == other.windows
    assert own.max_positions == other.max_positions
    ends = own.decoder.generation_config.eos_token_id
    assert ends == whole.generation_config.eos_token_id
    for compiled in (True, False):
        pairs = zip(
            _computed(own, compiled=compiled), _computed(other, compiled=compiled), strict=True
        )
        assert [torch.equal(one, expected) for one, expected in pairs].count(False) == 0


@pytest.mark.parametrize("name", NAMED)
def test_own_tokenizers_do_what_those_of_transformers_do(name: str) -> None:
    own: Any = load_tokenizer(name)
    other: Any = AutoTokenizer.from_pretrained(resolve_model(name))
    assert isinstance(own, Tokenizer)
    for special in (False, True):
        assert encode(own, TEXTS, special) == encode(other, TEXTS, special)
    for text in TEXTS:
        ids = encode(other, [text], True)[0].token_ids
        assert own.encode(text) == other.encode(text)
        for skips in (False, True):
            given = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
            assert own.decode(list(ids), **given) == other.decode(list(ids), **given)
        assert own.decode(torch.tensor(ids, dtype=torch.long)) == other.decode(ids)
        assert own.convert_ids_to_tokens(list(ids)) == other.convert_ids_to_tokens(list(ids))
    members = ("special_tokens_map", "all_special_tokens", "all_special_ids", "chat_template")
    tokens = [f"{kind}_token" for kind in ("bos", "eos", "unk", "pad", "sep", "cls")]
    for member in (*members, *tokens, *(f"{token}_id" for token in tokens), "model_max_length"):
        assert getattr(own, member) == getattr(other, member), member
    assert own.get_vocab() == other.get_vocab()
    assert len(own) == len(other)
    assert {**own.added_tokens_decoder} == {**other.added_tokens_decoder}
    assert own.convert_tokens_to_ids(["a", "no such token"]) == other.convert_tokens_to_ids(
        ["a", "no such token"]
    )
    if other.chat_template:
        messages = [{"role": "user", "content": "Who?"}]
        expected = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert templates.render(own, messages, add_generation_prompt=True) == expected
        assert own.apply_chat_template(messages, tokenize=False) == other.apply_chat_template(
            messages, tokenize=False
        )
    assert own("a b", return_tensors="pt")["input_ids"].shape[0] == 1


def test_the_model_of_transformers_is_made_over_the_same_weights(tmp_path: Path) -> None:
    model = KVModel.load(_saved(tmp_path, make_model("qwen3")))
    own = model.decoder
    assert isinstance(own, Decoder)
    before = _computed(model, compiled=True)
    weight = own.model.layers[0].mlp.up_proj.weight  # type: ignore[union-attr]
    assert isinstance(model.hf, PreTrainedModel)
    assert model.hf is model.decoder
    assert model.hf.model.layers[0].mlp.up_proj.weight.data_ptr() == weight.data_ptr()
    assert model.hf.name_or_path == str(tmp_path)
    assert all(map(torch.equal, _computed(model, compiled=True), before))


@pytest.mark.parametrize("family", ["gemma2", "phi3", "gpt-neox"])
def test_other_families_are_loaded_by_transformers(family: str, tmp_path: Path) -> None:
    model = KVModel.load(_saved(tmp_path, make_model(family)))
    assert isinstance(model.decoder, PreTrainedModel)


def test_weights_that_are_missing_are_named_by_transformers(tmp_path: Path) -> None:
    folder = _saved(tmp_path, make_model("llama"))
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lack 1 weights.*model\.norm\.weight"):
        KVModel.load(folder)


@pytest.mark.slow
def test_what_was_read_is_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    _saved(folder, make_model("llama"))
    bos = load_tokenizer(folder).bos_token
    (kept,) = (tmp_path / "cache" / "kvrag" / "read").iterdir()
    assert '"scaling": 0.' in kept.read_text()
    # Each load has a process of its own, forked from one that has imported what both need.
    program = """
import os, sys
from pathlib import Path
from kvrag.models.kv_model import KVModel
folder, kept, bos = sys.argv[1:]
for is_damaged in (False, True):
    if is_damaged:
        text = Path(kept).read_text()
        Path(kept).write_text(text.replace('"scaling": 0.', '"scaling": 1.', 1))
    if not os.fork():
        model = KVModel.load(folder)
        assert model.tokenizer.bos_token == bos
        print(model.fingerprint, "transformers" in sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""
    command = [sys.executable, "-c", program, str(folder), str(kept), bos]
    loaded = subprocess.run(command, capture_output=True, text=True)
    first, damaged = map(str.split, loaded.stdout.splitlines())
    assert (first[1], damaged) == ("False", [first[0], "True"]), loaded.stderr
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"bos_token": "<bos>"', '"bos_token": "<eos>"'))
    assert load_tokenizer(folder).bos_token == "<eos>"
    (folder / "chat_template.jinja").write_text("asked")
    more = folder / "additional_chat_templates"
    more.mkdir()
    for template in ("with tools", "with other tools"):
        (more / "tool_use.jinja").write_text(template)
        assert templates.render(load_tokenizer(folder), [], tools=[{}]) == template
