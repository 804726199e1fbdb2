"""From a prompt to fused KV."""
