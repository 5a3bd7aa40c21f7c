"""What the proofs of all CRMs share: which secrets count, a comparison that tells nothing, and how old is too old."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from datetime import datetime

from adapters.base import Rejected


def keys(secrets: Iterable[bytes]) -> list[bytes]:
    """The secrets that are not empty. Raises :class:`Rejected` where there is none: nothing proves nothing."""
    found = [secret for secret in secrets if secret]
    if not found:
        raise Rejected("no_secret")
    return found


def prove(given: str | Sequence[str], wanted: Iterable[bytes]) -> None:
    """Raise :class:`Rejected` unless one signature that was given is a wanted one.

    In time that does not depend on where they differ; as bytes, because text outside ASCII cannot be compared so.
    """
    offered = [text.encode("utf-8", "replace") for text in ([given] if isinstance(given, str) else given)]
    if not any(hmac.compare_digest(want, offer) for want in wanted for offer in offered):
        raise Rejected("bad_signature")


def fresh(signed_at: float, now: datetime, tolerance: float) -> None:
    """Raise :class:`Rejected` where a delivery was signed more than `tolerance` seconds from `now`, either way.

    `signed_at` is in seconds since 1970.
    """
    age = now.timestamp() - signed_at
    if abs(age) > tolerance:
        raise Rejected("too_old" if age > 0 else "too_new")
