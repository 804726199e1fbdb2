"""The report on fusing one prompt: an account of every token, byte and second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvrag.arguments import QUANTISED
from kvrag.eviction import EvictionReport
from kvrag.loading.cost import ChunkDecision
from kvrag.loading.stream_plan import StreamReport

if TYPE_CHECKING:
    from kvrag.fusion.layout import Layout

FULL_PREFILL = "full prefill"
"""The policy of models that compute prompts as wholes (`kvrag.fusion.whole`)."""


@dataclass(frozen=True)
class FusionReport:
    """The account of one fused prompt.

    Every prompt token is counted once:
    ``num_tokens == num_kept + num_exact + num_reused + num_recomputed + num_fresh``.

    Attributes
    ----------
    policy
        The recompute policy with its parameters, as in ``deviation(ratio=0.15, on=v)``.
    num_tokens
        Tokens of the prompt.
    num_exact
        Tokens taken from the store and equal to a full prefill: the chunk is where it was encoded.
    num_reused
        Tokens taken from the store and not corrected for the text before the chunk.
    num_recomputed
        Tokens found in the store but computed again because the policy chose them. If layers
        differ, this is the mean over all but the first, rounded up: in the first layer, a policy
        may compute everything in order to choose.
    num_fresh
        Tokens not in the store: the question, separators, chunk edges, misses.
    num_kept
        Tokens whose KV an earlier answer has left: a conversation's earlier turns, for example.
    num_made
        Fresh tokens of a chunk that stands first in a prompt for the first time. Its record, which
        is exact there, was computed, and is stored for later prompts.
    num_chunks
        Chunks of the prompt whose stored KV was used.
    bytes_loaded
        Bytes read from the store.
    hot_chunks, hot_bytes
        Chunks whose KV was in memory already, and its bytes, by the memory: ``card``, ``pinned``.
    num_decoded_by_host
        Chunks that the host decoded for a graphics card, which has no kernels for their codec.
    seconds
        Wall time by stage: ``layout`` (find chunks, tokenise), ``load`` (read, check and place
        stored KV, only the time spent waiting), ``ask`` (observe the question's attention),
        ``select`` (choose what to recompute), ``compute`` (layers and logits), and ``lost`` (work
        discarded when a record turned out to be damaged).
    hidden_load_seconds
        Seconds of loading in addition to ``load``, during which nothing waited.
    rows_by_layer
        Prompt and link tokens computed in each layer, besides those that the look has settled.
    num_links
        Link tokens inserted into the prompt; no other figure counts them except computed rows.
    num_unlinked
        Chunks without link tokens, because the table has too few or the prompt has no room.
    rows_asked
        Rows computed, over all layers, to observe the question's attention. Those before the first
        candidate are not computed again.
    rows_compared
        Rows of one layer whose keys and values, or attention, were computed only to choose among
        them.
    num_outpriced
        Fresh tokens that are stored: the whole prompt was computed, because that was expected to be
        faster.
    num_in_context
        Tokens found in the store that were encoded after a context: other text of their document,
        or a filler.
    expected_loss
        Share of full prefill's quality that policy ``auto`` expects to lose, by its calibration;
        None for other policies.
    expected_seconds, expected_load_seconds
        Seconds that ``auto`` expects fusing to take, and the seconds of loading among them, hidden
        or not; None for other policies, and if loading was not measured. Compare them with the sum
        of `seconds`, and with `load_seconds`.
    decisions
        For policy ``auto`` with measured loading: whether each stored chunk was loaded or
        computed, the expected seconds of both, and the actual seconds. A chunk that is computed by
        decision is not a miss; its tokens are fresh.
    eviction
        What an eviction policy kept while the answer was generated; None without a policy, or if
        the answer has one token.
    misses
        Why chunks found in the prompt were prefilled instead: reason to number of chunks. An
        earlier answer whose stored KV is lost counts as one.
    stream
        Result of streaming towards a time to first token; None if the KV was loaded whole.
    num_neutralised
        Control strings in documents and messages (``<|im_end|>``) that were tokenised as text.
    num_control
        Control strings, in a prompt given as one string, that are in no known document: they were
        treated as the caller's own. They are not counted if the index keeps control strings.
    num_folded
        Messages that were moved, or joined with others, because the chat template refuses or leaves
        out messages where they stood: a system message in mid-conversation, for example.
    fresh_reasons
        Why tokens are fresh: reason to number of tokens, `num_fresh` in all. Empty if reuse was
        off, and for markup.
    compute
        The precision that linear layers computed in (`KVModel.compute`).
    """

    policy: str
    num_tokens: int
    num_exact: int = 0
    num_reused: int = 0
    num_recomputed: int = 0
    num_fresh: int = 0
    num_chunks: int = 0
    bytes_loaded: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    rows_by_layer: tuple[int, ...] = ()
    hidden_load_seconds: float = 0.0
    rows_asked: int = 0
    rows_compared: int = 0
    num_outpriced: int = 0
    num_in_context: int = 0
    expected_loss: float | None = None
    expected_seconds: float | None = None
    expected_load_seconds: float | None = None
    num_kept: int = 0
    num_made: int = 0
    num_links: int = 0
    num_unlinked: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    eviction: EvictionReport | None = None
    stream: StreamReport | None = None
    decisions: tuple[ChunkDecision, ...] = ()
    num_neutralised: int = 0
    num_control: int = 0
    num_folded: int = 0
    fresh_reasons: Mapping[str, int] = field(default_factory=dict)
    compute: str = ""
    hot_chunks: Mapping[str, int] = field(default_factory=dict)
    hot_bytes: Mapping[str, int] = field(default_factory=dict)
    num_decoded_by_host: int = 0

    @classmethod
    def of(cls, layout: Layout, policy: str, **figures: Any) -> FusionReport:
        """Return the report on a prompt, with what its layout has counted."""
        return cls(
            policy,
            len(layout.plain_token_ids),
            num_neutralised=layout.num_neutralised,
            num_control=layout.num_control,
            num_folded=layout.num_folded,
            **figures,
        )

    @property
    def num_computed(self) -> int:
        """Fresh tokens of stored chunks that were quicker to compute than to load."""
        return sum(one.num_tokens for one in self.decisions if one.is_computed)

    @property
    def num_cached(self) -> int:
        """Tokens whose KV was not computed: it came from the store, or from an earlier answer."""
        return self.num_kept + self.num_exact + self.num_reused

    @property
    def load_seconds(self) -> float:
        """Seconds of loading, both waited for and hidden."""
        return self.seconds.get("load", 0.0) + self.hidden_load_seconds

    @property
    def recomputed_share(self) -> float:
        """Recomputed tokens over inexact tokens found in the store; 0 if there were none."""
        found = self.num_reused + self.num_recomputed
        return self.num_recomputed / found if found else 0.0

    @property
    def work_share(self) -> float:
        """Rows computed in all layers, over the rows of a full prefill.

        Everything counts in full: the question's rows that were computed only to see what they
        attend to, and rows that a layer computed in part, only to choose among them.
        """
        num_rows = sum(self.rows_by_layer) + self.rows_asked + self.rows_compared
        return num_rows / (len(self.rows_by_layer) * self.num_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values, including the derived figures."""
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
        kept = f"{self.num_kept} from an earlier answer, " if self.num_kept else ""
        parts = [
            f"{self.num_tokens} prompt tokens: {kept}{self.num_exact + self.num_reused} "
            f"from {self.num_chunks} cached chunks, {self.num_recomputed} recomputed, "
            f"{self.num_fresh} fresh",
            f"{_size(self.bytes_loaded)} loaded",
            self.policy,
        ]
        hot = ", ".join(f"{count} in {name}" for name, count in self.hot_chunks.items())
        late = sum(one.is_computed for one in self.decisions)
        parts[1:1] = [
            text
            for is_told, text in (
                (self.num_made, f"first chunk of {self.num_made} tokens computed, to be stored"),
                (
                    self.num_decoded_by_host,
                    f"{self.num_decoded_by_host} chunks decoded by the host, not the card",
                ),
                (any(self.hot_chunks.values()), f"chunks in memory: {hot}"),
                (self.num_outpriced, f"{self.num_outpriced} stored, but full prefill is faster"),
                (late, f"{late} chunks of {self.num_computed} tokens computed, slower to load"),
                (self.num_links, f"{self.num_links} link tokens"),
                (self.num_in_context, f"{self.num_in_context} encoded after a context"),
            )
            if is_told
        ]
        if self.num_unlinked:
            parts.append(f"{self.num_unlinked} chunks without link tokens")
        if self.stream is not None:
            parts.append(f"streamed in {self.stream.one_line()}")
        if self.eviction is not None:
            parts.append(self.eviction.one_line())
        if self.compute in QUANTISED:  # what the user would notice
            parts.append(f"computed in {self.compute}")
        if self.policy == FULL_PREFILL:
            parts += self.fresh_reasons
        if self.num_neutralised:
            parts.append(f"{self.num_neutralised} control strings read as text")
        if self.num_folded:
            parts.append(f"{self.num_folded} messages moved or joined for the chat template")
        if self.misses:
            parts.append(
                "misses: " + ", ".join(f"{count} {why}" for why, count in self.misses.items())
            )
        return " | ".join(parts)


def _size(num_bytes: int) -> str:
    """Return bytes with one decimal, in the unit that leaves few digits."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"
