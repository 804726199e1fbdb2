"""`kvrag bench stream`: contexts streamed over a link whose speed changes."""
