"""A client for tests that need no adapter."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest

from adapters.base import Credentials
from adapters.client import Client, CrmError

NOW = dt.datetime(2026, 4, 6, 9, 20, tzinfo=dt.UTC)
SECRET = "canary-secret-7711"


def client(url: str, **options: Any) -> Client:
    options = {"allow_private_hosts": True, "now": lambda: NOW} | options
    return Client(url, {"X-Key": SECRET}, Credentials(secrets={"key": SECRET}), **options)


def error_of(call: Callable[[], Any]) -> CrmError:
    with pytest.raises(CrmError) as caught:
        call()
    return caught.value
