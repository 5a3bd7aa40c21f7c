"""The search of the sandbox's HubSpot face: what it finds, in which order, how far, and how late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import requests

from connector.sandbox import Sandbox
from connector.sandbox.exchange import ApiError, Request
from connector.sandbox.hubspot_search import search as page_of

NOBODY = {"propertyName": "hubspot_owner_id", "operator": "NOT_HAS_PROPERTY"}


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(seed=1) as made:
        yield made


def search(sandbox: Sandbox, *filters: dict[str, Any], **more: Any) -> requests.Response:
    body = {"filterGroups": [{"filters": list(filters)}], "limit": 200, **more}
    token = sandbox.account()["hubspot_token"]
    url = f"{sandbox.hubspot_url}/crm/v3/objects/contacts/search"
    return requests.post(url, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=10)


def ids(answer: requests.Response) -> list[int]:
    return [int(row["id"]) for row in answer.json()["results"]]


def since(moment: datetime) -> dict[str, Any]:
    return {
        "propertyName": "lastmodifieddate",
        "operator": "GTE",
        "value": str(int(moment.timestamp() * 1000)),
    }


def test_changes_are_found_by_their_time_and_shown_in_pages(sandbox: Sandbox) -> None:
    old = [sandbox.create_lead(owner=12, created="2025-01-01T00:00:00+00:00") for _ in range(3)]
    with sandbox.crm.state.lock:
        for lead in sandbox.crm.state.leads.values():
            lead.updated = datetime(2025, 1, 2, tzinfo=UTC)
    hour_ago = since(datetime.now(UTC) - timedelta(hours=1))
    assert ids(search(sandbox, hour_ago)) == []
    for minutes, lead in enumerate(old):
        sandbox.clear_owner(lead)
        with sandbox.crm.state.lock:
            sandbox.crm.state.leads[lead].updated -= timedelta(minutes=minutes)
    by_change = [{"propertyName": "lastmodifieddate", "direction": "DESCENDING"}]
    assert set(ids(search(sandbox, NOBODY, hour_ago))) == set(old)
    first = search(sandbox, NOBODY, hour_ago, sorts=by_change, limit=2)
    assert first.json()["total"] == 3
    after = first.json()["paging"]["next"]["after"]
    rest = search(sandbox, NOBODY, hour_ago, sorts=by_change, limit=2, after=after)
    assert ids(first) + ids(rest) == old
    assert "paging" not in rest.json()


def test_a_search_has_its_limits(sandbox: Sandbox) -> None:
    by_id = {"propertyName": "hs_object_id", "direction": "ASCENDING"}
    for wrong in ({"sorts": [by_id, by_id]}, {"limit": 201}, {"after": "9900"}, {"sorts": [{"propertyName": "email"}]}):
        sandbox.create_lead()
        assert search(sandbox, NOBODY, **wrong).status_code == 400, wrong
    assert search(sandbox, *[NOBODY] * 7).status_code == 400
    rows = [{"id": str(n), "properties": {"hs_object_id": str(n)}} for n in range(10_200)]
    asked = Request("POST", "/", "", {}, b"")
    last = page_of(asked, {"limit": 200, "after": "9800", "sorts": [by_id]}, rows)
    assert [int(row["id"]) for row in last.body["results"]] == list(range(9800, 10_000))
    with pytest.raises(ApiError):
        page_of(asked, {"limit": 200, "after": last.body["paging"]["next"]["after"], "sorts": [by_id]}, rows)


def test_search_lags_behind_in_owners_and_in_times_of_changes(sandbox: Sandbox) -> None:
    lead = sandbox.create_lead(owner=12, created=(datetime.now(UTC) - timedelta(hours=2)).isoformat())
    sandbox.fault("stale", path="/search$", seconds=60)
    now = since(datetime.now(UTC) - timedelta(minutes=1))
    sandbox.clear_owner(lead)
    assert ids(search(sandbox, NOBODY)) == []
    assert ids(search(sandbox, now)) == []
    with sandbox.crm.state.lock:  # a minute and a half later
        held = sandbox.crm.state.leads[lead]
        held.history = type(held.history)([(at - 90, *what) for at, *what in held.history], maxlen=20)
    assert held.history[-1][0] < time.monotonic() - 60
    assert ids(search(sandbox, NOBODY)) == [lead]
