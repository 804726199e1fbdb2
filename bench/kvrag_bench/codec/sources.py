"""Real KV to measure codecs on: chunks to fit profiles to, and others to measure.

Texts of the two parts are different documents; chunks are whole documents joined and cut to an
exact number of tokens, as an index's chunks are of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvrag.chunk import normalise_text
from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.models.kv_model import KVModel
from kvrag_bench.codec.encoder import EncoderKV
from kvrag_bench.codec.options import MINILM, TINY, CodecBenchOptions
from kvrag_bench.quality.datasets import load_questions
from kvrag_corpus import generate_corpus
from kvrag_corpus.names import Split

_SEEDS: dict[Split, int] = {"train": 7, "test": 99}
_MEASURED_SHARE = 3  # one text in three


@dataclass(frozen=True)
class Source:
    """KV of one model.

    Attributes
    ----------
    name
        What rows call it.
    spec
        Its shape and type.
    fit
        Chunks that profiles are fitted to.
    measured
        By tokens a chunk, chunks of other texts.
    """

    name: str
    spec: KVSpec
    fit: Sequence[ChunkKV]
    measured: Mapping[int, Sequence[ChunkKV]]

    @cached_property
    def means(self) -> torch.Tensor:
        """Mean of every channel over the fitted part, float32 ``[2, L, H, 1, D]``."""
        total = sum(_both(kv).double().sum(3, keepdim=True) for kv in self.fit)
        assert isinstance(total, torch.Tensor)
        return (total / sum(kv.num_tokens for kv in self.fit)).float()

    @cached_property
    def channel_variance(self) -> float:
        """Mean variance of a channel about its mean in the fitted part."""
        total = sum(float((_both(kv) - self.means).square().sum()) for kv in self.fit)
        return total / sum(2 * kv.keys.numel() for kv in self.fit)


def make_source(
    name: str, options: CodecBenchOptions, on_progress: Callable[[str], None] = lambda _: None
) -> Source:
    """Compute the KV of a source.

    Raises
    ------
    ParameterError
        When the data file is broken or too small, or chunks are too long for the model.
    ModelLoadError, UnsupportedModelError
        When the model is not available.
    """
    model: EncoderKV | KVModel = EncoderKV() if name == MINILM else KVModel.load(name)
    if isinstance(model, EncoderKV):
        prefix: tuple[int, ...] = ()
        longest = model.max_tokens
    else:
        prefix = model.default_prefix_ids()
        longest = model.max_positions - len(prefix)
    if max(options.chunk_tokens) > longest:
        raise ParameterError(
            f"chunks of {max(options.chunk_tokens)} tokens do not fit the {longest} of {name}"
        )
    fit_texts, other_texts = _texts(name, options)

    def computed(ids: Sequence[list[int]], what: str) -> list[ChunkKV]:
        found = []
        for done, chunk in enumerate(ids):
            on_progress(f"{name}: computing chunk {done + 1} of {len(ids)} {what}")
            if isinstance(model, EncoderKV):
                found.append(model.prefill(chunk))
            else:
                found += model.prefill(prefix, [chunk])
        return found

    lengths = options.chunk_tokens
    fit_ids = _chunks(model.tokenizer, fit_texts, lengths, options.fit_tokens)
    fit = computed(fit_ids, "to fit")
    measured = {}
    for length in lengths:
        ids = _chunks(model.tokenizer, other_texts, (length,), options.test_tokens)
        measured[length] = computed(ids, f"of {length} tokens to measure")
    spec = model.spec if isinstance(model, EncoderKV) else model.chunk_spec
    return Source(name, spec, fit, measured)


def _texts(name: str, options: CodecBenchOptions) -> tuple[list[str], list[str]]:
    """Return the texts to fit on, and others."""
    if name == TINY:
        return _generated("train", options.fit_tokens), _generated("test", options.test_tokens)
    assert options.data is not None
    every = dict.fromkeys(t for asked in load_questions(options.data) for t in asked.texts)
    texts = list(every)
    if len(texts) < _MEASURED_SHARE:
        raise ParameterError(f"{options.data}: expected 3 different texts or more")
    # The end of the file, so that texts of one question stay on one side.
    cut = len(texts) - max(1, len(texts) // _MEASURED_SHARE)
    return texts[:cut], texts[cut:]


def _generated(split: Split, num_tokens: int) -> list[str]:
    # A context of five questions has five documents of some 30 tokens: twice what is needed.
    corpus = generate_corpus(_SEEDS[split], split=split, num_questions=max(50, num_tokens // 15))
    return [normalise_text(p) for document in corpus.documents for p in document.paragraphs]


def _chunks(
    tokenizer: object, texts: Sequence[str], lengths: Sequence[int], num_tokens: int
) -> list[list[int]]:
    """Return token ids of chunks of the lengths in turn, of about `num_tokens` in all."""
    ids = _joined(tokenizer, texts)
    chunks: list[list[int]] = []
    taken = 0
    while taken < num_tokens:
        length = lengths[len(chunks) % len(lengths)]
        chunk = [token for _, token in zip(range(length), ids, strict=False)]
        if len(chunk) < length:
            break
        chunks.append(chunk)
        taken += length
    if not chunks:
        raise ParameterError(
            f"the texts do not fill one chunk of {lengths[0]} tokens: give more, or --chunk-tokens"
        )
    return chunks


def _joined(tokenizer: object, texts: Sequence[str]) -> Iterator[int]:
    assert callable(tokenizer)
    for number, text in enumerate(texts):
        joined = f"\n\n{text}" if number else text
        yield from tokenizer(joined, add_special_tokens=False, verbose=False)["input_ids"]


def _both(kv: ChunkKV) -> torch.Tensor:
    return torch.stack([kv.keys, kv.values]).float()
