"""Anchors: trained tokens that summarise a block of a chunk; only their KV is stored.

Source: improved ANLLMs, KVLink (arXiv 2502.16002) §2.4 and appendix A.6, after Pang et al.,
Anchor-based LLMs (arXiv 2402.07616): fixed blocks of `BLOCK_TOKENS` tokens, with several anchors
per block, which see the block and the anchors of the blocks before it.

Deviations: each anchor is placed at a token, and has that token's position. Its input is the
token's embedding plus a learned row, not a learned row alone. An untrained anchor therefore equals
the token's own KV, so training starts from evenly spaced token dropping. For the same reason, an
anchor sees its block's tokens but not the block's other anchors, which repeat some of them. And a
chunk's tokens see all earlier tokens of the chunk, as in a full prefill, not only their block's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvrag import arguments
from kvrag.errors import AnchorsError, ParameterError, UnsupportedModelError
from kvrag.fusion.compression.spec import ANCHORS, BLOCK_TOKENS, KVZIP, Compression, key_options
from kvrag.kvcache import ChunkKV
from kvrag.models.capture import capture_rows, embed_tokens
from kvrag.models.families import project_logits
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import all_finite
from kvrag.models.rows import ROW_BLOCK

FILE_NAME = "anchors.safetensors"
"""Name of the anchors' file in a model's folder."""

FORMAT_VERSION = 1
_METADATA = "kvrag-anchors"
_MAX_RATES = 16

PREFIX, PADDING = -1, -2
"""Block numbers of rows that are not the chunk's: rows before the chunk, and padding."""


