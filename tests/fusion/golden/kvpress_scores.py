"""Scores of NVIDIA's kvpress, to hold ours against: writes ``kvzip-v1.safetensors``.

    python -m venv V && V/bin/pip install torch==2.13.0 kvpress==0.5.5 "transformers<5.3" && \
        V/bin/python tests/fusion/golden/kvpress_scores.py

kvpress wants an older Transformers than kvrag does, so it runs in an environment of its own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvrag.models.caches import CACHE_ARGUMENT

PATH = Path(__file__).with_name("kvzip-v1.safetensors")
REQUEST = "\n\nRepeat the previous context exactly."
REQUEST_PART = "\n\nRepeat the part of the previous context exactly, starting with"
NUM_TOKENS = 40
PART_TOKENS = (2048, 16)


def make_filled_model() -> LlamaForCausalLM:
    """Return a small Llama whose weights depend on nothing but their order."""
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            drawn = torch.randn(weight.shape, generator=random)
            weight.copy_(1.0 + 0.1 * drawn if weight.dim() == 1 else 0.3 * drawn)
            assert weight.isfinite().all(), name
    return model


def token_ids() -> list[int]:
    """Return the text that is scored."""
    random = torch.Generator().manual_seed(7)
    return torch.randint(3, 384, (NUM_TOKENS,), generator=random).tolist()


def main() -> None:
    """Write the scores."""
    import kvpress.presses.kvzip_press as kvzip
    from safetensors.torch import save_file
    from transformers import DynamicCache

    class Tokenizer:
        """Bytes are tokens: what kvrag's test gives its own side as well."""

        chat_template = None

        def encode(self, text: str, **_: object) -> torch.Tensor:
            return torch.tensor([list(text.encode())], dtype=torch.long).view(1, -1)

    class Scores(kvzip.KVzipPress):
        def post_init_from_model(self, model: object) -> None:
            pass

        def compress_post(self, model: object) -> None:
            self.kept = self.score_val[:, 0].clone()

    kvzip.AutoTokenizer = type("Auto", (), {"from_pretrained": staticmethod(lambda _: Tokenizer())})
    found = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        make_filled_model().save_pretrained(folder)
        for part_tokens in PART_TOKENS:
            model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
            press = Scores(compression_ratio=0.5, chunk_size=part_tokens, n_sink=0)
            with press(model):
                model.model(
                    input_ids=torch.tensor([token_ids()]), **{CACHE_ARGUMENT: DynamicCache()}
                )
            found[f"parts_of_{part_tokens}"] = press.kept.contiguous()
    save_file(found, str(PATH))


if __name__ == "__main__":
    main()
