"""Settings, from the environment alone. Every problem is reported at once, each with its fix."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from cryptography.fernet import Fernet
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from connector.errors import SettingsError

_KEY_HELP = 'python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"'


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says.

    `database_url` None means the embedded PostgreSQL under `home`. `migrate_url` and `listen_url` name direct
    connections where a pooler stands before `database_url`. `public_url` is what CRMs call, without a trailing
    slash. `secret_keys` are Fernet keys, newest first: the first seals, all open.
    """

    database_url: str | None = field(default=None, repr=False)
    migrate_url: str | None = field(default=None, repr=False)
    listen_url: str | None = field(default=None, repr=False)
    public_url: str = "http://127.0.0.1:8080"
    home: Path = Path(".turnlock")
    secret_keys: tuple[str, ...] = field(default=(), repr=False)
    allow_private_hosts: bool = False
    host: str = "127.0.0.1"
    port: int = 8080
    web_threads: int = 8
    deciders: int = 3
    senders: int = 8
    body_retention_days: int = 30


def _readable(url: str) -> bool:
    try:
        make_url(url)
    except (ArgumentError, ValueError):  # a port that is no number
        return False
    return True


def _flag(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on")


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read ``TURNLOCK_*``. Raises :class:`SettingsError` that lists everything wrong."""
    get = environ.get
    problems: list[str] = []

    def whole(name: str, default: int, low: int, high: int) -> int:
        text = get(name, "")
        if not text:
            return default
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            problems.append(f"{name}: {text!r} is not a whole number from {low} to {high}; correct or unset it")
            return default
        return int(text)

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
        try:
            Fernet(key)
        except ValueError:
            problems.append(f"TURNLOCK_SECRET_KEYS: key {number} is not a Fernet key; make one with: {_KEY_HELP}")
    if not keys:
        problems.append(
            "TURNLOCK_SECRET_KEYS: missing; CRM credentials are sealed with it, so keep it safe. "
            f"Make one with: {_KEY_HELP}"
        )
    port = whole("TURNLOCK_PORT", 8080, 1, 65535)
    public_url = get("TURNLOCK_PUBLIC_URL", f"http://127.0.0.1:{port}").rstrip("/")
    if urlsplit(public_url).scheme not in ("http", "https") or not urlsplit(public_url).hostname:
        problems.append("TURNLOCK_PUBLIC_URL: not an http(s) address; give the address that the CRM can reach")
    settings = Settings(
        database_url=database("TURNLOCK_DATABASE_URL"),
        migrate_url=database("TURNLOCK_MIGRATE_URL"),
        listen_url=database("TURNLOCK_LISTEN_URL"),
        public_url=public_url,
        home=Path(get("TURNLOCK_HOME") or ".turnlock"),
        secret_keys=keys,
        allow_private_hosts=_flag(get("TURNLOCK_ALLOW_PRIVATE_HOSTS", "")),
        host=get("TURNLOCK_HOST") or "127.0.0.1",
        port=port,
        web_threads=whole("TURNLOCK_WEB_THREADS", 8, 1, 128),
        deciders=whole("TURNLOCK_DECIDERS", 3, 1, 32),
        senders=whole("TURNLOCK_SENDERS", 8, 1, 64),
        body_retention_days=whole("TURNLOCK_BODY_RETENTION_DAYS", 30, 1, 3650),
    )
    if problems:
        raise SettingsError("Turnlock cannot start:\n" + "\n".join(f"  {p}" for p in problems))
    return settings
