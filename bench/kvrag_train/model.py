"""The tiny model's architecture: a plain Llama of Hugging Face, and its forward on a batch."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from kvrag_train.batches import IGNORED, PackedBatch


def build_config(
    tokenizer: PreTrainedTokenizerBase, hidden_size: int, num_layers: int
) -> LlamaConfig:
    """Return the configuration: four query heads, two key-value heads, head size 64."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        attention_bias=True,
        tie_word_embeddings=False,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def answer_logits(
    model: LlamaForCausalLM, batch: PackedBatch, isolate_documents: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the model and return only the answers' logits.

    Returns
    -------
    tuple of torch.Tensor
        Logits (answer tokens, vocabulary), their targets and their question numbers.
    """
    hidden = model.model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask(isolate_documents),
        use_cache=False,
    ).last_hidden_state
    wanted = batch.targets != IGNORED
    return model.lm_head(hidden[wanted]), batch.targets[wanted], batch.question_ids[wanted]


def questions_right(
    logits: torch.Tensor, targets: torch.Tensor, question_ids: torch.Tensor
) -> torch.Tensor:
    """Return for each question whether greedy decoding would give its answer exactly.

    Each token is predicted after the right ones before it; greedy decoding follows the same
    path exactly if every one of them, the end of the answer included, is ranked first.
    """
    right = (logits.argmax(-1) == targets).to(torch.int64)
    worst = torch.ones(int(question_ids.max()) + 1, dtype=torch.int64)
    return worst.scatter_reduce(0, question_ids, right, "amin").bool()
