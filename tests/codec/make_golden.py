"""Writes golden records of the codecs that need a profile: run once for a version of the format.

``python -m tests.codec.make_golden`` leaves what is there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from kvrag.codec.bands import Bands
from kvrag.codec.base import Codec
from kvrag.codec.config import LayerGroups, PipelineConfig, Rans, RateDistortion
from kvrag.codec.pca import PCA
from kvrag.codec.pipeline import PipelineCodec
from kvrag.codec.registry import codec_of
from kvrag.codec.tables import Exact, Uniform
from kvrag.codec.transforms import NoTransform
from kvrag.kvcache import KVSpec
from kvrag_testing.codec_contract import KEY, decode
from tests.support.codecs import fit, smooth_kv

GOLDEN = Path(__file__).parent / "golden"
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32)
CONFIGS = {
    "transform": PipelineConfig(
        PCA(group_layers=1), RateDistortion((2.0, 4.0)), Uniform(refinements=2), Rans(3)
    ),
    "lossless": PipelineConfig(NoTransform(), LayerGroups((1.0,), (1.0,)), Exact(), Rans(3)),
    "packed": PipelineConfig(Bands(4.2, 8), LayerGroups((1.0,), (1.0,)), Uniform(0.0), Rans(3)),
}


def main() -> None:
    """Write for each codec its profile, a record, and what the record decodes to."""
    for name, config in CONFIGS.items():
        if (GOLDEN / f"{name}-v2.kv").exists():
            continue
        profile = fit(config, SPEC)
        level = profile.levels[-1].name
        codec: Codec = PipelineCodec(profile, name, level)
        if name != "transform":
            codec = codec_of(profile)
        kv = smooth_kv(SPEC, 37, seed=9)
        kv.keys[1, :, 7] *= 300.0  # kept raw, or escaped
        record = codec.encode(KEY, kv)
        found = decode(codec, KEY, record, SPEC)
        files = {f"{name}-v2.profile": profile.content, f"{name}-v2.kv": record}
        for file, content in files.items():
            with (GOLDEN / file).open("xb") as out:
                out.write(content)
        save_file({"keys": found.keys, "values": found.values}, GOLDEN / f"{name}-v2.decoded")


if __name__ == "__main__":
    main()
