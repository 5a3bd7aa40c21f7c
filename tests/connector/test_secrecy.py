"""Nothing personal and no secret leaves by a side door: logs, answers, alarms, records, whatever goes wrong."""

from __future__ import annotations

import io
import json
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn
from uuid import uuid4

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

import connector.decide
from connector import accept, log, process, tenants
from connector.errors import SettingsError
from connector.log import ALLOWED
from connector.runtime import Runtime
from connector.sandbox import generic
from connector.vault import Vault
from routing import saving
from routing.decide import Bench
from routing.tables import metadata
from tests.rig import ABC, SANDBOXED, Rig, captured_logs, http_send, until

# Of a lead. Any of these anywhere but where a lead's facts and a delivery's body are kept is a leak.
NAME, EMAIL, PHONE, STREET, MESSAGE = "Kanaria", "kanaria@example.com", "3125550142", "9 Kanarien Row", "kanaria-note"
LEAD = {"name": f"{NAME} Moss", "emails": [EMAIL], "phones": [f"+1{PHONE}"], "street": STREET, "background": MESSAGE}
# Secrets of the sandbox's account, by their names there.
ACCOUNT = ("api_key", "system_key", "api_secret", "webhook_secret", "api_token", "hubspot_token", "hubspot_secret")
PERSONAL = ("kanari", PHONE, PHONE[-7:], "555-0142")
RULES = "rules: [{name: web, when: {field: source, equals: Web}, to: {queue: All}}]\n"


def fail(*_: Any, **__: Any) -> NoReturn:
    """A defect of ours whose message holds everything."""
    raise RuntimeError(f"{LEAD} {MESSAGE}")


def fail_in_sql(conn: sa.Connection, *_: Any, **__: Any) -> NoReturn:
    """The same, by the database: its error holds the values of the statement."""
    conn.execute(sa.text("SELECT CAST(:value AS integer)"), {"value": json.dumps(LEAD)})
    raise AssertionError("unreachable")


def through_every_door(rig: Rig, monkeypatch: pytest.MonkeyPatch, logs: io.StringIO) -> Iterator[str]:
    """Send canaries along every path, good and bad; yields what was answered."""

    def post(body: bytes, headers: dict[str, str] | None = None, event: str = "x") -> str:
        answer = rig.post(body, headers, event=event)
        return f"{answer.status} {answer.headers} {answer.body!r}"

    poison = json.dumps(LEAD).encode()
    rig.assign(source="Web", **LEAD)
    rig.assign(**LEAD)  # the same person again
    rig.sandbox.add_inquiry(int(rig.create(**LEAD)), type="Inquiry", message=MESSAGE, source=NAME)
    # Strangers, nonsense and defects at the door.
    yield post(poison, {"Content-Type": "application/json", "User-Agent": NAME, "Referer": MESSAGE})
    yield post(poison)
    yield post(poison[:-1])
    yield post(rig.delivery("1")[:-1] + b', "note": "%s"}' % MESSAGE.encode(), event="y")
    base = rig.hook_url.partition("/hooks/")[0]
    for path in (f"/hooks/{NAME}", f"/{MESSAGE}", "/healthz", "/readyz"):
        answer = http_send(base + path, poison, {}, "GET" if path.endswith("z") else "POST")
        yield f"{answer.headers} {answer.body!r}"
    with monkeypatch.context() as patched:
        patched.setattr(type(rig.tenant.adapter), "parse", fail)
        yield post(poison)
    with monkeypatch.context() as patched:
        patched.setattr(accept, "store_delivery", lambda runtime, *_, **__: fail_in_sql(runtime.engine.connect()))
        yield post(poison)
    # A CRM whose errors repeat what they were told.
    write = "PATCH" if rig.crm in ("bottlecrm", "hubspot") else "PUT"
    read = "POST" if rig.crm == "hubspot" else "GET"  # many at once, by their ids
    for status in (400, 401, 403, 404, 409, 422, 429, 500, 200):
        for method in (read, write):
            raw = {"what": "raw", "status": status, "body": poison.decode(), "times": 1}
            rig.sandbox.set_faults([raw | {"method": method, "path": "people|leads|contacts/"}])
            rig.create(**LEAD)
            until(lambda: rig.due_now() or rig.sandbox.faults()[0]["hits"], what=f"a {method} answered {status}")
    rig.sandbox.clear_faults()
    # Defects in the worker: while it decides, in its SQL, while it writes.
    monkeypatch.setattr(connector.decide, "_FAULT_TRIES", 1)
    for owner, what, how, told in (
        (Bench, "decide", fail, "decision failed"),
        (saving, "save_decisions", fail_in_sql, "decision failed"),
        (type(rig.tenant.adapter), "set_owner", fail, "write-back failed"),
    ):
        before = logs.getvalue().count(told)
        with monkeypatch.context() as patched:
            patched.setattr(owner, what, how)
            rig.create(**LEAD)
            until(lambda b=before, t=told: rig.due_now() or logs.getvalue().count(t) > b, what=f"a fault in {what}")
    rig.sandbox.delete_leads([int(rig.create(**LEAD))])
    last = rig.create(**LEAD)
    until(lambda: rig.due_now() or rig.owner(last), what="the owner of the last lead")
    rig.audit()


