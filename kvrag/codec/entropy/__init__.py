"""Entropy coding: probability tables fitted once per model, and rANS streams that use them."""
