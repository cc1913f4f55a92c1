"""Who may come in, and what keeps callers apart.

Keys are kept as digests and compared in constant time, all of them at every attempt. A key's requests share cached
prefixes only with that key's: its salt comes from a secret made anew in each process, so it cannot be guessed, and
neither can another tenant's prompts be probed by timing. Nothing here is ever logged but the place of a key in the
list.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from octavo.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. key: the place of its key in the list (from 1); 0 when there are no keys. salt: of its prefixes."""

    key: int = 0
    salt: str | None = None

    def cache_salt(self, asked: str | None) -> str | None:
        """The salt for a request that asked for one of its own, or for none."""
        if self.salt is None:
            return asked
        return self.salt if asked is None else f"{self.salt}:{asked}"


class KeyRing:
    """The keys of one server; their texts are forgotten."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in dict.fromkeys(keys)]
        self._secret = secrets.token_bytes(32)

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, presented: str) -> Caller | None:
        """The caller with this key. Takes the same time whichever key it is, and when it is none."""
        digest = sha256(presented.encode("utf-8", "replace")).digest()
        found = 0
        for place, known in enumerate(self._digests, 1):
            found += place * hmac.compare_digest(digest, known)
        if not found:
            return None
        salt = blake2b(self._digests[found - 1], key=self._secret, digest_size=16).hexdigest()
        return Caller(found, salt)


_bearer = HTTPBearer(auto_error=False, description="one of the server's API keys")


async def require_key(
    request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    """The dependency of every route but health checks: 401 unless a known key is given (or there are no keys)."""
    ring: KeyRing = request.app.state.keys
    if not len(ring):
        return Caller()
    caller = ring.find(given.credentials) if given is not None else None
    if caller is None:
        message = "no such API key" if given is not None else "an API key is needed: Authorization: Bearer <key>"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    request.scope["octavo.key"] = caller.key
    return caller


KeyedCaller = Annotated[Caller, Depends(require_key)]
