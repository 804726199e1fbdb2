"""An OpenAI-compatible server over indexes: `kvrag serve` and `kvrag mcp` (extra ``serve``).

Imports `llms` and everything below it.
Begin with `app.py`, which has the routes, then `service.py`, which has what they do.
"""
