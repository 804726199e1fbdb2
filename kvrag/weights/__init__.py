"""Weights by name: GGUF files from packages, Ollama, llama.cpp or a path, as folders to load."""
