"""Turning ChunkKV into stored bytes and back."""
