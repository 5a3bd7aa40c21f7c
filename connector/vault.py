"""Secrets at rest: sealed with a ring of keys, bound to their tenant and name."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable
from functools import lru_cache
from uuid import UUID

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from connector.errors import SettingsError


class Vault:
    """Seals and opens secrets. The first key seals; all open, so that keys rotate without downtime."""

    def __init__(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        ring = [Fernet(k) for k in keys]
        self._keys = [key.encode() for key in keys]
        self._ring, self._newest = MultiFernet(ring), ring[:1]
        # Opening costs ~0.1 ms, on every delivery; sealed bytes never change meaning, so a small cache is safe.
        self._cached = lru_cache(maxsize=1024)(self._open)

    def seal(self, tenant_id: UUID, name: str, value: str) -> bytes:
        """`value` sealed for this tenant and name. Fernet has no associated data, so both go inside."""
        return self._ring.encrypt(json.dumps([str(tenant_id), name, value]).encode())

    def open(self, tenant_id: UUID, name: str, sealed: bytes) -> str:
        """The value. Raises :class:`SettingsError` if no key of the ring opens it or it was sealed for another."""
        return self._cached(tenant_id, name, bytes(sealed))

    def proof(self, text: str) -> str:
        """A short proof, in hex, that Turnlock wrote `text`."""
        return self._proof(self._keys[0], text)

    def proves(self, text: str, proof: str) -> bool:
        """Whether `proof` is one of `text`, made with a key of the ring."""
        return any(hmac.compare_digest(self._proof(key, text).encode(), proof.encode()) for key in self._keys)

    @staticmethod
    def _proof(key: bytes, text: str) -> str:
        return hmac.new(key, b"turnlock proof\n" + text.encode(), hashlib.sha256).hexdigest()[:20]

    def is_newest(self, sealed: bytes) -> bool:
        """Whether the key that seals now opens this. What was sealed before it came must be sealed anew."""
        try:
            return bool([key.decrypt(sealed) for key in self._newest])
        except InvalidToken:
            return False

    def _open(self, tenant_id: UUID, name: str, sealed: bytes) -> str:
        try:
            tenant, field, value = json.loads(self._ring.decrypt(sealed))
        except (InvalidToken, ValueError):
            raise SettingsError(
                f"secret {name!r} cannot be opened; put the key that sealed it back into TURNLOCK_SECRET_KEYS"
            ) from None
        if (tenant, field) != (str(tenant_id), name):
            raise SettingsError(f"secret {name!r} was sealed for something else; enter it again")
        return str(value)