def dump(rig: Rig, *, but: tuple[str, ...] = ()) -> dict[str, str]:
    """Every row of the database as text, bytes as hex, by table; without the tables `but`."""
    found = {}
    with rig.runtime.engine.connect() as conn:
        for table in metadata.tables.values():
            if table.name not in but:
                columns = ", ".join(c.name for c in table.columns if (table.name, c.name) != ("events", "payload"))
                rows = conn.execute(sa.text(f"SELECT ({columns})::text FROM {table.name}")).scalars().all()
                found[table.name] = "\n".join(row or "" for row in rows)
    return found


def leaks(text: str, words: tuple[str, ...]) -> list[str]:
    """Which of `words` stand in `text`, in any case, also as hex."""
    low = text.lower()
    return [word for word in words if word.lower() in low or word.encode().hex() in low]


@pytest.mark.parametrize("crm", SANDBOXED)
def test_no_path_and_no_fault_lets_a_person_or_a_secret_out(
    make_rig: Callable[..., Rig], crm: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with captured_logs() as logs:
        rig = make_rig(crm=crm, config=ABC + RULES)
        answers = list(through_every_door(rig, monkeypatch, logs))
        rig.stop_worker()
    said = [json.loads(line) for line in logs.getvalue().splitlines()]
    account = rig.sandbox.account()
    secrets = tuple(account[name] for name in ACCOUNT)
    secrets += (rig.hook_url.rpartition("/")[2], rig.runtime.settings.secret_keys[0])
    words = PERSONAL + secrets

    # It really happened, and where facts and bodies are kept the person is found: a leak would be seen.
    assert {"rejected", "unexpected", "decision failed", "crm call failed", "write-back failed"} <= {
        line["event"] for line in said
    }
    assert leaks(dump(rig)["lead_facts"], (NAME, PHONE)) == [NAME, PHONE]
    assert leaks(dump(rig)["delivery_bodies"], (NAME,)) == [NAME]

    assert leaks(logs.getvalue(), words) == []
    assert {name for line in said for name in line} <= ALLOWED
    printed = capfd.readouterr()
    assert leaks(printed.out + printed.err, words) == []
    for answer in answers:
        assert leaks(answer, words) == [], answer
    kept = dump(rig, but=("lead_facts", "delivery_bodies"))
    assert {name: leaks(text, words) for name, text in kept.items() if leaks(text, words)} == {}
    assert leaks(dump(rig)["delivery_bodies"] + dump(rig)["lead_facts"], secrets) == []
    done = rig.one("SELECT count(*) FROM events WHERE tenant_id = :t AND state = 'done' AND payload IS NOT NULL")
    assert done == 0
    notes = json.dumps([rig.sandbox.lead(int(ref)) for ref, _ in rig.sandbox.owners()])
    assert leaks(str([lead["notes"] for lead in json.loads(notes)]), words) == []


def test_a_librarys_warning_is_told_by_its_name_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with captured_logs() as logs:
        logging.getLogger("waitress").error("Exception while serving %s", "/hooks/kanaria", exc_info=ValueError(NAME))
        logging.getLogger("urllib3.connectionpool").warning("Retrying %s", EMAIL)
    said = [json.loads(line) for line in logs.getvalue().splitlines()]
    assert [(line["event"], line["kind"], line["level"]) for line in said] == [
        ("library warning", "waitress", "error"),
        ("library warning", "urllib3.connectionpool", "warning"),
    ]
    assert leaks(logs.getvalue() + capfd.readouterr().err, PERSONAL) == []


def test_a_thread_that_dies_says_where_and_nothing_more(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # as it was, after this test
    with captured_logs() as logs:
        log.watch_threads()
        dying = threading.Thread(target=fail)
        dying.start()
        dying.join()
    (line,) = map(json.loads, logs.getvalue().splitlines())
    assert (line["event"], line["error"], line["where"].partition(":")[0]) == ("thread died", "RuntimeError", "fail")
    assert leaks(logs.getvalue() + capfd.readouterr().err, PERSONAL) == []


def test_a_field_that_is_not_on_the_list_is_not_logged() -> None:
    with captured_logs() as logs:
        log.get("test").warning("something", tenant="acme", name=NAME, email=EMAIL, body=MESSAGE, url="http://x/t")
    (line,) = map(json.loads, logs.getvalue().splitlines())
    assert line["tenant"] == "acme"
    assert leaks(logs.getvalue(), (*PERSONAL, "http")) == []


# -- secrets at rest --------------------------------------------------------------------------------------------


def test_a_hooks_token_is_kept_hashed_and_sealed_never_as_it_is(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(worker=False)
    token = rig.hook_url.rpartition("/")[2]
    (row,) = rig.rows(sa.text("SELECT * FROM hooks"))
    assert bytes(row.token_hash) == accept.token_hash(token)
    assert token.encode() not in bytes(row.sealed_token)
    assert len(token) >= 43  # 256 bits


def test_a_secret_sealed_for_one_tenant_and_name_opens_for_no_other() -> None:
    vault, ours, theirs = Vault([Fernet.generate_key().decode()]), uuid4(), uuid4()
    sealed = vault.seal(ours, "api_key", MESSAGE)
    assert vault.open(ours, "api_key", sealed) == MESSAGE
    assert MESSAGE.encode() not in sealed
    for tenant, name, value in (
        (theirs, "api_key", sealed),
        (ours, "webhook_secret", sealed),
        (ours, "api_key", sealed[:-2]),
        (ours, "api_key", b""),
        (ours, "api_key", sealed.decode().swapcase().encode()),
    ):
        with pytest.raises(SettingsError) as caught:
            vault.open(tenant, name, value)
        assert MESSAGE not in "".join(traceback.format_exception(caught.value))


def with_keys(rig: Rig, *keys: str) -> Runtime:
    """Another process on the same database, with these sealing keys."""
    return Runtime(replace(rig.runtime.settings, secret_keys=keys), rig.runtime.engine)


def test_sealing_keys_rotate_without_a_pause(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(worker=False)
    (old,), new = rig.runtime.settings.secret_keys, Fernet.generate_key().decode()
    both, only_new = with_keys(rig, new, old), with_keys(rig, new)
    url = rig.hook_url

    with pytest.raises(SettingsError) as caught:
        process.run(only_new, web=True, worker=True)  # before anything was sealed anew
    assert "acme: secret '" in str(caught.value)
    assert "put the key that sealed it back into TURNLOCK_SECRET_KEYS" in str(caught.value)
    with pytest.raises(SettingsError, match="acme: secret"):
        tenants.reseal(only_new)

    tenants.check_keys(both)
    assert tenants.reseal(both) == 3  # two secrets of the CRM, and the hook's token
    assert tenants.reseal(both) == 0
    tenants.check_keys(only_new)
    with only_new.engine.connect() as conn:
        assert tenants.hook_url(only_new, conn, rig.tenant) == url
        account = rig.sandbox.account()
        names = ("api_key", "system_key")
        assert only_new.secrets(conn, rig.tenant) == {name: [account[name]] for name in names}
    with pytest.raises(SettingsError):
        tenants.check_keys(with_keys(rig, old))


def test_a_removed_tenants_secrets_are_gone_and_hold_no_start_up(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(worker=False)
    tenants.uninstall(rig.runtime, rig.tenant)
    assert rig.one("SELECT count(*) FROM secrets") == 0
    tenants.check_keys(with_keys(rig, Fernet.generate_key().decode()))


# -- two live secrets -------------------------------------------------------------------------------------------

SECRETS = [f"whsec_{letter * 32}" for letter in "ABCD"]


def accepted(rig: Rig, secret: str) -> bool:
    body = rig.delivery("1")
    status = rig.post(body, generic.signed_headers(secret, f"evt_{secret[-1]}", body)).status
    assert status in (200, 401)
    return status == 200


def test_the_old_secret_of_a_hook_lives_a_while_beside_the_new_one(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic", worker=False)
    first = rig.sandbox.account()["webhook_secret"]
    a, b, c, _ = SECRETS
    assert [accepted(rig, s) for s in (first, a)] == [True, False]
    tenants.set_secret(rig.runtime, rig.tenant, "webhook_secret", a)
    assert [accepted(rig, s) for s in (first, a)] == [True, True]
    tenants.set_secret(rig.runtime, rig.tenant, "webhook_secret", b)  # at most two are live
    assert [accepted(rig, s) for s in (first, a, b)] == [False, True, True]
    rig.sql("UPDATE secrets SET retires_at = now() - interval '1 s' WHERE tenant_id = :t AND retires_at IS NOT NULL")
    rig.runtime.hooks.clear()  # a day is over
    assert [accepted(rig, s) for s in (a, b)] == [False, True]
    tenants.set_secret(rig.runtime, rig.tenant, "webhook_secret", c, at_once=True)
    assert [accepted(rig, s) for s in (b, c)] == [False, True]


def test_a_secret_that_another_process_ended_is_refused_within_moments(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(crm="generic", worker=False)
    old, new = rig.sandbox.account()["webhook_secret"], SECRETS[3]
    assert accepted(rig, old)
    elsewhere = with_keys(rig, *rig.runtime.settings.secret_keys)
    tenants.set_secret(elsewhere, rig.tenant, "webhook_secret", new, at_once=True)
    assert accepted(rig, new)  # never refused, however lately the hook was read
    until(lambda: not accepted(rig, old), 5, "the end of the old secret")
