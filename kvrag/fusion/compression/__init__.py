"""Compression: chunks stored as fewer rows of KV than they have tokens."""
