"""EspoCRM for the conformance suite."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

from adapters.base import HOOK_TOPIC, Credentials
from tests.adapters.kit import NOW, AgentRow, Fake, HookRow, Kit, LeadRow
from tests.adapters.loopback import Received, Reply


def refused(status: int, reason: str) -> Reply:
    """An answer without a body: the reason stands in a header."""
    return Reply(status, b"", {"X-Status-Reason": reason})


class FakeEspoCrm(Fake):
    """Answers as in tests/fixtures/espocrm/captured; a webhook keeps its topic in its address."""

    def add_hook(self, topic: str, url: str, active: bool = True) -> HookRow:
        return super().add_hook(topic, f"{url}/{topic}", active)

    def standing(self, url: str) -> list[tuple[str, bool]]:
        return sorted((h.topic, h.active) for h in self.hooks if h.url == f"{url}/{h.topic}")

    def handle(self, asked: Received) -> Reply:
        if asked.headers.get("x-api-key") != "canary-key-1":
            return Reply(401)
        api, version, kind, *rest = asked.path.strip("/").split("/")
        assert (api, version) == ("api", "v1")
        routes = {"Lead": self._leads, "User": self._users, "Webhook": self._webhooks, "App": self._user}
        routes |= {"Note": self._add_post, "Team": self._teams}
        return routes[kind](asked, rest) if kind in routes else refused(404, "No controller.")

    def _list(self, asked: Received, rows: Sequence[Any]) -> Reply:
        size, start = int(asked.query["maxSize"]), int(asked.query.get("offset") or 0)
        if size > 200:
            return refused(403, "Max size should not exceed 200. Use offset and limit.")
        clock = (NOW + self.clock_is_off).strftime("%a, %d %b %Y %H:%M:%S GMT")
        return Reply(body={"total": len(rows), "list": list(rows[start : start + size])}, headers={"Date": clock})

    def _lead(self, row: LeadRow) -> dict[str, Any]:
        return {
            "id": row.ref,
            "name": "canary-person",
            "status": "New",
            "emailAddress": "canary@example.com",
            "assignedUserId": row.owner,
            "followersIds": [*row.collaborators, *([row.owner] if row.owner else [])],
            "createdAt": row.created.strftime("%Y-%m-%d %H:%M:%S"),
            "modifiedAt": (row.changed or row.created).strftime("%Y-%m-%d %H:%M:%S"),
        }

    def _leads(self, asked: Received, rest: list[str]) -> Reply:
        if asked.method == "POST" and not rest:
            assert asked.headers["x-skip-duplicate-check"] == "true"
            assert set(asked.json) == {"firstName", "lastName", "emailAddress"}
            self.add_leads(LeadRow(ref := self.new_ref()))
            return Reply(body={k: v for k, v in self._lead(self.leads[ref]).items() if v is not None})
        if not rest:
            rows = list(self.leads.values())
            if field := asked.query.get("where[0][attribute]"):
                assert (asked.query["where[0][type]"], asked.query["order"]) == ("after", "asc")
                # Without a zone of its own EspoCRM takes the value for a time of the site's, which is not UTC here.
                zone = ZoneInfo(asked.query.get("where[0][timeZone]", "America/Denver"))
                after = datetime.strptime(asked.query["where[0][value]"], "%Y-%m-%d %H:%M:%S").replace(tzinfo=zone)
                at = {"createdAt": lambda r: r.created, "modifiedAt": lambda r: r.changed or r.created}[field]
                rows = sorted((r for r in rows if at(r) > after), key=lambda r: r.created)
            return self._list(asked, [self._lead(r) for r in rows])
        row = self.leads.get(rest[0])
        if row is None:
            return refused(404, f"Record {rest[0]} not found.")
        if rest[1:] == ["followers"]:
            assert (asked.method, set(asked.json)) == ("POST", {"id"})
            row.collaborators += [asked.json["id"]] if asked.json["id"] not in row.collaborators else []
            return Reply(body=True)
        if rest[1:] == ["stream"]:
            posts = [{"id": "n", "type": "Post", "post": f"**{of}**\n\n{text}"} for of, text in reversed(row.notes)]
            return self._list(asked, [*posts, {"id": "n", "type": "Create", "data": {}}])
        if asked.method == "DELETE":
            del self.leads[row.ref]
            return Reply(body=True)
        if asked.method == "PUT":
            assert set(asked.json) == {"assignedUserId"}
            row.owner = asked.json["assignedUserId"]
        return Reply(body=self._lead(row))

    def _add_post(self, asked: Received, _: list[str]) -> Reply:
        assert (asked.method, asked.json["type"], asked.json["parentType"]) == ("POST", "Post", "Lead")
        subject, _, body = asked.json["post"].removeprefix("**").partition("**\n\n")
        self.leads[asked.json["parentId"]].notes.append((subject, body))
        return Reply(body={"id": "n", **asked.json})

    def _teams(self, asked: Received, rest: list[str]) -> Reply:
        if rest:
            assert rest[1] == "users"
            users = [self.agents[ref] for ref in self.teams[rest[0]][1]]
            return self._list(asked, [self._agent(row) for row in users if row.active])
        return self._list(asked, [{"id": ref, "name": name} for ref, (name, _) in self.teams.items()])

    def _users(self, asked: Received, _: list[str]) -> Reply:
        return self._list(asked, [self._agent(a) for a in self.agents.values() if a.active])

    def _agent(self, row: AgentRow) -> dict[str, Any]:
        return {"id": row.ref, "name": f"Agent {row.ref}", "type": "regular", "isActive": True}

    def _webhooks(self, asked: Received, rest: list[str]) -> Reply:
        if asked.method == "DELETE":
            before = len(self.hooks)
            self.hooks = [h for h in self.hooks if h.ref != rest[0]]
            return Reply(body=True) if len(self.hooks) < before else refused(404, "Not found.")
        if asked.method == "POST":
            event, _, at = asked.json["event"], *asked.json["url"].rpartition("/")[::-2]
            assert asked.json["url"].endswith(f"/{event}")
            return Reply(201, self._hook(self.add_hook(event, at)))
        return self._list(asked, [self._hook(h) for h in self.hooks])

    def _hook(self, row: HookRow) -> dict[str, Any]:
        return {
            "id": row.ref,
            "event": row.topic,
            "url": row.url,
            "isActive": row.active,
            "secretKey": f"canary-made-{row.ref}",
        }

    def _user(self, asked: Received, _: list[str]) -> Reply:
        date = (NOW + self.clock_is_off).strftime("%a, %d %b %Y %H:%M:%S GMT")
        rights = {
            "table": {"Lead": {"read": "all", "edit": "all", "stream": "all"}, "Webhook": True},
            "assignmentPermission": "all",
            "userPermission": "all",
        }
        return Reply(body={"user": {"id": "77", "userName": "router"}, "acl": rights}, headers={"Date": date})


class TheKit(Kit):
    name = "espocrm"
    secrets = (b"wh1:canary-one,wh2:canary-other", b"wh1:canary-two")
    void_secrets = (b"", b"wh1:", b":", b",")
    signature_headers = ("x-signature",)
    credentials = Credentials(secrets={"api_key": "canary-key-1", "webhook_secret": secrets[0].decode()})
    ponds = False
    zone = None
    shows_deactivated = False
    refusal: ClassVar[Mapping[str, str]] = {"X-Status-Reason": "No access."}
    required: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {
        "Lead.create": ((0, "id"), (1, "id"), (0,)),
        "Lead.delete": ((0, "id"),),
    }
    texts: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {}

    def sign(self, body: bytes, secret: bytes, at: datetime = NOW, headers: Mapping[str, str] = {}) -> dict[str, str]:
        hook_id, _, key = secret.partition(b",")[0].partition(b":")
        proof = hook_id + b":" + hmac.new(key, body, hashlib.sha256).digest()
        return {HOOK_TOPIC: "Lead.create", **headers, "x-signature": base64.b64encode(proof).decode()}

    def retopic(self, body: Any, topic: str) -> Any:
        return body

    def topic_headers(self, topic: str) -> Mapping[str, str]:
        return {HOOK_TOPIC: topic}

    def batch(self, refs: Sequence[str | None]) -> Any:
        return [{"id": ref, "name": "canary-person"} if ref else {"name": "no id"} for ref in refs]

    def fake(self) -> Fake:
        return FakeEspoCrm()
