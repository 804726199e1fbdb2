"""A whole context into the fused buffer, against the time the model takes to prefill it.

Weights are random: they give the model's shape and timing, but spread a token's keys and values
over more directions than training leaves, so that more components are coded at a rate than would
be for a trained model. Times here are upper bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from kvrag.codec.base import Codec, Destination
from kvrag.codec.config import RateDistortion, choose_codec
from kvrag.codec.fitting import fit_profile
from kvrag.codec.pca import PCA
from kvrag.codec.pipeline import PipelineChunk, PipelineCodec
from kvrag.codec.registry import get_codec
from kvrag.errors import ParameterError
from kvrag.kvcache import ChunkKV, FusedKV
from kvrag.models.kv_model import KVModel
from kvrag.positions.rotary import RotaryTable
from kvrag.store.memory import MemoryRecord
from kvrag_bench.codec.options import CodecBenchOptions
from kvrag_bench.codec.presets import NO_MODEL
from kvrag_bench.codec.records import KEY, bytes_per_token
from kvrag_bench.codec.rows import CONTEXT, CodecRow
from kvrag_bench.shapes import random_model, random_text


@dataclass(frozen=True)
class Context:
    """A prompt's chunks, a buffer for them, and their positions."""

    model: KVModel
    chunks: Sequence[ChunkKV]
    fused: FusedKV
    tables: Sequence[RotaryTable]
    prefill_seconds: float


