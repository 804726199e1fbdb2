"""`kvrag bench exact`: how far fusion is from plain Transformers where it must equal it.

Every way reads the same prompt of real text and is fed the same answer, the one that Transformers
gives in one forward pass. Its logits at each position of the answer are compared with those of
that pass. Transformers itself, over blocks of tokens, shows how much rounding alone changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from kvrag.chunk import ChunkKey, normalise_text
from kvrag.codec.base import EncodedChunk
from kvrag.codec.registry import get_codec
from kvrag.errors import ParameterError
from kvrag.fusion.controller import Choice, make_choice
from kvrag.fusion.decoding import make_decoder
from kvrag.fusion.fuser import fuse
from kvrag.fusion.layout import Layout, ReusedSpan
from kvrag.fusion.loader import OpenKV
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT
from kvrag.regularfile import read_regular
from kvrag.store.memory import MemoryStore
from kvrag_bench.judge.bank import ChunkBank
from kvrag_bench.judge.questions import render

FLOAT32_BOUND = 1e-4
"""Largest difference in float32 that counts as equal, in standard deviations of the logits."""

_QUESTION = "What does this text say about the people who work there?"
# Characters of the chunks, in turn: seams within words and numbers. One chunk is longer than
# Gemma's window of 512 tokens, and one is hardly longer than the shortest span that is reused.
_CHUNK_CHARACTERS = (151, 503, 2999, 1009, 31, 1777)
_QUESTION_TOKENS = 32  # at the end of the prompt, always computed
_BLOCK_TOKENS = 256
_PLAIN = "Transformers"


@dataclass(frozen=True)
class ExactOptions:
    """What to compare.

    Attributes
    ----------
    model
        A model folder or name.
    data
        A text file, or a folder of text files.
    num_tokens
        Length of the prompt; one prompt for each value.
    policies
        Policies that recompute everything at ratio 1.0.
    dtypes
        Element types of weights and KV; the first is also the reference of the others.
    answer_tokens
        Tokens of the answer.
    """

    model: str = "smollm2-135m"
    data: Path = Path("examples/handbook")
    num_tokens: Sequence[int] = (500, 2000, 8000)
    policies: Sequence[str] = ("deviation", "two_stage")
    dtypes: Sequence[str] = ("float32", "bfloat16")
    answer_tokens: int = 32

    def __post_init__(self) -> None:
        if min(*self.num_tokens, self.answer_tokens) < 1:
            raise ParameterError("bench exact: tokens must be 1 or more")
        for policy in self.policies:
            make_choice(policy, ratio=1.0)


@dataclass(frozen=True)
class ExactRow:
    """One way to compute a prompt, against another.

    Attributes
    ----------
    num_tokens
        Tokens of the prompt.
    way, reference
        What is compared with what.
    num_exact, num_reused, num_recomputed
        Tokens of chunks, by what became of them; 0 without kvrag.
    by_deviation, by_range
        The largest difference of a logit, at any position of the answer, over the standard
        deviation and over the range of that position's logits.
    num_equal, num_answer
        Answer tokens before the first that differs from the reference's, and all.
    bound
        The largest `by_deviation` that counts as equal; None if nothing is required.
    """

    model: str
    dtype: str
    num_tokens: int
    way: str
    reference: str
    num_exact: int
    num_reused: int
    num_recomputed: int
    by_deviation: float
    by_range: float
    num_equal: int
    num_answer: int
    bound: float | None

    @property
    def is_right(self) -> bool:
        """Whether everything that is required holds."""
        return self.bound is None or (
            self.by_deviation <= self.bound and self.num_equal == self.num_answer
        )


@dataclass(frozen=True)
class _Answer:
    """Logits ``[A, V]`` in float32 at each position of an answer, and its A tokens."""

    logits: torch.Tensor
    token_ids: tuple[int, ...]


def run_exact_bench(
    options: ExactOptions, on_progress: Callable[[str], None] | None = None
) -> Iterator[ExactRow]:
    """Yield a row for each way, as each is measured.

    Raises
    ------
    ParameterError, ModelLoadError, UnsupportedModelError
        When the model or the text cannot be used, or prompts do not fit.
    """
    say = on_progress or (lambda _: None)
    text = _read(options.data)
    first: dict[int, _Answer] = {}
    for dtype in options.dtypes:
        say(f"loading {options.model} in {dtype}")
        # Asked for by name, it is computed in even where the processor is slow at it.
        compute = dtype if dtype == "bfloat16" else None
        model = KVModel.load(options.model, dtype=dtype, compute=compute)
        for num_tokens in options.num_tokens:
            about = f"{dtype}, {num_tokens:,} tokens"
            compared = _Comparison(model, dtype, text, num_tokens, options, say, about)
            yield from compared.rows(first.get(num_tokens), options.dtypes[0])
            first.setdefault(num_tokens, compared.plain)


class _Comparison:
    """One prompt, computed in several ways by one model."""

    def __init__(
        self,
        model: KVModel,
        dtype: str,
        text: str,
        num_tokens: int,
        options: ExactOptions,
        say: Callable[[str], None],
        about: str,
    ) -> None:
        if num_tokens + options.answer_tokens > model.max_positions:
            raise ParameterError(
                f"{num_tokens} tokens and an answer of {options.answer_tokens} do not fit the "
                f"{model.max_positions} of {model.name}: fewer --tokens"
            )
        self._model, self._dtype, self._options = model, dtype, options
        self._pieces = _pieces_of(model, text, num_tokens)
        self._prompt = render(_QUESTION, self._pieces, model.tokenizer, True)
        self._token_ids = self._prompt.token_ids(model.tokenizer)
        self._say: Callable[[str], None] = lambda what: say(f"{about}: {what}")
        self._say(f"{_PLAIN}, in one pass")
        self.plain = self._by_transformers()

    def rows(self, other: _Answer | None, other_dtype: str) -> Iterator[ExactRow]:
        """Yield the rows; `other` is what Transformers gave in another type."""
        if other is not None:
            forced = self._by_transformers(other.token_ids)
            yield self._row(_PLAIN, forced, other, f"{_PLAIN}, {other_dtype}")
        forced = self._by_transformers(self.plain.token_ids, _BLOCK_TOKENS)
        yield self._row(f"{_PLAIN}, blocks of {_BLOCK_TOKENS}", forced, self.plain, _PLAIN)
        self._say("encoding chunks")
        bank = ChunkBank(self._model, self._pieces, [get_codec("raw")])
        layout = bank.lay_out(self._prompt)
        assert list(layout.token_ids) == self._token_ids
        open_kv = bank.opener("raw")
        for name in self._options.policies:
            everything = make_choice(name, ratio=1.0)
            yield self._fused(f"{name}, ratio 1.0", layout, open_kv, everything, is_exact=True)
        nothing = make_choice("none")
        yield self._fused("nothing recomputed", layout, open_kv, nothing, is_exact=False)
        self._say("encoding chunks after their text")
        layout, open_kv = self._in_place()
        yield self._fused("encoded after the same text", layout, open_kv, nothing, is_exact=True)

    def _in_place(self) -> tuple[Layout, OpenKV]:
        """Return the prompt with chunks that were encoded after the same tokens, and their KV."""
        model, token_ids = self._model, tuple(self._token_ids)
        num_prefix = len(model.default_prefix_ids())
        end = len(token_ids) - _QUESTION_TOKENS
        starts = [end // 9, end // 3]
        codec, store, spans = get_codec("raw"), MemoryStore(), []
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            (kv,) = model.prefill(token_ids[:start], [token_ids[start:stop]])
            store.put(_key(start), codec.encode(_key(start), kv))
            context = token_ids[num_prefix:start]
            spans.append(ReusedSpan(str(start), start, 0, stop - start, context))

        def open_kv(chunk_id: str, _: tuple[int, ...]) -> EncodedChunk | None:
            key = _key(int(chunk_id))
            record = store.open(key)
            return None if record is None else codec.open(key, record, model.chunk_spec)

        return Layout(token_ids, tuple(spans), num_prefix, has_prefix=True), open_kv

    def _fused(
        self, way: str, layout: Layout, open_kv: OpenKV, choice: Choice, *, is_exact: bool
    ) -> ExactRow:
        self._say(way)
        model, answer = self._model, self.plain.token_ids
        num_tokens = len(layout.token_ids)
        buffer = FusedKV(model.spec, num_tokens, num_tokens + len(answer), model.device)
        fused = fuse(model, layout, open_kv, choice, buffer)
        step = make_decoder(model, fused, None).step
        found = _continue(fused.logits, step, len(answer), forced=answer)
        report = fused.report
        counts = (report.num_exact, report.num_reused, report.num_recomputed)
        bound = FLOAT32_BOUND if is_exact and self._dtype == "float32" else None
        return self._row(way, found, self.plain, _PLAIN, counts, bound)

    def _row(
        self,
        way: str,
        found: _Answer,
        expected: _Answer,
        reference: str,
        counts: tuple[int, int, int] = (0, 0, 0),
        bound: float | None = None,
    ) -> ExactRow:
        difference = (found.logits - expected.logits).abs().amax(1)
        spread = expected.logits.amax(1) - expected.logits.amin(1)
        agrees = (found.logits.argmax(1) == expected.logits.argmax(1)).tolist()
        num_equal = agrees.index(False) if False in agrees else len(agrees)
        return ExactRow(
            model=self._model.name,
            dtype=self._dtype,
            num_tokens=len(self._token_ids),
            way=way,
            reference=reference,
            num_exact=counts[0],
            num_reused=counts[1],
            num_recomputed=counts[2],
            by_deviation=float((difference / expected.logits.std(1)).max()),
            by_range=float((difference / spread).max()),
            num_equal=num_equal,
            num_answer=len(agrees),
            bound=bound,
        )

    @torch.no_grad()
    def _by_transformers(
        self, forced: Sequence[int] = (), block_tokens: int | None = None
    ) -> _Answer:
        """Compute the prompt and an answer without kvrag."""
        model = self._model
        cache: Any = None

        def forward(token_ids: Sequence[int]) -> torch.Tensor:
            nonlocal cache
            fed = torch.tensor([list(token_ids)], device=model.device)
            with model.lock:
                # All rows' logits would fill gigabytes at Gemma's vocabulary.
                output = model.hf(
                    input_ids=fed, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1
                )
            cache = getattr(output, CACHE_ARGUMENT)
            logits: torch.Tensor = output.logits[0, -1]
            return logits

        size = block_tokens or len(self._token_ids)
        for begin in range(0, len(self._token_ids), size):
            logits = forward(self._token_ids[begin : begin + size])
        num_answer = self._options.answer_tokens
        return _continue(logits, lambda token: forward([token]), num_answer, forced)


def _continue(
    logits: torch.Tensor,
    step: Callable[[int], torch.Tensor],
    num_tokens: int,
    forced: Sequence[int],
) -> _Answer:
    """Feed an answer; without one, the likeliest tokens."""
    rows, token_ids = [logits.float()], list(forced[:1]) or [int(logits.argmax())]
    while len(rows) < num_tokens:
        rows.append(step(token_ids[-1]).float())
        token_ids.append(forced[len(token_ids)] if forced else int(rows[-1].argmax()))
    return _Answer(torch.stack(rows), tuple(token_ids))


def _read(data: Path) -> str:
    paths = sorted(path for path in data.iterdir() if path.is_file()) if data.is_dir() else [data]
    try:
        return "\n\n".join(normalise_text(read_regular(path).decode()) for path in paths)
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            f"bench exact: cannot read {data}: {error}; --data takes a text file or a folder of "
            "text files"
        ) from error


def _pieces_of(model: KVModel, text: str, num_tokens: int) -> list[str]:
    """Return the beginning of a text, in pieces that make a prompt of that many tokens."""

    def prompt_tokens(num_characters: int) -> int:
        pieces = _cut(text[:num_characters])
        return len(render(_QUESTION, pieces, model.tokenizer, True).token_ids(model.tokenizer))

    if prompt_tokens(len(text)) < num_tokens:
        raise ParameterError(
            f"bench exact: the text has fewer than {num_tokens:,} tokens: give more with --data"
        )
    return _cut(text[: bisect_right(range(len(text)), num_tokens, key=prompt_tokens) - 1])


def _cut(text: str) -> list[str]:
    pieces = []
    lengths = cycle(_CHUNK_CHARACTERS)
    while text:
        length = next(lengths)
        pieces.append(normalise_text(text[:length]))
        text = text[length:]
    return [piece for piece in pieces if piece]


def _key(start: int) -> ChunkKey:
    return ChunkKey(f"{start:040x}")
