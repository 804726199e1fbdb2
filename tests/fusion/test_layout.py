from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from kvrag.chunk import Chunk
from kvrag.fusion.layout import (
    MISS_NO_OFFSETS,
    MISS_TOKENS_DIFFER,
    MISS_UNKNOWN_CHUNK,
    Layout,
    ReusedSpan,
    lay_out,
)
from kvrag.fusion.segments import ChunkMatcher, Match
from kvrag.models.tokens import Tokens, encode
from tests.fusion.prompts import TOKENIZER_NAMES, corpora, get_tokenizer, make_chunk, prompts
from tests.support.properties import examples

A = "Ines keeps the harbour ledger of Varn, and nobody else may write in it before noon.\nSo be it."
B = "Tomas repairs the tall clock whenever the northern light fails, which is twice a winter."


def tokens_of(prompt: str, tokenizer: Any, add_special_tokens: bool = True) -> Tokens:
    (tokens,) = encode(tokenizer, [prompt], add_special_tokens)
    return tokens


def find_and_lay_out(
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    corpus: dict[str, str],
    prefix_ids: Sequence[int] = (),
    *,
    add_special_tokens: bool = True,
    **options: Any,
) -> tuple[Layout, dict[str, Chunk], list[Match]]:
    matcher = ChunkMatcher()
    for chunk_id, text in corpus.items():
        matcher.add(chunk_id, text)
    chunks = {i: make_chunk(tokenizer, i, text) for i, text in corpus.items()}
    matches = matcher.find(prompt)
    tokens = tokens_of(prompt, tokenizer, add_special_tokens)
    layout = lay_out(tokens, matches, chunks, prefix_ids, **options)
    return layout, chunks, matches


def check(
    layout: Layout,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    chunks: dict[str, Chunk],
    *,
    add_special_tokens: bool = True,
) -> None:
    """Assert what must be true of any layout."""
    plain = tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
    assert layout.token_ids == tuple(plain)
    end = layout.prefix_length if layout.has_prefix else 0
    for span in layout.spans:
        assert span.length >= 4
        assert end <= span.prompt_start
        assert span.chunk_start >= 0
        end = span.prompt_end
        assert end < len(plain), "the last token has to be computed"
        chunk_ids = chunks[span.chunk_id].token_ids
        assert span.chunk_end <= len(chunk_ids)
        assert (
            layout.token_ids[span.prompt_start : end]
            == chunk_ids[span.chunk_start : span.chunk_end]
        )


def num_trimmed(layout: Layout, chunks: dict[str, Chunk]) -> list[tuple[int, int]]:
    """Return, for each span, how many of its chunk's tokens are missing at either side."""
    return [
        (span.chunk_start, len(chunks[span.chunk_id].token_ids) - span.chunk_end)
        for span in layout.spans
    ]


# --- examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZER_NAMES)
@pytest.mark.parametrize(("separator", "most"), [("\n\n", 2), (" ", 2), (" (", 2), ('"', 3)])
def test_few_tokens_are_trimmed_whatever_the_tokenizer(name, separator, most):
    tokenizer = get_tokenizer(name)
    prompt = separator.join(["Use this", A, B, A, "Who keeps the ledger?"])
    layout, chunks, _ = find_and_lay_out(tokenizer, prompt, {"a": A, "b": B})
    check(layout, tokenizer, prompt, chunks)
    assert [span.chunk_id for span in layout.spans] == ["a", "b", "a"]
    assert layout.misses == {}
    assert all(max(sides) <= most for sides in num_trimmed(layout, chunks))


def test_span_right_behind_the_prefix_is_exact():
    tokenizer = get_tokenizer("byte-level")
    layout, chunks, _ = find_and_lay_out(tokenizer, f"{A}\n\n{B}\n\nQ", {"a": A, "b": B}, (0,))
    check(layout, tokenizer, f"{A}\n\n{B}\n\nQ", chunks)
    assert (layout.has_prefix, layout.prefix_length) == (True, 1)
    assert [layout.is_exact(span) for span in layout.spans] == [True, False]


def test_span_behind_a_foreign_beginning_is_not_exact():
    tokenizer = get_tokenizer("byte-level")
    options = {"add_special_tokens": False}
    layout, chunks, _ = find_and_lay_out(tokenizer, A + "\n", {"a": A}, (0,), **options)
    check(layout, tokenizer, A + "\n", chunks, add_special_tokens=False)
    assert (layout.has_prefix, layout.prefix_length) == (False, 0)
    assert layout.spans[0].prompt_start == 0
    assert not layout.is_exact(layout.spans[0])
    layout, _, _ = find_and_lay_out(tokenizer, A + "\n", {"a": A}, (), **options)
    assert layout.is_exact(layout.spans[0])