def context_rows(
    options: CodecBenchOptions, on_progress: Callable[[str], None] = lambda _: None
) -> Iterator[CodecRow]:
    """Yield a row for each codec and, for codec ``transform``, each size of its layer groups.

    Raises
    ------
    ParameterError
        When the context does not fit the model.
    """
    model = random_model(options.shape)
    num_tokens = options.context_chunks * options.context_tokens
    if num_tokens > model.max_positions:
        raise ParameterError(
            f"a context of {num_tokens} tokens does not fit the {model.max_positions} of "
            f"{model.name}"
        )
    context = prepare_context(model, options, on_progress)
    # Texts of other seeds than the context's.
    count = max(4, -(-options.fit_tokens // options.context_tokens))
    fit = []
    for number in range(count):
        on_progress(f"computing chunk {number + 1} of {count} to fit")
        fit += random_chunk(model, options.context_tokens, 10_000 + number)
    for label, size, codec in _codecs(model, fit, options, on_progress):
        on_progress(f"decoding {num_tokens} tokens of {label}, {options.repeats + 1} times")
        yield replace(_row(context, label, codec, options.repeats), group_layers=size)


def prepare_context(
    model: KVModel, options: CodecBenchOptions, on_progress: Callable[[str], None]
) -> Context:
    """Compute a context's chunks, make room for them, and time full prefill of as many tokens."""
    chunks = []
    for number in range(options.context_chunks):
        on_progress(f"computing chunk {number + 1} of {options.context_chunks} of the context")
        chunks += random_chunk(model, options.context_tokens, number)
    num_tokens = sum(kv.num_tokens for kv in chunks)
    on_progress(f"full prefill of {num_tokens} tokens")
    # The chunks before it have warmed the model up.
    started = time.perf_counter()
    plain_prefill(model, num_tokens)
    prefill = time.perf_counter() - started
    fused = FusedKV(model.spec, num_tokens, num_tokens)
    return Context(model, chunks, fused, model.tables(num_tokens), prefill)


def plain_prefill(model: KVModel, num_tokens: int) -> None:
    """Compute any tokens with plain Transformers."""
    ids = torch.arange(num_tokens)[None] % 4096 + 3
    with model.lock, torch.no_grad():
        model.hf(input_ids=ids, logits_to_keep=1)


def random_chunk(model: KVModel, num_tokens: int, seed: int) -> list[ChunkKV]:
    """Return the KV of a chunk of random text."""
    text = random_text(model, num_tokens, seed)
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    return model.prefill(model.default_prefix_ids(), [ids])


def _codecs(
    model: KVModel,
    fit: Sequence[ChunkKV],
    options: CodecBenchOptions,
    on_progress: Callable[[str], None],
) -> Iterator[tuple[str, int | None, Codec]]:
    """Yield codecs, with their labels and the layers of a group where that is ours to say."""
    choices = [choose_codec(name) for name in options.decode_codecs]
    bits = tuple(
        float(choice.level)
        for choice in choices
        if choice.config is not None and isinstance(choice.config.allocation, RateDistortion)
    )
    for choice in choices:
        if choice.config is None:
            yield choice.label, None, get_codec(choice.label)
        elif not isinstance(choice.config.transform, PCA):
            on_progress(f"fitting {choice.label}")
            profile = fit_profile(choice.config, model.chunk_spec, NO_MODEL, fit)
            yield choice.label, None, get_codec(choice.label, profile)
    for wanted in options.group_layers if bits else ():
        config = next(c.config for c in choices if c.config and isinstance(c.config.transform, PCA))
        assert isinstance(config.transform, PCA)
        config = replace(
            config,
            transform=replace(config.transform, group_layers=wanted),
            allocation=RateDistortion(bits),
        )
        size = len(config.transform.plans(model.chunk_spec)[0].layers)
        words = f"groups of {size} layers"

        def say(line: str, words: str = words) -> None:
            on_progress(f"{words}: {line}")

        profile = fit_profile(config, model.chunk_spec, NO_MODEL, fit, say)
        for level in profile.levels:
            name = f"transform:{level.name}"
            yield name, size, PipelineCodec(profile, name, level.name)


def _row(context: Context, label: str, codec: Codec, repeats: int) -> CodecRow:
    records = [codec.encode(KEY, kv) for kv in context.chunks]
    times = [decode_context(context, codec, records) for _ in range(repeats + 1)][1:]
    whole = [sum(parts) for parts in times]
    num_tokens = context.fused.num_tokens
    num_bytes = sum(len(record) for record in records)
    bits = 8 * num_bytes / sum(2 * kv.keys.numel() for kv in context.chunks)
    preset, _, level = label.partition(":")
    return CodecRow(
        part=CONTEXT,
        source=context.model.name,
        preset=preset,
        level=level or None,
        num_tokens=num_tokens,
        bits_per_element=bits,
        bytes_per_token=bytes_per_token(context.model.chunk_spec, bits),
        threads=torch.get_num_threads(),
        baseline="prefill",
        ratio=median(whole) / context.prefill_seconds,
        seconds=median(whole),
        entropy_seconds=median(entropy for entropy, _ in times),
        transform_seconds=median(rest for _, rest in times),
    )


def decode_context(context: Context, codec: Codec, records: Sequence[bytes]) -> tuple[float, float]:
    """Return seconds until all whole numbers are known, and from there to the buffer.

    Codecs without whole numbers take all their time in the second part.
    """
    spec, fused = context.model.chunk_spec, context.fused
    started = time.perf_counter()
    chunks = [codec.open(KEY, MemoryRecord(KEY, record), spec) for record in records]
    for chunk in chunks:
        if isinstance(codec, PipelineCodec) and isinstance(chunk, PipelineChunk):
            for block in range(len(codec.profile.transform.plans)):
                chunk.block(block)
    known = time.perf_counter()
    for layer in range(spec.num_layers):
        begin = 0
        for chunk in chunks:
            rows = slice(begin, begin + chunk.num_tokens)
            begin = rows.stop
            into = Destination(
                keys=fused.keys[layer][0, :, rows],
                values=fused.values[layer][0, :, rows],
                tokens=slice(0, chunk.num_tokens),
                table=context.tables[layer],
                rows=rows,
            )
            chunk.place_layer(layer, into)
    return known - started, time.perf_counter() - known
