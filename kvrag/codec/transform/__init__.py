"""Transforms, the first stage of a codec: channels of KV to rows that are cheap to code."""
