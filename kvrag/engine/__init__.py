"""Answering: from a prompt to an `Answer`."""
