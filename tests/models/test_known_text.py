"""Tokenising around texts whose tokens are known gives what tokenising the whole gives."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvrag.chunk import Chunk, normalise_text
from kvrag.models import known_text
from kvrag.models.control import ControlTokens, encode_documents
from kvrag.models.known_text import (
    PATTERNS,
    KnownText,
    KnownTexts,
    cuts_at_borders,
    ids_of,
)
from kvrag.models.tokens import SpliceOffsets, encode
from kvrag_train.tokenizer import build_tokenizer
from tests.support.tokenizers import FAMILIES, MARKERS, TEMPLATE, family_tokenizer

_SAMPLE = [
    "The quick brown fox jumps over the lazy dog near the old river bank.\n\nThe fox.\n\n",
    "Ines keeps the harbour ledger, and Tomas doesn't repair the tall clock of 1987. 12 345 6789\n",
]


def _backend(
    pre_tokenizer: pre.PreTokenizer, normaliser: normalizers.Normalizer | None, trims: bool
) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normaliser is not None:
        backend.normalizer = normaliser
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", *MARKERS]
    alphabet = pre.ByteLevel.alphabet()
    backend.train_from_iterator(
        _SAMPLE * 3,
        trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        ),
    )
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trims),
            processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
            ),
        ]
    )
    return backend


def _split(pattern: str) -> pre.PreTokenizer:
    level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"), level])


_GPT2 = pre.ByteLevel(add_prefix_space=False)
REAL: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: _backend(_GPT2, None, True),
    "llama-3": lambda: _backend(_split(PATTERNS[1]), None, True),
    "qwen-2": lambda: _backend(_split(PATTERNS[2]), normalizers.NFC(), False),
    "smollm": lambda: _backend(pre.Sequence([pre.Digits(True), _GPT2]), None, True),
}
ALL = [*FAMILIES, *REAL, "kvrag-tiny"]
# The stripping ones, those with a normaliser and those of other kinds are not known to.
CUTTING = {"byte-level", "byte-level-unflagged", *REAL, "kvrag-tiny"}


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    if name in FAMILIES:
        return family_tokenizer(name)
    if name in REAL:
        return PreTrainedTokenizerFast(
            tokenizer_object=REAL[name](),
            bos_token="<s>",
            eos_token="</s>",
            chat_template=TEMPLATE,
            clean_up_tokenization_spaces=False,
        )
    return build_tokenizer()


PIECES = st.sampled_from(
    [
        *("the quick brown fox", " the", "fox jumps", " ", "  ", "\n", "\n\n", "Ines", "\t", "x"),
        *("doesn't", "'s", "'S", "'", "12 345 6789", "1987", "a1 b2", "é", "e\u0301", "\u0338"),
        *(
            "北京",
            "naïve café",
            "\u200b",
            "\u00a0",
            "\u017f",
            "İ",
            "🙂",
            " a b",
            "- ",
            ". The",
            "…",
        ),
        *("<", ">", "<|", "|>", "<|im_", "end|>", "/s>", "<s", "<|im_start|>", "<|im_end|>"),
        *("<s>", "</s>", "<unk>", "[CLS]", "[SEP]", "<b>", "<eos>", "\u212a x", "a\u0301 b"),
    ]
)
LONG = "the quick brown fox jumps over the lazy dog"
TEXTS = st.lists(PIECES, max_size=16).map("".join)
CHUNKS = st.tuples(TEXTS, st.sampled_from([LONG, "", f"{LONG}, {LONG}"]), TEXTS).map("".join)

prompts = given(
    chunks=st.lists(CHUNKS, min_size=1, max_size=3),
    betweens=st.lists(TEXTS, min_size=4, max_size=4),
    keeps=st.booleans(),
    cut=st.integers(0, 12),
)


def check(name: str, chunks: list[str], betweens: list[str], keeps: bool, cut: int) -> None:
    tokenizer = tokenizer_of(name)
    control = None if keeps else ControlTokens(tokenizer)
    known_texts = KnownTexts(tokenizer, *([] if control is None else [control.find]))
    prompt, known = betweens[0], []
    for number, written in enumerate(chunks):
        text = normalise_text(written)
        (alone,) = encode_documents(tokenizer, [text], control)
        starts = tuple(start for start, _ in alone.offsets)
        chunk = Chunk(str(number), text, alone.token_ids, starts, "source", number)
        shown = text[: len(text) - cut]
        known.append(KnownText(len(prompt), len(prompt) + len(shown), chunk))
        prompt += shown + betweens[number + 1]
    for adds in (True, False):
        (expected,) = encode(tokenizer, [prompt], adds)
        for _ in range(2):  # the second time, what was found out of texts is kept
            found = known_texts.encode(prompt, adds, known)
            assert found.token_ids == expected.token_ids
            assert list(found.offsets) == [tuple(one) for one in expected.offsets]
            if isinstance(found.offsets, SpliceOffsets):
                assert name in CUTTING
                assert found.offsets.starts.tolist() == [start for start, _ in expected.offsets]
            assert ids_of(found.token_ids).tolist() == list(expected.token_ids)
        if control is not None:
            data = [(one.start, one.end) for one in known]
            whole = control.prompt(prompt, add_special_tokens=adds, data=data)
            again = control.prompt(prompt, found, add_special_tokens=adds, data=data)
            assert again.token_ids == whole.token_ids
            assert (again.num_control, again.num_neutralised) == (
                whole.num_control,
                whole.num_neutralised,
            )


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None)
@prompts
def test_the_same_ids_and_offsets(
    name: str, chunks: list[str], betweens: list[str], keeps: bool, cut: int
) -> None:
    check(name, chunks, betweens, keeps, cut)


@pytest.mark.parametrize("name", ALL)
def test_which_tokenizers_are_known(name: str) -> None:
    assert cuts_at_borders(tokenizer_of(name)) is (name in CUTTING)


@pytest.mark.parametrize("name", sorted(CUTTING))
def test_few_characters_are_tokenised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(name)
    text = f"{LONG}. " * 40 + "Done."
    (alone,) = encode(tokenizer, [text], False)
    chunk = Chunk("a", text, alone.token_ids, tuple(s for s, _ in alone.offsets), "source", 0)
    prompt = f"Read: {text}\n\nWho?"
    tokenised: list[int] = []

    def counting(given: PreTrainedTokenizerBase, texts: list[str], adds: bool) -> object:
        tokenised.extend(map(len, texts))
        return encode(given, texts, adds)

    monkeypatch.setattr(known_text, "encode", counting)
    found = KnownTexts(tokenizer).encode(prompt, True, [KnownText(6, 6 + len(text), chunk)])
    ends = [0, len(found.token_ids) - 1]
    given = [found.offsets[number] for number in ends]
    assert sum(tokenised) < 60 < len(text)
    # Ends of tokens inside are asked for.
    assert list(found.offsets)[1:-1] == list(encode(tokenizer, [prompt], True)[0].offsets)[1:-1]
    assert sum(tokenised) > len(text)
    assert [found.offsets[number] for number in ends] == given


def test_tokens_that_spell_another_text_are_not_put_in() -> None:
    tokenizer = tokenizer_of("llama-3")
    text = f"{LONG}. {LONG}."
    (alone,) = encode(tokenizer, [text], False)
    ids = list(alone.token_ids)
    ids[len(ids) // 2] += 1
    chunk = Chunk("a", text, tuple(ids), tuple(s for s, _ in alone.offsets), "source", 0)
    found = KnownTexts(tokenizer).encode(text, False, [KnownText(0, len(text), chunk)])
    assert found == alone


@pytest.mark.parametrize("token", ["fox jumps", "brown ", "\u212a x"])
def test_an_added_token_across_a_border_is_found(token: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=REAL["gpt-2"]())
    assert cuts_at_borders(tokenizer)
    tokenizer.add_tokens([AddedToken(token, normalized=False)])
    assert not cuts_at_borders(tokenizer)
