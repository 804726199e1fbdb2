"""What `kvrag bench codec` found: one flat kind of row for all its parts."""

from __future__ import annotations

from dataclasses import dataclass

PRESET = "preset"
BASELINE = "baseline"
DESIGN = "design"
EQUAL = "equal distortion"
CODER = "coder"
CONTEXT = "context"


@dataclass(frozen=True)
class CodecRow:
    """One measurement; what does not apply to it is None.

    Attributes
    ----------
    part
        `PRESET`: a codec on chunks of one length. `BASELINE`: so a baseline. `EQUAL`: a codec
        interpolated to a relative error, against a baseline. `DESIGN`: so the codec with stages
        exchanged, against the design of codec ``transform``. `CODER`: an entropy coder alone.
        `CONTEXT`: a whole context decoded.
    source
        Whose KV, or which symbols.
    preset, level
        The codec, and its level or instruction set; a level with ``/n`` is cut after n planes.
    num_tokens
        Of a chunk, or of the context.
    bits_per_element
        Of whole records: headers, scales, patches and padding too.
    bytes_per_token
        The same, of all layers.
    relative_error
        Squared error over the squared distance to the channel's mean in the fitted part.
    balanced_error
        The same for each layer and kind by itself, and the mean of these.
    entropy_bits
        Code length of the symbols under the tables they are coded with, a KV element or symbol.
    threads
        Threads that it ran on.
    group_layers
        Layers that share a basis, where the bench chose their number.
    baseline
        What `ratio` compares with.
    ratio
        How many times better than the baseline: smaller, or faster. For contexts the share of
        the baseline's time.
    seconds, entropy_seconds, transform_seconds
        Of a context: whole, until all whole numbers are known, and from there to the buffer.
    """

    part: str
    source: str
    preset: str
    level: str | None = None
    num_tokens: int | None = None
    bits_per_element: float | None = None
    bytes_per_token: float | None = None
    relative_error: float | None = None
    balanced_error: float | None = None
    entropy_bits: float | None = None
    encode_symbols_per_second: float | None = None
    decode_symbols_per_second: float | None = None
    threads: int | None = None
    group_layers: int | None = None
    baseline: str | None = None
    ratio: float | None = None
    seconds: float | None = None
    entropy_seconds: float | None = None
    transform_seconds: float | None = None

    @property
    def name(self) -> str:
        """Preset and level as users type them, and the layers of a group where that is set."""
        name = self.preset if self.level is None else f"{self.preset}:{self.level}"
        if self.group_layers is None:
            return name
        return f"{name}, {self.group_layers} layers"
