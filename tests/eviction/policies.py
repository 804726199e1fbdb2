"""Policies for tests, and a slow account of what CORM keeps."""

from dataclasses import dataclass
from typing import ClassVar

from kvrag.eviction.base import EvictionPolicy, HeldKeys


@dataclass(frozen=True)
class KeepAll(EvictionPolicy):
    """Shown everything, evicts nothing."""

    name: ClassVar[str] = "keep_all"

    @property
    def num_queries(self) -> int:
        return 5

    def after_prompt(self, keys: HeldKeys) -> None:
        return None


class SlowCorm:
    """One head, by the words of the paper: a set of keys, and which were important to whom."""

    def __init__(self, window: int, recent: int, threshold: float = 1.0) -> None:
        self.window, self.recent, self.threshold = window, recent, threshold
        self.alive: set[int] = set()
        self.record: list[set[int]] = []
        self.num_seen = 0

    def begin(self, num_tokens: int) -> None:
        self.alive = set(range(num_tokens))
        self.num_seen = num_tokens

    def note(self, weights: list[dict[int, float]]) -> None:
        """Note one query: for each query head of the group, the weight of each key it sees."""
        important = {
            key
            for head in weights
            for key, weight in head.items()
            if weight >= self.threshold / len(head)
        }
        self.record.append(important)

    def evict(self) -> None:
        last = self.record[-self.window :]
        if len(last) < self.window:
            return
        for key in sorted(self.alive):
            is_recent = key >= self.num_seen - self.recent
            if not is_recent and all(key not in important for important in last):
                self.alive.remove(key)
