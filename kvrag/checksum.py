"""The checksum of the values in a JSON file that kvrag writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

NAME = "checksum"
"""The name under which a file holds its checksum."""


def checksum(values: Mapping[str, Any]) -> str:
    """Return the digest of all values in a file except the digest itself."""
    said = {name: value for name, value in values.items() if name != NAME}
    canonical = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
