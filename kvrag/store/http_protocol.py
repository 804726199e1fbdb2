"""The protocol between `HttpStore` and the server of ``kvrag serve-kv``.

Records are resources under ``/v1/records/``, named by their keys. Clients read them by ranges (RFC
9110 §14), under the tag that the record had when it was opened (§8.8.3, §13.1.1).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvrag.errors import ParameterError
from kvrag.regularfile import read_regular

SERVICE = "kvrag"
PROTOCOL = 1
ROOT = "/v1"
RECORDS = "/v1/records"

TOKEN_VARIABLE = "KVRAG_KV_TOKEN"
"""Environment variable with the token, for the server and for its clients."""


def read_token(path: str | Path | None) -> str:
    """Return the token from a file, or from the environment if `path` is None; "" if there is none.

    Raises
    ------
    ParameterError
        When the file cannot be read or other users may read it, or when the token is empty or holds
        characters other than visible ASCII.
    """
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        return _checked(token, TOKEN_VARIABLE) if token else ""
    try:
        token = read_regular(path).decode().strip()
        mode = Path(path).stat().st_mode
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"{path} is not a file with a token: "
            f"{getattr(error, 'strerror', None) or 'it holds something else'}; make one with "
            "'openssl rand -hex 32'"
        ) from error
    if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ParameterError(
            f"{path}: other users may read this token; take that right away (chmod 600)"
        )
    return _checked(token, str(path))


def _checked(token: str, where: str) -> str:
    if not token or not all("!" <= character <= "~" for character in token):
        raise ParameterError(
            f"{where}: a token is one line of visible ASCII characters; make one with "
            "'openssl rand -hex 32'"
        )
    return token
