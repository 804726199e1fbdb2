"""A test bench: one random model, a few chunks in memory, and the fuser over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache

import torch

from kvrag.chunk import Chunk, ChunkKey, chunk_key
from kvrag.codec.base import EncodedChunk
from kvrag.codec.registry import get_codec
from kvrag.fusion.fuser import FusedPrompt, fuse
from kvrag.fusion.layout import Layout, lay_out
from kvrag.fusion.policies.base import RecomputePolicy
from kvrag.fusion.segments import ChunkMatcher
from kvrag.kvcache import FusedKV
from kvrag.models.kv_model import KVModel
from kvrag.models.tokens import encode
from kvrag.store.memory import MemoryStore

TEXTS = (
    "Ines keeps the harbour ledger of Varn and writes each ship down before noon.",
    "She repaired the tall clock in the year of the flood, and the keeper paid her.",
    "The northern light is kept by Tomas, who was born near the old river bank.",
    "A quick brown fox jumps over the lazy dog; nobody in the town wrote it down.",
)


def make_chunk(model: KVModel, text: str, ordinal: int = 0) -> Chunk:
    """Return `text` as a chunk, tokenised alone."""
    encoding = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return Chunk(
        chunk_id=f"chunk-{ordinal}",
        text=text,
        token_ids=tuple(encoding["input_ids"]),
        token_starts=tuple(start for start, _ in encoding["offset_mapping"]),
        source="bench",
        ordinal=ordinal,
    )


@dataclass
class Bench:
    """Chunks of one model, encoded and stored in memory.

    They are encoded after `head`; None means what the tokenizer puts before a prompt, since these
    prompts are plain strings.
    """

    model: KVModel
    texts: Sequence[str] = TEXTS
    store: MemoryStore = field(default_factory=MemoryStore)
    head: InitVar[Sequence[int] | None] = None

    def __post_init__(self, head: Sequence[int] | None) -> None:
        self.codec = get_codec("raw")
        self.prefix_ids = tuple(self.model.tokenizer("")["input_ids"] if head is None else head)
        self.chunks = {
            chunk.chunk_id: chunk
            for chunk in (make_chunk(self.model, text, i) for i, text in enumerate(self.texts))
        }
        self.matcher = ChunkMatcher()
        for chunk in self.chunks.values():
            self.matcher.add(chunk.chunk_id, chunk.text)
            (kv,) = self.model.prefill(self.prefix_ids, [chunk.token_ids])
            self.store.put(
                self.key(chunk.chunk_id), self.codec.encode(self.key(chunk.chunk_id), kv)
            )

    def key(self, chunk_id: str) -> ChunkKey:
        return chunk_key(
            tenant_salt=b"bench",
            model_fingerprint=self.model.fingerprint,
            tokenizer_fingerprint=self.model.tokenizer_fingerprint,
            prefix_ids=self.prefix_ids,
            token_ids=self.chunks[chunk_id].token_ids,
        )

    def open_kv(self, chunk_id: str, context_ids: tuple[int, ...] = ()) -> EncodedChunk | None:
        del context_ids  # all chunks were encoded after the prefix alone
        record = self.store.open(self.key(chunk_id))
        if record is None:
            return None
        return self.codec.open(self.key(chunk_id), record, self.model.chunk_spec)

    def lay_out(self, prompt: str) -> Layout:
        (tokens,) = encode(self.model.tokenizer, [prompt], True)
        return lay_out(tokens, self.matcher.find(prompt), self.chunks, self.prefix_ids)

    def fuse(self, prompt: str, policy: RecomputePolicy, spare: int = 16) -> FusedPrompt:
        layout = self.lay_out(prompt)
        num_tokens = len(layout.token_ids)
        buffer = FusedKV(self.model.spec, num_tokens, num_tokens + spare, self.model.device)
        return fuse(self.model, layout, self.open_kv, policy, buffer)

    @torch.no_grad()
    def plain_logits(self, prompt: str) -> torch.Tensor:
        """Return Transformers' own last logits ``[vocabulary]`` for the prompt."""
        ids = self.model.tokenizer(prompt, return_tensors="pt")["input_ids"]
        logits: torch.Tensor = self.model.hf(ids.to(self.model.device)).logits[0, -1]
        return logits

    def prompt(self, *order: int, question: str = "Question: who keeps it?\nAnswer:") -> str:
        """Return the chunks in the order given, then a question, as a stuffed prompt."""
        chosen = order or range(len(self.texts))
        return "\n\n".join([*(self.texts[i] for i in chosen), question])


@lru_cache(maxsize=32)
def bench_of(model: KVModel, texts: tuple[str, ...] = TEXTS) -> Bench:
    """Return a bench; the same object for the same model and texts."""
    return Bench(model, texts)


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max |difference| over the spread (standard deviation) of `expected`."""
    expected = expected.float()
    return float((found.float() - expected).abs().max() / expected.std())
