"""`kvrag bench vllm`: fused prompts served by vLLM, beside its own prefill and prefix caching."""
