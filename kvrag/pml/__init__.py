"""Prompt Markup Language: prompts written as reusable modules (Prompt Cache)."""
