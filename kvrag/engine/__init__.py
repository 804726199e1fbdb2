"""From a prompt to an answer."""
