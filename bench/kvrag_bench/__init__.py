"""The referee: speed, quality and size on equal terms."""
