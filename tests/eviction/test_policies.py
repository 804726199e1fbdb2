"""Each policy over weights made up, step by step, against a slow account of the same rule."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrag.errors import ParameterError
from kvrag.eviction.base import EvictionPolicy, HeldKeys
from kvrag.eviction.cache import STEP_ROWS, EvictingLayer, _Memory
from kvrag.eviction.registry import CormPolicy, make_eviction
from kvrag_testing.baselines import H2OPolicy, SnapKVPolicy, StreamingPolicy
from tests.eviction.policies import SlowCorm
from tests.support.properties import examples

HEADS, GROUPS = 2, 2


class Simulation:
    """A layer of two heads whose queries attend to keys as a table of chance says."""

    def __init__(
        self,
        policy: EvictionPolicy,
        num_prompt: int,
        num_steps: int,
        seed: int,
        window: int | None = None,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        total = num_prompt + num_steps
        # Few keys draw much.
        self.table = torch.rand(HEADS, GROUPS, total, total, generator=draw) ** 12
        self.num_prompt, self.num_steps = num_prompt, num_steps
        self.window = window
        self.layer = EvictingLayer(policy, window, 0, _Memory(1))
        held = HeldKeys.of_prompts(torch.ones(1, num_prompt, dtype=torch.bool), HEADS)
        asking = range(num_prompt - min(policy.num_queries, num_prompt), num_prompt)
        for at in range(0, len(asking), 3):  # a few queries at a time, as attention does
            seen = [(query, range(query + 1)) for query in asking[at : at + 3]]
            weights = [
                [[self._row(h, g, *one) for one in seen] for g in range(GROUPS)]
                for h in range(HEADS)
            ]
            stacked = torch.stack([torch.stack([torch.stack(g) for g in h]) for h in weights])
            visible = [len(self.visible(places, query)) for query, places in seen]
            policy.observe(held, stacked, torch.tensor(visible))
        rows = torch.arange(num_prompt, dtype=torch.float32)[None, None, :, None]
        self.layer.keep(held, rows.expand(1, HEADS, -1, 4), rows.expand(1, HEADS, -1, 4) + 0.5)

    def visible(self, places, query: int) -> list[int]:
        first = 0 if self.window is None else query - self.window + 1
        return [place for place in places if first <= place <= query]

    def weights(self, head: int, group: int, query: int, places) -> dict[int, float]:
        seen = self.visible(places, query)
        drawn = self.table[head, group, query, seen]
        return dict(zip(seen, (drawn / drawn.sum()).tolist(), strict=True))

    def _row(self, head: int, group: int, query: int, places) -> torch.Tensor:
        row = torch.zeros(self.num_prompt)
        for place, weight in self.weights(head, group, query, places).items():
            row[place] = weight
        return row

    def step(self, query: int) -> None:
        kv = self.layer.kv
        self.layer.append(torch.full((HEADS, 4), float(query)), torch.full((HEADS, 4), query + 0.5))
        weights = torch.zeros(HEADS, GROUPS, max(kv.counts))
        for head in range(HEADS):
            places = kv.notes.places[head][: kv.counts[head]].tolist()
            for group in range(GROUPS):
                found = self.weights(head, group, query, places)
                for slot, place in enumerate(places):
                    weights[head, group, slot] = found.get(place, 0.0)
        self.layer.evict(weights)

    def kept(self, head: int) -> set[int]:
        return set(self.layer.kv.kept()[head].tolist())

    def check_rows(self) -> None:
        """Keys, values and notes have to move together, and nothing else may be held."""
        kv = self.layer.kv
        for head in range(HEADS):
            count = kv.counts[head]
            places = kv.notes.places[head, :count]
            assert kv.notes.held[head].tolist() == [
                slot < count for slot in range(kv.notes.held.shape[1])
            ]
            keys, values = kv.head(head)
            assert torch.equal(keys, places[:, None].expand(-1, 4).float())
            assert torch.equal(values, keys + 0.5)
        assert kv.keys.shape[0] - sum(kv.counts) <= (2 * STEP_ROWS + 1) * HEADS


def follow(
    simulation: Simulation, expected: Callable[[int, int], set[int]], num_prompt: int
) -> None:
    """Compare what is kept behind the prompt and behind every step."""
    for query in range(num_prompt - 1, num_prompt + simulation.num_steps):
        if query >= num_prompt:
            simulation.step(query)
        for head in range(HEADS):
            assert simulation.kept(head) == expected(head, query), (head, query)
        simulation.check_rows()


@settings(max_examples=examples(25))
@given(
    num_prompt=st.integers(1, 40),
    num_steps=st.integers(0, 30),
    window=st.integers(1, 20),
    recent=st.integers(1, 20),
    threshold=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    layer_window=st.none() | st.integers(1, 24),
    seed=st.integers(0, 1000),
)
@example(num_prompt=30, num_steps=20, window=6, recent=4, threshold=1.0, layer_window=None, seed=1)
@example(num_prompt=30, num_steps=20, window=6, recent=4, threshold=2.0, layer_window=9, seed=2)
def test_corm_keeps_what_the_slow_account_keeps(
    num_prompt: int,
    num_steps: int,
    window: int,
    recent: int,
    threshold: float,
    layer_window: int | None,
    seed: int,
) -> None:
    policy = CormPolicy(window=window, recent=recent, threshold=threshold)
    simulation = Simulation(policy, num_prompt, num_steps, seed, layer_window)
    slow = [SlowCorm(window, recent, threshold) for _ in range(HEADS)]

    def expected(head: int, query: int) -> set[int]:
        one = slow[head]
        asking = [query]
        if query == num_prompt - 1:
            one.begin(num_prompt)
            asking = list(range(max(0, num_prompt - window), num_prompt))
        else:
            one.alive.add(query)
            one.num_seen += 1
        for row in asking:
            places = [place for place in sorted(one.alive) if place <= row]
            one.note([simulation.weights(head, group, row, places) for group in range(GROUPS)])
        one.evict()
        if layer_window is not None:
            one.alive = {place for place in one.alive if place > query + 1 - layer_window}
        return set(one.alive)

    follow(simulation, expected, num_prompt)


@settings(max_examples=examples(15))
@given(
    num_prompt=st.integers(1, 40),
    num_steps=st.integers(0, 30),
    sinks=st.integers(0, 6),
    recent=st.integers(1, 20),
)
@example(num_prompt=30, num_steps=20, sinks=3, recent=7)
def test_streaming_keeps_sinks_and_the_recent(
    num_prompt: int, num_steps: int, sinks: int, recent: int
) -> None:
    simulation = Simulation(StreamingPolicy(sinks, recent), num_prompt, num_steps, seed=0)

    def expected(head: int, query: int) -> set[int]:
        return {place for place in range(query + 1) if place < sinks or place > query - recent}

    follow(simulation, expected, num_prompt)


@settings(max_examples=examples(15))
@given(
    num_prompt=st.integers(1, 40),
    num_steps=st.integers(0, 20),
    heavy=st.integers(1, 12),
    recent=st.integers(1, 12),
    window=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
@example(num_prompt=30, num_steps=15, heavy=5, recent=4, window=12, seed=1)
def test_h2o_keeps_heavy_hitters_and_the_recent(
    num_prompt: int, num_steps: int, heavy: int, recent: int, window: int, seed: int
) -> None:
    policy = H2OPolicy(heavy=heavy, recent=recent, window=window)
    simulation = Simulation(policy, num_prompt, num_steps, seed)
    drawn: list[dict[int, float]] = [{}, {}]

    def expected(head: int, query: int) -> set[int]:
        scores = drawn[head]
        asking = [query]
        if query == num_prompt - 1:
            asking = list(range(max(0, num_prompt - window), num_prompt))
            scores.update(dict.fromkeys(range(num_prompt), 0.0))
        else:
            scores[query] = 0.0
        for row in asking:
            for group in range(GROUPS):
                places = [place for place in scores if place <= row]
                for place, weight in simulation.weights(head, group, row, places).items():
                    scores[place] += weight / GROUPS
        old = sorted((place for place in scores if place <= query - recent), key=scores.get)
        for place in old[: max(0, len(scores) - heavy - recent)]:
            del scores[place]
        return set(scores)

    # Keys of equal score are told apart by chance: with a few queries many have none.
    for query in range(num_prompt - 1, num_prompt + num_steps):
        if query >= num_prompt:
            simulation.step(query)
        for head in range(HEADS):
            kept, wanted = simulation.kept(head), expected(head, query)
            assert len(kept) == len(wanted)
            least = min((drawn[head][place] for place in wanted - kept), default=0.0)
            assert least <= 1e-6, "a heavy key went in place of a light one"
            drawn[head] = {place: drawn[head].get(place, 0.0) for place in kept}
        simulation.check_rows()


def test_snapkv_chooses_once_and_in_stretches() -> None:
    policy = SnapKVPolicy(budget=6, window=2, pool=3)
    layer = EvictingLayer(policy, None, 0, _Memory(1))
    held = HeldKeys.of_prompts(torch.ones(1, 12, dtype=torch.bool), 1)
    weights = torch.zeros(1, 2, 2, 12)
    weights[0, 0, 1, 5] = 0.5
    weights[0, 1, 0, 0] = 0.1
    policy.observe(held, weights, torch.tensor([11, 12]))
    layer.keep(held, torch.rand(1, 1, 12, 4), torch.rand(1, 1, 12, 4))
    kept = layer.kv.kept()[0].tolist()
    assert set(kept) >= {4, 5, 6, 10, 11}
    assert len(kept) == 6
    assert kept[0] in (0, 1)
    layer.append(torch.rand(1, 4), torch.rand(1, 4))
    layer.evict(torch.zeros(1, 2, 7))
    assert layer.kv.kept()[0].tolist() == [*kept, 12]


@pytest.mark.parametrize("name", ["streaming", "h2o", "snapkv"])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
def test_a_share_of_the_prompt_is_kept(name: str, share: float) -> None:
    policy = make_eviction(f"{name}:share={share}")
    simulation = Simulation(policy, 40, 3, seed=1)
    # Streaming keeps its sinks and the last key whatever the share.
    least = 5 if name == "streaming" else 1
    wanted = max(40 * share, least)
    assert [len(simulation.kept(head)) for head in range(HEADS)] == [wanted] * HEADS


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cormm", "unknown eviction 'cormm'; known: none, corm, streaming, h2o, snapkv"),
        ("corm:window=0", "window=0: expected 1 or more"),
        ("corm:window=99999999999999999999", "at most 2147483648"),
        ("streaming:sinks=99999999999999999999", "at most 2147483648"),
        ("corm:recent=-2", "recent=-2: expected 1 or more"),
        ("corm:window=2.5", "window=2.5 has the wrong type: expected a whole number"),
        ("corm:windows=2", "'corm' has no parameter windows; it has recent, threshold, window"),
        ("corm:window", "expected PARAMETER=VALUE, found 'window'"),
        ("corm:threshold=0", "threshold=0: expected more than 0, and finite"),
        ("corm:threshold=nan", "threshold=nan: expected more than 0, and finite"),
        ("corm:threshold=inf", "threshold=inf: expected more than 0, and finite"),
        ("corm:window=1:window=2", "gives window twice"),
        ("none:share=0.5", "'none' takes no parameters"),
        ("streaming:recent=4:share=0.5", "replaces recent=4: leave one out"),
        ("streaming:sinks=-1", "sinks=-1: expected 0 or more"),
        ("streaming:share=0", "expected a share above 0, at most 1"),
        ("h2o:share=1.5", "expected a share above 0, at most 1"),
        ("h2o:share=0.5:heavy=3", "replaces heavy=3"),
        ("h2o:heavy=0", "heavy=0: expected 1 or more"),
        ("snapkv:pool=4", "pool=4: expected an odd number"),
        ("snapkv:budget=4:share=0.5", "replaces budget=4"),
        ("snapkv:share=nan", "expected a share above 0, at most 1"),
    ],
)
def test_specs_that_cannot_be(spec: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message.replace("(", r"\(")):
        make_eviction(spec)


@pytest.mark.parametrize(
    ("spec", "policy", "told"),
    [
        ("corm", CormPolicy(256, 256), "corm(window=256, recent=256, threshold=1.0)"),
        ("corm:window=16:recent=8", CormPolicy(16, 8), "corm(window=16, recent=8, threshold=1.0)"),
        ("streaming", StreamingPolicy(4, 1020), "streaming(sinks=4, recent=1020)"),
        ("h2o", H2OPolicy(768, 256), "h2o(heavy=768, recent=256, window=256)"),
        ("snapkv:share=0.5", SnapKVPolicy(share=0.5), "snapkv(share=0.5, window=32, pool=7)"),
    ],
)
def test_specs_that_can_be(spec: str, policy: EvictionPolicy, told: str) -> None:
    """What a report says can be asked for again."""
    assert make_eviction(spec) == make_eviction(policy) == make_eviction(told) == policy
    assert str(policy) == told