@dataclass(frozen=True, eq=False)
class Anchors:
    """Trained anchors of one model.

    Attributes
    ----------
    rates
        The compression rates that the anchors were trained for, ascending.
    model_fingerprint
        Fingerprint of the model that encodes and reads the anchors.
    embeddings
        ``[rows, hidden]``: for each rate in order, the rows of a full block's anchors.
    """

    rates: tuple[float, ...]
    model_fingerprint: str
    embeddings: torch.Tensor

    @property
    def digest(self) -> str:
        """BLAKE2b-160, hexadecimal, of everything that stored KV depends on."""
        found = hashlib.blake2b(self._metadata().encode(), digest_size=20)
        table = self.embeddings.detach().to("cpu", torch.float32).contiguous()
        found.update(table.flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def _metadata(self) -> str:
        fields = {
            "version": FORMAT_VERSION,
            "rates": list(self.rates),
            "model_fingerprint": self.model_fingerprint,
        }
        return json.dumps(fields)

    def save(self, path: Path | str) -> None:
        """Write one safetensors file, atomically."""
        target = Path(path)
        partial = target.with_suffix(".partial")
        table = self.embeddings.detach().to("cpu", torch.float32).contiguous()
        save_file({"embeddings": table}, str(partial), metadata={_METADATA: self._metadata()})
        partial.replace(target)

    @classmethod
    def load(cls, path: Path | str) -> Anchors:
        """Read the anchors that `save` wrote.

        Raises
        ------
        AnchorsError
            If the file is missing, damaged, too new, or not a file of anchors.
        ParameterError
            If no file can have that path.
        """
        place = arguments.path(path, "anchors")
        if not place.is_file():
            raise AnchorsError(
                f"no anchors at {arguments.shown(str(path))}: expected a {FILE_NAME} that 'kvrag "
                "train anchors' "
                "wrote into a model's folder"
            )
        try:
            with safe_open(str(place), framework="pt") as file:
                metadata = file.metadata() or {}
                table = file.get_tensor("embeddings")
        except (SafetensorError, OSError, ValueError) as error:
            raise AnchorsError(f"{place}: not a readable file of anchors: {error}") from error
        found = cls(*_checked_header(metadata.get(_METADATA), place), table)
        is_finite = table.is_floating_point() and all_finite(table)
        if table.dim() != 2 or len(table) != num_slots(found.rates) or not is_finite:
            raise AnchorsError(
                f"{place}: embeddings {list(table.shape)}, expected finite numbers of shape "
                f"[{num_slots(found.rates)}, hidden]; train them again"
            )
        return found

    def check(self, model: KVModel, compression: Compression) -> None:
        """Raise AnchorsError unless these anchors belong to `model` and to the rate."""
        if self.model_fingerprint != model.fingerprint:
            raise AnchorsError(
                f"anchors of another model: expected anchors of {model.name} (fingerprint "
                f"{model.fingerprint}), found fingerprint {self.model_fingerprint}; train them "
                "with 'kvrag train anchors' (the element type counts: the same weights in another "
                "type are another model)"
            )
        if compression.rate not in self.rates:
            known = ", ".join(f"{ANCHORS}:{rate:g}" for rate in self.rates)
            raise AnchorsError(
                f"these anchors were trained for {known}, not for {compression}: choose one of "
                "their rates, or train others with 'kvrag train anchors --rates'"
            )
        width = model.decoder.config.hidden_size
        if self.embeddings.shape[1] != width:
            raise AnchorsError(
                f"anchors: embeddings of width {self.embeddings.shape[1]}, expected {width} for "
                f"{model.name}; train them again"
            )


def num_slots(rates: Sequence[float]) -> int:
    """Return the number of rows in the table of anchors for these rates."""
    return sum(Compression(ANCHORS, rate).num_rows(BLOCK_TOKENS) for rate in rates)


def find_anchors(model: KVModel) -> Anchors:
    """Return the anchors in the model's folder. Raises as `Anchors.load` does."""
    folder = Path(getattr(model.decoder, "name_or_path", ""))
    if not folder.is_absolute():
        raise AnchorsError(
            f"{model.name} was not loaded from a folder, so it has no anchors: train some with "
            "'kvrag train anchors', and use the folder that it writes as the model"
        )
    return Anchors.load(folder / FILE_NAME)


@dataclass(frozen=True)
class AnchoredRows:
    """The sequence that a chunk's anchors are computed in: prefix, tokens, anchors.

    Attributes
    ----------
    token_ids, positions
        Token id and position of each row; an anchor has those of the token where it is placed.
    slots
        Each anchor's row in the table of anchors; -1 for other rows.
    blocks
        The block that each row belongs to; `PREFIX` for rows before the chunk.
    num_anchors
        Number of anchors; they are the last rows.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    num_anchors: int


def anchored_rows(
    prefix_ids: Sequence[int],
    token_ids: Sequence[int],
    compression: Compression,
    rates: Sequence[float],
) -> AnchoredRows:
    """Return the rows for encoding one chunk, with anchors trained for `rates`."""
    stands_at = compression.anchored_tokens(len(token_ids))
    earlier = [rate for rate in rates if rate < compression.rate]
    first_slot = num_slots(earlier)
    slots: list[int] = []
    for place, token in enumerate(stands_at):
        # Each block's first anchor uses the first slot.
        is_first = place == 0 or stands_at[place - 1] // BLOCK_TOKENS != token // BLOCK_TOKENS
        slots.append(first_slot if is_first else slots[-1] + 1)
    num_before, num_tokens = len(prefix_ids), len(token_ids)
    return AnchoredRows(
        token_ids=(*prefix_ids, *token_ids, *(token_ids[token] for token in stands_at)),
        positions=(*range(num_before + num_tokens), *(num_before + token for token in stands_at)),
        slots=(*[-1] * (num_before + num_tokens), *slots),
        blocks=(
            *[PREFIX] * num_before,
            *(token // BLOCK_TOKENS for token in range(num_tokens)),
            *(token // BLOCK_TOKENS for token in stands_at),
        ),
        num_anchors=len(stands_at),
    )


def anchor_mask(positions: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return which rows see which, ``[B, W, W]`` bool, for ``[B, W]`` rows as in `AnchoredRows`.

    Tokens see the tokens before them. Anchors see the prefix, their block's tokens and the anchors
    of earlier blocks. Each padding row sees only itself, and no other row sees it.
    """
    is_anchor = slots >= 0
    seen_block, seen_anchor = blocks[:, None, :], is_anchor[:, None, :]
    own_block = blocks[:, :, None]
    causal = positions[:, None, :] <= positions[:, :, None]
    by_token = causal & ~seen_anchor & (seen_block != PADDING)
    by_anchor = (
        (seen_block == PREFIX)
        | (~seen_anchor & (seen_block == own_block))
        | (seen_anchor & (seen_block < own_block))
    )
    allowed = torch.where(is_anchor[:, :, None], by_anchor, by_token)
    itself = torch.eye(blocks.shape[1], dtype=torch.bool, device=blocks.device)
    return torch.where(own_block == PADDING, itself, allowed)


@torch.no_grad()
def encode_anchors(
    model: KVModel,
    prefix_ids: Sequence[int],
    token_ids: Sequence[int],
    compression: Compression,
    anchors: Anchors,
) -> ChunkKV:
    """Return the position-free KV of a chunk's anchors, in order.

    Parameters
    ----------
    model
        The model.
    prefix_ids
        Token ids before the chunk.
    token_ids
        The chunk's T >= 1 token ids.
    compression
        A compression with one of the anchors' rates.
    anchors
        The model's anchors (`Anchors.check`).
    """
    laid = anchored_rows(prefix_ids, token_ids, compression, anchors.rates)
    ids, positions, slots, blocks = (
        torch.tensor(values, device=model.device)
        for values in (laid.token_ids, laid.positions, laid.slots, laid.blocks)
    )
    embeds = embed_tokens(model, ids)
    table = anchors.embeddings.to(embeds.device, embeds.dtype)
    embeds[slots >= 0] += table[slots[slots >= 0]]
    allowed = anchor_mask(positions[None], blocks[None], slots[None])[0]
    rows = torch.arange(len(ids) - laid.num_anchors, len(ids), device=model.device)
    return capture_rows(model, embeds, positions, rows, allowed)[0]


def _checked_header(text: str | None, place: Path) -> tuple[tuple[float, ...], str]:
    if text is None:
        raise AnchorsError(f"{place}: not a file of anchors: its metadata has no {_METADATA!r}")
    try:
        fields: Any = json.loads(text)
        version, rates, fingerprint = (
            fields[name] for name in ("version", "rates", "model_fingerprint")
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AnchorsError(
            f"{place}: damaged header of anchors: {arguments.shown(error)}"
        ) from error
    if version != FORMAT_VERSION:
        raise AnchorsError(
            f"{place}: anchors of format {version}, expected {FORMAT_VERSION}: use the kvrag that "
            "wrote them, or train them again"
        )
    sound = (
        isinstance(rates, list)
        and 0 < len(rates) <= _MAX_RATES
        and all(type(rate) is float and 0.0 < rate < 1.0 for rate in rates)
        and sorted(set(rates)) == rates
    )
    if not sound or not isinstance(fingerprint, str):
        raise AnchorsError(
            f"{place}: rates {arguments.shown(rates)} of model {arguments.shown(fingerprint)}: "
            "expected ascending shares between "
            "0 and 1, and a fingerprint"
        )
    return tuple(rates), fingerprint


# Token dropping: stores only the KV of the most informative tokens.
#
# Source: self-information of Selective Context (Li et al., arXiv 2310.06201, §3), the criterion
# that the LLMLingua family and KVLink (arXiv 2502.16002) §2.4 prune prompts by: a token that the
# text before it makes likely carries little information. KVLink uses the trained classifier of
# LLMLingua-2; here the model itself gives the probabilities, so no other model is needed.
#
# Deviation: tokens are chosen one by one, not by phrases, and their KV are those of the whole
# chunk: each kept token has seen the dropped ones before it. (docs/results/compression.md compares
# this with encoding the kept text alone.)


def drop_tokens(
    model: KVModel,
    prefix_ids: Sequence[int],
    token_ids: Sequence[int],
    compression: Compression,
) -> ChunkKV:
    """Return the position-free KV of a chunk's most informative tokens, in order.

    Parameters
    ----------
    model
        The model.
    prefix_ids
        Token ids before the chunk, whose KV is not kept.
    token_ids
        The chunk's T >= 1 token ids.
    compression
        Sets how many rows to keep.
    """
    kv, information = encode_informed(model, prefix_ids, token_ids)
    kept = most_informative(information, compression.num_rows(len(token_ids)))
    return ChunkKV(kv.keys[:, :, kept].contiguous(), kv.values[:, :, kept].contiguous())


def encode_informed(
    model: KVModel, prefix_ids: Sequence[int], token_ids: Sequence[int]
) -> tuple[ChunkKV, torch.Tensor]:
    """Return a chunk's KV, and the self-information of its tokens in nats, ``[T]`` float32.

    The first token's is infinite if no token precedes it, since nothing predicts it.
    """
    ids = torch.tensor([*prefix_ids, *token_ids], device=model.device)
    first = max(0, len(prefix_ids) - 1)
    rows = torch.arange(first, len(ids), device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    with torch.no_grad():
        kv, hidden = capture_rows(model, embed_tokens(model, ids), positions, rows)
        behind = ids[first + 1 :]
        found = []
        # In blocks: a whole chunk's logits over a large vocabulary need more memory than its KV.
        for begin in range(0, len(behind), ROW_BLOCK):
            block = slice(begin, begin + ROW_BLOCK)
            logits = project_logits(model.hf, hidden[:-1][block]).float()
            targets = behind[block, None]
            found.append(-logits.log_softmax(-1).gather(1, targets)[:, 0])
    information = torch.cat([*found, torch.empty(0, device=model.device)]).cpu()
    if not prefix_ids:
        return kv, torch.cat([torch.tensor([torch.inf]), information])
    return ChunkKV(kv.keys[:, :, 1:].contiguous(), kv.values[:, :, 1:].contiguous()), information


def most_informative(information: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ascending indices of the `count` most informative tokens; ties take the first."""
    return information.sort(descending=True, stable=True).indices[:count].sort().values


class Compressor:
    """Encodes chunks of one model as fewer rows than they have tokens.

    Parameters
    ----------
    model
        The model.
    compression
        The kind and rate of compression.
    anchors
        The anchors for kind ``anchors``; None uses those in the model's folder.

    Raises
    ------
    ParameterError
        If chunks are no longer compressed so.
    UnsupportedModelError
        If the model's KV is valid only at the positions where it was computed.
    AnchorsError
        If anchors are needed but missing, or belong to another model or other rates.
    """

    def __init__(
        self, model: KVModel, compression: Compression, anchors: Anchors | None = None
    ) -> None:
        if compression.kind == KVZIP:
            raise ParameterError(
                f"compression {compression} is gone: on real models, codec transform:4 takes fewer "
                "bytes and loses less. Make a new index with --codec transform:4; an index that "
                "has this compression still answers"
            )
        if model.is_position_bound:
            raise UnsupportedModelError(
                f"{model.name} learned its positions, so a chunk's rows cannot move; store its "
                "chunks uncompressed"
            )
        self._model = model
        self.compression = compression
        self._anchors: Anchors | None = None
        if compression.kind == ANCHORS:
            self._anchors = anchors or find_anchors(model)
            self._anchors.check(model, compression)

    @property
    def key_options(self) -> dict[str, str]:
        """Options for a chunk's key, so that each compression's KV has its own key."""
        return key_options(self.compression, self.anchors_digest)

    @property
    def anchors_digest(self) -> str:
        """Digest of the anchors, or "" if there are none."""
        return "" if self._anchors is None else self._anchors.digest

    def encode(self, prefix_ids: Sequence[int], token_ids: Sequence[int]) -> ChunkKV:
        """Return the position-free KV of a chunk's compressed rows."""
        if self._anchors is None:
            return drop_tokens(self._model, prefix_ids, token_ids, self.compression)
        return encode_anchors(self._model, prefix_ids, token_ids, self.compression, self._anchors)
