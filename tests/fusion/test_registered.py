"""Policies of other distributions."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrag.errors import ParameterError
from kvrag.fusion.controller import make_choice, takes_ratio
from kvrag.fusion.repair import make_repair
from tests.support.distributions import installed

LAST = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.fusion.policies.base import RecomputePolicy


@dataclass(frozen=True)
class LastPolicy(RecomputePolicy):
    name: ClassVar[str] = "last"
    tokens: int = 2

    def candidates(self, prompt):
        picked = [torch.arange(max(one.prompt_start, one.prompt_end - self.tokens), one.prompt_end)
                  for one in prompt.spans]
        return torch.cat(picked) if picked else torch.empty(0, dtype=torch.long)
"""
POINTS = {"kvrag.policies: last": "last_policy:LastPolicy"}


def test_a_policy_of_another_distribution(tmp_path: Path) -> None:
    with installed(tmp_path, "last_policy", LAST, POINTS):
        repair = make_repair("last:tokens=3:shift=0.5")
        assert str(repair) == "last(tokens=3, shift=0.5)"
        assert make_choice(str(repair)) == repair
        assert make_repair("last", boundary_tokens=5).policy.tokens == 5
        assert not takes_ratio("last")
        with pytest.raises(ParameterError, match="'last' takes no depth; it takes tokens"):
            make_repair("last:depth=2")
        with pytest.raises(ParameterError, match="tokens='x' has the wrong type"):
            make_repair("last:tokens=x")
        with pytest.raises(ParameterError, match=r"unknown policy 'first'.*random, last, auto"):
            make_choice("first")
    with pytest.raises(ParameterError, match="unknown policy 'last'"):
        make_choice("last")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import no_such_library", "ModuleNotFoundError: .*no_such_library"),
        ("LastPolicy = 5", "subclass of kvrag.fusion.policies.base.RecomputePolicy, found 5"),
        (LAST.replace('"last"', '"other"'), "a dataclass with the class attribute name = 'last'"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, module: str, message: str) -> None:
    place = "entry point 'kvrag.policies: last = last_policy:LastPolicy' of last_policy 1.5"
    with (
        installed(tmp_path, "last_policy", module, POINTS),
        pytest.raises(ParameterError, match=f"{place}: expected .*{message}"),
    ):
        make_choice("last")
