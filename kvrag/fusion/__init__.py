"""Fusion: from a prompt and stored chunks to the prompt's KV."""
