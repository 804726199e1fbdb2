"""What codecs are compared with: CacheGen's public scheme, and plain 8 bits.

Source: the scheme of the code published with CacheGen (SIGCOMM 2024), which has neither its
paper's deltas nor its offline tables: every token of a layer and kind is divided by its greatest
magnitude over all channels and cut into a fixed number of bins (keys 32 in the first third of the
layers and 16 in the others, values 32 in the first sixteenth and 16 in the others), and each
channel of each layer is arithmetic-coded with a separate table, counted on the chunk and stored
with it.

The baseline is counted in its favour: an ideal arithmetic coder (the chunk's own entropy), tables
of 8 bits an entry between the least and the greatest symbol that the channel takes, scales of 16
bits, no container.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrag.kvcache import ChunkKV
from kvrag_bench.codec.records import Meter, Point
from kvrag_bench.codec.sources import Source

CACHEGEN_PUBLIC = "cachegen-public"
EIGHT_BIT = "8-bit"
BIN_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""What the bins of the public scheme are multiplied by, for its curve."""
_SCALE_BITS = 16
_ENTRY_BITS = 8
_FINE, _COARSE = 32, 16


def public_bins(num_layers: int, kind: int) -> list[int]:
    """Return the bins of each layer's keys (`kind` 0) or values (1)."""
    fine = max(1, num_layers // (3 if kind == 0 else 16))
    return [_FINE if layer < fine else _COARSE for layer in range(num_layers)]


def measure_cachegen(
    source: Source, chunks: Sequence[ChunkKV], factor: float, *, same_bins: bool = False
) -> Point:
    """Return where CacheGen's public scheme stands with its bins times `factor`.

    Parameters
    ----------
    same_bins
        Give every layer and kind the coarse number of bins: a variant that serves models whose
        first layers need no finer ones.
    """
    meter = Meter(source)
    for kv in chunks:
        entropy = tables = 0.0
        decoded = []
        for kind, tensor in enumerate((kv.keys.float(), kv.values.float())):
            bins = [_COARSE] * len(tensor) if same_bins else public_bins(len(tensor), kind)
            layers = []
            for layer, count in zip(tensor, bins, strict=True):
                # n bins about zero: whole numbers from -(n / 2 - 1) to n / 2 - 1.
                most = max(1.0, count * factor / 2 - 1)
                symbols, found = _by_token(layer, most)
                payload, support = _channel_entropy(symbols)
                entropy += payload
                tables += support * _ENTRY_BITS
                layers.append(found)
            decoded.append(torch.stack(layers))
        scales = 2 * len(kv.keys) * kv.num_tokens * _SCALE_BITS
        meter.add(kv, ChunkKV(*decoded), entropy + tables + scales, entropy)
    return meter.point()


def measure_eight_bit(source: Source, chunks: Sequence[ChunkKV]) -> Point:
    """Return where 8 bits an element and one scale for each token, layer and kind stand."""
    meter = Meter(source)
    for kv in chunks:
        found = [
            torch.stack([_by_token(layer, 127.0)[1] for layer in tensor.float()])
            for tensor in (kv.keys, kv.values)
        ]
        scales = 2 * len(kv.keys) * kv.num_tokens * _SCALE_BITS
        meter.add(kv, ChunkKV(*found), 8.0 * 2 * kv.keys.numel() + scales, None)
    return meter.point()


def _by_token(layer: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers and what they stand for, of one layer's ``[H, T, D]``."""
    scale = layer.abs().amax((0, 2), keepdim=True).half().float().clamp(min=1e-7)
    symbols = (layer / scale * most).round()
    return symbols, symbols * scale / most


def _channel_entropy(symbols: torch.Tensor) -> tuple[float, int]:
    """Return the bits of all channels under their own counts, and the entries of their tables."""
    rows = symbols.transpose(1, 2).flatten(0, 1).long()
    least = rows.amin(1, keepdim=True)
    widths = (rows.amax(1) - least[:, 0] + 1).tolist()
    width = int(max(widths))
    index = rows - least + width * torch.arange(len(rows))[:, None]
    counts = torch.bincount(index.flatten(), minlength=width * len(rows)).double()
    counts = counts[counts > 0]
    num_tokens = rows.shape[1]
    return float((counts * (num_tokens / counts).log2()).sum()), int(sum(widths))
