"""Salesforce for the conformance suite: messages in XML, an account that answers queries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from adapters.base import Credentials
from adapters.salesforce_reading import id18
from tests.adapters import soql
from tests.adapters.kit import NOW, Fake, Kit, LeadRow
from tests.adapters.loopback import Received, Reply

ACCOUNT = id18("00D7Q000000Trnk")
USER = id18("0057Q000000Ntgr")
_OUT = "http://soap.sforce.com/2005/09/outbound"
_XSI = "http://www.w3.org/2001/XMLSchema-instance"
_DATA = "/services/data/v66.0"


def error(code: str, message: str = "canary", status: int = 400) -> Reply:
    """An answer that says no, as Salesforce words it."""
    return Reply(status, [{"message": message, "errorCode": code, "fields": []}])


def stamp(moment: datetime) -> str:
    """A time as the API writes it."""
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}+0000"


class FakeSalesforce(Fake):
    """Queries over leads, users, groups and tasks; conditional owner writes; an assignment rule that meddles."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: dict[str, datetime] = {}
        self.deleted: dict[str, str | None] = {}  # of deleted leads: the lead they were merged into
        self.converted: set[str] = set()
        self.custom: dict[str, Any] = {}  # further fields that all leads have
        self.hidden: set[str] = set()  # fields of leads that the connected user may not see
        self.queues: set[str] = set()  # which of the teams are queues for leads
        self.nested: list[tuple[str, str]] = []  # groups in groups
        self.usage = "api-usage=18/5000"
        self.may_transfer = True
        self.emails: dict[str, str] = {}  # of leads that were made by the API
        self.meddler: str | None = "99"  # whom the account's assignment rule gives leads to
        self.token = "canary-session-1"
        self._lists: dict[str, tuple[list[dict[str, Any]], int]] = {}

    def touch(self, ref: str) -> None:
        """Something of the lead changes."""
        self.changed[ref] = self._changed(self.leads[ref]) + timedelta(seconds=1)

    def _changed(self, row: LeadRow) -> datetime:
        return self.changed.get(row.ref, row.changed or row.created)

    def handle(self, asked: Received) -> Reply:
        if asked.headers.get("authorization") != f"Bearer {self.token}":
            return error("INVALID_SESSION_ID", "Session expired or invalid", 401)
        path = asked.path.rstrip("/")
        if path == _DATA:
            clock = (NOW + self.clock_is_off).strftime("%a, %d %b %Y %H:%M:%S GMT")
            link = f"https://login.salesforce.com/id/{ACCOUNT}/{USER}"
            return Reply(body={"query": f"{_DATA}/query", "identity": link}, headers={"Date": clock})
        if path in (f"{_DATA}/query", f"{_DATA}/queryAll"):
            assert len(asked.query["q"]) < 16_000
            size = int(asked.headers.get("sforce-query-options", "batchSize=2000").removeprefix("batchSize="))
            return self._query(asked.query["q"], path.endswith("All"), size)
        if path.startswith(f"{_DATA}/query/"):
            return self._page(path.rpartition("/")[2])
        if path == f"{_DATA}/sobjects/Task" and "IsReminderSet" in asked.json:
            said = asked.json
            assert said["ReminderDateTime"].startswith(said["ActivityDate"])
            task = (said["OwnerId"], f"{said['Subject']} {said['Description']}", said["ReminderDateTime"])
            self.leads[said["WhoId"]].tasks.append(task)
            return Reply(201, {"id": self.new_ref(), "success": True, "errors": []})
        if path == f"{_DATA}/sobjects/Task":
            assert asked.json["ActivityDate"] == f"{NOW:%Y-%m-%d}"
            self.leads[asked.json["WhoId"]].notes.append((asked.json["Subject"], asked.json["Description"]))
            return Reply(201, {"id": self.new_ref(), "success": True, "errors": []})
        if path == f"{_DATA}/sobjects/Lead":
            return self._make(asked)
        found = re.fullmatch(f"{_DATA}/sobjects/Lead/([A-Za-z0-9]+)", path)
        assert found
        if asked.method == "DELETE":
            if found[1] in self.deleted or found[1] not in self.leads:
                return error("ENTITY_IS_DELETED", "entity is deleted", 404)
            self.deleted[found[1]] = None
            return Reply(204)
        assert asked.method == "PATCH"
        return self._own(found[1], asked)

    def _make(self, asked: Received) -> Reply:
        given = dict(asked.json)
        if lacking := sorted({"LastName", "Company"} - {name for name, value in given.items() if value}):
            return error("REQUIRED_FIELD_MISSING", f"Required fields are missing: {lacking}")
        owner = given.pop("OwnerId", USER)
        if asked.headers.get("sforce-auto-assign", "TRUE").upper() != "FALSE" and self.meddler:
            owner = self.meddler
        assert given.keys() == {"FirstName", "LastName", "Company", "Email"}
        queued = owner in self.queues or owner.startswith("00G") or owner == "7"
        made = LeadRow(self.new_ref(), owner=None if queued else owner, pond=owner if queued else None)
        self.add_leads(made)
        self.emails[made.ref] = given["Email"]
        return Reply(201, {"id": made.ref, "success": True, "errors": []})

    def _own(self, ref: str, asked: Received) -> Reply:
        if ref in self.deleted or ref not in self.leads:
            return error("ENTITY_IS_DELETED", "entity is deleted", 404)
        if ref in self.converted:
            return error("CANNOT_UPDATE_CONVERTED_LEAD", "cannot reference converted lead")
        row = self.leads[ref]
        since = parsedate_to_datetime(asked.headers["if-unmodified-since"])
        if self._changed(row) > since:
            return Reply(412)
        (owner,) = asked.json.values()
        agent = self.agents.get(owner)
        if agent is not None and not agent.active:
            return error("INACTIVE_OWNER_OR_USER", "owner or user is inactive.")
        meddled = asked.headers.get("sforce-auto-assign", "TRUE").upper() != "FALSE" and self.meddler
        row.owner, row.pond = meddled or owner, None
        self.touch(ref)
        return Reply(204)

    # -- queries ------------------------------------------------------------------------------------------
    def _query(self, text: str, deleted: bool, size: int) -> Reply:
        try:
            query = soql.read(text)
        except soql.Malformed:
            return error("MALFORMED_QUERY", "unexpected token")
        if query.of == "Lead":
            rows = list(self._leads(deleted))
        else:
            rows = list(
                {"User": self._users, "Task": self._tasks, "Group": self._groups}.get(query.of, self._more)(query)
            )
        known = {name.lower() for name in _COLUMNS[query.of]} | (
            {n.lower() for n in self.custom} if query.of == "Lead" else set()
        )
        for name in sorted(query.names):
            if name.lower() not in known or (query.of == "Lead" and name in self.hidden):
                said = f"ERROR at Row:1:Column:8\nNo such column '{name}' on entity '{query.of}'. If you are attempting"
                return error("INVALID_FIELD", f"\n{text[:40]}\n ^\n{said}")
        shown = [_shown(query.of, {name: row.get(name) for name in query.columns}) for row in query.run(rows)]
        locator = f"01g{len(self._lists)}"
        self._lists[locator] = (shown, min(max(size, 200), 2000, self.page))
        return self._page(f"{locator}-0")

    def _page(self, locator: str) -> Reply:
        name, _, at = locator.partition("-")
        if name not in self._lists:
            return error("INVALID_QUERY_LOCATOR", "invalid query locator")
        (rows, size), start = self._lists[name], int(at)
        end = start + size
        more = {"nextRecordsUrl": f"{_DATA}/query/{name}-{end}"} if end < len(rows) else {}
        body = {"totalSize": len(rows), "done": not more, **more, "records": rows[start:end]}
        return Reply(body=body, headers={"Sforce-Limit-Info": self.usage})

    def _leads(self, deleted: bool) -> Iterator[dict[str, Any]]:
        for row in self.leads.values():
            gone = row.ref in self.deleted
            if gone and not deleted:
                continue
            kind = "User" if row.owner else "Queue" if row.pond else None
            yield {
                "Id": row.ref, "OwnerId": row.owner or row.pond, "Owner.Type": kind, "IsDeleted": gone,
                "IsConverted": row.ref in self.converted, "MasterRecordId": self.deleted.get(row.ref),
                "CreatedDate": row.created, "LastModifiedDate": self._changed(row),
                "SystemModstamp": self._changed(row), "Email": self.emails.get(row.ref, "canary@example.com"),
                "Name": "canary-person",
                **self.custom,
            }  # fmt: skip

    def _users(self, _: soql.Query) -> Iterator[dict[str, Any]]:
        for row in self.agents.values():
            yield {
                "Id": row.ref, "Name": f"Agent {row.ref}", "Email": f"{row.ref}@example.com", "IsActive": row.active,
                "TimeZoneSidKey": "America/Denver", "UserType": "Standard",
            }  # fmt: skip
        yield {"Id": "777", "Name": "Bot", "IsActive": True, "UserType": "AutomatedProcess", "TimeZoneSidKey": "GMT"}

    def _tasks(self, _: soql.Query) -> Iterator[dict[str, Any]]:
        for row in self.leads.values():
            for at, body in enumerate([*(body for _, body in row.notes), *(text for _, text, _ in row.tasks)]):
                yield {"Id": f"00T{row.ref}{at}", "WhoId": row.ref, "Description": body, "CreatedDate": row.created}

    def _groups(self, _: soql.Query) -> Iterator[dict[str, Any]]:
        for ref, (name, _members) in self.teams.items():
            yield {"Id": ref, "Name": name, "Type": "Queue" if ref in self.queues else "Regular"}

    def _more(self, query: soql.Query) -> Iterator[dict[str, Any]]:
        if query.of == "QueueSobject":
            for ref in sorted(self.queues):
                yield {"QueueId": ref, "Queue.Name": self.teams[ref][0], "SobjectType": "Lead"}
        elif query.of == "GroupMember":
            for ref, (_, members) in self.teams.items():
                for member in members:
                    yield {"GroupId": ref, "UserOrGroupId": member, "Group.Type": "Regular"}
            for ref, inner in self.nested:
                yield {"GroupId": ref, "UserOrGroupId": inner, "Group.Type": "Regular"}
        else:
            assert query.of == "UserRecordAccess"
            for ref in self.leads:
                yield {"UserId": USER, "RecordId": ref, "HasTransferAccess": self.may_transfer}


