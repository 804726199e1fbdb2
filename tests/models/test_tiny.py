"""kvrag-tiny as it ships: intact, loadable as any Hugging Face model, and good at its task."""

import hashlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from kvrag_corpus import generate_corpus
from kvrag_train.batches import Item
from kvrag_train.evaluate import Score, corpus_items, evaluate
from kvrag_train.export import SHIPPED
from kvrag_train.prompts import CHAT_SYSTEM, CHAT_USER
from kvrag_train.tokenizer import build_tokenizer
from tests.support.properties import trials

# The bars are as far under the card's figures as the sampling error of so few questions wants.
NUM_QUESTIONS = trials(400, 150)
BARS = {
    "overall": 0.88,
    "inside": 0.93,
    "carried_over": 0.87,
    "two_hop": 0.85,
    "superseded": 0.9,
    "unanswerable": 0.8,
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return corpus_items(generate_corpus(seed=11, split="test", num_questions=NUM_QUESTIONS))


@pytest.fixture(scope="module")
def full_prefill(model, tokenizer, items) -> dict[str, Score]:
    return evaluate(model, tokenizer, items)


@pytest.fixture(scope="module")
def plain_reuse(model, tokenizer, items) -> dict[str, Score]:
    return evaluate(model, tokenizer, items, isolate_documents=True)


def test_files_are_those_of_the_checksums() -> None:
    lines = (SHIPPED / "SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split("  ")) for line in lines)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(sums)
    for name, digest in sums.items():
        assert hashlib.sha256((SHIPPED / name).read_bytes()).hexdigest() == digest, name


def test_full_prefill_answers_unseen_names(full_prefill) -> None:
    for kind, bar in BARS.items():
        assert full_prefill[kind].exact_match >= bar, kind


def test_plain_reuse_loses_what_needs_attention_between_chunks(full_prefill, plain_reuse) -> None:
    def lost(kind: str) -> float:
        return full_prefill[kind].exact_match - plain_reuse[kind].exact_match

    assert lost("carried_over") >= 0.30
    assert lost("overall") >= 0.15


def test_the_card_states_what_was_measured() -> None:
    table = json.loads((SHIPPED / "scores.json").read_text())
    card = (SHIPPED / "README.md").read_text()
    assert table["questions"] >= 1000
    assert f"{table['full_prefill']['overall'][0]:.1%}" in card
    assert f"{table['plain_reuse']['carried_over'][0]:.1%}" in card


def test_tokenizer_is_the_one_the_code_builds(tokenizer) -> None:
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()


@pytest.mark.parametrize(
    "text", ["plain words", "  spaces \t\n\n kept\n", "Ünïcode 漢字 🙂", "don't 12.5% <b>", ""]
)
def test_any_text_tokenises_and_comes_back(tokenizer, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_chat_template_renders_the_trained_formats(tokenizer) -> None:
    documents = ["The baker lives in Bramora.", "The smith fears Bramora."]
    user = [{"role": "user", "content": "\n\n".join(documents) + "\n\nQuestion: Who?"}]
    system = [
        {"role": "system", "content": "\n\n".join(documents)},
        {"role": "user", "content": "Who?"},
    ]
    for messages, prompt_format in ((user, CHAT_USER), (system, CHAT_SYSTEM)):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == "<bos>" + prompt_format.render(documents, "Who?")
