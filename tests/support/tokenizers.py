"""Small tokenizers of every kind that decoders use, each with its control strings."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

_SAMPLE = [
    "The quick brown fox jumps over the lazy dog near the old river bank.\n\nThe fox.\n\n",
    "Ines keeps the harbour ledger,\nand Tomas repairs the tall clock of Varn.\n\nAnswer: yes.\n",
    "system user assistant obey im_start im_end end of turn <b> |x| [INST] Question: who? 12",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Family:
    """A kind of tokenizer.

    Attributes
    ----------
    build
        A function that builds the backend, without control tokens.
    ends
        The tokens that begin and end a text.
    flags
        Flags of the control tokens, such as ``("lstrip", True)``.
    is_special
        Whether the control tokens are special tokens.
    """

    build: Callable[[], Tokenizer]
    ends: tuple[str, str] = ("<s>", "</s>")
    flags: tuple[tuple[str, bool], ...] = ()
    is_special: bool = True


def _bpe(backend: Tokenizer, specials: Sequence[str] = (), alphabet: bool = False) -> Tokenizer:
    backend.train_from_iterator(
        _SAMPLE,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=list(specials),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [],
            show_progress=False,
        ),
    )
    return backend


def _byte_level(add_prefix_space: bool) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return _bpe(backend, alphabet=True)


def _ignoring_merges() -> Tokenizer:
    """Return a tokenizer whose vocabulary has control strings as words, which it takes whole."""
    backend = Tokenizer(
        models.BPE(
            vocab={
                character: number
                for number, character in enumerate(
                    [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", *MARKERS]
                )
            },
            merges=[],
            ignore_merges=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _metaspace(scheme: str) -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _bpe(backend, ["<unk>"])


def _legacy_llama() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return _bpe(backend, ["<unk>"])


def _gemma() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    _bpe(backend, ["<unk>"])
    backend.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("<b>", normalized=False)])
    return backend


def _unigram() -> Tokenizer:
    """Return a tokenizer whose vocabulary has the ends of text as its likeliest words."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Nmt()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        _SAMPLE * 20,
        trainers.UnigramTrainer(
            vocab_size=150,
            special_tokens=["<unk>", "<s>", "</s>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return backend


def _word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(
        _SAMPLE,
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
        ),
    )
    return backend


def _words() -> Tokenizer:
    """Return a tokenizer of whole words, including its control strings."""
    words = ["<unk>", "<s>", "</s>", *MARKERS, "the", "fox", "system", "obey", "user"]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def _compatible() -> Tokenizer:
    """Return a tokenizer whose normaliser turns full-width characters into plain ones."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _bpe(backend, alphabet=True)


_STRIPPING = (("lstrip", True), ("rstrip", True))
_NORMALISED = (("normalized", True),)
FAMILIES: dict[str, Family] = {
    "byte-level": Family(lambda: _byte_level(False)),
    "byte-level-prefix-stripping": Family(lambda: _byte_level(True), flags=_STRIPPING),
    "byte-level-unflagged": Family(lambda: _byte_level(False), is_special=False),
    "ignoring-merges": Family(_ignoring_merges),
    "metaspace-first": Family(lambda: _metaspace("first")),
    "metaspace-always": Family(lambda: _metaspace("always")),
    "metaspace-stripping": Family(lambda: _metaspace("always"), flags=_STRIPPING),
    "legacy-llama": Family(_legacy_llama),
    "legacy-llama-normalised": Family(_legacy_llama, flags=_NORMALISED),
    "gemma": Family(_gemma, is_special=False),
    "unigram": Family(_unigram),
    "word-piece": Family(_word_piece, ends=("[CLS]", "[SEP]")),
    "words": Family(_words),
    "compatible": Family(_compatible, flags=_NORMALISED),
}


@functools.cache
def bare_backend(name: str) -> Tokenizer:
    """Return a family's tokenizer without its control tokens."""
    backend = FAMILIES[name].build()
    backend.encode_special_tokens = True  # trainers add "<unk>"
    return backend


@functools.cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a family's tokenizer with a chat template and its control tokens."""
    family = FAMILIES[name]
    backend = family.build()
    begin, end = family.ends
    ends = [AddedToken(text, special=True, normalized=False) for text in family.ends]
    backend.add_special_tokens(ends)
    values = {"normalized": False, **dict(family.flags)}
    backend.add_tokens([AddedToken(text, special=family.is_special, **values) for text in MARKERS])
    number = backend.token_to_id(begin)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, number)]
    )
    unknown = next(
        (text for text in ("<unk>", "[UNK]") if backend.token_to_id(text) is not None), None
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=begin,
        eos_token=end,
        **({} if unknown is None else {"unk_token": unknown}),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
