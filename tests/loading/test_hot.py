"""What all prompts of a process share on their way to a card."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvrag.loading import hot


def test_threads_that_begin_at_the_same_time_share_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(device: Any) -> object:
        time.sleep(0.05)
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", slow)
    monkeypatch.setattr(hot, "streams", {})
    card = torch.device("cuda", 1)
    with ThreadPoolExecutor(8) as pool:
        copying = {*pool.map(hot.copy_stream, [card] * 8)}
    assert len(copying) == 1
    assert {hot.decode_stream(card), hot.copy_stream(torch.device("cuda", 0))}.isdisjoint(copying)
