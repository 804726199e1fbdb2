"""What `kvrag bench codec` is asked to measure, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrag import arguments
from kvrag.codec.config import choose_codec
from kvrag.errors import ParameterError
from kvrag_bench.shapes import SHAPES

PARTS = ("rate", "designs", "speed", "decode")
TINY = "kvrag-tiny"
MINILM = "minilm"
DEFAULT_CODECS = (
    "raw",
    "lossless",
    "cachegen:1",
    "cachegen:2",
    "cachegen:3",
    "cachegen:4",
    "transform:2",
    "transform:1",
    "transform:0.5",
    "transform:0.3",
    "transform:0.15",
    "transform:0.08",
)
DECODE_CODECS = ("transform:2", "transform:1", "transform:0.5", "lossless", "raw")


@dataclass(frozen=True)
class CodecBenchOptions:
    """What to measure.

    Attributes
    ----------
    parts
        Of `PARTS`.
    sources
        ``kvrag-tiny``, ``minilm``, or folders and names of decoders; all but the first need
        `data`.
    data
        A file of texts in MuSiQue or LongBench layout.
    codecs
        Codecs whose rate and distortion are measured.
    chunk_tokens
        Tokens of the chunks, each length a row.
    fit_tokens, test_tokens
        About how many tokens profiles are fitted on, and how many others are measured.
    shape
        Of the random model whose context is decoded, a name in `kvrag_bench.shapes.SHAPES`.
    decode_codecs
        Codecs to decode a context with.
    group_layers
        Sizes of the layer groups of codec ``transform`` to decode with; 0 means the codec's own.
    context_chunks, context_tokens
        Chunks of the context, and tokens of each.
    symbol_rows, symbol_tokens
        Size of the matrix that entropy coders are timed on.
    repeats
        Rounds of timing, of which medians are reported.
    """

    parts: Sequence[str] = PARTS
    sources: Sequence[str] = (TINY,)
    data: str | None = None
    codecs: Sequence[str] = DEFAULT_CODECS
    chunk_tokens: Sequence[int] = (100, 250, 500)
    fit_tokens: int = 16_000
    test_tokens: int = 5_000
    shape: str = "qwen2.5-0.5b"
    decode_codecs: Sequence[str] = DECODE_CODECS
    group_layers: Sequence[int] = (4, 8)
    context_chunks: int = 10
    context_tokens: int = 500
    symbol_rows: int = 1000
    symbol_tokens: int = 500
    repeats: int = 7

    def __post_init__(self) -> None:
        _require_known("part", self.parts, PARTS)
        _require_some("source", self.sources)
        _require_some("chunk length", self.chunk_tokens)
        if self.shape not in SHAPES:
            raise ParameterError(
                f"there is no shape {self.shape!r}; known shapes: {', '.join(SHAPES)}"
            )
        for codec in (*self.codecs, *self.decode_codecs):
            choose_codec(codec)
        for what, count in (
            *(("chunk tokens", tokens) for tokens in self.chunk_tokens),
            ("fit tokens", self.fit_tokens),
            ("test tokens", self.test_tokens),
            ("chunks of the context", self.context_chunks),
            ("tokens of its chunks", self.context_tokens),
            ("rows of symbols", self.symbol_rows),
            ("symbols a row", self.symbol_tokens),
            ("repeats", self.repeats),
        ):
            if count < 1:
                raise ParameterError(f"bench codec: {what}: expected 1 or more, found {count}")
        if min(self.group_layers, default=0) < 0:
            raise ParameterError(
                "bench codec: layers of a group: expected 0 (the codec's own) or more"
            )
        if {"rate", "designs"} & set(self.parts):
            self._check_data()

    def _check_data(self) -> None:
        needing = [source for source in self.sources if source != TINY]
        if needing and self.data is None:
            raise ParameterError(
                f"source {needing[0]!r} needs texts: give a file in MuSiQue layout with --data"
            )
        if self.data is not None and not arguments.path(self.data, "data").is_file():
            raise ParameterError(f"there is no data file {arguments.shown(self.data)}")
        for source in needing:
            # A name without a folder would be looked for on the hub, after minutes of work.
            is_name = source == MINILM or "/" in source
            if not is_name and not arguments.path(source, "source").is_dir():
                raise ParameterError(
                    f"there is no source {arguments.shown(source)}: expected {TINY!r}, {MINILM!r}, "
                    "or the folder "
                    "or hub name of a decoder"
                )


def _require_some(what: str, values: Sequence[object]) -> None:
    if not values:
        raise ParameterError(f"bench codec: expected at least one {what}, found none")


def _require_known(what: str, values: Sequence[str], known: Sequence[str]) -> None:
    _require_some(what, values)
    for value in values:
        if value not in known:
            raise ParameterError(f"there is no {what} {value!r}; known: {', '.join(known)}")
