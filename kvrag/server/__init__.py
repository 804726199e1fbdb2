"""An OpenAI-compatible server over an index (extra ``serve``)."""
