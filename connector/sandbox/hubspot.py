"""The HubSpot face under ``/hubspot``: contacts, owners, notes, tasks, search and OAuth, as far as a router meets them.

Source: https://developers.hubspot.com/docs (webhooks guide, using-object-apis, search-the-crm, owners guide, notes
guide, manage-oauth-tokens, error-handling). Deliveries are arrays of at most 100 elements, signed by version 3 with the
hook's own address; an owner write echoes only a few properties. A private app and an OAuth app stand on the account.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import unescape
from typing import Any
from urllib.parse import parse_qsl, urlencode

from connector.sandbox import hubspot_search
from connector.sandbox.deliver import Delivery
from connector.sandbox.exchange import Answer, ApiError, Request, Routes
from connector.sandbox.hubspot_app import AppHooks
from connector.sandbox.limits import Windows
from connector.sandbox.state import Agent, Change, Hook, Lead, State

FACE = "hubspot"
TOPICS = {
    "created": "contact.creation",
    "owner": "contact.propertyChange",
    "stage": "contact.propertyChange",
    "deleted": "contact.deletion",
    "merged": "contact.merge",
}
_PROPERTIES = {"owner": "hubspot_owner_id", "stage": "lifecyclestage"}
RETRIES = (60, 300, 900, 1800, 3600, 7200, 10800, 14400, 21600, 21600)  # up to 10 times in 24 hours, spread at random
BATCH = 100
SCOPES = ("crm.objects.contacts.read", "crm.objects.contacts.write", "crm.objects.owners.read")
_WINDOW = 1.0  # seconds, of the limit on searches
_SEARCHES = 5


def sign(secret: str, url: str, stamp: str, body: bytes) -> str:
    """The value of ``X-HubSpot-Signature-v3`` for a POST to `url`, which needs no decoding."""
    signed = f"POST{url}".encode() + body + stamp.encode()
    return base64.b64encode(hmac.new(secret.encode(), signed, hashlib.sha256).digest()).decode()


def signed_headers(secret: str, url: str, body: bytes) -> dict[str, str]:
    """Headers of an attempt made now."""
    stamp = str(int(time.time() * 1000))
    return {
        "Content-Type": "application/json",
        "User-Agent": "HubSpot Connect 2.0 (http://dev.hubspot.com/)",
        "X-HubSpot-Request-Timestamp": stamp,
        "X-HubSpot-Signature-v3": sign(secret, url, stamp, body),
    }


def element(portal: int, app: int, topic: str, lead: int, number: int, **more: Any) -> dict[str, Any]:
    """One element of a delivery."""
    return {
        "appId": app,
        "eventId": number,
        "subscriptionId": 3_000_000 + len(topic),
        "portalId": portal,
        "occurredAt": int(time.time() * 1000),
        "subscriptionType": topic,
        "attemptNumber": 0,
        "objectId": lead,
        **more,
    }


class HubSpot:
    """One request in, one answer out. The caller holds the state's transaction."""

    name = FACE
    prefix = "/hubspot"

    def __init__(self, state: State, base: Callable[[], str]) -> None:
        self._state = state
        self._base = base
        self._windows = Windows()
        self._app = AppHooks(state, FACE)
        # Access tokens of the OAuth app and when each ends (monotonic); codes with redirect_uri and code challenge.
        self._tokens: dict[str, float] = {}
        self._codes: dict[str, tuple[str, str]] = {}
        self._open = Routes(
            ("GET", "/oauth/authorize", self._authorize),
            ("POST", "/oauth/v3/token", self._token),
            ("POST", "/oauth/v3/token/revoke", self._revoke),
            ("POST", "/oauth/v2/private-apps/get/access-token-info", self._token_info),
        )
        contacts = "/crm/v3/objects/contacts"
        self._routes = Routes(
            ("GET", "/account-info/v3/details", self._details),
            ("GET", contacts, self._list),
            ("POST", f"{contacts}/batch/read", self._read),
            ("POST", f"{contacts}/search", self._search),
            ("PATCH", f"{contacts}/([0-9]{{1,18}})", self._change),
            ("DELETE", f"{contacts}/([0-9]{{1,18}})", self._delete),
            ("POST", contacts, self._create),
            ("GET", r"/crm/v4/objects/contacts/([0-9]{1,18})/associations/(notes|tasks)", self._told_ids),
            ("POST", "/crm/v3/objects/notes", self._add_note),
            ("POST", "/crm/v3/objects/tasks", self._add_task),
            ("POST", "/crm/v3/objects/(notes|tasks)/batch/read", self._read_told),
            ("GET", "/crm/v3/owners", self._owners),
            ("GET", r"/crm/v3/owners/([^/]+)", self._owner),
        )

    def error(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> Answer:
        """An error in this face's form."""
        category = {401: "INVALID_AUTHENTICATION", 404: "OBJECT_NOT_FOUND", 429: "RATE_LIMITS"}.get(status)
        body = {"status": "error", "message": text, "correlationId": "9c5760c4-2c71-4059-897d-cf20a1ce1523"}
        return Answer(status, body | {"category": category or "VALIDATION_ERROR"}, dict(headers or {}))

    def answer(self, request: Request) -> Answer:
        """Serve one request."""
        try:
            if request.path.startswith("/oauth/"):
                return self._open.serve(request)
            if request.path.startswith("/webhooks/"):
                return self._app.answer(request)
            if not self._known(request.headers.get("authorization", "").removeprefix("Bearer ")):
                return self.error(401, "Authentication credentials not found.")
            settings, now, told = self._state.settings, time.monotonic(), dict[str, str]()
            search = request.path.endswith("/search")  # counted apart, and silent about it
            if settings.limits and search and self._windows.take("search", _SEARCHES, _WINDOW, now)[1]:
                return self._limited("SECONDLY")
            if settings.limits and not search:
                left, wait = self._windows.take("all", settings.limit_hubspot, settings.rate_window, now)
                if wait:
                    return self._limited("TEN_SECONDLY_ROLLING")
                said = {"Max": settings.limit_hubspot, "Remaining": left}
                told = {f"X-HubSpot-RateLimit-{name}": str(value) for name, value in said.items()}
            answer = self._routes.serve(request)
            answer.headers = {**told, **answer.headers}
            return answer
        except ApiError as error:
            return self.error(error.status, error.text, error.headers)

    def _limited(self, policy: str) -> Answer:
        answer = self.error(429, f"You have reached your {policy.lower()} limit.")
        answer.body |= {"errorType": "RATE_LIMIT", "policyName": policy}
        return answer

    def _known(self, token: str) -> bool:
        if hmac.compare_digest(token.encode("utf-8", "replace"), self._state.account.hubspot_token.encode()):
            return True
        return self._tokens.get(token, 0.0) > time.monotonic()

    # -- deliveries ---------------------------------------------------------------------------------------
    def publish(self, changes: Sequence[Change]) -> list[Delivery]:
        """One element per change that is subscribed, at most 100 in a delivery, in the order of the changes."""
        made = []
        for hook in [h for h in self._state.hooks.values() if h.face == FACE and h.active]:
            told = [(topic, lead, item) for change in changes for topic, lead, item in self._elements(change)]
            told = [
                (topic, lead, item)
                for topic, lead, item in told
                if topic in hook.topics or f"{topic}:{item.get('propertyName')}" in hook.topics
            ]
            for start in range(0, len(told), min(self._state.settings.batch, BATCH)):
                made.append(self._delivery(hook, told[start : start + min(self._state.settings.batch, BATCH)]))
        return made

    def _elements(self, change: Change) -> list[tuple[str, int, dict[str, Any]]]:
        account, lead = self._state.account, change.lead
        source = {"changeSource": "CRM_UI", "sourceId": "userId:882761034"}
        if change.by == "api":
            source = {"changeSource": "INTEGRATION", "sourceId": str(account.hubspot_app)}
        kinds: list[tuple[str, dict[str, Any]]] = []
        if change.kind == "created":
            kinds.append(("created", {"changeFlag": "CREATED"}))
        elif change.kind == "deleted":
            kinds.append(("deleted", {"changeFlag": "DELETED"}))
        elif change.kind == "merged":
            *_, primary, lost = lead.former
            merged = {"primaryObjectId": primary, "mergedObjectIds": [lost], "newObjectId": lead.id}
            kinds.append(("merged", {"changeFlag": "MERGED", **merged}))
        elif change.kind == "updated":
            owner = "" if lead.owner is None else str(lead.owner)
            values = {"owner": owner if change.owner_changed else None, "stage": change.stage}
            kinds += [
                (kind, {"propertyName": _PROPERTIES[kind], "propertyValue": value})
                for kind, value in values.items()
                if value is not None
            ]
        return [
            (
                TOPICS[kind],
                lead.id,
                element(
                    account.hubspot_portal,
                    account.hubspot_app,
                    TOPICS[kind],
                    lead.id,
                    self._state.number("hubspot_event"),
                    **source,
                    **more,
                ),
            )
            for kind, more in kinds
        ]

    def _delivery(self, hook: Hook, told: Sequence[tuple[str, int, dict[str, Any]]]) -> Delivery:
        secret = self._state.account.hubspot_secret
        return Delivery(
            id=self._state.number("delivery"),
            hook=hook,
            topic=told[0][0],
            leads=[lead for _, lead, _ in told],
            message_id=str(told[0][2]["eventId"]),
            body=json.dumps([item for *_, item in told], separators=(",", ":")).encode(),
            sign=lambda raw: signed_headers(secret, hook.url, raw),
            retries=RETRIES,
        )

    # -- OAuth --------------------------------------------------------------------------------------------
    def _authorize(self, request: Request, match: re.Match[str]) -> Answer:
        """The account's admin agrees at once: back to the app with a code."""
        query, account = request.query, self._state.account
        if query.get("client_id") != account.hubspot_client or not query.get("redirect_uri") or not query.get("scope"):
            raise ApiError(400, "client_id, redirect_uri or scope is wrong.")
        code = f"code-{self._state.number('code')}"
        self._codes[code] = query["redirect_uri"], query.get("code_challenge", "")
        back = urlencode({"code": code, "state": query.get("state", "")})
        return Answer(302, None, {"Location": f"{query['redirect_uri']}?{back}"})

    def _token(self, request: Request, match: re.Match[str]) -> Answer:
        account, form = self._state.account, dict(parse_qsl(request.body.decode("utf-8", "replace")))
        if (form.get("client_id"), form.get("client_secret")) != (account.hubspot_client, account.hubspot_secret):
            return Answer(400, {"error": "invalid_client", "status": "BAD_CLIENT_ID", "message": "missing or invalid"})
        if form.get("grant_type") == "authorization_code":
            digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
            proof = base64.urlsafe_b64encode(digest).decode().rstrip("=") if "code_verifier" in form else ""
            good = self._codes.pop(form.get("code", ""), None) == (form.get("redirect_uri"), proof)
            self._state.settings.hubspot_revoked &= not good
        else:
            good = form.get("refresh_token") == account.hubspot_refresh and not self._state.settings.hubspot_revoked
        if not good:
            text = "refresh token is invalid, expired or revoked"
            return Answer(
                400,
                {"error": "invalid_grant", "error_description": text, "status": "BAD_REFRESH_TOKEN", "message": text},
            )
        token, lives = f"CK-sandbox-{self._state.number('token')}", self._state.settings.hubspot_token_lives
        self._tokens[token] = time.monotonic() + lives
        return Answer(
            200,
            {
                "token_type": "bearer",
                "access_token": token,
                "refresh_token": account.hubspot_refresh,
                "hub_id": account.hubspot_portal,
                "scopes": ["oauth", *SCOPES],
                "expires_in": int(lives),
                "token_use": "access_token",
            },
        )

    def _revoke(self, request: Request, match: re.Match[str]) -> Answer:
        """The app's own grant ends, until the account's admin agrees anew."""
        account, form = self._state.account, dict(parse_qsl(request.body.decode("utf-8", "replace")))
        if (form.get("client_id"), form.get("client_secret")) != (account.hubspot_client, account.hubspot_secret):
            raise ApiError(400, "The app is not known.")
        if (form.get("token"), form.get("token_type_hint")) != (account.hubspot_refresh, "refresh_token"):
            raise ApiError(400, "The token is not known.")
        self._state.settings.hubspot_revoked = True
        self._tokens.clear()
        return Answer(200, {})

    def _token_info(self, request: Request, match: re.Match[str]) -> Answer:
        """What the token of the private app may do. Of other tokens nothing is told."""
        account = self._state.account
        if request.json(400).get("tokenKey") != account.hubspot_token:
            raise ApiError(400, "The token is not that of a private app.")
        about = {"userId": 882761034, "hubId": account.hubspot_portal, "appId": account.hubspot_app}
        return Answer(200, {**about, "scopes": list(SCOPES)})

    # -- contacts -----------------------------------------------------------------------------------------
    def _details(self, request: Request, match: re.Match[str]) -> Answer:
        return Answer(200, {"portalId": self._state.account.hubspot_portal, "timeZone": "US/Central"})

    def _shown(self, request: Request, lead: Lead, names: Sequence[str]) -> dict[str, Any]:
        owner = request.view.holder(lead, time.monotonic())[0]
        first, _, last = (lead.name or "").partition(" ")
        values: dict[str, Any] = {
            "firstname": first,
            "lastname": last,
            "email": lead.emails[0] if lead.emails else None,
            "phone": lead.phones[0] if lead.phones else None,
            "address": lead.street,
            "city": lead.city,
            "state": lead.state,
            "zip": lead.zip,
            "country": lead.country,
            "lifecyclestage": lead.stage,
            "hubspot_owner_id": None if owner is None else str(owner),
            "hs_analytics_source": lead.source,
            "hs_analytics_source_data_1": lead.campaign,
            "recent_conversion_event_name": lead.form,
            "hs_language": lead.language,
            "lead_type": lead.type,
            "budget_max": None if lead.price is None else str(lead.price),
            "lead_tags": ";".join(lead.tags),
            "hs_merged_object_ids": ";".join(map(str, lead.former)) or None,
            **{name: str(value) for name, value in lead.custom.items()},
        }
        changed = request.view.changed(lead, time.monotonic())
        always = {"createdate": _stamp(lead.created), "lastmodifieddate": _stamp(changed), "hs_object_id": lead.id}
        wanted = {name: values[name] for name in names if name in values}  # unknown names are silently left out
        properties = wanted | {name: str(value) for name, value in always.items()}
        return {
            "id": str(lead.id),
            "properties": properties,
            "createdAt": always["createdate"],
            "updatedAt": always["lastmodifieddate"],
            "archived": False,
        }

    def _lead(self, request: Request, text: str) -> Lead:
        lead = self._state.leads.get(int(text)) if re.fullmatch(r"[0-9]{1,18}", text) else None
        if lead is None or not request.view.sees(lead, time.monotonic()):
            raise ApiError(404, "resource not found")
        return lead

    def _inputs(self, request: Request) -> list[str]:
        inputs = [str(item.get("id")) for item in request.json(400).get("inputs", ())]
        if len(inputs) > BATCH or len(set(inputs)) < len(inputs):
            raise ApiError(400, "At most 100 inputs, and their ids must be unique.")
        return inputs

    def _read(self, request: Request, match: re.Match[str]) -> Answer:
        rows, lost = [], []
        for text in self._inputs(request):
            try:
                rows.append(self._shown(request, self._lead(request, text), request.json(400).get("properties", ())))
            except ApiError:
                lost.append(text)
        body: dict[str, Any] = {"status": "COMPLETE", "results": rows}
        if not lost:
            return Answer(200, body)
        text = "Could not get some CONTACT objects, they may be deleted or not exist. Check that ids are valid."
        error = {"status": "error", "category": "OBJECT_NOT_FOUND", "message": text, "context": {"ids": lost}}
        return Answer(207, {**body, "numErrors": 1, "errors": [error]})

    def _list(self, request: Request, match: re.Match[str]) -> Answer:
        limit = min(int(request.query.get("limit") or 10), 100)
        rows = [self._shown(request, lead, ()) for lead in list(self._state.leads.values())[:limit]]
        return Answer(200, {"results": rows})

    def _search(self, request: Request, match: re.Match[str]) -> Answer:
        body, mono = request.json(400), time.monotonic()
        names = hubspot_search.needed(body)
        shown = [self._shown(request, x, names) for x in self._state.leads.values() if request.view.sees(x, mono)]
        return hubspot_search.search(request, body, shown)

    def _change(self, request: Request, match: re.Match[str]) -> Answer:
        state, lead = self._state, self._lead(request, match[1])
        values = request.json(400).get("properties")
        if not isinstance(values, dict) or values.keys() != {"hubspot_owner_id"}:
            raise ApiError(400, "Property values were not valid.")
        text = str(values["hubspot_owner_id"] or "")
        agent = state.agents.get(int(text)) if text.isdecimal() else None
        effect = request.view.lost_owner
        if text and (agent is None or not agent.active):
            if agent is None or state.settings.hubspot_inactive == "refuse":
                raise ApiError(
                    400, f'Property values were not valid: [{{"error":"INVALID_OWNER_ID","value":"{text}"}}]'
                )
            effect = effect or ("empty" if state.settings.hubspot_inactive == "empty" else None)
        state.write_owner(lead, int(text) if text else None, effect)
        request.owner_written = lead.id
        return Answer(200, self._shown(request, lead, ()))

    def _create(self, request: Request, match: re.Match[str]) -> Answer:
        values = request.json(400).get("properties") or {}
        name = " ".join(str(values.get(k) or "") for k in ("firstname", "lastname")).strip()
        given: dict[str, Any] = {"name": name or None, "emails": [values["email"]] if values.get("email") else []}
        lead = self._state.create({**given, "phones": [], "tags": []}, "api")
        return Answer(201, self._shown(request, lead, ("email", "firstname", "lastname")))

    def _delete(self, request: Request, match: re.Match[str]) -> Answer:
        self._state.delete(self._lead(request, match[1]))
        return Answer(204)

    # -- notes, tasks, owners ------------------------------------------------------------------------------------
    def _told(self, kind: str) -> dict[int, list[dict[str, Any]]]:
        return self._state.notes if kind == "notes" else self._state.tasks

    def _told_ids(self, request: Request, match: re.Match[str]) -> Answer:
        told = self._told(match[2]).get(self._lead(request, match[1]).id, [])
        return Answer(200, {"results": [{"toObjectId": one["id"], "associationTypes": []} for one in told]})

    def _read_told(self, request: Request, match: re.Match[str]) -> Answer:
        wanted, kind = self._inputs(request), match[1]
        found = [one for told in self._told(kind).values() for one in told if str(one["id"]) in wanted]
        shown = [
            {"hs_note_body": f"{one['subject']}<br>{one['body']}"}
            if kind == "notes"
            else {"hs_task_subject": one["text"], "hs_task_body": one["body"]}
            for one in found
        ]
        rows = [{"id": str(one["id"]), "properties": values} for one, values in zip(found, shown, strict=True)]
        return Answer(200, {"status": "COMPLETE", "results": rows})

    def _add_task(self, request: Request, match: re.Match[str]) -> Answer:
        body = request.json(400)
        values, (link, *_) = body.get("properties") or {}, body.get("associations") or [{}]
        if not values.get("hs_timestamp") or link.get("types", [{}])[0].get("associationTypeId") != 204:
            raise ApiError(400, "hs_timestamp and an association of type 204 are required.")
        agent = str(values.get("hubspot_owner_id") or "")
        if not agent.isdecimal() or int(agent) not in self._state.agents:
            raise ApiError(400, "hubspot_owner_id is not valid.")
        lead, text = self._lead(request, str(link["to"]["id"])), str(values.get("hs_task_subject", ""))
        task = self._state.add_task(lead, int(agent), text, str(values.get("hs_task_body", "")), values["hs_timestamp"])
        return Answer(201, {"id": str(task["id"]), "properties": {}})

    def _add_note(self, request: Request, match: re.Match[str]) -> Answer:
        body = request.json(400)
        values, (link, *_) = body.get("properties") or {}, body.get("associations") or [{}]
        if not values.get("hs_timestamp") or link.get("types", [{}])[0].get("associationTypeId") != 202:
            raise ApiError(400, "hs_timestamp and an association of type 202 are required.")
        lead = self._lead(request, str(link["to"]["id"]))
        subject, _, text = str(values.get("hs_note_body", "")).partition("<br>")
        plain = unescape(re.sub("<[^>]*>", "", subject)), unescape(text.replace("<br>", "\n"))
        return Answer(201, {"id": str(self._state.add_note(lead, *plain)["id"]), "properties": {}})

    def _owners(self, request: Request, match: re.Match[str]) -> Answer:
        archived = request.query.get("archived") == "true"
        rows = [agent for agent in self._state.agents.values() if agent.active is not archived]
        start, limit = int(request.query.get("after") or 0), min(int(request.query.get("limit") or 100), 100)
        body: dict[str, Any] = {"results": [self._owner_json(agent) for agent in rows[start : start + limit]]}
        if start + limit < len(rows):
            body["paging"] = {"next": {"after": str(start + limit)}}
        return Answer(200, body)

    def _owner(self, request: Request, match: re.Match[str]) -> Answer:
        agent = self._state.agents.get(int(match[1])) if match[1].isdecimal() else None
        if agent is None or agent.active is (request.query.get("archived") == "true"):
            raise ApiError(404, "resource not found")
        return Answer(200, self._owner_json(agent))

    def _owner_json(self, agent: Agent) -> dict[str, Any]:
        first, _, last = agent.name.partition(" ") if agent.active else ("", "", "")
        body: dict[str, Any] = {
            "id": str(agent.id),
            "email": agent.email,
            "type": "PERSON",
            "archived": not agent.active,
        }
        body |= {"firstName": first, "lastName": last, "userId": agent.id + 900_000 if agent.active else None}
        teams = [{"id": str(p["id"]), "name": p["name"], "primary": True} for p in self._state.ponds.values()]
        shared = [t for t, p in zip(teams, self._state.ponds.values(), strict=True) if agent.id in p["agents"]]
        return body | ({"teams": shared} if agent.active and shared else {})


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