@pytest.mark.parametrize("name", TOKENIZER_NAMES)
def test_cut_chunk_is_reused_up_to_the_cut(name):
    tokenizer = get_tokenizer(name)
    prompt = f"Use\n\n{A[:75]}\n\nWho?"
    layout, chunks, matches = find_and_lay_out(tokenizer, prompt, {"a": A})
    check(layout, tokenizer, prompt, chunks)
    assert matches == [Match("a", 5, 80, True)]
    span = layout.spans[0]
    assert span.chunk_start <= 2
    assert chunks["a"].token_starts[span.chunk_end - 1] > 60


def test_span_is_cut_at_the_first_token_that_differs():
    tokenizer = get_tokenizer("byte-level")
    chunk = make_chunk(tokenizer, "a", A)
    ids = list(chunk.token_ids)
    ids[10] += 1
    damaged = Chunk("a", A, tuple(ids), chunk.token_starts, "test", 0)
    matches = [Match("a", 0, len(A), False)]
    layout = lay_out(tokens_of(A + "\n", tokenizer), matches, {"a": damaged}, (0,))
    assert layout.spans == (ReusedSpan("a", 12, 11, len(ids) - 11),)


def test_chunk_of_another_tokenizer_is_a_miss():
    foreign = make_chunk(get_tokenizer("word-piece"), "a", A)
    matches = [Match("a", 0, len(A), False), Match("gone", len(A), len(A) + 2, False)]
    layout = lay_out(
        tokens_of(A + "\n\n", get_tokenizer("byte-level")), matches, {"a": foreign}, ()
    )
    assert layout.spans == ()
    assert layout.misses == {MISS_TOKENS_DIFFER: 1, MISS_UNKNOWN_CHUNK: 1}


def test_tokenizer_without_offsets_is_a_plain_prefill():
    class SlowTokenizer:
        is_fast = False

        def __call__(self, prompts: list[str], *, return_offsets_mapping: bool, **_: Any) -> Any:
            assert not return_offsets_mapping
            return {"input_ids": [[1, 2, 3] for _ in prompts]}

    chunk = make_chunk(get_tokenizer("byte-level"), "a", A)
    matches = [Match("a", 0, len(A), False)]
    layout = lay_out(tokens_of(A, SlowTokenizer()), matches, {"a": chunk}, (1,))
    assert layout == Layout((1, 2, 3), (), 1, True, {MISS_NO_OFFSETS: 1}, chunk_ids=("a",))


# --- properties -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZER_NAMES)
@settings(max_examples=examples(50), derandomize=True)
@given(data=st.data())
def test_ids_are_plain_and_spans_are_chunk_tokens(name, data):
    tokenizer = get_tokenizer(name)
    corpus = data.draw(corpora())
    prompt, _ = data.draw(prompts(corpus))
    special = data.draw(st.booleans())
    prefix_ids = data.draw(
        st.sampled_from(((), tuple(tokenizer("")["input_ids"][:1]), (3, 1, 4, 1, 5)))
    )
    options = {"add_special_tokens": special}
    layout, chunks, matches = find_and_lay_out(tokenizer, prompt, corpus, prefix_ids, **options)
    check(layout, tokenizer, prompt, chunks, **options)
    assert len(layout.spans) + sum(layout.misses.values()) == len(matches)
    for span in layout.spans:
        if layout.is_exact(span):
            encoded = (*prefix_ids, *chunks[span.chunk_id].token_ids[: span.length])
            assert layout.token_ids[: span.prompt_end] == encoded


@settings(max_examples=examples(100), derandomize=True)
@given(st.data())
def test_separated_chunks_are_reused_whole(data):
    # This tokenizer keeps line ends apart from words, so nothing is lost at a blank line.
    tokenizer = get_tokenizer("byte-level")
    corpus = data.draw(corpora())
    prompt, inserted = data.draw(prompts(corpus))
    layout, chunks, matches = find_and_lay_out(tokenizer, prompt + "\n\n?", corpus)
    assert layout.misses == {}
    whole = {m.start for m in matches if not m.is_prefix}
    assert {item.start for item in inserted if not item.is_cut} <= whole
    for match, span in zip(matches, layout.spans, strict=True):
        if not match.is_prefix:
            assert (span.chunk_start, span.length) == (0, len(chunks[span.chunk_id].token_ids))
