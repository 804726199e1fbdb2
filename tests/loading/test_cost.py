import json
import math
from dataclasses import asdict

import pytest

from kvrag.errors import ParameterError
from kvrag.loading.cost import LoadingCost, TierCost, pipelined_seconds
from kvrag.loading.pace import fit_prices


def test_where_it_is_not_known_where_a_record_is_it_is_at_home() -> None:
    near, far = TierCost("memory:", 0.0, 0.1), TierCost("file:x", 0.0, 0.2)
    cost = LoadingCost("tiered:memory:|file:x", (near, far))
    assert [cost.tier(number) for number in (0, 1, None)] == [near, far, far]
    assert LoadingCost.from_dict(json.loads(json.dumps(asdict(cost)))) == cost
    with pytest.raises(ParameterError, match="the cost of a tier"):
        LoadingCost("memory:", ())


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, "fast", None])
def test_prices_that_are_none(wrong: object) -> None:
    with pytest.raises(ParameterError, match="0 or more seconds"):
        TierCost("memory:", 0.0, wrong)


def test_the_shorter_hides_but_for_one_layer() -> None:
    assert pipelined_seconds(8.0, 2.0, 4) == 8.5
    assert pipelined_seconds(2.0, 8.0, 4) == 8.5
    assert pipelined_seconds(3.0, 3.0, 1) == 6.0
    assert pipelined_seconds(3.0, 4.0, 0) == 7.0


def test_nothing_costs_less_than_nothing() -> None:
    amounts = [(1, 1), (1, 2), (1, 3)]
    found = fit_prices(amounts, [3.0, 2.0, 1.0])
    assert found[1] == 0.0
    assert found[0] > 0.0
