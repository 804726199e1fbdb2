"""A small index over a few passages, for the tests of the framework adapters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvrag.chunk import Document
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag_testing.bench_top import TEXTS
from tests.support.models import make_model, make_tokenizer

PASSAGES = {
    "ledger": "Ines keeps the harbour ledger of Varn. Every ship that enters is written into it.",
    "clock": "Tomas repairs the tall clock of Varn, which stands beside the northern light.",
    "fox": "The quick brown fox jumps over the lazy dog near the old river bank each morning.",
    "book": "The keeper of the northern light wrote the book about the ships of the harbour.",
    "bridge": "An old bridge crosses the river at Varn; carts & horses pay one coin, people none.",
}


@dataclass(frozen=True)
class Rag:
    """An index, the folder of its model, and the model and tokenizer for full prefill."""

    index: Index
    model_folder: Path
    hf: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    @property
    def path(self) -> Path:
        return self.index.path

    def plain_answer(self, prompt: str | Sequence[Mapping[str, str]], max_tokens: int) -> str:
        """Return the greedy answer of Transformers alone."""
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        else:
            text = self.tokenizer.apply_chat_template(
                list(prompt), tokenize=False, add_generation_prompt=True
            )
            ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            output = self.hf.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
            )
        return self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def text_index(folder: Path, model: Any, texts: Sequence[str] = TEXTS, **options: Any) -> Index:
    """Return a new index of texts, each a document ``text-N``; `model` may name a family."""
    if isinstance(model, str):
        model = KVModel(make_model(model), make_tokenizer())
    index = Index.create(folder, model=model, embedding="hashing", **options)
    index.add([Document(f"text-{number}", text) for number, text in enumerate(texts)])
    return index


def save_model(folder: Path, family: str = "llama", **options: Any) -> PreTrainedModel:
    """Save a tiny random model with its tokenizer; `options` are those of `make_model`."""
    model = make_model(family, **options)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model


def make_index(folder: Path, **options: Any) -> Index:
    """Return an empty index in a folder, of a tiny random model beside it."""
    save_model(folder / "model")
    made = {"model": folder / "model", "embedding": "hashing", **options}
    return Index.create(folder / "index", **made)


@pytest.fixture(scope="session")
def rag(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rag]:
    """The index of `PASSAGES`, one chunk each."""
    torch.set_num_threads(1)  # more threads only slow down a model this small
    folder = tmp_path_factory.mktemp("rag")
    hf = save_model(folder / "model")
    with Index.create(folder / "index", model=folder / "model", embedding="hashing") as index:
        index.add([Document(source=name, text=text) for name, text in PASSAGES.items()])
        yield Rag(index, folder / "model", hf, make_tokenizer())
