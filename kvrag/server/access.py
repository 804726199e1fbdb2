"""API keys and what each one may do; whose an address is."""

from __future__ import annotations

import hashlib
import ipaddress
import math
import os
import stat
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvrag.errors import ParameterError
from kvrag.regularfile import read_regular
from kvrag.server.problems import LimitError, RequestError

KEY_VARIABLE = "KVRAG_SERVER_KEY"
"""Environment variable with the one key of a server without a file of keys; clients read it too."""

_Limit = Annotated[int | None, Field(default=None, ge=1)]
_SHORTEST_KEY = 16


class ApiKey(BaseModel):
    """A key, whose it is, and its limits; None means no limit.

    Attributes
    ----------
    name
        Its name in logs.
    key
        What clients send.
    tenant
        Keys of one tenant count as one when the worker chooses who is next.
    requests_per_minute, tokens_per_minute
        Tokens are those of prompts and answers.
    concurrency
        Most requests and answers at the same time: a request counts as one, and each further answer
        to it as another.
    max_prompt_tokens
        Most tokens in a prompt.
    kept_bytes
        Most bytes of the tenant's conversations, and of its uploads with their KV.
    operator
        Whether the key may read the metrics, which show what all tenants do.
    """

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, frozen=True)

    name: str = Field(min_length=1, max_length=100)
    key: str = Field(min_length=_SHORTEST_KEY, max_length=500, pattern="^[!-~]+$", repr=False)
    tenant: str = Field(default="", max_length=100)
    requests_per_minute: _Limit
    tokens_per_minute: _Limit
    concurrency: _Limit
    max_prompt_tokens: _Limit
    kept_bytes: _Limit
    operator: bool = False


_ANYONE = ApiKey.model_construct(name="", key="")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    keys: list[ApiKey] = Field(min_length=1)


def read_keys(path: Path | None) -> list[ApiKey]:
    """Return the keys in a TOML file, or the environment's key if `path` is None.

    Raises
    ------
    ParameterError
        When the file cannot be read or other users may read it, or a key is wrong.
    """
    if path is None:
        key = os.environ.get(KEY_VARIABLE, "")
        return _checked(KEY_VARIABLE, {"keys": [{"name": "default", "key": key}]}) if key else []
    try:
        content = tomllib.loads(read_regular(path).decode())
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"{path} is not a file of keys: {getattr(error, 'strerror', None) or error}; write "
            "[[keys]] with a name and a key for each"
        ) from error
    if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ParameterError(
            f"{path}: other users may read these keys; take that right away (chmod 600)"
        )
    return _checked(str(path), content)


def _checked(where: str, content: dict[str, Any]) -> list[ApiKey]:
    try:
        keys = _File.model_validate(content).keys
    except ValidationError as error:
        # Without the input: it may be a key.
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ParameterError(
            f"{where}: {place}: {first['msg']}; a key is {_SHORTEST_KEY} or more visible ASCII "
            "characters, as 'openssl rand -hex 32' makes them"
        ) from error
    for field in ("name", "key"):
        if len({getattr(one, field) for one in keys}) < len(keys):
            raise ParameterError(f"{where}: two keys have the same {field}; each has its own")
    return keys


