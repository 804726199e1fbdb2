"""Placing staged rows: the kernel, in Triton's interpreter, as PyTorch does (see `test_card`)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from kvrag.fusion.card import Placement, is_right
from kvrag.native.gpu import tiled
from tests.support.properties import in_turn

SHAPES = [(16, 16), (64, 64), (128, 128), (80, 32), (96, 96), (64, 16)]


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(("shape", "is_half"), in_turn(SHAPES))
def test_the_kernel_places_as_pytorch_does(
    shape: tuple[int, int], is_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_dim, rotated = shape
    dtype = torch.float16 if is_half else torch.float32
    started: list[None] = []
    start = Placement._start
    monkeypatch.setattr(Placement, "_start", lambda *given: started.append(start(*given)))
    monkeypatch.setattr(tiled, "_trusted", {})
    assert is_right(dtype, torch.device("cpu"), head_dim, frozenset([rotated]))
    assert started
    # One that writes elsewhere is not trusted.
    monkeypatch.setattr(Placement, "_start", lambda one, *_: one.values.add_(1))
    monkeypatch.setattr(tiled, "_trusted", {})
    assert not is_right(dtype, torch.device("cpu"), head_dim, frozenset([rotated]))