_COLUMNS = {
    "Lead": [
        "Id", "OwnerId", "Owner.Type", "IsDeleted", "IsConverted", "MasterRecordId", "CreatedDate", "LastModifiedDate",
        "SystemModstamp", "Name", "Email", "Phone", "MobilePhone", "Street", "City", "State", "PostalCode", "Country",
        "Latitude", "Longitude", "LeadSource", "Status", "Company", "Title", "Industry", "Rating", "Website",
    ],
    "User": ["Id", "Name", "Email", "IsActive", "TimeZoneSidKey", "UserType"],
    "Task": ["Id", "WhoId", "Description", "CreatedDate"],
    "Group": ["Id", "Name", "Type"],
    "QueueSobject": ["QueueId", "Queue.Name", "SobjectType"],
    "GroupMember": ["GroupId", "UserOrGroupId", "Group.Type"],
    "UserRecordAccess": ["UserId", "RecordId", "HasTransferAccess"],
}  # fmt: skip


def _shown(of: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the API shows it: related fields in objects, times as texts."""
    found: dict[str, Any] = {"attributes": {"type": of, "url": f"{_DATA}/sobjects/{of}/{row.get('Id', '')}"}}
    for name, value in row.items():
        above, _, field = name.rpartition(".")
        shown = stamp(value) if isinstance(value, datetime) else value
        (found.setdefault(above, {"attributes": {"type": "Name"}}) if above else found)[field] = shown
    return found


# -- messages ----------------------------------------------------------------------------------------------------------


def _element(name: str, value: Any, prefix: str) -> str:
    if isinstance(value, list):
        return "".join(_element(name, one, prefix) for one in value)
    if value is None:
        return f'<{prefix}{name} xsi:nil="true"/>'
    if not isinstance(value, dict):
        return f"<{prefix}{name}>{escape(json.dumps(value) if not isinstance(value, str) else value)}</{prefix}{name}>"
    inside, kind = ("sf:", value.get("@type")) if "@type" in value else (prefix, None)
    about = f' xsi:type={quoteattr(str(kind))} xmlns:sf="urn:sobject.enterprise.soap.sforce.com"' if kind else ""
    children = "".join(_element(k, v, inside) for k, v in value.items() if k != "@type")
    return f"<{prefix}{name}{about}>{children}</{prefix}{name}>"


def message(body: Mapping[str, Any]) -> bytes:
    """An outbound message."""
    inner = "".join(_element(name, value, "") for name, value in body.items())
    return (
        '<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope '
        'xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/" xmlns:xsd="http://www.w3.org/2001/XMLSchema" '
        f'xmlns:xsi="{_XSI}"><soapenv:Body><notifications xmlns="{_OUT}">{inner}</notifications>'
        "</soapenv:Body></soapenv:Envelope>"
    ).encode()


def _value(element: ElementTree.Element) -> Any:
    if element.get(f"{{{_XSI}}}nil") == "true":
        return None
    if len(element) == 0:
        return element.text or ""
    kind = element.get(f"{{{_XSI}}}type")
    found: dict[str, Any] = {"@type": kind} if kind else {}
    for child in element:
        name = child.tag.rpartition("}")[2]
        if name == "Notification":
            found.setdefault(name, []).append(_value(child))
        else:
            found[name] = _value(child)
    return found


def _typed(inside: bytes, used: bytes = b"") -> bytes:
    """A good message, but for a document type before it and what it uses of that."""
    good = message(
        {"OrganizationId": ACCOUNT, "Notification": {"Id": "04l1", "sObject": {"@type": "sf:Lead", "Id": "00Q1"}}}
    )
    text = good.replace(b"<notifications ", b"<note>" + used + b"</note><notifications ")
    return text.replace(b"?>", b"?><!DOCTYPE soapenv:Envelope " + inside + b">", 1)


_LAUGHS = b"".join(b'<!ENTITY l%d "%b">' % (n, b"&l%d;" % (n - 1) * 10 if n else b"ha") for n in range(10))
#: https://github.com/tiran/defusedxml tells what each of them does to a parser.
HOSTILE = {
    "a harmless document type": _typed(b""),
    "a document type elsewhere": _typed(b'SYSTEM "http://127.0.0.1:1/x.dtd"'),
    "an entity": _typed(b'[<!ENTITY a "b">]', b"&a;"),
    "a billion laughs": _typed(b"[" + _LAUGHS + b"]", b"&l9;"),
    "quadratic": _typed(b'[<!ENTITY a "' + b"a" * 50_000 + b'">]', b"&a;" * 5_000),
    "a file": _typed(b'[<!ENTITY f SYSTEM "file:///etc/passwd">]', b"&f;"),
    "an address": _typed(b'[<!ENTITY f SYSTEM "http://127.0.0.1:1/">]', b"&f;"),
    "a parameter entity": _typed(b'[<!ENTITY % p SYSTEM "http://127.0.0.1:1/"> %p;]'),
}


class TheKit(Kit):
    name = "salesforce"
    secrets = (b"none", b"none")
    void_secrets = ()
    signature_headers = ()
    credentials = Credentials({}, {"access_token": "canary-session-1"})
    pond_is_owner = True
    hostile = tuple(HOSTILE.values())
    required: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {
        "created": (
            ("OrganizationId",), ("Notification",), ("Notification", 0), ("Notification", 0, "Id"),
            ("Notification", 0, "sObject", "Id"),
        ),
    }  # fmt: skip
    texts: ClassVar[Mapping[str, Sequence[Sequence[str | int]]]] = {}

    def load(self, body: bytes) -> Any:
        root = ElementTree.fromstring(body)
        return _value(root[0][0])

    def dump(self, body: Any) -> bytes:
        return message(body)

    def sign(self, body: bytes, secret: bytes, at: datetime = NOW, headers: Mapping[str, str] = {}) -> dict[str, str]:
        return {**headers, "content-type": "text/xml; charset=UTF-8", "soapaction": '""'}

    def retopic(self, body: Any, topic: str) -> Any:
        def about(told: Any) -> Any:
            if topic not in ("created", "changed"):
                return {**told, "@type": f"sf:{topic}"}
            later = "2026-04-06T09:00:00.000Z" if topic == "changed" else told.get("CreatedDate")
            return {**told, "LastModifiedDate": later}

        def told(one: Any) -> Any:
            return {**one, "sObject": about(one["sObject"])} if "sObject" in one else one

        return {**body, "Notification": [told(one) for one in body["Notification"]]}

    def batch(self, refs: Sequence[str | None]) -> Any:
        made = "2026-04-06T08:20:00.000Z"
        told = [
            {"Id": f"04l{ref or 'x1'}", "sObject": {"@type": "sf:Lead", "Id": ref or "?", "CreatedDate": made}}
            for ref in refs
        ]
        return {"OrganizationId": ACCOUNT, "ActionId": "04k7Q0000004aBc", "SessionId": None, "Notification": told}

    def fake(self) -> Fake:
        return FakeSalesforce()
