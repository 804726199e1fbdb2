"""What single tokens add to a text, in bytes."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

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


def test_tokens_with_byte_fallback_spell_a_text() -> None:
    """As in Llama 2's tokenizers, whose decoder drops the first space."""
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
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    pieces = [token_bytes(tokenizer, one) for one in (1, 2, 3, 4, 5, 6)]
    assert pieces == [b" the", b" cat", b"s", b"\xe2", b"\x80", b"\x99"]


def test_a_row_that_pads_the_vocabulary_adds_nothing() -> None:
    tokenizer = make_tokenizer()
    assert token_bytes(tokenizer, len(tokenizer) + 5) == b""
