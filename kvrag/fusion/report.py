"""What fusing one prompt did: an account of every token, byte and second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvrag.eviction.report import EvictionReport
from kvrag.loading.cost import ChunkDecision
from kvrag.loading.stream_report import StreamReport


@dataclass(frozen=True)
class FusionReport:
    """The account of one fused prompt.

    Every prompt token is counted once:
    ``num_tokens == num_exact + num_reused + num_recomputed + num_fresh``.

    Attributes
    ----------
    policy
        The recompute policy with its parameters, as in ``deviation(ratio=0.15, on=v)``.
    num_tokens
        Tokens of the prompt.
    num_exact
        Taken from the store and equal to a full prefill: the chunk stands where it was encoded.
    num_reused
        Taken from the store, not corrected for the text before the chunk.
    num_recomputed
        Found in the store, then computed again because the policy chose them; where layers differ,
        the mean over all but the first, rounded up: in the first a policy may compute everything
        to choose by.
    num_fresh
        Never in the store: the question, separators, chunk edges, misses.
    num_chunks
        Chunks of the prompt whose KV was used.
    bytes_loaded
        Bytes read from the store.
    seconds
        Wall time by stage: ``layout`` (find chunks, tokenise), ``load`` (read, check and place
        stored KV, as far as it was waited for), ``ask`` (see where the question looks),
        ``select`` (choose what to recompute), ``compute`` (layers and logits), and ``lost`` (work
        thrown away when a record turned out damaged half-way).
    hidden_load_seconds
        Seconds of loading besides those of ``load``: nobody waited while they passed.
    rows_by_layer
        Prompt and link tokens computed in each layer.
    num_links
        Link tokens put between the prompt's own, counted nowhere else but in the rows computed.
    num_compressed, num_compressed_rows
        Of the reused tokens, those of compressed chunks; and the stored rows that stand for them.
    num_unlinked
        Chunks without link tokens: there are none for so many, or no room for any.
    rows_asked
        Rows computed, over all layers, only to see where the question looks.
    num_in_context
        Of the tokens found in the store, those encoded behind other text of their document.
    expected_loss
        Share of full prefill's quality that policy ``auto`` expects to lose, by its calibration;
        None of other policies.
    expected_seconds, expected_load_seconds
        What ``auto`` expects fusing to take, and the loading in it, hidden or not; None of other
        policies, and of loading that was not measured. It took the sum of `seconds`, and
        `load_seconds`.
    decisions
        Of policy ``auto`` with loading that was measured: whether each stored chunk was loaded or
        computed, what was expected of the one and the other, and what it took. A chunk that is
        computed by decision is no miss; its tokens are fresh.
    eviction
        What an eviction policy kept while the answer was written; None where there was none, or the
        answer had one token.
    misses
        Why chunks found in the prompt were prefilled instead: reason to number of chunks.
    stream
        What streaming towards a time to first token came to; None where the KV was loaded whole.
    num_neutralised
        Control strings of documents and messages (``<|im_end|>``) that were tokenised as text.
    num_control
        Control strings that stand in a prompt given as one string, in no document that is known:
        they were taken for the caller's own. Not counted where the index keeps control strings.
    """

    policy: str
    num_tokens: int
    num_exact: int
    num_reused: int
    num_recomputed: int
    num_fresh: int
    num_chunks: int
    bytes_loaded: int
    seconds: Mapping[str, float]
    rows_by_layer: tuple[int, ...]
    hidden_load_seconds: float = 0.0
    rows_asked: int = 0
    num_in_context: int = 0
    expected_loss: float | None = None
    expected_seconds: float | None = None
    expected_load_seconds: float | None = None
    num_links: int = 0
    num_unlinked: int = 0
    num_compressed: int = 0
    num_compressed_rows: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    eviction: EvictionReport | None = None
    stream: StreamReport | None = None
    decisions: tuple[ChunkDecision, ...] = ()
    num_neutralised: int = 0
    num_control: int = 0

    @property
    def num_computed(self) -> int:
        """Of the fresh tokens, those of stored chunks that were quicker to compute than to load."""
        return sum(one.num_tokens for one in self.decisions if one.is_computed)

    @property
    def num_cached(self) -> int:
        """Tokens whose KV came from the store and was kept."""
        return self.num_exact + self.num_reused

    @property
    def load_seconds(self) -> float:
        """Seconds of loading, waited for or hidden."""
        return self.seconds.get("load", 0.0) + self.hidden_load_seconds

    @property
    def recomputed_share(self) -> float:
        """Recomputed tokens over those found in the store and not exact; 0 where none were."""
        found = self.num_reused + self.num_recomputed
        return self.num_recomputed / found if found else 0.0

    @property
    def work_share(self) -> float:
        """Rows computed in all layers, over those of a full prefill."""
        return (sum(self.rows_by_layer) + self.rows_asked) / (
            len(self.rows_by_layer) * self.num_tokens
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, the derived figures included."""
        return {
            **asdict(self),
            "stream": None if self.stream is None else self.stream.to_dict(),
            "rows_by_layer": list(self.rows_by_layer),
            "num_cached": self.num_cached,
            "num_computed": self.num_computed,
            "load_seconds": self.load_seconds,
            "recomputed_share": self.recomputed_share,
            "work_share": self.work_share,
        }

    def one_line(self) -> str:
        """Return the report as one line for a terminal."""
        parts = [
            f"{self.num_tokens} prompt tokens: {self.num_cached} from {self.num_chunks} "
            f"cached chunks, {self.num_recomputed} recomputed, {self.num_fresh} fresh",
            f"{_size(self.bytes_loaded)} loaded",
            self.policy,
        ]
        if self.num_compressed:
            rows = f"{self.num_compressed} of them compressed to {self.num_compressed_rows} rows"
            parts.insert(1, rows)
        if self.num_in_context:
            parts.insert(1, f"{self.num_in_context} encoded behind their document's text")
        if self.num_links:
            parts.insert(1, f"{self.num_links} link tokens")
        if self.num_unlinked:
            parts.append(f"{self.num_unlinked} chunks without link tokens")
        if self.num_computed:
            num_chunks = sum(one.is_computed for one in self.decisions)
            parts.insert(
                1, f"{num_chunks} chunks of {self.num_computed} tokens computed, slower to load"
            )
        if self.stream is not None:
            parts.append(f"streamed in {self.stream.one_line()}")
        if self.eviction is not None:
            parts.append(self.eviction.one_line())
        if self.num_neutralised:
            parts.append(f"{self.num_neutralised} control strings read as text")
        if self.misses:
            parts.append(
                "misses: " + ", ".join(f"{count} {why}" for why, count in self.misses.items())
            )
        return " | ".join(parts)


def _size(num_bytes: int) -> str:
    """Return bytes with one decimal, in the unit that leaves few digits."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"
