"""Attention of scattered rows against plain torch in float64, for every instruction set."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.errors import ParameterError
from kvrag.native.attention import Buffers, Mass, Scores, attend, attend_each
from kvrag.native.kernels import instruction_sets, use_instruction_set
from tests.support.instructions import kept_instruction_set, torch_threads
from tests.support.properties import examples


def attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    last_keys: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention ``[n, heads, V]`` and weights ``[heads, n, K]``, written out in float64."""
    group = query.shape[0] // key.shape[0]
    keys, values = (kv.double().repeat_interleave(group, dim=0) for kv in (key, value))
    scores = query.double() @ keys.mT * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    places = torch.arange(key.shape[1])
    hidden = places > last_keys[:, None]
    if window is not None:
        hidden |= places <= last_keys[:, None] - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1), weights


def rows_of(num_keys: int, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, num_keys, (num_rows,), generator=generator).sort().values


@settings(max_examples=examples(60))
@given(data=st.data())
def test_it_is_attention_as_written_out(data: st.DataObject) -> None:
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7]))
    num_keys = draw(st.sampled_from([1, 5, 95, 96, 97, 192, 300]))
    num_rows = draw(st.sampled_from([1, 2, 15, 16, 17, 50]))
    dims = [draw(st.sampled_from([1, 5, 8, 24, 32, 64, 80, 96, 112, 128])) for _ in range(2)]
    # Another kernel computes few rows whose weights do not count.
    counts = draw(st.booleans())
    window = draw(st.sampled_from([None, 1, 20, 100, 1000]))
    softcap = draw(st.sampled_from([None, 0.5, 30.0]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    heads = num_kv_heads * group
    # As in a fused buffer and in a layer: neither heads nor rows are next to each other.
    query = torch.randn(num_rows, heads + 1, dims[0], generator=generator).to(dtype)
    query = query[:, 1:].transpose(0, 1)
    key, value = (
        torch.randn(num_kv_heads, num_keys + 3, dim, generator=generator).to(dtype)[:, 3:]
        for dim in dims
    )
    last_keys = rows_of(num_keys, num_rows, generator)
    first_row = draw(st.sampled_from([0, num_rows // 3, num_rows]))
    expected, weights = attended(query, key, value, last_keys, 0.3, window, softcap)
    wanted = weights[:, first_row:].sum(1).view(num_kv_heads, group, num_keys).sum(1)
    allowed = expected.abs() * (2**-8 if dtype == torch.bfloat16 else 0) + 1e-5
    # Where pairs of bfloat16 are multiplied, each weight is rounded too, by at most 2^-8 of itself.
    gathered, _ = attended(query, key, value.abs(), last_keys, 0.3, window, softcap)
    rounding = gathered * (2**-8 if dtype == torch.bfloat16 else 0)
    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            taken = torch.full((num_kv_heads, num_keys), 5.0)
            found = attend(
                query,
                key,
                value,
                last_keys,
                Scores(0.3, softcap or 0.0, window),
                Mass(taken, first_row) if counts else None,
            )
            if counts:
                assert torch.allclose(taken.double(), wanted, rtol=1e-4, atol=1e-5), name
            assert found.dtype == dtype
            slack = rounding if name in ("avx512bf16", "amxbf16") else 0
            assert (found.double() - expected).abs().le(allowed + slack).all(), name


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_weights_are_exact_to_float32(isa: str, softcap: float | None) -> None:
    """Each row sees two keys, so its output is one weight: scores from tiny to huge."""
    apart = torch.cat([torch.linspace(-30, 30, 4001), torch.logspace(-6, 0, 999)])
    query = apart.view(1, -1, 1)
    key = torch.tensor([[[0.0], [1.0]]])
    value = torch.tensor([[[0.0], [1.0]]])
    last_keys = torch.ones(len(apart), dtype=torch.long)
    found = attend(query, key, value, last_keys, Scores(1.0, softcap or 0.0))
    expected, _ = attended(query, key, value, last_keys, 1.0, None, softcap)
    # Rounding a score, once or in each step of its cap, moves a weight by this much.
    rounding = 1.5e-7 if softcap is None else 5e-7
    allowed = expected * (3e-7 + rounding * apart.abs().double()[:, None, None])
    assert (found.double() - expected).abs().le(allowed).all()


def test_scores_far_below_and_above(isa: str) -> None:
    """Later keys outdo earlier ones by more than float32 can hold, and the other way round."""
    key = torch.tensor([-1e4, 0.0, 1e4] * 100)[None, :, None]
    value = torch.arange(300.0)[None, :, None]
    query = torch.tensor([1.0, -1.0])[:, None, None]
    found = attend(query, key, value, torch.tensor([299]), Scores(1.0))
    wanted = [value[0, 2::3].mean(), value[0, 0::3].mean()]
    assert torch.allclose(found[0, :, 0], torch.stack(wanted))


def test_damage_shows_where_it_is_seen_and_only_there(isa: str) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 40, 8, generator=generator)
    key, value = torch.randn(2, 1, 40, 8, generator=generator)
    key[0, 20] = float("nan")
    last_keys = torch.arange(40)
    broken = attend(query, key, value, last_keys, Scores(1.0)).isnan().any(-1).any(-1)
    assert broken.tolist() == [row >= 20 for row in range(40)]
    late = attend(query, key, value, last_keys, Scores(1.0, window=5)).isnan().any(-1).any(-1)
    assert late.tolist() == [20 <= row < 25 for row in range(40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.parametrize(("heads", "key_heads"), [(6, 2), (4, 1)])
def test_threads_change_no_bit(
    isa: str, dtype: torch.dtype, window: int | None, heads: int, key_heads: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(heads, 300, 64, generator=generator).to(dtype)
    key, value = torch.randn(2, key_heads, 900, 64, generator=generator).to(dtype)
    last_keys = rows_of(900, 300, generator)
    found, counted, plain = [], [], []
    for threads in (1, 2, 3, 8):
        taken = torch.empty(key_heads, 900)
        with torch_threads(threads):
            scores = Scores(0.1, window=window)
            found.append(attend(query, key, value, last_keys, scores, Mass(taken, 100)))
            plain.append(attend(query, key, value, last_keys, scores))
        counted.append(taken)
        assert abs(float(taken.sum()) - heads * 200) < 1e-2
    for ways in (found, counted, plain):
        assert all(torch.equal(ways[0], one) for one in ways[1:])


def test_nothing_to_attend() -> None:
    key, taken = torch.ones(1, 3, 4), torch.ones(1, 3)
    none = attend(torch.ones(2, 0, 4), key, key, torch.arange(0), Scores(1.0), Mass(taken))
    assert none.shape == (0, 2, 4)
    assert (taken == 0).all()


QUERY, KEY = torch.zeros(4, 3, 8), torch.zeros(2, 5, 8)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"query": QUERY.double()}, "query: expected torch.float32, torch.bfloat16"),
        ({"key": KEY.bfloat16()}, "key: expected torch.float32, as query"),
        ({"key": KEY[..., :7]}, r"key: expected shape \[any, any, 8\]"),
        ({"value": KEY[:, :4]}, r"value: expected shape \[2, 5, any\]"),
        *(
            ({"scores": Scores(scale)}, "scale: expected a number above 0")
            for scale in (0.0, -1.0, float("nan"), float("inf"))
        ),
        ({"query": QUERY[:3]}, "query: expected a multiple of the 2 key heads"),
        ({"query": torch.zeros(4, 8, 3).mT}, "query: expected a contiguous last axis"),
        ({"last_keys": torch.arange(3).int()}, "last_keys: expected int64"),
        *(
            ({"last_keys": torch.tensor(rows)}, "last_keys: expected ascending indices of 5 keys")
            for rows in ([0, 2, 1], [-1, 0, 1], [0, 1, 5])
        ),
        ({"scores": Scores(1.0, window=0)}, "window: expected at least 1"),
        ({"mass": Mass(torch.zeros(2, 4))}, r"mass: expected shape \[2, 5\]"),
    ],
)
def test_mistakes_of_the_caller(given: dict[str, Any], told: str) -> None:
    right = {"query": QUERY, "key": KEY, "value": KEY, "last_keys": torch.arange(3)}
    with pytest.raises(ParameterError, match=told):
        attend(**{**right, "scores": Scores(1.0), **given})


def on_threads(num_threads: int) -> torch.Tensor:
    """Return attention with enough work for several threads."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(3, 2000, 64, generator=generator)
    rows = rows_of(2000, 200, generator)
    query = torch.randn(9, 200, 64, generator=generator)
    with torch_threads(num_threads):
        return attend(query, keys, keys, rows, Scores(0.1))


@pytest.mark.slow
def test_a_forked_process_does_not_wait_for_threads_that_it_lacks() -> None:
    """OpenMP's threads are the parent's, and the coder's; the child must not ask them."""
    code = (
        "import os, torch\n"
        "from tests.native.cases import make_case\n"
        "from tests.native.test_attention import on_threads\n"
        "from tests.native.test_entropy import round_trip\n"
        "case = make_case(5, 300, 500)\n"
        "round_trip(case, 7, threads=2)\n"
        "torch.set_num_threads(2)\n"
        "torch.randn(500, 500) @ torch.randn(500, 500)\n"
        "expected = on_threads(2)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    torch.set_num_threads(1)  # PyTorch's own operators would wait\n"
        "    round_trip(case, 7, threads=2)\n"
        "    os._exit(0 if torch.allclose(on_threads(2), expected, atol=1e-6) else 1)\n"
        "raise SystemExit(os.waitpid(child, 0)[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], timeout=120, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr


def buffers_of(
    capacities: list[int], places: list[int], dim: int, dtype: torch.dtype
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Buffers]:
    """Return random keys and values ``[2, C, dim]`` of several prompts, and where they are."""
    generator = torch.Generator().manual_seed(5)
    kv = [
        (
            torch.randn(2, capacity, dim, generator=generator).to(dtype),
            torch.randn(2, capacity, dim, generator=generator).to(dtype),
        )
        for capacity in capacities
    ]
    keys, values = (np.array([one[i].data_ptr() for one in kv]) for i in range(2))
    return kv, Buffers(keys, values, np.array(capacities), np.array(places))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("group", "dim", "window"), [(1, 5, 30), (3, 64, None), (20, 16, 1), (3, 64, 30)]
)
def test_a_batch_is_one_call_for_each_row_bit_for_bit(
    isa: str, dtype: torch.dtype, window: int | None, group: int, dim: int
) -> None:
    places = [0, 40, 97, 7]
    kv, buffers = buffers_of([1, 41, 120, 8], places, dim, dtype)
    before = [tuple(part.clone() for part in one) for one in kv]
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(4, 2 * group, dim, generator=generator).to(dtype).transpose(0, 1)
    key, value = (
        torch.randn(4, 2, dim, generator=generator).to(dtype).transpose(0, 1) for _ in range(2)
    )
    scores = Scores(0.3, 20.0, window)
    found = attend_each(query, key, value, buffers, scores)
    for row, place in enumerate(places):
        one = slice(row, row + 1)
        for part, old, new in zip(kv[row], before[row], (key, value), strict=True):
            old[:, place] = new[:, row]
            assert part.equal(old)  # this row was written, and no other
        alone = attend(query[:, one], *kv[row], torch.tensor([place]), scores)
        assert found[one].equal(alone)


def test_bad_batches_are_refused() -> None:
    kv, buffers = buffers_of([8, 8], [3, 4], 16, torch.float32)
    row = torch.zeros(2, 2, 16)
    for wrong in (-1, 8):
        places = np.array([3, wrong])
        with pytest.raises(ParameterError, match="places: expected rows of buffers"):
            attend_each(row, row, row, buffers._replace(places=places), Scores(1.0))
    with pytest.raises(ParameterError, match="multiple of the 2 key heads"):
        attend_each(torch.zeros(3, 2, 16), row, row, buffers, Scores(1.0))
    with pytest.raises(ParameterError, match=r"capacities: expected shape \[2\]"):
        attend_each(row, row, row, buffers._replace(capacities=np.array([8])), Scores(1.0))
    with pytest.raises(ParameterError, match="window: expected at least 1"):
        attend_each(row, row, row, buffers, Scores(1.0, window=0))
    with pytest.raises(ParameterError, match=r"query: expected torch.float32"):
        attend_each(row.half(), row, row, buffers, Scores(1.0))
    assert all(part.isfinite().all() for one in kv for part in one)
