"""Training of links: its forward is that of question time, and a run does what it says."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kvrag.errors import ParameterError
from kvrag.fusion.fuser import fuse
from kvrag.fusion.linked_rows import insert_links
from kvrag.fusion.links import FILE_NAME, LinksHeader, LinkTokens, find_links
from kvrag.fusion.policies.base import NonePolicy
from kvrag.ingest.contexts import filler_ids
from kvrag.kvcache import FusedKV
from kvrag.models.caches import FusedCache
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag_bench.judge.questions import JudgedQuestion, RenderedPrompt
from kvrag_testing.bench_top import TEXTS, Bench, relative_difference
from kvrag_train.batches import IGNORED
from kvrag_train.links.batch import Packer
from kvrag_train.links.data import FileSource, LinkItem
from kvrag_train.links.memory import chosen_precision
from kvrag_train.links.options import LinkTrainingOptions
from kvrag_train.links.parameters import LinkParameters
from kvrag_train.links.student import Student, training_mode
from kvrag_train.links.trainer import LinkTrainer
from tests.support.models import HEAD, make_model, make_tokenizer

FAMILIES = ("llama", "mistral-sliding", "qwen3", "phi3", "gemma2", "gemma3", "gpt-neox")
QUESTIONS = ("who keeps it?", "when was the flood?")


def item(order: tuple[int, ...] = (2, 0, 3)) -> LinkItem:
    texts = tuple(TEXTS[i] for i in order)
    prompts = tuple(
        RenderedPrompt("Context:\n" + "\n\n".join([*texts, f"Question: {q}\nAnswer:"]), True)
        for q in QUESTIONS
    )
    return LinkItem(texts, prompts, (" Ines", " the keeper of Varn"), ("near", "far"))


def options(out: Path, **changed: Any) -> LinkTrainingOptions:
    fields: dict[str, Any] = {
        **{"num_links": 2, "max_documents": 5, "steps": 4, "rows": 3, "questions": 2, "rank": 4},
        **{"evaluate_every": 2, "evaluate_questions": 4, "save_every": 2, "warmup_steps": 1},
    }
    return LinkTrainingOptions(out, **{**fields, **changed})


def questions(count: int = 12, answers: tuple[str, ...] = ("Ines",)) -> list[JudgedQuestion]:
    """Return questions with these answers in turn."""
    return [
        JudgedQuestion(
            f"{i}",
            ("near", "far")[i % 2],
            f"who keeps {i}?",
            (answers[i % len(answers)],),
            TEXTS[: 2 + i % 2],
        )
        for i in range(count)
    ]


def make_trainer(out: Path, **changed: Any) -> LinkTrainer:
    model = KVModel(make_model(num_hidden_layers=2), make_tokenizer())
    return LinkTrainer(options(out, **changed), model, FileSource(questions(), model.tokenizer))


def fused_answer_logits(
    bench: Bench, links: LinkTokens, item: LinkItem, number: int
) -> torch.Tensor:
    """Return what the fuser and generation behind it predict along the answer."""
    model = bench.model
    tokenizer = model.tokenizer
    layout = insert_links(bench.lay_out(item.prompts[number].text), links.header)
    num_prompt = len(layout.token_ids)
    buffer = FusedKV(model.spec, num_prompt, num_prompt + 32)
    on_model = links.on(model)
    fused = fuse(model, layout, bench.open_kv, NonePolicy(), buffer, on_model)
    answer = tokenizer(item.answers[number], add_special_tokens=False)["input_ids"]
    with torch.no_grad(), on_model.answering(model):
        behind = model.hf(
            input_ids=torch.tensor([answer]),
            **{CACHE_ARGUMENT: FusedCache(buffer, num_prompt)},
            use_cache=True,
        ).logits[0]
    return torch.cat([fused.logits[None], behind])


@pytest.mark.parametrize(
    ("family", "way", "num_filler"),
    [
        *((family, way, 0) for family in FAMILIES for way in ("embeddings", "adapter")),
        *((family, "embeddings", 21) for family in ("llama", "mistral-sliding", "gemma3")),
    ],
)
def test_training_computes_what_question_time_computes(
    family: str, way: str, num_filler: int
) -> None:
    model = KVModel(make_model(family), make_tokenizer())
    bench = Bench(model, head=model.default_prefix_ids())
    header = header_of(options(Path(), mode="frozen", way=way, num_links=3), model)
    parameters = LinkParameters(model, header, 4, 0)
    with torch.no_grad():
        for up in parameters.up.values():
            up.normal_(0.0, 0.3)
    # Two items of unlike lengths, so that both kinds of padding are there.
    items = [item((1,)), item()]
    batch = Packer(model, header, num_filler=num_filler).pack(items, linked=True)
    with torch.no_grad():
        logits = Student(model, parameters, False).logits(batch)
    if num_filler:
        encode_after_filler(bench, num_filler)
    ids = batch.question_ids[batch.targets != IGNORED]
    links = parameters.links(header)
    for place in range(4):
        expected = fused_answer_logits(bench, links, items[place // 2], place % 2)
        assert relative_difference(logits[ids == place], expected) < 1e-4


def encode_after_filler(bench: Bench, num_filler: int, adapter: Any = None) -> None:
    """Encode each chunk after the prefix and the end of the filler."""
    before = (*bench.prefix_ids, *filler_ids(bench.model.tokenizer)[-num_filler:])
    for chunk_id, chunk in bench.chunks.items():
        (kv,) = bench.model.prefill(before, [chunk.token_ids], adapter=adapter)
        bench.store.replace(bench.key(chunk_id), bench.codec.encode(bench.key(chunk_id), kv))


def test_the_document_that_stands_first_has_no_filler_before_it() -> None:
    model = KVModel(make_model(), make_tokenizer())
    header = header_of(options(Path(), num_links=2), model)
    prompts = (RenderedPrompt(HEAD + "\n\n".join([TEXTS[0], TEXTS[1], "Question: who?"]), True),)
    asked = LinkItem(TEXTS[:2], prompts, (" Ines",), ("near",))
    with_filler, without = (
        Packer(model, header, num_filler=number).pack([asked], linked=True) for number in (8, 0)
    )
    first, second = without.chunk_positions[:, 0].tolist()
    assert with_filler.chunk_positions[:, 0].tolist() == [first, second - 8]
    assert torch.equal(with_filler.stored_positions, without.stored_positions)


def header_of(chosen: LinkTrainingOptions, model: KVModel) -> Any:
    return LinksHeader(
        chosen.mode, chosen.way, chosen.num_links, chosen.max_documents, model.fingerprint, 1.0
    )


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_plain_rows_are_plain_prefill(family: str) -> None:
    model = KVModel(make_model(family), make_tokenizer())
    header = header_of(options(Path()), model)
    student = Student(model, LinkParameters(model, header, 4, 0), True)
    asked = item()
    batch = Packer(model, header).pack([asked], linked=False)
    assert batch.stored.shape[1] == 0
    assert int(batch.link_rows.max()) == -1
    with torch.no_grad():
        logits = student.logits(batch)
        ids = batch.question_ids[batch.targets != IGNORED]
        for number, prompt in enumerate(asked.prompts):
            answer = model.tokenizer(asked.answers[number], add_special_tokens=False)["input_ids"]
            tokens = torch.tensor([[*prompt.token_ids(model.tokenizer), *answer]])
            expected = model.hf(tokens).logits[0, -len(answer) - 1 :]
            assert relative_difference(logits[ids == number], expected) < 1e-4


@pytest.mark.parametrize("way", ["embeddings", "adapter"])
def test_frozen_training_leaves_the_model_alone(tmp_path: Path, way: str) -> None:
    trainer = make_trainer(tmp_path, mode="frozen", way=way, loss="distill")
    before = {name: weight.clone() for name, weight in trainer.model.hf.state_dict().items()}
    started = {name: w.detach().clone() for name, w in trainer.parameters.named_parameters()}
    plain = trainer.evaluate()
    trainer.run()
    for name, weight in trainer.model.hf.state_dict().items():
        assert torch.equal(weight, before[name])
    assert all(not torch.equal(w, started[n]) for n, w in trainer.parameters.named_parameters())
    after = trainer.evaluate()
    assert {k: v for k, v in after.items() if k.startswith("plain")} == {
        k: v for k, v in plain.items() if k.startswith("plain")
    }
    links = find_links(tmp_path)
    links.check(trainer.model)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint.safetensors",
        FILE_NAME,
        "log.jsonl",
    ]


def test_tuned_training_writes_a_model_with_its_links(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    before = trainer.model.hf.state_dict()["model.embed_tokens.weight"].clone()
    trainer.run()
    written = KVModel.load(tmp_path)
    links = find_links(tmp_path)
    assert links.header.mode == "tuned"
    links.check(written)
    assert not torch.equal(written.hf.state_dict()["model.embed_tokens.weight"], before)
    assert written.tokenizer_fingerprint == trainer.model.tokenizer_fingerprint
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert {"linked/overall", "plain/overall", "linked/far"} <= records[-1].keys()
    assert "loss/plain" in records[0]


@pytest.mark.parametrize("changed", [{}, {"mode": "frozen", "way": "adapter"}])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    whole = make_trainer(tmp_path / "whole", **changed)
    whole.run()
    first = make_trainer(tmp_path / "parts", **changed)
    with training_mode(first.model, first.options.mode == "tuned"):
        first.advance()
        first.advance()
    first._save_checkpoint()
    second = make_trainer(tmp_path / "parts", **changed)
    assert second.step == 2
    second.run()
    for name, weight in whole.parameters.named_parameters():
        assert torch.equal(weight, dict(second.parameters.named_parameters())[name])
    for name, weight in whole.model.hf.named_parameters():
        assert torch.equal(weight, second.model.hf.get_parameter(name))


def test_the_teacher_answers_as_the_plain_pipeline_does(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, mode="frozen", way="adapter", loss="distill", teacher_answers=True
    )
    items = [item((1,)), item()]
    answers = trainer.teacher.answers(items)
    model, end = trainer.model, trainer.model.tokenizer.eos_token_id
    prompts = [prompt for one in items for prompt in one.prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt.token_ids(model.tokenizer)])
        expected = model.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=15,
            do_sample=False,
            pad_token_id=2,
        )[0, ids.shape[1] :].tolist()
        assert answer == (expected if expected[-1] == end else [*expected, end])
    with training_mode(model, False):
        assert trainer.advance()["loss/linked"] >= 0.0


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3"])
def test_layers_computed_twice_give_the_same_gradients(tmp_path: Path, family: str) -> None:
    found = []
    for checkpointing in (False, True):
        model = KVModel(make_model(family), make_tokenizer())
        source = FileSource(questions(), model.tokenizer)
        trainer = LinkTrainer(options(tmp_path / f"{checkpointing}"), model, source)
        kept = 0

        def note(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with (
            training_mode(model, True, checkpointing=checkpointing),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            batch = trainer.packer.pack(source.draw(Random(1), 3, 2), linked=True)
            logits = trainer.student.logits(batch)
            logits.square().sum().backward()
        assert "forward" not in vars(model.hf.base_model.layers[0])
        gradients = {name: weight.grad for name, weight in model.hf.named_parameters()}
        found.append((kept, logits.detach(), gradients))
    (kept, logits, gradients), (kept_less, again, others) = found
    assert torch.equal(logits, again)
    assert kept_less < kept / 2
    for name, gradient in gradients.items():
        other = others[name]
        assert torch.allclose(gradient, other, rtol=1e-4, atol=1e-6)


def test_bfloat16_arithmetic_leaves_weights_in_float32(tmp_path: Path) -> None:
    losses = []
    for precision in ("float32", "bfloat16"):
        trainer = make_trainer(tmp_path / precision, precision=precision, num_links=1)
        seen = []
        with training_mode(trainer.model, True, checkpointing=precision == "bfloat16"):
            layer = trainer.model.hf.get_submodule("model.layers.1.mlp.up_proj")
            hook = layer.register_forward_hook(lambda *given, seen=seen: seen.append(given[2]))
            losses.append(trainer.advance()["loss/linked"])
            hook.remove()
        assert {str(output.dtype) for output in seen} == {f"torch.{precision}"}
        assert {weight.dtype for weight in trainer.model.hf.parameters()} == {torch.float32}
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert chosen_precision("auto", torch.device("cpu")) == "float32"


def test_training_learns(tmp_path: Path) -> None:
    """A handful of steps make the answers of four questions likelier."""
    trainer = make_trainer(tmp_path, steps=12, learning_rate=5e-3)
    with training_mode(trainer.model, True):
        losses = [trainer.advance()["loss/linked"] for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


# -- data -------------------------------------------------------------------------------------


def test_what_is_held_out_is_never_drawn() -> None:
    source = FileSource(questions(40), make_tokenizer())
    held_out = {p.text for i in source.held_out(99) for p in i.prompts}
    assert len(held_out) == 4
    names = {text.split("keeps ")[1].split("?")[0] for text in held_out}
    drawn = {p.text for i in source.draw(Random(1), 200, 5) for p in i.prompts}
    assert not any(f"keeps {name}?" in text for name in names for text in drawn)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mode": "thawed"}, "mode 'thawed': expected one of tuned, frozen"),
        ({"way": "adapter"}, "one of mode 'frozen'"),
        ({"way": "kv"}, "way 'kv': expected one of embeddings, adapter"),
        ({"loss": "none"}, "loss 'none'"),
        ({"teacher_answers": True}, "of loss 'distill'"),
        ({"plain_share": 1.0}, "plain_share 1.0"),
        ({"steps": 0}, "steps 0: expected at least 1"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("inf")}, "learning_rate inf: expected more than 0, and finite"),
        ({"link_learning_rate": float("inf")}, "link_learning_rate inf"),
        ({"seed": 2**63}, r"expected 0 to 2\*\*63 - 1"),
        ({"seed": -1}, "seed -1"),
        ({"precision": "int8"}, "precision 'int8'"),
        (
            {"mode": "frozen", "way": "adapter", "gradient_checkpointing": True},
            "without an adapter",
        ),
        ({"num_links": 0}, "num_links 0: expected at least 1"),
    ],
)
def test_options_out_of_range_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        options(Path(), **changed)
