"""The compiled kernels; what calls them is `kvrag.native`, which checks the arguments."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[np.uint8] | NDArray[np.int16]
_Floats = NDArray[np.float32]
_Elements = NDArray[np.float32] | NDArray[np.int16]
_Patches = tuple[NDArray[np.uint32], NDArray[np.uint32], _Floats]

class Model:
    def __init__(self, frequencies: NDArray[np.uint16]) -> None: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def num_symbols(self) -> int: ...

def encode(
    model: Model,
    symbols: NDArray[np.uint8],
    classes: NDArray[np.uint16],
    contexts: NDArray[np.uint8] | None,
    num_streams: int,
    threads: int,
) -> bytes | None: ...
def decode(
    jobs: Sequence[
        tuple[
            Model,
            NDArray[np.uint8],
            NDArray[np.uint16],
            NDArray[np.uint8],
            NDArray[np.uint8] | None,
        ]
    ],
    threads: int,
) -> list[tuple[int, int, int, int]]: ...
def ideal_bits(
    model: Model,
    symbols: NDArray[np.uint8],
    classes: NDArray[np.uint16],
    contexts: NDArray[np.uint8] | None,
) -> float: ...
def first_uncodable(
    model: Model,
    symbols: NDArray[np.uint8],
    classes: NDArray[np.uint16],
    contexts: NDArray[np.uint8] | None,
) -> tuple[int, int]: ...
def transform(
    numbers: _Numbers,
    shrink: _Floats | None,
    patches: _Patches | None,
    basis: _Floats,
    mean: _Floats,
    out: NDArray[np.float32] | NDArray[np.int16],
    element_type: int,
    first_token: int,
    tables: tuple[_Floats, _Floats] | None,
    threads: int,
) -> None: ...

class Bands:
    def __init__(
        self,
        widths: NDArray[np.uint8],
        basis: NDArray[np.int8],
        starts: NDArray[np.int32],
        mean: _Floats,
        scales: _Floats,
        powers: _Floats,
        levels: NDArray[np.uint8],
        band_channels: int,
    ) -> None: ...

def place_packed(
    rows: NDArray[np.uint8],
    first_byte: int,
    row_bytes: int,
    first_token: int,
    num_tokens: int,
    keys: Bands,
    keys_at: int,
    keys_head_stride: int,
    keys_token_stride: int,
    values: Bands | None,
    values_at: int,
    values_head_stride: int,
    values_token_stride: int,
    num_heads: int,
    head_dim: int,
    type: int,
    cos_at: int,
    sin_at: int,
    angle_stride: int,
    num_rotated: int,
    threads: int,
) -> None: ...
def pack(
    numbers: _Floats,
    widths: NDArray[np.uint8],
    weights: _Floats,
    powers: _Floats,
    nearest: NDArray[np.uint8],
    meanings: _Floats,
    rows: NDArray[np.uint8],
    lost: _Floats,
) -> None: ...
def attend(
    query: _Elements,
    key: _Elements,
    value: _Elements,
    last_keys: NDArray[np.int64],
    out: _Elements,
    window: int,
    scale: float,
    softcap: float,
    mass: _Floats | None,
    first_counted: int,
    threads: int,
) -> None: ...
def attend_each(
    query: _Elements,
    key: _Elements,
    value: _Elements,
    key_addresses: NDArray[np.int64],
    value_addresses: NDArray[np.int64],
    capacities: NDArray[np.int64],
    places: NDArray[np.int64],
    out: _Elements,
    window: int,
    scale: float,
    softcap: float,
    threads: int,
) -> None: ...
def linear(
    input: int,
    weight: int,
    bias: int,
    out: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    is_bfloat16: bool,
    threads: int,
) -> None: ...

INT8_PANEL: int

def int8_linear(
    input: int,
    weight: int,
    scale: int,
    bias: int,
    out: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    is_bfloat16: bool,
    threads: int,
) -> None: ...

GROUP: int

class GroupedWeights:
    def __init__(
        self,
        weight: int,
        scale: int,
        least: int,
        bias: int,
        factor: float,
        bits: int,
        num_inputs: int,
        num_outputs: int,
    ) -> None: ...

def grouped_linear(
    input: int, weights: GroupedWeights, out: int, num_rows: int, is_bfloat16: bool, threads: int
) -> None: ...
def grouped_rows(
    outputs: int, weights: GroupedWeights, out: int, count: int, is_bfloat16: bool, threads: int
) -> None: ...
def norm(
    input: int,
    weight: int,
    out: int,
    num_rows: int,
    width: int,
    epsilon: float,
    adds_one: bool,
    is_bfloat16: bool,
    threads: int,
) -> None: ...
def gate(
    gate: int, up: int, out: int, count: int, is_gelu: bool, is_bfloat16: bool, threads: int
) -> None: ...
def rotate(
    input: int,
    out: int,
    cos: int,
    sin: int,
    input_head_stride: int,
    input_token_stride: int,
    out_head_stride: int,
    out_token_stride: int,
    angle_stride: int,
    num_heads: int,
    num_tokens: int,
    head_dim: int,
    num_rotated: int,
    is_bfloat16: bool,
) -> None: ...

class Layers:
    def __init__(self, is_bfloat16: bool, width: int) -> None: ...
    def add_slot(self, width: int) -> int: ...
    def linear(self, source: int, to: int, weight: int, bias: int) -> None: ...
    def int8_linear(self, source: int, to: int, weight: int, scale: int, bias: int) -> None: ...
    def grouped_linear(self, source: int, to: int, weights: GroupedWeights) -> None: ...
    def norm(
        self, source: int, to: int, weight: int, width: int, epsilon: float, adds_one: bool
    ) -> None: ...
    def gate(self, gate: int, up: int, to: int, is_gelu: bool) -> None: ...
    def add(self, one: int, other: int, to: int) -> None: ...
    def rotate(self, source: int, to: int, table: int, head_dim: int) -> None: ...
    def attend(
        self,
        query: int,
        key: int,
        value: int,
        to: int,
        num_kv_heads: int,
        head_dim: int,
        window: int,
        scale: float,
        softcap: float,
    ) -> None: ...
    def end_layer(self) -> None: ...
    def run_layer(
        self,
        layer: int,
        hidden: int,
        cos: NDArray[np.float32],
        sin: NDArray[np.float32],
        keys: int,
        values: int,
        head_stride: int,
        num_keys: int,
        places: NDArray[np.int64],
        mass: NDArray[np.float32] | None,
        first_counted: int,
        threads: int,
    ) -> None: ...
    def run(
        self,
        hidden: int,
        cos: list[NDArray[np.float32]],
        sin: list[NDArray[np.float32]],
        key_addresses: NDArray[np.int64],
        value_addresses: NDArray[np.int64],
        capacities: NDArray[np.int64],
        places: NDArray[np.int64],
        threads: int,
    ) -> None: ...

def contexts(values: NDArray[np.int16], out: NDArray[np.uint8]) -> None: ...
def refine(values: NDArray[np.int16], symbols: NDArray[np.uint8]) -> None: ...
def instruction_set() -> str: ...
def instruction_sets() -> list[str]: ...
def use_instruction_set(name: str) -> bool: ...
