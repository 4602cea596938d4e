"""`ApiKeys`: who may use the API. Keys are kept as hashes, compared in constant time, and never logged."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path

from graft_dist.errors import ConfigError
from serve import errors


class ApiKeys:
    """The valid keys; without any, everybody may."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def load(cls, file: str | None, variable: str | None) -> ApiKeys:
        """Read keys from a file or an environment variable.

        A file has one key a line; a # at the beginning or after a blank starts a comment. A variable has commas
        between keys.

        Raises:
            ConfigError: the file cannot be read, the variable is not set, there is no key in it, or one is not ASCII.
        """
        if file is not None:
            try:
                lines = Path(file).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the file of API keys {file} cannot be read ({error})") from error
            keys = [re.split(r"(?:^|\s)#", line)[0].strip() for line in lines]  # a key may have a # in it
        elif variable is not None:
            keys = [key.strip() for key in os.environ.get(variable, "").split(",")]
        else:
            return cls([])
        found = [key for key in keys if key]
        if not found:
            raise ConfigError(f"there is no API key in {file or variable}: nobody could use the server")
        for number, key in enumerate(found, start=1):
            if not key.isascii():
                raise ConfigError(
                    f"API key {number} in {file or variable} has letters that HTTP headers do not carry: use ASCII"
                )
        return cls(found)

    def check(self, authorization: str | None) -> None:
        """Raise `ApiError` 401 unless the header `Authorization: Bearer KEY` has a valid key."""
        if not self._digests:
            return
        kind, _, key = (authorization or "").partition(" ")
        sent = _digest(key.strip())
        # All of them, always: the time must not tell which key comes near.
        matches = [hmac.compare_digest(sent, digest) for digest in self._digests]
        if kind.lower() != "bearer" or not any(matches):
            raise errors.unauthorized()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
