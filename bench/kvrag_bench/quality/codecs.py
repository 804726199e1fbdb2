"""The codecs that take part, each fitted to the model first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrag.codec.base import Codec
from kvrag.codec.config import choose_codec
from kvrag.codec.fitting import fit_profile
from kvrag.codec.profile import Profile
from kvrag.codec.registry import get_codec
from kvrag.ingest.coding import spread_evenly
from kvrag.kvcache import ChunkKV
from kvrag.models.kv_model import KVModel


def fit_codecs(
    model: KVModel,
    names: Sequence[str],
    texts: Sequence[str],
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Codec]:
    """Return codecs by name, each once, their profiles fitted to a sample of texts.

    Parameters
    ----------
    names
        Such as ``raw`` or ``transform:1``.
    texts
        What the model's KV is sampled on.
    on_progress
        Receives a line whenever there is something new to say.
    """
    choices = {choice.label: choice for choice in map(choose_codec, names)}
    profiles: dict[str, Profile] = {}
    samples: dict[int, list[ChunkKV]] = {}
    codecs = []
    for choice in choices.values():
        profile = None
        if choice.config is not None:
            written = choice.config.to_json()
            if written not in profiles:
                size = choice.config.transform.sample_tokens
                if size not in samples:
                    samples[size] = prefill_sample(model, texts, size, on_progress)
                on_progress(f"fitting codec {choice.label}")
                profiles[written] = fit_profile(
                    choice.config, model.chunk_spec, model.fingerprint, samples[size]
                )
            profile = profiles[written]
        codecs.append(get_codec(choice.label, profile))
    return codecs


def prefill_sample(
    model: KVModel,
    texts: Sequence[str],
    num_tokens: int,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[ChunkKV]:
    """Return the KV of about `num_tokens` tokens of texts, spread evenly over `texts`.

    Each is computed after only the prefix.
    """
    prefix = model.default_prefix_ids()
    encoded = model.tokenizer(list(dict.fromkeys(texts)), add_special_tokens=False)["input_ids"]
    chosen = spread_evenly([len(ids) for ids in encoded], num_tokens)
    sample = []
    for done, number in enumerate(chosen):
        if done % 32 == 0:
            on_progress(f"computing chunk {done + 1:,} of {len(chosen):,} of the codecs' sample")
        sample += model.prefill(prefix, [encoded[number]])
    return sample
