"""Every fault of the sandbox, proven."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import pytest
import requests

from connector.sandbox import Sandbox
from tests.connector import sandbox_rig
from tests.connector.sandbox_rig import ANA, BEN, CY, DEE, ELI, Api, Receiver, owner, put, until

api, receiver, sandbox = sandbox_rig.api, sandbox_rig.receiver, sandbox_rig.sandbox


def test_fault_status_and_retry_after(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()
    for status in (401, 403, 404, 429, 500, 502, 503, 504):
        sandbox.fault("status", method="PUT", path=r"^/v1/people/\d+$", times=1, status=status)
        answer = put(api, lead)
        assert (answer.status_code, list(answer.json()), owner(api, lead)) == (status, ["errorMessage"], None)
        assert "Retry-After" not in answer.headers
    for given, shown in ((7, "7"), ("huge", "99999999"), ("negative", "-5"), ("garbage", "soon")):
        sandbox.fault("status", times=1, status=429, retry_after=given)
        assert put(api, lead).headers["Retry-After"] == shown
    sandbox.fault("status", face="generic", times=1, status=429, retry_after="date:5")
    assert put(api, lead).status_code == 200  # another face
    late = api.generic("GET", "/account")
    assert (late.status_code, list(late.json())) == (429, ["error"])
    wait = parsedate_to_datetime(late.headers["Retry-After"]) - datetime.now(UTC)
    assert timedelta(seconds=4) < wait <= timedelta(seconds=6)
    sandbox.fault("status", times=1, status=500, apply=True)
    assert (put(api, lead, BEN).status_code, owner(api, lead)) == (500, BEN)  # done, and yet an error
    assert put(api, lead, CY).status_code == 200


def test_fault_how_often(api: Api, sandbox: Sandbox) -> None:
    def calls(count: int) -> list[int]:
        return [api.fub("GET", "/identity").status_code for _ in range(count)]

    rule = sandbox.fault("status", status=500, skip=1, times=2)
    assert calls(4) == [200, 500, 500, 200]
    assert (sandbox.faults()[0]["seen"], sandbox.faults()[0]["hits"]) == (4, 2)
    sandbox.clear_faults(rule)
    first, second = sandbox.set_faults([{"what": "status", "status": 502}, {"what": "status", "status": 500}])
    assert calls(3) == [502] * 3
    sandbox.clear_faults(first)
    assert calls(1) == [500]
    sandbox.clear_faults()
    assert calls(1) == [200]
    sandbox.fault("status", status=500, probability=0.5)
    mixed = calls(60)
    assert 15 <= mixed.count(500) <= 45
    with Sandbox(seed=1) as twin:
        twin.fault("status", status=500, probability=0.5)
        other = Api(twin)
        assert [other.fub("GET", "/identity").status_code for _ in range(60)] == mixed  # the same seed
        other.session.close()
    for wrong, text in (
        ({"what": "melt"}, "no fault 'melt'"),
        ({"what": "slow", "status": 1}, "slow has no status"),
        ({"what": "drop", "sent": "all"}, "sent must be one of"),
        ({"what": "slow", "path": "("}, "not a regular expression"),
    ):
        with pytest.raises(ValueError, match=text):
            sandbox.set_faults([wrong])
    assert second > first


def test_fault_slow_and_drip(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()
    sandbox.fault("slow", times=1, seconds=0.3)
    started = time.monotonic()
    assert put(api, lead).status_code == 200
    assert time.monotonic() - started >= 0.3
    sandbox.fault("slow", times=1, seconds=0.4, apply_first=True)
    with pytest.raises(requests.ReadTimeout):
        put(api, lead, BEN, timeout=0.1)
    until(lambda: owner(api, lead) == BEN)
    sandbox.fault("drip", times=1, seconds=1.0, pace=0.0005)
    started = time.monotonic()
    assert put(api, lead, CY, timeout=0.5).json()["assignedUserId"] == CY  # never 0.5 s of silence, and yet
    assert time.monotonic() - started >= 1.0


def test_fault_odd_answers(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()
    sandbox.fault("html", times=1)
    answer = put(api, lead)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert answer.text.startswith("<!doctype html>")
    sandbox.fault("raw", times=1, body='{"id": 1', status=201)
    assert (put(api, lead).status_code, owner(api, lead)) == (201, None)
    sandbox.fault("redirect", times=1, location="http://127.0.0.1:9/steal")
    answer = put(api, lead)
    assert (answer.status_code, answer.headers["Location"]) == (307, "http://127.0.0.1:9/steal")
    sandbox.fault("empty", times=3)
    assert (put(api, lead).json(), owner(api, lead)) == ({}, None)
    body = api.fub("GET", "/people").json()
    assert (body["people"], body["_metadata"]["total"]) == ([], 0)
    assert api.fub("GET", f"/people/{lead}").json() == {}
    sandbox.fault("empty", times=2)
    assert api.generic("GET", f"/leads?ids={lead}").json() == {"leads": []}
    assert api.generic("GET", "/agents").json() == {"agents": [], "next": None}
    sandbox.fault("endless", times=1)
    with put(api, lead, stream=True) as endless:
        got = 0
        for piece in endless.iter_content(65_536):
            got += len(piece)
            if got > 3_000_000:
                break
    assert got > 3_000_000
    assert owner(api, lead) == ANA


def test_fault_lost_connections(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()
    for apply, sent, expected in ((False, "nothing", None), (True, "nothing", ANA), (True, "headers", ANA)):
        sandbox.set_owner(lead, None)
        sandbox.fault("drop", times=1, apply=apply, sent=sent)
        with pytest.raises(requests.ConnectionError, match=r"reset by peer|Connection aborted"):
            put(api, lead)
        assert owner(api, lead) == expected
        assert sandbox.call_log()[-1]["status"] is None
    sandbox.set_owner(lead, None)
    sandbox.fault("zombie", times=1, seconds=0.6)
    with pytest.raises(requests.ConnectionError):
        put(api, lead, BEN)
    assert put(api, lead, CY).status_code == 200
    assert owner(api, lead) == CY
    until(lambda: owner(api, lead) == BEN)  # it was only late
    sandbox.fault("zombie", times=1, seconds=0.05, status=504)
    assert put(api, lead, DEE).status_code == 504
    until(lambda: owner(api, lead) == DEE)
    sandbox.fault("twice", times=1)
    api.fub("POST", "/notes", json={"personId": lead, "body": "x"})
    assert len(sandbox.lead(lead)["notes"]) == 2


@pytest.mark.parametrize(("effect", "left"), [("empty", None), ("unchanged", BEN)])
def test_fault_owner_silently_not_set(api: Api, sandbox: Sandbox, effect: str, left: int | None) -> None:
    lead = sandbox.create_lead(owner=BEN)
    sandbox.fault("lost_owner", times=2, owner=effect)
    answer = put(api, lead)
    assert (answer.status_code, answer.json()["assignedUserId"], owner(api, lead)) == (200, left, left)
    answer = api.generic("PUT", f"/leads/{lead}/owner", {"owner": str(ANA)})
    assert (answer.status_code, owner(api, lead)) == (200, left)
    writes = sandbox.write_log(lead=lead)
    assert [(row["target"], row["owner"], row["effect"]) for row in writes] == [(ANA, left, effect)] * 2


def test_fault_flip(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    api.subscribe(receiver, "peopleUpdated")
    lead = sandbox.create_lead()
    sandbox.fault("flip", seconds=0.4, owner=ELI, method="PUT", times=1)
    assert put(api, lead).json()["assignedUserId"] == ANA
    assert owner(api, lead) == ANA
    until(lambda: owner(api, lead) == ELI)
    assert [(row["new"], row["by"]) for row in sandbox.owner_log(lead=lead)] == [(ANA, "api"), (ELI, "rule")]
    assert sandbox.wait_idle()
    assert len(receiver.got) == 2


def test_fault_unreadable_and_stale(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()
    old = sandbox.create_lead(created=(datetime.now(UTC) - timedelta(minutes=5)).isoformat())
    rule = sandbox.fault("unreadable", method="GET", seconds=1.0)
    assert api.fub("GET", f"/people/{lead}").status_code == 404
    assert [row["id"] for row in api.fub("GET", f"/people?id={lead},{old}").json()["people"]] == [old]
    assert [row["id"] for row in api.generic("GET", f"/leads?ids={lead},{old}").json()["leads"]] == [str(old)]
    until(lambda: api.fub("GET", f"/people/{lead}").status_code == 200)
    sandbox.clear_faults(rule)
    sandbox.fault("stale", method="GET", seconds=0.8)
    put(api, lead)
    assert owner(api, lead) == ANA
    assert api.fub("GET", f"/people/{lead}").json()["assignedUserId"] is None
    assert api.generic("GET", f"/leads/{lead}").json()["lead"]["owner"] is None
    until(lambda: api.fub("GET", f"/people/{lead}").json()["assignedUserId"] == ANA)


def test_fault_hold(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()
    with ThreadPoolExecutor(2) as pool:
        sandbox.fault("hold", method="PUT", times=1)
        waiting = pool.submit(put, api, lead)
        assert sandbox.wait_held()
        assert [(row["method"], row["path"]) for row in sandbox.held()] == [("PUT", f"/people/{lead}")]
        assert (owner(api, lead), waiting.done()) == (ANA, False)
        assert sandbox.release() == 1
        assert waiting.result(5).status_code == 200
        assert sandbox.held() == []
        # Held before it is done: a human comes between the read and the write.
        sandbox.fault("hold", method="PUT", times=1, apply=False)
        waiting = pool.submit(put, api, lead, BEN)
        assert sandbox.wait_held()
        sandbox.set_owner(lead, DEE)
        sandbox.release(sandbox.held()[0]["id"])
        assert waiting.result(5).json()["assignedUserId"] == BEN
        sandbox.fault("hold", method="PUT", times=1)
        waiting = pool.submit(put, api, lead, CY)
        assert sandbox.wait_held()
        sandbox.release(outcome="drop")
        with pytest.raises(requests.ConnectionError):
            waiting.result(5)
    assert owner(api, lead) == CY
    assert not sandbox.wait_held(timeout=0.01)
