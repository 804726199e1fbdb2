"""Hugging Face decoders behind one interface."""