class Bucket:
    """A limit of so much a minute, after which it fills again evenly.

    Parameters
    ----------
    per_minute
        The amount; a whole minute's worth may be taken at once.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._then = time.monotonic()

    def seconds_until(self, amount: float) -> float:
        """Return the seconds until `amount` is there; 0 if it is."""
        now = time.monotonic()
        gained = (now - self._then) * self._per_minute / 60
        self._level, self._then = min(self._per_minute, self._level + gained), now
        return max(0.0, amount - self._level) * 60 / self._per_minute

    def take(self, amount: float) -> None:
        """Take an amount, also if less is there: the debt is paid before anything else."""
        self._level -= amount


class Account:
    """One caller's use of the server. Only the event loop's thread may use it.

    Parameters
    ----------
    key
        The caller's key; that of a server without keys has no limits.
    """

    def __init__(self, key: ApiKey = _ANYONE) -> None:
        self.name = key.name
        self.tenant = key.tenant or key.name
        self.is_operator = key.operator
        self._key = key
        self._num_active = 0
        self._requests = _bucket(key.requests_per_minute)
        self._tokens = _bucket(key.tokens_per_minute)

    @property
    def counts_tokens(self) -> bool:
        """Whether prompts must be counted before they are computed."""
        return self._tokens is not None or self._key.max_prompt_tokens is not None

    def enter(self, *, computes: bool = True) -> None:
        """Begin a request; `leave` ends it. Raises LimitError.

        `computes` says whether it may cost tokens.
        """
        most = self._key.concurrency
        if most is not None and self._num_active >= most:
            raise LimitError(f"this key may have {most} requests at the same time", 1)
        tokens = self._tokens if computes else None
        for bucket, amount, what in ((self._requests, 1, "requests"), (tokens, 0, "tokens")):
            if bucket is not None and (seconds := bucket.seconds_until(amount)) > 0:
                raise LimitError(f"this key has used up its {what} a minute", math.ceil(seconds))
        if self._requests is not None:
            self._requests.take(1)
        self._num_active += 1

    def add(self, num_answers: int) -> None:
        """Count further answers of a request that has entered.

        Raises
        ------
        LimitError
            When that is too many at the moment.
        RequestError
            When the request alone has more answers than the key may have.
        """
        most = self._key.concurrency
        if most is not None and 1 + num_answers > most:
            raise RequestError(
                400,
                f"the request has {1 + num_answers} answers, and this key may have {most} at the "
                "same time; ask for fewer",
                param="n",
            )
        if most is not None and self._num_active + num_answers > most:
            raise LimitError(f"this key may have {most} answers at the same time", 1)
        self._num_active += num_answers

    def leave(self, num_answers: int = 1) -> None:
        """End a request and all its answers."""
        self._num_active -= num_answers

    def check_prompt(self, num_tokens: int) -> None:
        """Raise RequestError if a prompt is too long for the key."""
        most = self._key.max_prompt_tokens
        if most is not None and num_tokens > most:
            raise RequestError(
                400,
                f"the prompt has {num_tokens} tokens, and this key may send {most}; shorten it",
                code="context_length_exceeded",
            )

    @property
    def limits_bytes(self) -> bool:
        """Whether what the tenant keeps must be counted before anything is added."""
        return self._key.kept_bytes is not None

    def check_kept(self, num_bytes: int) -> None:
        """Raise RequestError if the tenant would keep more than the key allows."""
        most = self._key.kept_bytes
        if most is not None and num_bytes > most:
            raise RequestError(
                507,
                f"conversations and uploads would take {num_bytes:,} bytes, and this key may keep "
                f"{most:,}; delete some",
                "rate_limit_error",
                code="storage_full",
            )

    def charge(self, num_tokens: int) -> None:
        """Count tokens that were used."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)


def _bucket(per_minute: int | None) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute)


class Accounts:
    """The accounts of all keys.

    Parameters
    ----------
    keys
        The keys; without any, everybody who reaches the server shares one account.
    """

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        # By digest, so that the time of a look-up says nothing about a key.
        self._by_digest = {_digest(one.key): Account(one) for one in keys}
        self._anyone = Account()
        self._has_tenants = len({one.tenant for one in self._by_digest.values()}) > 1

    @property
    def need_a_key(self) -> bool:
        """Whether requests must send a key."""
        return bool(self._by_digest)

    def of(self, authorization: str) -> Account:
        """Return the account for a header ``Authorization``. Raises RequestError."""
        if not self._by_digest:
            return self._anyone
        scheme, _, given = authorization.partition(" ")
        account = self._by_digest.get(_digest(given.strip()))
        if account is None or scheme.lower() != "bearer":
            raise RequestError(
                401,
                "this server asks for a key: send 'Authorization: Bearer KEY'",
                "authentication_error",
                code="invalid_api_key",
            )
        return account

    def check_operator(self, account: Account) -> None:
        """Raise RequestError unless an account may see what all tenants do."""
        if self._has_tenants and not account.is_operator:
            raise RequestError(
                403,
                "this shows what all tenants do: send a key that has 'operator = true' in the "
                "server's file of keys",
                "authentication_error",
                code="operator_only",
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's own, whatever a name server says."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_of(host: str) -> str:
    """Return the address that counts as one peer: an IPv4 address, or an IPv6 subscriber's /64.

    Text that is not an address counts as it is.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False).network_address)
    return str(address)
