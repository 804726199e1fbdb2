"""`kvrag bench attention`: rates of attention of scattered rows, in the kernel and in PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvrag.errors import ParameterError
from kvrag.models.rows import ROW_BLOCK
from kvrag.native import Mass, Scores, attend

# PyTorch multiplies what its mask hides: it is fastest here with few rows at a time.
_ROWS_IN_PYTORCH = 32
_MATRIX = 1000


@dataclass(frozen=True)
class AttentionOptions:
    """What to measure.

    Attributes
    ----------
    heads, kv_heads, head_dim
        Query heads, key heads, and channels of a head.
    num_tokens
        Tokens of the prompt.
    ratio
        Share of the tokens that attend, at random places.
    dtype
        Element type.
    repeats
        Timed runs of each way, in turn; one more runs first and does not count.
    """

    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    num_tokens: int = 6000
    ratio: float = 0.15
    dtype: torch.dtype = torch.float32
    repeats: int = 5

    def __post_init__(self) -> None:
        sizes = (self.heads, self.kv_heads, self.head_dim, self.num_tokens, self.repeats)
        if min(sizes) < 1 or self.heads % self.kv_heads or not 0.0 < self.ratio <= 1.0:
            raise ParameterError(
                "bench attention: expected sizes of 1 and more, query heads a multiple of the key "
                f"heads, and a ratio above 0 and at most 1; found {self}"
            )


@dataclass(frozen=True)
class AttentionRow:
    """One way to attend.

    Attributes
    ----------
    way
        What was measured.
    gflops
        Median of billions of useful operations in a second of CPU time. Multiplications that a mask
        hides do not count, nor does the mass of keys.
    """

    way: str
    gflops: float


def run_attention_bench(options: AttentionOptions) -> Iterator[AttentionRow]:
    """Yield the rates of all ways, measured in turn."""
    ways = _ways(options)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.repeats + 1):
        for way, (operations, work) in ways.items():
            started = time.process_time()
            work()
            rates[way].append(operations / (time.process_time() - started) / 1e9)
    for way, found in rates.items():
        yield AttentionRow(way, median(found[1:]))


def _ways(options: AttentionOptions) -> dict[str, tuple[float, Callable[[], object]]]:
    generator = torch.Generator().manual_seed(0)
    num_tokens, head_dim = options.num_tokens, options.head_dim
    num_groups = options.heads // options.kv_heads

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(options.dtype)

    query = drawn(options.heads, num_tokens, head_dim)
    key, value = drawn(2, options.kv_heads, num_tokens, head_dim)
    num_rows = max(1, round(options.ratio * num_tokens))
    rows = torch.randperm(num_tokens, generator=generator)[:num_rows].sort().values
    asking = query[:, rows].contiguous()
    dense_key, dense_value = (part.repeat_interleave(num_groups, 0)[None] for part in (key, value))
    matrix = drawn(_MATRIX, _MATRIX)
    product = 2.0 * _MATRIX**3
    scale = head_dim**-0.5

    def kernel(*, counts: bool) -> None:
        for first in range(0, num_rows, ROW_BLOCK):
            block = rows[first : first + ROW_BLOCK]
            end = int(block[-1]) + 1
            mass = Mass(torch.empty(options.kv_heads, end)) if counts else None
            asked = asking[:, first : first + ROW_BLOCK]
            attend(asked, key[:, :end], value[:, :end], block, Scores(scale), mass)

    def pytorch() -> None:
        for first in range(0, num_rows, _ROWS_IN_PYTORCH):
            block = rows[first : first + _ROWS_IN_PYTORCH]
            end = int(block[-1]) + 1
            asked = asking[:, first : first + _ROWS_IN_PYTORCH]
            scaled_dot_product_attention(
                asked.reshape(options.kv_heads, num_groups, -1, head_dim).transpose(0, 1),
                key[:, :end].expand(num_groups, -1, -1, -1),
                value[:, :end].expand(num_groups, -1, -1, -1),
                attn_mask=torch.arange(end) <= block[:, None],
            )

    def dense() -> None:
        scaled_dot_product_attention(query[None], dense_key, dense_value, is_causal=True)

    per_key = 4.0 * options.heads * head_dim
    scattered = per_key * int((rows + 1).sum())
    return {
        "kernel": (scattered, lambda: kernel(counts=False)),
        "kernel, with the mass of keys": (scattered, lambda: kernel(counts=True)),
        f"PyTorch, {_ROWS_IN_PYTORCH} rows at a time": (scattered, pytorch),
        "PyTorch's dense causal prefill": (per_key * num_tokens * (num_tokens + 1) / 2, dense),
        f"product of {_MATRIX:,} x {_MATRIX:,} matrices": (product, lambda: matrix @ matrix),
    }
