"""The sandbox's BottleCRM face over real sockets: it does what the captured server did, and looks like it."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import requests

from connector.sandbox import Sandbox
from tests.connector import sandbox_rig
from tests.connector.sandbox_rig import ACCOUNT, ANA, BEN, CY, ELI, Receiver, until

receiver, sandbox = sandbox_rig.receiver, sandbox_rig.sandbox
CAPTURED = Path(__file__).parents[1] / "fixtures" / "bottlecrm" / "captured"


def captured(name: str) -> Any:
    (path,) = CAPTURED.glob(f"{name}*.json")
    return json.loads(path.read_text())


def call(sandbox: Sandbox, method: str, path: str, body: Any = None, token: str = ACCOUNT.api_token) -> Any:
    url, headers = sandbox.bottlecrm_url + "/api" + path, {"Authorization": f"Bearer {token}"}
    return requests.request(method, url, json=body, headers=headers, timeout=10)


def write(sandbox: Sandbox, lead: int, *holders: object) -> tuple[int, Any]:
    answer = call(sandbox, "PATCH", f"/leads/{lead}/", {"assigned_to": list(holders)})
    return answer.status_code, answer.json()


def holders(sandbox: Sandbox, lead: int) -> list[str]:
    shown = call(sandbox, "GET", f"/leads/{lead}/").json()["lead_obj"]["assigned_to"]
    return [profile["id"] for profile in shown]


def test_wrong_tokens_and_webhooks_are_refused_as_they_were(sandbox: Sandbox) -> None:
    for token, path, name in (("bcrm_pat_x", "/leads/1/", "api41"), (ACCOUNT.api_token, "/webhooks/", "api08")):
        answer = call(sandbox, "GET", path, token=token)
        assert (answer.status_code, answer.json()) == (403, captured(name)["response"])
    assert call(sandbox, "GET", "/leads/77/").json() == captured("api34")["response"]


def test_owner_writes_end_as_they_did(sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()
    done = (200, captured("api30")["response"])
    assert write(sandbox, lead, str(ANA)) == done
    assert holders(sandbox, lead) == [str(ANA)]
    assert write(sandbox, lead, str(BEN), str(ELI)) == done  # replaces all
    assert holders(sandbox, lead) == [str(ELI), str(BEN)]  # newest profile first, whatever was written
    assert write(sandbox, lead, "999") == done  # unknown: and nobody has it
    assert holders(sandbox, lead) == []
    write(sandbox, lead, str(ANA))
    sandbox.deactivate_agent(CY)
    assert write(sandbox, lead, str(CY)) == done
    assert holders(sandbox, lead) == []
    status, answer = write(sandbox, lead, "nope")
    assert (status, answer) == (400, captured("api36")["response"])
    assert [row["target"] for row in sandbox.write_log()] == [ANA, ELI, 999, ANA, CY]
    sandbox.fault("lost_owner", owner="unchanged")
    assert write(sandbox, lead, str(ANA)) == done
    assert holders(sandbox, lead) == []


def test_lists_look_like_the_captured_ones(sandbox: Sandbox) -> None:
    for number in range(25):
        sandbox.create_lead(created=(datetime.now(UTC) - timedelta(days=number % 2 * 3)).isoformat())
    sandbox.create_lead(stage="Closed")
    sandbox.deactivate_agent(BEN)
    seen: list[str] = []
    offset: int | None = 0
    today = datetime.now(UTC) - timedelta(days=1)
    while offset is not None:
        query = f"?open=true&limit=5&offset={offset}&created_at__gte={today:%Y-%m-%d}"
        page = call(sandbox, "GET", f"/leads/{query}").json()["open_leads"]
        assert page.keys() == captured("api26")["response"]["open_leads"].keys()
        seen += [lead["id"] for lead in page["open_leads"]]
        offset = page["offset"]
    assert len(seen) == len(set(seen)) == page["leads_count"] == 13
    assert seen != sorted(seen)
    assert seen != sorted(seen, reverse=True)
    users, real = call(sandbox, "GET", "/users/?limit=100").json(), captured("api05")["response"]
    for name in ("active_users", "inactive_users"):
        assert users[name].keys() == real[name].keys()
    profile = users["inactive_users"]["inactive_users"][0]
    assert (profile["id"], profile["is_active"]) == (str(BEN), False)
    assert profile.keys() <= real["active_users"]["active_users"][0].keys()
    shown = call(sandbox, "GET", f"/leads/{seen[0]}/").json()
    assert shown["lead_obj"].keys() <= captured("api25")["response"]["lead_obj"].keys()


def test_deliveries_are_signed_and_shaped_like_the_captured_ones(sandbox: Sandbox, receiver: Receiver) -> None:
    sandbox.configure(concurrency=1)
    sandbox.add_hook("bottlecrm", receiver.url)
    lead = sandbox.create_lead(owner=ANA, collaborators=[BEN])
    write(sandbox, lead, str(ANA))
    write(sandbox, lead, str(ANA))  # a write that changes nothing is told, too
    sandbox.delete_leads([lead])
    assert sandbox.wait_idle()
    assert [body["event"] for body in receiver.bodies()] == [
        "lead.created",
        "lead.updated",
        "lead.updated",
        "lead.deleted",
    ]
    assert receiver.bodies()[0]["data"]["assigned_to"] == [str(BEN), str(ANA)]
    real = captured("wh0001")
    for headers, raw in receiver.got:
        at = re.fullmatch(r"t=(\d+),v1=[0-9a-f]{64}", headers["x-bottlecrm-signature"])
        assert at is not None
        assert abs(int(at[1]) - time.time()) < 30
        signed = hmac.new(ACCOUNT.webhook_secret.encode(), f"{at[1]}.".encode() + raw, hashlib.sha256).hexdigest()
        assert headers["x-bottlecrm-signature"].endswith(signed)
        assert {name.lower() for name, _ in real["headers"]} <= {*headers, "accept-encoding"}
        ours, theirs = json.loads(raw), json.loads(real["body"])
        assert list(ours) == list(theirs)  # in the same order
        assert list(ours["data"]) == list(theirs["data"])
        assert b": " not in raw


def test_the_signature_is_that_of_the_captured_server() -> None:
    from connector.sandbox.bottlecrm import sign

    secret = captured("api07")["response"]["secret"]
    for path in CAPTURED.glob("wh*.json"):
        real = json.loads(path.read_text())
        given = dict(real["headers"])["X-BottleCRM-Signature"]
        assert sign(secret, int(given[2:].partition(",")[0]), real["body"].encode()) == given


@pytest.mark.parametrize("status", [500, 301, 404])
def test_a_retry_keeps_the_old_body_and_its_numbers(sandbox: Sandbox, receiver: Receiver, status: int) -> None:
    receiver.statuses = [status, 200]
    sandbox.add_hook("bottlecrm", receiver.url, ["lead.created"])
    lead = sandbox.create_lead()
    sandbox.set_owner(lead, ANA)
    until(lambda: len(receiver.got) == 2)
    (first, body), (again, later) = receiver.got
    assert body == later  # still nobody's
    assert first["x-bottlecrm-delivery"] == again["x-bottlecrm-delivery"]
    assert json.loads(later)["data"]["assigned_to"] == []
