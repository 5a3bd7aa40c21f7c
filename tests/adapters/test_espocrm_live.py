"""EspoCRM in the running service: the secrets that it makes itself, and an address for each topic."""

from __future__ import annotations

from collections.abc import Callable

from adapters.base import HOOK_TOPIC
from connector import tenants
from tests.adapters.test_conformance_live import Live, Make, make_live, send_to
from tests.rig import http_send, until

__all__ = ["make_live"]


def made_by_the_crm(live: Live) -> bytes:
    return ",".join(f"{h.ref}:canary-made-{h.ref}" for h in live.fake.hooks if h.topic == "Lead.create").encode()


def secrets(live: Live) -> list[str]:
    with live.runtime.engine.connect() as conn:
        return live.runtime.secrets(conn, live.tenant)["webhook_secret"]


def test_an_install_keeps_the_secrets_of_the_crm(make_live: Callable[[str], Make]) -> None:
    live = make_live("espocrm")()
    live.free("5001", "5002")
    body, _ = live.tell("5001")
    first = made_by_the_crm(live)
    assert first.decode() in secrets(live)[0]
    assert send_to(live.hook_url, (body, live.kit.sign(body, first))) == 200
    until(lambda: live.held_by("5001") == ["12"], what="an owner")

    tenants.install(live.runtime, live.tenant)
    assert len(secrets(live)) == 2  # nothing new: neither the one that is lived with nor the old one goes
    live.fake.hooks = [h for h in live.fake.hooks if h.topic != "Lead.create"]  # as after a 410, or by hand
    tenants.install(live.runtime, live.tenant)
    second = made_by_the_crm(live)
    assert second != first
    body, _ = live.tell("5002")
    for secret in (first, second):  # what was queued before is still signed with the old one
        assert send_to(live.hook_url, (body, live.kit.sign(body, secret))) == 200
    until(lambda: live.held_by("5002") == ["13"], what="an owner")
    live.in_step("5001", "5002")


def test_the_topic_is_the_address_and_not_the_senders(make_live: Callable[[str], Make]) -> None:
    live = make_live("espocrm")()
    live.free("5001")
    body, headers = live.tell("5001")
    signed = {name: value for name, value in headers.items() if name != HOOK_TOPIC}
    for path in ("", "/Lead.nope", "/Contact.create"):
        assert http_send(live.hook_url + path, body, signed).status == 200
    assert http_send(f"{live.hook_url}/Lead.create/more", body, signed).status == 404
    assert [event.state for event in live.events()] == ["ignored"]
    assert live.held_by("5001") == [None]
    assert http_send(f"{live.hook_url}/Lead.create", body, signed).status == 200
    until(lambda: live.held_by("5001") == ["12"], what="an owner")
    # Kept with the delivery, so that a replay of it knows as well.
    kept = "SELECT count(*) FROM deliveries WHERE tenant_id = :t AND CAST(headers AS text) LIKE '%Lead.create%'"
    assert live.one(kept) == 1
