"""Training of link tokens."""
