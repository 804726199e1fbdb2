"""Values of options are checked before a model is loaded, and reach the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvrag.cli import options as o
from kvrag.errors import ParameterError

INDEX: Any = SimpleNamespace(compression=None)  # what an engine's constructor looks at


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"policy": "nonsense"}, "unknown policy 'nonsense'"),
        ({"ratio": float("nan")}, "ratio"),
        ({"policy": "boundary", "boundary_tokens": 0}, "boundary_tokens"),
        ({"store_patience": -1}, "store_patience -1: expected a number above 0"),
        ({"never_slower": 3}, "never_slower 3: expected"),
        ({"eviction": "lru"}, "unknown eviction 'lru'"),
    ],
)
def test_values_of_an_engine(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        o.Answering(**values).engine(INDEX)


@pytest.mark.parametrize(
    "values",
    [{"temperature": float("nan")}, {"temperature": float("inf")}, {"seed": -1}, {"top_p": 0}],
)
def test_values_of_a_sampler(values: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=next(iter(values))):
        o.Sampled(**values)
