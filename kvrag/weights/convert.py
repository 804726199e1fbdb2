"""The process that converts a GGUF file to a folder: weights, tokenizer, chat template.

Runs as a separate process, ``python -m kvrag.weights.convert FILE FOLDER [small]``: dequantising
takes memory that only the end of a process returns.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from kvrag.arguments import shown
from kvrag.errors import ModelLoadError
from kvrag.plugins import reason
from kvrag.weights import packing
from kvrag.weights.architectures import Metadata


def convert(path: Path, folder: Path, *, is_small: bool = False) -> None:
    """Write the model of a GGUF file into a folder, as safetensors.

    Parameters
    ----------
    path
        The file, in one piece.
    folder
        Exists and is empty.
    is_small
        Whether matrices keep their bits where they can; all other weights become bfloat16.

    Raises
    ------
    ModelLoadError
        When the file cannot be read, is of another architecture than `ARCHITECTURES` has, says
        more or less than its model is, or has a quantisation that ``gguf`` does not take back.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(str(path))
    except BaseException as error:  # it raises whatever the bytes lead to
        raise ModelLoadError(
            f"{path} cannot be read as GGUF ({reason(error)}): it is cut short, damaged, or of "
            "another version; fetch it again"
        ) from error
    _check_types(path, reader)
    known = Metadata(path, reader)

    try:
        tokenizer = _tokenizer(known)
        planned = packing.plan(known, is_small=is_small)
    except ModelLoadError:
        raise
    except BaseException as error:  # a foreign file takes the libraries anywhere
        raise ModelLoadError(
            f"Transformers cannot read {path} (architecture {shown(known.architecture)}): "
            f"{reason(error).rstrip('.')}. Take the model's folder of safetensors instead"
        ) from error
    settings = planned.model.generation_config
    ends = settings.eos_token_id
    told = ends if isinstance(ends, list) else [ends]
    settings.eos_token_id = sorted({*told, *_ends(known)} - {None}) or None
    tokenizer.save_pretrained(folder)
    planned.save_pretrained(folder)


def _check_types(path: Path, reader: Any) -> None:
    import gguf

    plain = {gguf.GGMLQuantizationType[name] for name in ("F16", "F32", "F64")}
    known = plain | set(gguf.quants._type_traits)
    for tensor in reader.tensors:
        if tensor.tensor_type not in known:
            raise ModelLoadError(
                f"{path}: tensor {tensor.name} is quantised as {tensor.tensor_type.name}, which "
                "the gguf package does not dequantise; take a file in another type, such as "
                "Q4_K_M or Q8_0"
            )


def _tokenizer(known: Metadata) -> Any:
    """Return a file's tokenizer, which cuts text into words as the model's own does."""
    # Seconds to import, so only for a file that can be read.
    import tokenizers
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    name = str(known.field("tokenizer.ggml.pre", None))
    is_whole = name in _WHOLE_WORDS
    given: dict[str, Any] = {"add_bos_token": True} if is_whole else {}
    cuts = _cuts()
    is_bytes = known.field("tokenizer.ggml.model") == "gpt2"
    if is_bytes and name not in cuts:
        raise known.refusal(
            f"cuts text into words as {shown(name)} does (tokenizer.ggml.pre), which kvrag does "
            "not know"
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        str(known.path.parent), gguf_file=known.path.name, **given
    )
    if is_bytes:
        split = [
            pre_tokenizers.Split(tokenizers.Regex(one), behavior="isolated") for one in cuts[name]
        ]
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.model.ignore_merges = is_whole
    return tokenizer


# Words that are tokens stay whole in these, and texts begin with BOS unless the file says not.
_WHOLE_WORDS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
)
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"


def _cuts() -> dict[str, tuple[str, ...]]:
    """Return what text is cut by, one after the other, by the names that llama.cpp has for it."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    theirs: dict[str, str] = GGUF_PRE_TOKENIZER_SPLITS
    found: dict[str, tuple[str, ...]] = {name: (one,) for name, one in theirs.items()}
    more = {
        "smollm starcoder refact command-r exaone codeshell minerva-7b mellum2": (_DIGIT, _WORDS),
        "gpt-2 phi-2 olmo mpt jais exaone4 mellum gigachat a.x-4.0 trillion granite-docling": (
            _WORDS,
        ),
        "stablelm2 hunyuan solar-open": found["qwen2"],
        "glm4 chatglm-bpe": found["llama-bpe"],
        "seed-coder": (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        "deepseek-coder": (
            *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"),
            *(r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", _DIGIT),
        ),
    }
    return found | {name: cut for names, cut in more.items() for name in names.split()}


def _ends(known: Metadata) -> set[int | None]:
    """Return tokens that end a turn: chat models declare them beside the end of a text."""
    return {known.field(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")}


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        try:
            convert(Path(sys.argv[1]), Path(sys.argv[2]), is_small=sys.argv[3:] == ["small"])
        except ModelLoadError as error:
            sys.exit(str(error))
        except OSError as error:
            sys.exit(f"{error.strerror or error}; KVRAG_MODELS names another folder")
