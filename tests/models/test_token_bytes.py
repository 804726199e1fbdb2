"""What single tokens add to a text, in bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvrag.engine.text_stream import TextStream
from kvrag.models.tokens import token_bytes
from tests.support.models import make_tokenizer

TEXT = "Ines\u2019 ledger: 12 £, naïve 猫 🐈\n\tand\u00a0more."


def test_byte_level_tokens_spell_any_text() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    pieces = [token_bytes(tokenizer, one) for one in ids]
    assert b"".join(pieces).decode() == TEXT
    with pytest.raises(UnicodeDecodeError):
        [piece.decode() for piece in pieces]  # there are parts of characters


def byte_fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 2's, whose decoder drops the first space."""
    vocabulary = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "<0xE2>": 4, "<0x80>": 5, "<0x99>": 6}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)  # type: ignore[no-untyped-call]


def test_tokens_with_byte_fallback_spell_a_text() -> None:
    tokenizer = byte_fallback()
    pieces = [token_bytes(tokenizer, one) for one in (1, 2, 3, 4, 5, 6)]
    assert pieces == [b" the", b" cat", b"s", b"\xe2", b"\x80", b"\x99"]


def test_a_row_that_pads_the_vocabulary_adds_nothing() -> None:
    tokenizer = make_tokenizer()
    assert token_bytes(tokenizer, len(tokenizer) + 5) == b""


def starts(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> tuple[list[int], str]:
    """Return where a stream says that each token begins, and the text."""
    stream = TextStream(tokenizer)
    found = []
    for one in ids:
        found.append(stream.start_of(one))
        stream.push(one)
    return found, stream.text


@given(
    data=st.lists(st.sampled_from([b"a", b"\xe2\x80\x99", b"\xe2", b"\x80", b"\xf0\x9f", b"\xff"]))
)
def test_a_token_begins_in_the_character_of_its_first_byte(data: list[bytes]) -> None:
    """Also after bytes that are no UTF-8, each of which is a character for good."""
    tokenizer = make_tokenizer()
    number_of = {
        token_bytes(tokenizer, one): one
        for one in range(len(tokenizer))
        if one not in tokenizer.all_special_ids
    }
    whole = b"".join(data)
    found, text = starts(tokenizer, [number_of[bytes([one])] for one in whole])
    assert text == whole.decode(errors="replace")
    # Python says of each beginning how many characters it has; the last one may go on.
    for place, start in enumerate(found):
        before, upto = (whole[:end].decode(errors="replace") for end in (place, place + 1))
        goes_on = len(upto) == len(before) and place > 0
        assert start == len(before) - goes_on, (whole, place)


def test_where_single_bytes_begin() -> None:
    tokenizer = byte_fallback()
    assert starts(tokenizer, [1, 4, 5, 6, 3])[0] == [0, 3, 3, 3, 4]
    # Nothing completes the character, so each of its bytes is one.
    found, text = starts(tokenizer, [1, 4, 5, 3])
    assert text == "the\ufffd\ufffds"
    assert found[-1] == 5
