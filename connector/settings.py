"""Settings, from the environment alone. Every problem is reported at once, each with its fix."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from connector.errors import SettingsError

_KEY = re.compile("[A-Za-z0-9_-]{43}=")  # 32 bytes
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_KEY_HELP = 'python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"'


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says.

    `database_url` None means the embedded PostgreSQL under `home`. `migrate_url` and `listen_url` name direct
    connections where a pooler stands before `database_url`. `public_url` is what CRMs call, without a trailing
    slash. `secret_keys` are Fernet keys, newest first: the first seals, all open. `ca_file` holds certificates, as PEM,
    that are trusted beside the public ones.
    """

    database_url: str | None = field(default=None, repr=False)
    migrate_url: str | None = field(default=None, repr=False)
    listen_url: str | None = field(default=None, repr=False)
    public_url: str = "http://127.0.0.1:8080"
    home: Path = Path(".turnlock")
    secret_keys: tuple[str, ...] = field(default=(), repr=False)
    allow_private_hosts: bool = False
    ca_file: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    web_threads: int = 8
    deciders: int = 3
    senders: int = 8
    body_retention_days: int = 30
    facts_retention_days: int | None = None


def _readable(url: str) -> bool:
    try:
        make_url(url)
    except (ArgumentError, ValueError):  # a port that is no number
        return False
    return True


def _callable(url: str) -> bool:
    """Whether a CRM could call addresses below `url`."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return good and not (parts.query or parts.fragment or "@" in parts.netloc or re.search(r"\s", url))


def _certificates(path: str) -> bool:
    try:
        return ssl.create_default_context(cafile=path).cert_store_stats()["x509"] > 0
    except (OSError, ValueError):  # ssl.SSLError is an OSError
        return False


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read ``TURNLOCK_*``. Raises :class:`SettingsError` that lists everything wrong."""
    get = environ.get
    problems: list[str] = []
    kept = "TURNLOCK_FACTS_RETENTION_DAYS"

    def whole(name: str, default: int, low: int, high: int) -> int:
        text = get(name, "")
        if not text:
            return default
        if not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
            problems.append(f"{name}: {text[:20]!r} is not a whole number from {low} to {high}; correct or unset it")
            return default
        return int(text)

    def yes(name: str) -> bool:
        text = get(name, "").strip().lower()
        if text not in _YES + _NO:
            problems.append(f"{name}: neither yes nor no; set it to 1 or 0")
        return text in _YES

    def database(name: str) -> str | None:
        text = get(name) or None
        if text is None:
            return None
        for prefix in ("postgresql+psycopg://", "postgresql://", "postgres://"):
            if text.startswith(prefix) and _readable(text):
                return "postgresql+psycopg://" + text.removeprefix(prefix)
        problems.append(f"{name}: not a PostgreSQL address; give it the form postgresql://user:password@host/database")
        return None

    keys = tuple(k.strip() for k in get("TURNLOCK_SECRET_KEYS", "").split(",") if k.strip())
    for number, key in enumerate(keys, 1):
        # Not by trying: the decoder skips what is not base64, so two keys with another separator would pass as one.
        if not _KEY.fullmatch(key):
            problems.append(f"TURNLOCK_SECRET_KEYS: key {number} is not a Fernet key; make one with: {_KEY_HELP}")
    if not keys:
        problems.append(
            "TURNLOCK_SECRET_KEYS: missing; CRM credentials are sealed with it, so keep it safe. "
            f"Make one with: {_KEY_HELP}"
        )
    ca_file = get("TURNLOCK_CA_FILE") or None
    if ca_file is not None and not _certificates(ca_file):
        problems.append("TURNLOCK_CA_FILE: no file of certificates in PEM form that can be read; correct or unset it")
    port = whole("TURNLOCK_PORT", 8080, 1, 65535)
    public_url = (get("TURNLOCK_PUBLIC_URL") or f"http://127.0.0.1:{port}").rstrip("/")
    if not _callable(public_url):
        problems.append("TURNLOCK_PUBLIC_URL: not an http(s) address; give the address that the CRM can reach")
    settings = Settings(
        database_url=database("TURNLOCK_DATABASE_URL"),
        migrate_url=database("TURNLOCK_MIGRATE_URL"),
        listen_url=database("TURNLOCK_LISTEN_URL"),
        public_url=public_url,
        home=Path(get("TURNLOCK_HOME") or ".turnlock"),
        secret_keys=keys,
        allow_private_hosts=yes("TURNLOCK_ALLOW_PRIVATE_HOSTS"),
        ca_file=ca_file,
        host=get("TURNLOCK_HOST") or "127.0.0.1",
        port=port,
        web_threads=whole("TURNLOCK_WEB_THREADS", 8, 1, 128),
        deciders=whole("TURNLOCK_DECIDERS", 3, 1, 32),
        senders=whole("TURNLOCK_SENDERS", 8, 1, 64),
        facts_retention_days=whole(kept, 365, 1, 3650) if get(kept) else None,
        body_retention_days=whole("TURNLOCK_BODY_RETENTION_DAYS", 30, 1, 3650),
    )
    if problems:
        raise SettingsError("Turnlock cannot start:\n" + "\n".join(f"  {p}" for p in problems))
    return settings
