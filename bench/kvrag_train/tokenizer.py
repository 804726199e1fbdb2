"""The tiny model's tokenizer: byte-level BPE in which every word of the grammar is one token.

The merges are written down rather than learned: first those that build the head of a name
with its leading space, then the tails, then the words of the grammar and of the prompt
formats. Merges of lower rank go first, so a name is always its head and its tail, two
tokens, and any other text falls back to bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvrag_corpus.grammar import (
    OPENINGS,
    RELATIONS,
    TRADES,
    UNKNOWN_ANSWER,
    UPDATE_OPENINGS,
)
from kvrag_corpus.names import name_heads, name_tails
from kvrag_train.prompts import CHAT_LANGCHAIN, CHAT_LLAMAINDEX, FORMATS, PromptFormat

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>")
# Words with their leading space, numbers, runs of newlines, runs of punctuation.
_SPLIT = r" ?[A-Za-z]+| ?[0-9]+|\n+| ?[^\sA-Za-z0-9]+|\s"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


class _Merges:
    """An ordered merge list that grows until given words are single tokens."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[str, str], int] = {}

    def encode(self, symbols: list[str]) -> list[str]:
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            merged: list[str] = []
            for symbol in symbols:
                if merged and (merged[-1], symbol) == best:
                    merged[-1] += symbol
                else:
                    merged.append(symbol)
            symbols = merged
        return symbols

    def make_one_token(self, word: str) -> None:
        while len(symbols := self.encode(list(word))) > 1:
            self.ranks[symbols[0], symbols[1]] = len(self.ranks)


def _grammar_words() -> list[str]:
    """Return the words of the grammar and the prompts as they stand, with leading space.

    Token ids are append-only: words of the frameworks' chat prompts come after all others.
    """
    chat = (CHAT_LANGCHAIN, CHAT_LLAMAINDEX)
    texts = [_sample(prompt) for prompt in FORMATS if prompt not in chat]
    for relation in RELATIONS:
        texts += [f"The {text}" for text in (*relation.statements, relation.role)]
        texts += [*relation.questions, *(f"Question: {q}" for q in relation.questions)]
    texts += [*OPENINGS, *UPDATE_OPENINGS, *(f"the {trade}" for trade in TRADES)]
    texts += [f" {UNKNOWN_ANSWER}", ". She now . He", " The", "context: documents. Question? I"]
    words = _split_words(texts)
    return words + [word for word in _split_words(map(_sample, chat)) if word not in words]


def _sample(prompt: PromptFormat) -> str:
    return prompt.render(["The", "The"], "Who?")


def _split_words(texts: Iterable[str]) -> list[str]:
    return sorted({piece for text in texts for piece in re.findall(_SPLIT, _drop_fields(text))})


def _drop_fields(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "\n")
    return re.sub(r"\{\w+\}", "", text)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer; the same every time.

    Returns
    -------
    PreTrainedTokenizerFast
        ``tokenizer(text)`` begins with ``<bos>``; the chat template knows the roles
        system, user and assistant.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges = _Merges()
    for head in name_heads():
        merges.make_one_token(_as_bytes(byte_level, f" {head}"))
    for tail in name_tails():
        merges.make_one_token(_as_bytes(byte_level, tail))
    for word in _grammar_words():
        merges.make_one_token(_as_bytes(byte_level, word))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges.ranks)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges.ranks)))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A <bos> $B",
        special_tokens=[("<bos>", vocabulary["<bos>"])],
    )
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _as_bytes(byte_level: pre_tokenizers.ByteLevel, text: str) -> str:
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))


def name_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that names are made of: every head with its space, every tail."""
    pieces = [*(f" {head}" for head in name_heads()), *name_tails()]
    return [ids[0] for ids in tokenizer(pieces, add_special_tokens=False)["input_ids"]]


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    build_tokenizer().save_pretrained(str(folder))
    # The class name that every version of Transformers knows, not only the newest.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
