"""Decoding into a buffer on a GPU; without one, its kernels are played by the host's threads."""

from __future__ import annotations

import pytest
import torch

from kvrag.codec import decoding
from kvrag.codec.base import Destination
from kvrag.kvcache import KVSpec
from kvrag.native import gpu
from kvrag.positions.rotary import RotaryTable
from kvrag.testing.codec_contract import KEY, BytesSource
from tests.codec.test_pipeline import CONFIGS, fitting_codec
from tests.native.test_gpu import device, emulator
from tests.support.codecs import smooth_kv

__all__ = ["device", "emulator"]
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float32)


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_buffer_on_a_gpu(
    name: str, device: str, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = fitting_codec(name)
    kv = smooth_kv(SPEC, 70, seed=3)
    kv.keys[:, :, 33] *= 50  # kept raw
    record = codec.encode(KEY, kv)
    angles = torch.randn(120, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = (torch.cat([f(angles)] * 2, dim=1) for f in (torch.cos, torch.sin))
    tokens, rows = slice(10, 61), slice(40, 91)

    def place(where: str) -> torch.Tensor:
        chunk = codec.open(KEY, BytesSource(record), SPEC)
        table = RotaryTable(cos.to(where), sin.to(where))
        buffer = torch.zeros(2, 2, 2, 120, 16, device=where)
        for layer_index in range(2):
            keys, values = buffer[layer_index]
            into = Destination(keys[:, rows], values[:, rows], tokens, table, rows)
            chunk.place_layer(layer_index, into)
        return buffer.cpu()

    expected = place("cpu")
    calls = []
    monkeypatch.setattr(decoding, "_is_on_gpu", lambda out: out.device.type == device)
    monkeypatch.setattr(decoding, "_gpu_kernels", lambda: gpu if has_kernels else None)
    if device == "cpu" and not has_kernels:
        # The host buffer of the detour must not be taken for one on the device.
        seen = iter([True, False] * 4)
        monkeypatch.setattr(decoding, "_is_on_gpu", lambda _: next(seen, True))
    original = gpu.reconstruct
    monkeypatch.setattr(gpu, "reconstruct", lambda *a, **k: (calls.append(1), original(*a, **k)))
    found = place(device)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    is_transform = name in ("transform", "apart")
    assert len(calls) == (4 if is_transform and has_kernels else 0)
