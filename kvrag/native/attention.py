"""Attention of rows at any positions to the keys before them.

Work and memory grow with the keys that rows see: nothing masked is multiplied, and no matrix of
scores exists. ``cuda/host/attend_tile.h`` has the arithmetic, which is float32 for both types.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.errors import ParameterError
from kvrag.native.kernels import IS_COMPILED, ArrayLike, kernels, view

ATTENTION_TYPES = (torch.float32, torch.bfloat16) if IS_COMPILED else ()
"""What the kernels of models compute; nothing where none were compiled: PyTorch computes there."""

_Bits = NDArray[np.float32] | NDArray[np.int16]

NO_WINDOW = 1 << 62
"""More keys than there can be."""


class Scores(NamedTuple):
    """How a layer's attention weighs keys.

    Attributes
    ----------
    scale
        Factor of the scores, above 0.
    softcap
        Soft cap of the scores: c tanh(score / c); 0: none.
    window
        How many keys a row sees at most; None: all up to its last.
    """

    scale: float
    softcap: float = 0.0
    window: int | None = None

    def numbers(self) -> tuple[int, float, float]:
        """Return window, scale and soft cap as kernels take them."""
        return NO_WINDOW if self.window is None else self.window, self.scale, self.softcap


class Mass(NamedTuple):
    """Where to write the weights that keys get, summed over rows and over a key head's query heads.

    Attributes
    ----------
    out
        ``[H, K]`` float32, contiguous.
    first_row
        The first row that counts.
    """

    out: ArrayLike
    first_row: int = 0


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    last_keys: ArrayLike,
    scores: Scores,
    mass: Mass | None = None,
) -> torch.Tensor:
    """Return what rows gather from keys: ``[n, G * H, V]``, contiguous. It uses PyTorch's threads.

    Parameters
    ----------
    query
        ``[G * H, n, D]``, float32 or bfloat16. Each key head's G query heads are next to each
        other. As for keys and values, the last stride is 1, the others are free.
    key, value
        ``[H, K, D]`` and ``[H, K, V]``, of the same type.
    last_keys
        ``[n]`` int64, ascending: the index of the last key that each row sees.
    scores
        How keys are weighed.
    mass
        Where to write what keys get; None: nowhere. No product is computed again: each thread
        keeps weights of rows that count, at most 512 bytes for each key.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape, type or value.
    """
    asked, keys = _heads(query, key)
    num_heads, num_rows, _ = asked.shape
    num_kv_heads, num_keys, _ = keys.shape
    values = _floats(value, "value", query.dtype, (num_kv_heads, num_keys, None))
    check_scores(scores)
    out = query.new_empty(num_rows, num_heads, values.shape[2])
    kernels.attend(
        asked,
        keys,
        values,
        check_ascending(last_keys, "last_keys", num_rows, num_keys),
        _floats(out, "out", query.dtype, (None, None, None)),
        *scores.numbers(),
        *mass_of(mass, num_kv_heads, num_keys),
        torch.get_num_threads(),
    )
    return out


def mass_of(
    mass: Mass | None, num_heads: int, num_keys: int
) -> tuple[NDArray[np.float32] | None, int]:
    """Return where mass goes, and the first row that counts, as kernels take them."""
    if mass is None:
        return None, 0
    shape = (num_heads, num_keys)
    taken = view(mass.out, "mass", np.float32, shape, contiguous=True, writable=True)
    return taken, mass.first_row


class Buffers(NamedTuple):
    """Where the rows of a batch are written, a buffer for each.

    Attributes
    ----------
    keys, values
        ``[n]`` int64: the addresses of the buffers' keys and values, ``[H, C, D]`` each. The caller
        keeps the memory alive, and no two rows have the same.
    capacities
        ``[n]`` int64: C of each buffer.
    places
        ``[n]`` int64: which row of its buffer each row is. It sees the keys up to there.
    """

    keys: NDArray[np.int64]
    values: NDArray[np.int64]
    capacities: NDArray[np.int64]
    places: NDArray[np.int64]


def attend_each(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, buffers: Buffers, scores: Scores
) -> torch.Tensor:
    """Write each row's key and value to its own buffer, and attend to the keys there.

    Returns ``[n, G * H, D]``, contiguous; the same, bit for bit, as one call of `attend` a row.

    Parameters
    ----------
    query
        ``[G * H, n, D]``, float32 or bfloat16; see `attend`.
    key, value
        ``[H, n, D]``, of the same type.
    buffers
        A buffer for each row.
    scores
        How keys are weighed.

    Raises
    ------
    ParameterError
        If an argument has the wrong shape, type or value.
    """
    asked, keys = _heads(query, key, query.shape[1] if query.ndim == 3 else None)
    num_heads, num_rows, head_dim = asked.shape
    values = _floats(value, "value", query.dtype, (len(keys), num_rows, head_dim))
    check_scores(scores)
    key_places, value_places, capacities, places = (
        view(one, name, np.int64, (num_rows,), contiguous=True)
        for name, one in zip(buffers._fields, buffers, strict=True)
    )
    check_places(capacities, places)
    out = query.new_empty(num_rows, num_heads, head_dim)
    kernels.attend_each(
        asked,
        keys,
        values,
        key_places,
        value_places,
        capacities,
        places,
        _floats(out, "out", query.dtype, (None, None, None)),
        *scores.numbers(),
        torch.get_num_threads(),
    )
    return out


def _heads(
    query: torch.Tensor, key: torch.Tensor, num_keys: int | None = None
) -> tuple[_Bits, _Bits]:
    """Return queries and keys as kernels take them, or raise ParameterError."""
    if query.dtype not in ATTENTION_TYPES:
        known = ", ".join(str(dtype) for dtype in ATTENTION_TYPES)
        raise ParameterError(f"query: expected {known}, found {query.dtype}")
    asked = _floats(query, "query", query.dtype, (None, None, None))
    keys = _floats(key, "key", query.dtype, (None, num_keys, asked.shape[2]))
    if len(keys) == 0 or len(asked) % len(keys):
        raise ParameterError(
            f"query: expected a multiple of the {len(keys)} key heads, found {len(asked)} heads"
        )
    return asked, keys


def check_scores(scores: Scores) -> None:
    """Raise ParameterError unless the scale is above 0 and finite, and a window at least 1."""
    if scores.window is not None and scores.window < 1:
        raise ParameterError(f"window: expected at least 1, found {scores.window}")
    # Kernels look for the greatest score before they multiply.
    if not 0 < scores.scale < math.inf:
        raise ParameterError(f"scale: expected a number above 0, found {scores.scale}")


def check_places(capacities: NDArray[np.int64], places: NDArray[np.int64]) -> None:
    """Raise ParameterError unless places are rows of their buffers."""
    if not ((places >= 0) & (places < capacities)).all():
        raise ParameterError(
            f"places: expected rows of buffers with {capacities} rows, found {places}"
        )


def check_ascending(
    indices: ArrayLike, name: str, num_rows: int, num_keys: int, *, distinct: bool = False
) -> NDArray[np.int64]:
    """Return indices of keys as numpy sees them; raise ParameterError unless they ascend.

    They may repeat unless they are `distinct`.
    """
    found = view(indices, name, np.int64, (num_rows,), contiguous=True)
    in_order = (np.greater if distinct else np.greater_equal)(found[1:], found[:-1]).all()
    if num_rows and not (in_order and found[0] >= 0 and found[-1] < num_keys):
        kind = "ascending, different" if distinct else "ascending"
        raise ParameterError(f"{name}: expected {kind} indices of {num_keys} keys, found {found}")
    return found


def _floats(
    tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> _Bits:
    """Return a tensor as numpy sees it, bfloat16 as its bits."""
    if tensor.dtype != dtype:
        raise ParameterError(f"{name}: expected {dtype}, as query, found {tensor.dtype}")
    if dtype == torch.float32:
        return view(tensor, name, np.float32, shape)
    return view(tensor.detach().view(torch.int16), name, np.int16, shape)
