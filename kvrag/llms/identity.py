"""What answers depend on, by which frameworks' caches of answers tell them apart."""

from __future__ import annotations

import hashlib

from kvrag.ingest.index import Index
from kvrag.regularfile import read_regular


def file_digest(name: str) -> str:
    """Return a digest of a file's contents, or its name if it cannot be read."""
    try:
        return hashlib.blake2b(read_regular(name), digest_size=20).hexdigest()
    except OSError:
        return name


def recorded_identity(index: Index) -> dict[str, str]:
    """Return the recorded properties of an index that affect its answers."""
    return {
        "index": str(index.path),
        "store": index.store.url,
        "model_fingerprint": index.config.model_fingerprint,
        "tokenizer_fingerprint": index.config.tokenizer_fingerprint,
        "dtype": index.config.dtype,
        "codec": index.config.codec,
        "control_tokens": index.config.control_tokens,
    }
