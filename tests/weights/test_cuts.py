"""How the text of a GGUF file's tokenizer is cut into words, which merges do not cross."""

from pathlib import Path
from typing import Any

import gguf
import pytest

from kvrag.errors import ModelLoadError
from kvrag.weights.architectures import Metadata
from kvrag.weights.convert import _tokenizer
from tests.support.gguf_files import write_gguf


def tokenizer(path: Path, **given: Any) -> Any:
    write_gguf(path / "m.gguf", **given)
    return _tokenizer(Metadata(path / "m.gguf", gguf.GGUFReader(str(path / "m.gguf"))))


# As llama.cpp cuts it, but for `tekken`, whose combining accent stays with its letter as in the
# tokenizer of the model.
@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "It| '|S|\n\n  | 12345| x|²|.|\n| e|\u0301|Ab"),
        ("smollm", "It| '|S|\n\n   |1|2|3|4|5| x|²|.|\n| e|\u0301|Ab"),
        ("qwen2", "It| '|S|\n\n|  | |1|2|3|4|5| x|²|.\n| e|\u0301Ab"),
        ("llama-bpe", "It| '|S|\n\n|  | |123|45| x|²|.\n| e|\u0301Ab"),
        ("tekken", "It| '|S|\n\n|  | |1|2|3|4|5| x|²|.\n| e\u0301|Ab"),
        ("seed-coder", "It| '|S|\n\n|  | |1|2|3|4|5| x|²|.|\n| e|\u0301Ab"),
        ("deepseek-coder", "It| '|S|\n|\n|   |1|2|3|4|5| x|²|.|\n| e|\u0301|Ab"),
    ],
)
def test_text_is_cut_as_the_file_says(pre: str, words: str, tmp_path: Path) -> None:
    backend = tokenizer(tmp_path, pre=pre).backend_tokenizer
    text = words.replace("|", "")
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    assert "|".join(text[first:last] for _, (first, last) in found) == words


def test_words_that_are_tokens_stay_whole(tmp_path: Path) -> None:
    """Llama 3's are not reached by merges alone; its files begin texts with BOS unless they say."""
    usual, whole = (tokenizer(tmp_path, pre=pre) for pre in ("gpt-2", "llama-bpe"))
    assert not usual.backend_tokenizer.model.ignore_merges
    assert whole.backend_tokenizer.model.ignore_merges
    assert whole("a")["input_ids"] == usual("a")["input_ids"]  # the file says that none is first


@pytest.mark.parametrize("pre", ["default", "later", None])
def test_what_is_not_known_is_refused(pre: str | None, tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=rf"words as {str(pre)!r} does \(tokenizer\.ggml\.pre\)"
    ):
        tokenizer(tmp_path, pre=pre)
