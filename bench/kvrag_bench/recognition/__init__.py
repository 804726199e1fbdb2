"""`kvrag bench recognition`: what of prompts is recognised as text of an index."""
