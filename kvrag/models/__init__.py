"""Hugging Face decoders with one interface."""
