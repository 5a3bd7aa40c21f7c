"""The sandbox's deliveries, logs, server and process."""

from __future__ import annotations

import base64
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from standardwebhooks import Webhook

from connector.sandbox import Remote, Sandbox
from connector.sandbox.fub_hooks import sign as fub_sign
from connector.sandbox.people import invent
from connector.sandbox.server import Handler
from tests.connector import sandbox_rig
from tests.connector.sandbox_rig import ACCOUNT, ANA, BEN, POND, Api, Receiver, put

api, receiver, sandbox = sandbox_rig.api, sandbox_rig.receiver, sandbox_rig.sandbox


def test_a_delivery_is_retried_with_the_same_id(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    receiver.statuses = [500, 302, 200]
    api.subscribe(receiver, "peopleCreated")
    sandbox.create_lead()
    assert sandbox.wait_idle()
    assert len({body["eventId"] for body in receiver.bodies()}) == 1
    assert [row["status"] for row in sandbox.deliveries()[0]["attempts"]] == [500, 302, 200]
    assert sandbox.deliveries()[0]["state"] == "delivered"
    # 60 s and 300 s, times the scale.
    assert receiver.at[1] - receiver.at[0] >= 0.012
    assert receiver.at[2] - receiver.at[1] >= 0.060


def test_a_dead_receiver_exhausts_the_retries(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    sandbox.configure(retry_scale=0.00001)
    api.subscribe(receiver, "peopleCreated")
    receiver.close()
    sandbox.create_lead()
    assert sandbox.wait_idle()
    delivery = sandbox.deliveries()[0]
    assert (delivery["state"], len(delivery["attempts"])) == ("failed", 20)
    assert {row["error"] for row in delivery["attempts"]} == {"ConnectionRefusedError"}


@pytest.mark.parametrize("status", [406, 410])
def test_fub_406_and_410_delete_the_hook(api: Api, sandbox: Sandbox, receiver: Receiver, status: int) -> None:
    receiver.statuses = [status]
    api.subscribe(receiver, "peopleCreated")
    sandbox.create_lead()
    assert sandbox.wait_idle()
    assert sandbox.hooks() == []
    sandbox.create_lead()
    assert sandbox.wait_idle()
    assert len(receiver.got) == 1


def test_a_slow_receiver_is_given_up_and_strangers_are_never_called(
    api: Api, sandbox: Sandbox, receiver: Receiver
) -> None:
    sandbox.configure(timeout=0.1, retry_scale=1.0)
    receiver.wait = 0.4
    api.subscribe(receiver, "peopleCreated")
    api.fub("POST", "/webhooks", json={"event": "peopleCreated", "url": "https://hooks.example.com/"})
    sandbox.create_lead()
    assert sandbox.wait_idle(retries=False)
    errors = [row["error"] for item in sandbox.deliveries() for row in item["attempts"]]
    assert sorted(errors) == ["TimeoutError", "not_loopback"]
    assert not sandbox.wait_idle(timeout=0.05)  # a retry still waits


def test_pause_resume_and_one_at_a_time(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    api.subscribe(receiver, "peopleCreated")
    sandbox.configure(concurrency=1)
    sandbox.pause_dispatch()
    leads = [sandbox.create_lead() for _ in range(12)]
    assert not sandbox.wait_idle(timeout=0.1)
    assert receiver.got == []
    sandbox.resume_dispatch()
    assert sandbox.wait_idle()
    assert [body["resourceIds"] for body in receiver.bodies()] == [[lead] for lead in leads]
    assert receiver.most == 1


def test_duplicates_come_at_once(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    receiver.wait = 0.1
    api.subscribe(receiver, "peopleCreated")
    sandbox.webhook_faults(copies=5)
    sandbox.create_lead()
    assert sandbox.wait_idle()
    assert len(receiver.got) == 5
    assert len({body for _, body in receiver.got}) == 1
    assert receiver.most == 5
    assert sandbox.deliveries()[0]["state"] == "delivered"


def test_reorder_delay_and_drop(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    api.subscribe(receiver, "peopleCreated")
    sandbox.webhook_faults(reorder=0.3)
    leads = [sandbox.create_lead() for _ in range(20)]
    assert sandbox.wait_idle()
    order = [body["resourceIds"][0] for body in receiver.bodies()]
    assert order != leads
    assert sorted(order) == leads
    sandbox.webhook_faults(delay=0.2)
    started = time.monotonic()
    sandbox.create_lead()
    assert sandbox.wait_idle()
    assert receiver.at[-1] - started >= 0.2
    sandbox.webhook_faults(drop=0.5)
    for _ in range(40):
        sandbox.create_lead()
    assert sandbox.wait_idle()
    states = [item["state"] for item in sandbox.deliveries()[-40:]]
    assert 8 <= states.count("dropped") <= 32
    assert states.count("dropped") + states.count("delivered") == 40
    assert len(receiver.got) == 21 + states.count("delivered")
    with pytest.raises(ValueError, match="no fault lose"):
        sandbox.webhook_faults(lose=1)


def test_the_echo_can_come_before_the_answer(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    api.subscribe(receiver, "peopleUpdated")
    receiver.wait = 0.5
    lead = sandbox.create_lead()
    api.fub("PUT", f"/people/{lead}", json={"assignedUserId": ANA})
    assert sandbox.deliveries()[-1]["state"] == "waiting"  # answered before the receiver has finished
    assert sandbox.wait_idle()
    sandbox.webhook_faults(echo_first=True)
    api.fub("PUT", f"/people/{lead}", json={"assignedUserId": BEN})
    assert sandbox.deliveries()[-1]["state"] == "delivered"
    assert len(receiver.got) == 2


def test_a_past_delivery_again_and_any_body_at_all(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    (hook,) = api.subscribe(receiver, "peopleCreated")
    generic = int(api.generic("POST", "/hooks", {"url": receiver.url, "topics": ["lead.updated"]}).json()["id"])
    sandbox.create_lead()
    assert sandbox.wait_idle()
    sandbox.resend(sandbox.deliveries()[0]["id"], copies=2)
    assert sandbox.wait_idle()
    assert receiver.got[1] == receiver.got[0] == receiver.got[2]
    sandbox.send_raw(hook, "{not json")
    assert sandbox.wait_idle()
    headers, raw = receiver.got[3]
    assert raw == b"{not json"
    assert headers["fub-signature"] == fub_sign(raw, ACCOUNT.system_key)
    sandbox.send_raw(hook, "base64:" + base64.b64encode(b"\x00\xff").decode(), signed=False, headers={"X-Odd": "1"})
    assert sandbox.wait_idle()
    headers, raw = receiver.got[4]
    assert (raw, headers["x-odd"], "fub-signature" in headers) == (b"\x00\xff", "1", False)
    sandbox.send_raw(generic, b'{"a":1}')
    assert sandbox.wait_idle()
    Webhook(ACCOUNT.webhook_secret).verify(receiver.got[5][1], receiver.got[5][0])
    with pytest.raises(ValueError, match="no hook 99"):
        sandbox.send_raw(99, "")


def test_logs_counts_and_settings(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()
    put(api, lead)
    put(api, lead)
    sandbox.set_owner(lead, BEN)
    sandbox.clear_owner(lead, POND)
    log = sandbox.owner_log()
    assert [(row["old"], row["new"], row["by"]) for row in log] == [
        (None, ANA, "api"),
        (ANA, BEN, "human"),
        (BEN, None, "human"),
    ]
    assert [row["seq"] for row in log] == sorted(row["seq"] for row in log)
    assert sandbox.owner_log(since=log[1]["seq"]) == log[2:]
    assert [row["changed"] for row in sandbox.write_log()] == [True, False]
    call = sandbox.call_log()[0]
    assert (call["face"], call["method"], call["path"], call["status"]) == (
        "followupboss",
        "PUT",
        f"/v1/people/{lead}",
        200,
    )
    assert "12" not in json.dumps([call["query"], call["faults"]])
    assert sandbox.counts()["owner_changes"] == 3
    assert sandbox.owners() == [[lead, None]]
    sandbox.clear_logs()
    assert (sandbox.owner_log(), sandbox.call_log()) == ([], [])
    for bad in ({"concurrency": "2"}, {"limits": 1}, {"colour": 1}, {"fub_inactive": "x"}, {"check": 1}):
        with pytest.raises(ValueError, match="settings"):
            sandbox.configure(**bad)
    with pytest.raises(ValueError, match="no agent 99"):
        sandbox.create_leads(2, owner=99)
    with pytest.raises(ValueError, match="no field colour"):
        sandbox.create_lead(colour="red")
    assert sandbox.counts()["leads"] == 1


def test_invented_people_are_repeatable_apart_and_fictitious() -> None:
    people = [invent(3, number) for number in range(500)]
    assert people == [invent(3, number) for number in range(500)]
    assert people != [invent(4, number) for number in range(500)]
    assert len({row["emails"][0] for row in people}) == len({row["phones"][0] for row in people}) == 500
    assert all(row["emails"][0].endswith("@example.com") and " 555-01" in row["phones"][0] for row in people)


def test_keep_alive_is_fast_and_one_connection(api: Api, sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()
    took = []
    for agent in (ANA, BEN) * 100:
        started = time.perf_counter()
        assert put(api, lead, agent).status_code == 200
        took.append(time.perf_counter() - started)
    assert statistics.median(took) < 0.02  # a stall of Nagle's algorithm against a delayed ACK is 0.04 s each
    pools = api.session.get_adapter(sandbox.url).poolmanager.pools
    assert [pools[key].num_connections for key in list(pools.keys())] == [1]


def test_many_clients_at_once(sandbox: Sandbox) -> None:
    leads = sandbox.create_leads(200)

    def work(mine: list[int]) -> int:
        client = Api(sandbox)
        done = sum(put(client, lead).status_code == 200 for lead in mine)
        client.session.close()
        return done

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(work, [leads[place::16] for place in range(16)])) == 200
    assert len(sandbox.owner_log()) == 200
    assert len({row["seq"] for row in sandbox.owner_log()}) == 200


def test_bodies_that_are_not_whole_change_nothing(sandbox: Sandbox) -> None:
    lead = sandbox.create_lead()
    auth = base64.b64encode(f"{ACCOUNT.api_key}:".encode()).decode()
    head = f"PUT /v1/people/{lead} HTTP/1.1\r\nHost: x\r\nAuthorization: Basic {auth}\r\n"
    with socket.create_connection(("127.0.0.1", sandbox.port), 5) as raw:
        raw.sendall(f'{head}Content-Length: 500\r\n\r\n{{"assignedUserId": 12}}'.encode())
        raw.shutdown(socket.SHUT_WR)
        assert raw.recv(1000) == b""
    with socket.create_connection(("127.0.0.1", sandbox.port), 5) as raw:
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        assert raw.recv(1000).startswith(b"HTTP/1.1 411 ")
    assert (sandbox.lead(lead)["owner"], sandbox.call_log()) == (None, [])


def test_hooks_by_hand(api: Api, sandbox: Sandbox, receiver: Receiver) -> None:
    sandbox.configure(concurrency=1)
    assert len(sandbox.add_hook("followupboss", receiver.url)) == 4
    assert len(sandbox.add_hook("followupboss", receiver.url, ["peopleStageUpdated"])) == 1
    (hook,) = sandbox.add_hook("generic", receiver.url)
    lead = sandbox.create_lead(stage="Lead")
    assert sandbox.wait_idle()
    sandbox.change_hook(hook, active=False)
    sandbox.edit_leads([lead], stage="Nurture")
    assert sandbox.wait_idle()
    told = [body.get("event") or body["type"] for body in receiver.bodies()]
    assert told == ["peopleCreated", "lead.created", "peopleUpdated", "peopleStageUpdated"]
    assert receiver.bodies()[-1]["data"] == {"stage": "Nurture"}
    with pytest.raises(ValueError, match="no face 'x'"):
        sandbox.add_hook("x", receiver.url)


def test_only_this_machine_gives_orders(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = property(lambda self: ("203.0.113.9", 4711), lambda self, value: None)
    assert requests.post(f"{sandbox.url}/_sandbox/counts", timeout=5).status_code == 200
    monkeypatch.setattr(Handler, "client_address", stranger, raising=False)
    assert requests.post(f"{sandbox.url}/_sandbox/counts", timeout=5).status_code == 403


def test_a_process_of_its_own() -> None:
    started = time.monotonic()
    command = [sys.executable, "-m", "connector.sandbox", "--seed", "5", "--limits", "on", "--retry-scale", "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert time.monotonic() - started < 5
        assert ready["pid"] == process.pid
        remote = Remote(ready["url"])
        assert remote.configure(batch=7)["limits"] is True
        leads = remote.create_leads(count=2, source="Zillow")
        assert remote.lead(lead=leads[1])["emails"] == invent(5, 1)["emails"]
        account = remote.account()
        answer = requests.get(account["bases"]["followupboss"] + "/identity", auth=(account["api_key"], ""), timeout=5)
        assert answer.json()["account"]["id"] == ACCOUNT.id
        assert [row["status"] for row in remote.call_log()] == [200]
        with pytest.raises(ValueError, match="no order 'stop'"):
            remote.stop()
        with pytest.raises(ValueError, match="no lead 1"):
            remote.set_owner(lead=1, agent=ANA)
        assert requests.get(ready["url"] + "/_sandbox/counts", timeout=5).status_code == 405
        assert requests.get(ready["url"] + "/elsewhere", timeout=5).status_code == 404
        # It must end cleanly even while a call is held.
        remote.fault(what="hold")
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(requests.get, account["bases"]["followupboss"] + "/users", timeout=10)
            assert remote.wait_held()
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0
            with pytest.raises(requests.ConnectionError):
                held.result(5)


def test_sigint_ends_it_too() -> None:
    command = [sys.executable, "-m", "connector.sandbox"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 0
