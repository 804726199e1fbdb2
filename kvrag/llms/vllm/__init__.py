"""vLLM, unpatched, serving prompts whose KV kvrag has fused (docs/vllm.md)."""
