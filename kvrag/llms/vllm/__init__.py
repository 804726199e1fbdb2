"""vLLM, unpatched, serving prompts whose KV kvrag has fused (docs/vllm.md).

`engine.py` is what users call. `connector.py` runs in vLLM, with one half in its
scheduler and one in its worker.
"""
