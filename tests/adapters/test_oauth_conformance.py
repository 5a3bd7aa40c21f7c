"""What every adapter whose CRM has apps inherits: consent, renewal and return of a grant, over a real socket."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from adapters import oauth, registry
from adapters.client import Client
from adapters.oauth import App, DeadGrant, OAuth, Tokens
from adapters.outcome import CrmError, Outcome
from tests.adapters.loopback import Received, Reply, Server, reset
from tests.adapters.sockets import client

APP = App("app-1", "canary-app-secret", "https://turnlock.example.com/oauth/callback")
REFRESH = "canary-refresh-1"
SPECS = {name: spec for name in registry.names() if (spec := registry.adapter(name).oauth) is not None}
#: A token answer with whatever one of these CRMs needs of it.
ANSWER = {
    "access_token": "canary-access", "refresh_token": "canary-refresh-2", "token_type": "Bearer", "expires_in": 1800,
    "hub_id": 62515, "api_domain": "https://acme.example.com", "instance_url": "https://acme.example.com",
    "id": "https://login.salesforce.com/id/00D7Q000000Trnk/0057Q000000Ntgr",
}  # fmt: skip


@pytest.fixture(params=sorted(SPECS))
def spec(request: pytest.FixtureRequest) -> OAuth:
    return SPECS[request.param]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(lambda _: Reply(body=ANSWER)).running() as made:
        yield made


def calls(spec: OAuth, crm: Client) -> dict[str, Callable[[], Tokens]]:
    """All ways to a token."""
    verifier = "v" * 64 if spec.pkce else None
    ways: dict[str, Callable[[], Tokens]] = {
        "redeem": lambda: oauth.redeem(crm, spec, APP, "canary-code", verifier),
        "renew": lambda: oauth.renew(crm, spec, APP, REFRESH),
    }
    if spec.client_credentials:
        ways["fetch"] = lambda: oauth.fetch(crm, spec, APP)
    return ways


def test_some_adapters_have_apps() -> None:
    assert {"hubspot", "pipedrive", "salesforce"} <= set(SPECS)


def test_a_consent_is_asked_for_over_https_with_state_and_without_a_secret(spec: OAuth) -> None:
    verifier = "v" * 64 if spec.pkce else None
    url = oauth.consent_url(spec, APP, "state-1", verifier)
    asked = dict(parse_qsl(urlsplit(url).query))
    assert url.startswith("https://")
    assert (asked["state"], asked["client_id"], asked["redirect_uri"]) == ("state-1", "app-1", APP.redirect_uri)
    assert asked.get("code_challenge_method") == ("S256" if spec.pkce else None)
    assert "v" * 64 not in url
    assert "canary" not in url
    assert all(address.startswith("https://") for address in (spec.token_url, spec.revoke_url or "https://"))


def proves(asked: Received) -> bool:
    """Whether the app proved itself, in one of the two ways, and never in the address."""
    form = dict(parse_qsl(asked.body.decode()))
    pair = base64.b64encode(b"app-1:canary-app-secret").decode()
    header = asked.headers.get("authorization") == f"Basic {pair}"
    return (
        header or (form.get("client_id"), form.get("client_secret")) == ("app-1", APP.client_secret)
    ) and not asked.query


def test_a_token_is_asked_for_once_with_the_apps_proof(spec: OAuth, server: Server) -> None:
    with client(server.url) as crm:
        for way, call in calls(spec, crm).items():
            server.received.clear()
            tokens = call()
            assert (tokens.access, tokens.lives) == ("canary-access", 1800.0)
            assert "canary" not in repr(tokens), way
            (asked,) = server.received
            assert asked.path == urlsplit(spec.token_url).path
            assert proves(asked), way
        server.received.clear()
        oauth.revoke(crm, spec, APP, REFRESH)
        assert [proves(asked) or not spec.basic for asked in server.received] == [True] * (spec.revoke_url is not None)


@pytest.mark.parametrize(
    ("reply", "outcomes"),
    [
        (Reply(400, {"error": "invalid_grant", "error_description": "canary-person"}), {Outcome.REAUTHORISE}),
        (Reply(401, {"error": "invalid_grant"}), {Outcome.REAUTHORISE}),
        (Reply(401, {"error": "invalid_client"}), {Outcome.FORBIDDEN}),
        (Reply(400, {"error": "unauthorized_client"}), {Outcome.FORBIDDEN}),
        (Reply(429, {}, {"Retry-After": "7"}), {Outcome.WAIT}),
        (Reply(503), {Outcome.WAIT}),
        (Reply(500, b"<html>canary-person"), {Outcome.UNKNOWN}),
        (Reply(302, headers={"Location": "https://other.example.com/"}), {Outcome.REDIRECTED}),
        (reset(), {Outcome.UNKNOWN}),
        *((Reply(body=body), {Outcome.ANSWER_UNREADABLE, Outcome.UNKNOWN}) for body in (
            None, b"", b"<html>", [], "x", {}, {**ANSWER, "access_token": None}, {**ANSWER, "access_token": 7},
        )),
    ],
)  # fmt: skip
def test_what_comes_back_instead_is_told_apart_and_tells_nothing(
    spec: OAuth, server: Server, reply: Reply, outcomes: set[Outcome]
) -> None:
    server.handle = lambda _: reply
    with client(server.url) as crm:
        for way, call in calls(spec, crm).items():
            server.received.clear()
            with pytest.raises(CrmError) as caught:
                call()
            error = caught.value
            assert error.outcome in outcomes, way
            over = isinstance(reply.body, dict) and reply.body.get("error") == "invalid_grant"
            assert isinstance(error, DeadGrant) == over, way
            assert len(server.received) == 1, way  # a refresh token that was sent is never sent again by itself
            told = f"{error} {error!r} {error.text} {error.args} {error.__cause__!r} {error.__context__!r}"
            assert "canary" not in told, way


def test_the_suite_fails_one_who_takes_every_refusal_for_the_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oauth, "_said", lambda data: "invalid_grant")
    with pytest.raises(AssertionError):
        test_what_comes_back_instead_is_told_apart_and_tells_nothing(
            SPECS["salesforce"], server, Reply(503), {Outcome.WAIT}
        )


def test_the_suite_fails_one_who_shows_the_secret_in_the_address(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_the_query(crm: Client, path: str, *, data: Any, headers: Any) -> Any:
        return crm.request("POST", path, params=data, headers=headers)

    monkeypatch.setattr(Client, "post", in_the_query)
    with pytest.raises(AssertionError):
        test_a_token_is_asked_for_once_with_the_apps_proof(SPECS["hubspot"], server)


def test_an_unusual_lifetime_is_bounded(spec: OAuth, server: Server) -> None:
    found = []
    with client(server.url) as crm:
        for said in ("3599", 0, -5, 10**9, None, "soon"):
            server.handle = lambda _, s=said: Reply(body=json.loads(json.dumps({**ANSWER, "expires_in": s})))
            found.append(oauth.renew(crm, spec, APP, REFRESH).lives)
    assert found == [3599.0, 1.0, 1.0, 86400.0, oauth.LIFETIME, oauth.LIFETIME]
