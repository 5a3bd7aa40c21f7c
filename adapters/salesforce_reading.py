"""What Salesforce sends, in Turnlock's words: outbound messages, leads, users, errors. Pure; the calls are in
``salesforce.py``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from email.utils import format_datetime
from types import MappingProxyType
from typing import Any
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from adapters import payload
from adapters.base import Event, EventKind, Unreadable
from adapters.budget import Left
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from routing.model import AgentSeen, Lead

# -- ids ---------------------------------------------------------------------------------------------------------------

_SUFFIX = "ABCDEFGHIJKLMNOPQRSTUVWXYZ012345"


def id18(ref: str) -> str:
    """An id in its form of 18 characters, of which no two differ by case alone; what is not one of 15 stays as it is.

    The last three characters tell which of the 15 before are capitals, five at a time.
    """
    if not re.fullmatch("[0-9A-Za-z]{15}", ref):
        return ref
    fives = (ref[0:5], ref[5:10], ref[10:15])
    return ref + "".join(_SUFFIX[sum(1 << at for at, char in enumerate(five) if char.isupper())] for five in fives)


def is_id(ref: str) -> bool:
    """Whether a ref can be a record's id. Each has a digit: the first three characters name the object."""
    return re.fullmatch("(?=[A-Za-z]*[0-9])[0-9A-Za-z]{1,18}", ref) is not None


# SOQL and SOSL Reference, Quoted String Escapes (sforce_api_calls_soql_select_quotedstringescapes).
_ESCAPES = str.maketrans(
    {"\\": "\\\\", "'": "\\'", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
)


def quoted(text: str) -> str:
    """A text as one value of a query."""
    return f"'{text.translate(_ESCAPES)}'"


def any_of(refs: Iterable[str]) -> str:
    """The list of a query's IN."""
    return f"({','.join(quoted(id18(ref)) for ref in refs)})"


# -- outbound messages -------------------------------------------------------------------------------------------------

_BODY = "{http://schemas.xmlsoap.org/soap/envelope/}Body"
_OUT = "{http://soap.sforce.com/2005/09/outbound}"
_FIELD = "{urn:sobject.enterprise.soap.sforce.com}"
_TYPE = "{http://www.w3.org/2001/XMLSchema-instance}type"
_MOST = 500  # elements of a message; Salesforce sends 100 at most

#: https://developer.salesforce.com/docs/platform/api/guide/sforce-api-om-outboundmessaging-wsdl.html
ACK = (
    '<?xml version="1.0" encoding="UTF-8"?>\n'
    '<soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/"><soapenv:Body>'
    '<notificationsResponse xmlns="http://soap.sforce.com/2005/09/outbound"><Ack>true</Ack></notificationsResponse>'
    "</soapenv:Body></soapenv:Envelope>"
)


def events_of(body: bytes) -> list[Event]:
    """The events of a message. One that cannot be read is parked alone; what only the token proves has no final key."""
    message = _message(body)
    account = _id(message, f"{_OUT}OrganizationId", "00D")
    told = message.findall(f"{_OUT}Notification")
    if not told:
        raise payload.missing("Notification")
    if len(told) > _MOST:
        raise Unreadable("too_many_elements")
    digest = hashlib.sha256(body).hexdigest()
    events: dict[str, Event] = {}
    for position, one in enumerate(told):
        try:
            event = _event(one, account)
        except Unreadable as error:
            key = f"{digest}:{position}"
            event = Event(EventKind.UNREADABLE, key, key_is_final=False, problem=error.reason, account=account)
        events.setdefault(event.key, event)
    return list(events.values())


def _message(body: bytes) -> Element:
    if len(body) > payload.DELIVERY.max_bytes:
        raise Unreadable("too_big")
    try:
        root = fromstring(body, forbid_dtd=True)
    except DefusedXmlException:
        raise Unreadable("forbidden_xml") from None
    except (ParseError, ValueError, LookupError):  # the latter two for encodings that do not exist or do not fit
        raise Unreadable("not_xml") from None
    found = root.find(f"{_BODY}/{_OUT}notifications")
    if found is None:
        raise Unreadable("no_outbound_message")
    return found


def _event(told: Element, account: str) -> Event:
    """A lead that was new or changed when it was sent: at least once, in no order, with its fields of that moment."""
    key = f"{account}:{_id(told, f'{_OUT}Id')}"
    record = told.find(f"{_OUT}sObject")
    nothing = Event(EventKind.UNKNOWN, key, key_is_final=False, account=account)
    if record is None or (len(record) == 0 and not (record.text or "").strip()):
        return nothing  # it was deleted before it was sent
    if (record.get(_TYPE) or "").rpartition(":")[2] != "Lead":
        return nothing
    ref = _id(record, f"{_FIELD}Id")
    shown = Fields({name: record.findtext(f"{_FIELD}{name}") for name in ("CreatedDate", _CHANGED)}, strict=True)
    made, changed = shown.time("CreatedDate"), shown.time(_CHANGED)
    kind = EventKind.LEAD_CREATED if made and made == changed else EventKind.LEAD_CHANGED
    return Event(kind, key, key_is_final=False, ref=ref, occurred_at=changed, account=account)


def _id(above: Element, tag: str, prefix: str = "") -> str:
    found = above.find(tag)
    text = ((found.text if found is not None and len(found) == 0 else None) or "").strip()
    if not text:
        raise payload.missing(tag.rpartition("}")[2])
    if not is_id(text) or not text.startswith(prefix):
        raise Unreadable("wrong_type")
    return id18(text)


# -- leads and users ---------------------------------------------------------------------------------------------------

_CHANGED = "LastModifiedDate"
#: Without these there is no lead to speak of. ``Owner.Type`` tells a queue from a user.
NEEDED = ("Id", "OwnerId", "Owner.Type", "IsConverted", "CreatedDate", _CHANGED, "SystemModstamp")
_ABOUT = ("Company", "Title", "Industry", "Rating", "Website")
_OPTIONAL = (
    "Name", "Email", "Phone", "MobilePhone", "Street", "City", "State", "PostalCode", "Country", "Latitude",
    "Longitude", "LeadSource", "Status", *_ABOUT,
)  # fmt: skip
_NAMED = ("price", "tags", "type", "form", "language")


def further(said: Mapping[str, str]) -> list[str]:
    """Fields that the admin named for rules: names apart, and those of price, tags, type, form and language."""
    named = [said.get(f"{word}_field") or "" for word in _NAMED]
    found = payload.unique(name.strip() for name in [*(said.get("fields") or "").split(","), *named])
    return [name for name in found if re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,79}", name)]


def optional_fields(said: Mapping[str, str]) -> list[str]:
    """What is read of a lead beside :data:`NEEDED`: each once, for a query takes no twins, and case does not count."""
    taken = {name.lower() for name in NEEDED}
    found = {name.lower(): name for name in reversed([*_OPTIONAL, *further(said)]) if name.lower() not in taken}
    return sorted(found.values())


def unknown_column(data: Any) -> str | None:
    """The field that a query was refused for: it does not exist, or the connected user may not see it.

    An empty text where Salesforce does not name it, None where the query was not refused for a field.
    """
    for error in _errors(data):
        if error.text("errorCode") == "INVALID_FIELD":
            found = re.search("No such column '([A-Za-z0-9_.]{1,200})'", error.text("message") or "")
            return found[1] if found else ""
    return None


def is_queue(row: Fields) -> bool:
    """Whether the owner of a lead is a queue."""
    kind = row.object("Owner").text("Type")
    return kind == "Queue" or (kind is None and (row.text("OwnerId") or "").startswith("00G"))


def lead_of(row: Fields, said: Mapping[str, str], former: tuple[str, ...] = ()) -> Lead:
    """A lead. A queue that owns it is a pond, or nobody at all with the parameter ``all_queues`` = yes."""
    if not row.has("OwnerId"):
        raise payload.missing("OwnerId")  # nobody is guessed
    owner, queued = row.optional_ref("OwnerId"), is_queue(row)
    holder = id18(owner) if owner else None
    # The later of the two: a write is conditional on it, and whichever of them Salesforce compares, it must not be
    # older than the lead as read.
    changed = max((t for t in (row.time(_CHANGED), row.time("SystemModstamp")) if t), default=None)
    names = {name.lower(): name for name in row.data}
    named = {word: names.get((said.get(f"{word}_field") or "-").lower(), "-") for word in _NAMED}
    kept = [names[name.lower()] for name in (*_ABOUT, *further(said)) if name.lower() in names]
    return Lead(
        ref=id18(row.ref("Id")),
        former_refs=former,
        owner_ref=None if queued else holder,
        pond_ref=holder if queued and said.get("all_queues") != "yes" else None,
        source=row.text("LeadSource"),
        stage=row.text("Status"),
        type=row.text(named["type"]),
        price=row.number(named["price"]),
        form=row.text(named["form"]),
        language=row.text(named["language"]),
        tags=payload.unique(tag.strip() for tag in (row.text(named["tags"]) or "").split(";")),
        street=row.text("Street"),
        city=row.text("City"),
        state=row.text("State"),
        zip=row.text("PostalCode"),
        country=row.text("Country"),
        latitude=row.number("Latitude"),
        longitude=row.number("Longitude"),
        emails=payload.emails([row.text("Email")]),
        phones=payload.phones(row.text(k) for k in ("Phone", "MobilePhone")),
        custom=MappingProxyType(row.scalars(dict.fromkeys(kept))),
        created_at=row.time("CreatedDate"),
        updated_at=changed,
        name=row.text("Name"),
    )


def unmodified_since(lead: Lead) -> str | None:
    """The HTTP date for a write that shall meet the lead as it was read, in whole seconds, rounded up."""
    if lead.updated_at is None:
        return None
    part = timedelta(microseconds=lead.updated_at.microsecond)
    return format_datetime(lead.updated_at - part + timedelta(seconds=1 if part else 0), usegmt=True)


def agent_of(user: Fields) -> AgentSeen:
    """A user. Those who are inactive keep their leads and are given none."""
    ref = id18(user.ref("Id"))
    return AgentSeen(
        ref=ref,
        name=user.text("Name") or ref,
        email=user.text("Email"),
        active=user.flag("IsActive") is True,
        zone=user.zone("TimeZoneSidKey"),
    )


def identity(data: Fields, key: str) -> tuple[str, str]:
    """Account and user out of an identity address (``.../id/00D.../005...``)."""
    found = re.search("/id/(00D[0-9A-Za-z]{12}(?:[0-9A-Za-z]{3})?)/([0-9A-Za-z]{15,18})$", data.text(key) or "")
    if found is None:
        raise payload.missing(key)
    return id18(found[1]), id18(found[2])


def api_host(answer: Fields) -> str:
    """Where the API of this account is, by a token answer: it may be moved, so each answer counts."""
    url = answer.required_text("instance_url").rstrip("/")
    if not re.fullmatch(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?", url):
        raise Unreadable("wrong_type")
    return url


def left_of(headers: Mapping[str, str]) -> Mapping[str, Left]:
    """What is left of the calls of 24 hours, by ``Sforce-Limit-Info: api-usage=18/5000; ...``."""
    said = headers.get("Sforce-Limit-Info") or ""
    found = re.search("(?:^|[ ;,])api-usage=([0-9]{1,12})/([0-9]{1,12})", said, re.ASCII)
    if found is None:
        return {}
    used, limit = int(found[1]), int(found[2])
    return {"daily": Left(max(0, limit - used), limit)}


# -- errors ------------------------------------------------------------------------------------------------------------

_RETIRED = (
    "Salesforce does not know the API version that Turnlock speaks. Set the parameter api_version to one that the "
    "account has, or update Turnlock."
)
_READS = "Salesforce does not let the connected user see leads. Give that user read and edit on leads and their fields."
_AWAY = "The agent's user is inactive in Salesforce. The lead goes to the next agent; reactivate the user there."
_NO_API = "This Salesforce edition or user has no API. Give the connected user API Enabled, or change the edition."
_MAY_NOT = (
    "Salesforce does not let the connected user change the owner of this lead. Give that user edit on leads and "
    "Transfer Leads, or Modify All on leads."
)
_RULE = "{} Let it pass for the connected user, or correct the lead in Salesforce; then `turnlock replay` tries again."
_ODD = "Salesforce refuses the request as wrong: {}. Report it with the version of Turnlock; the lead is parked."

#: https://developer.salesforce.com/docs/platform/api-rest/guide/errorcodes and, for the codes, the SOAP API's
#: StatusCode and ExceptionCode. What stands in no table means what its status means.
ERRORS: Mapping[str, tuple[Outcome, str]] = MappingProxyType(
    {
        "UNABLE_TO_LOCK_ROW": (
            Outcome.NOT_SENT,
            "Another change holds the lead in Salesforce. Nothing was changed; Turnlock tries again.",
        ),
        "INVALID_QUERY_LOCATOR": (
            Outcome.NOT_SENT,
            "Salesforce gave up a list before its end was read. Turnlock reads it again from the start.",
        ),
        "FIELD_CUSTOM_VALIDATION_EXCEPTION": (
            Outcome.REFUSED,
            _RULE.format("A validation rule in Salesforce refuses the lead with its new owner."),
        ),
        "REQUIRED_FIELD_MISSING": (Outcome.REFUSED, _RULE.format("The lead lacks a field that Salesforce demands.")),
        "ENTITY_IS_LOCKED": (Outcome.REFUSED, _RULE.format("An approval process in Salesforce has locked the lead.")),
        "CANNOT_EXECUTE_FLOW_TRIGGER": (Outcome.REFUSED, _RULE.format("A flow in Salesforce failed on the lead.")),
        "CANNOT_INSERT_UPDATE_ACTIVATE_ENTITY": (
            Outcome.REFUSED,
            _RULE.format("A trigger in Salesforce failed on the lead."),
        ),
        "INVALID_FIELD": (Outcome.REFUSED, _ODD.format("a field is unknown there, or hidden from the connected user")),
        "INVALID_FIELD_FOR_INSERT_UPDATE": (Outcome.REFUSED, _MAY_NOT),
        "MALFORMED_ID": (Outcome.REFUSED, _ODD.format("an id is none")),
        "MALFORMED_QUERY": (Outcome.REFUSED, _ODD.format("a query cannot be read")),
        "INVALID_CROSS_REFERENCE_KEY": (
            Outcome.AGENT_REFUSED,
            "Salesforce does not know the agent's user. The lead goes to the next agent; run `turnlock agents sync`.",
        ),
        "INACTIVE_OWNER_OR_USER": (Outcome.AGENT_REFUSED, _AWAY),
        "OPERATION_WITH_INACTIVE_USER": (Outcome.AGENT_REFUSED, _AWAY),
        "TRANSFER_REQUIRES_READ": (
            Outcome.AGENT_REFUSED,
            "The agent may not read leads in Salesforce. Give the agent's profile read on leads.",
        ),
        "ENTITY_FAILED_IFLASTMODIFIED_ON_UPDATE_CHECK": (
            Outcome.CONFLICT,
            "Somebody changed the lead in Salesforce meanwhile. Turnlock reads it again.",
        ),
        "ENTITY_IS_DELETED": (Outcome.GONE, "The lead was deleted in Salesforce."),
        "CANNOT_UPDATE_CONVERTED_LEAD": (Outcome.GONE, "The lead was converted in Salesforce."),
        "INSUFFICIENT_ACCESS_OR_READONLY": (Outcome.FORBIDDEN, _MAY_NOT),
        "INSUFFICIENT_ACCESS_ON_CROSS_REFERENCE_ENTITY": (Outcome.FORBIDDEN, _MAY_NOT),
        "INVALID_TYPE": (Outcome.FORBIDDEN, _READS),
        "API_DISABLED_FOR_ORG": (Outcome.FORBIDDEN, _NO_API),
        "API_CURRENTLY_DISABLED": (Outcome.FORBIDDEN, _NO_API),
        "FORBIDDEN": (Outcome.FORBIDDEN, _NO_API),
        "REQUEST_LIMIT_EXCEEDED": (
            Outcome.WAIT,
            "The account has used up its API calls in Salesforce, which all its programs share. Turnlock waits.",
        ),
    }
)
#: Statuses that mean something else here. 300: an id of ours names several records, which no repeat changes.
STATUSES: Mapping[int, tuple[Outcome, str]] = MappingProxyType(
    {
        300: (Outcome.REFUSED, _ODD.format("an id names several records")),
        410: (Outcome.FORBIDDEN, _RETIRED),
    }
)
#: For a query the lack of the address is never that of a lead.
UNKNOWN_VERSION = (Outcome.FORBIDDEN, _RETIRED)
#: Where a query was refused for a field without which there is no lead.
UNREADABLE_LEADS = (Outcome.FORBIDDEN, _READS)

# Of a lead that Turnlock makes to try the way: the table below speaks of owners.
NOBODY = (
    "A lead in Salesforce always has an owner. Name the queue or user that holds unassigned leads under `unassigned` "
    "in the configuration."
)
NOT_MADE = (
    "Salesforce refuses the test lead, which has a name, a company, an email address and an owner that stands for "
    "nobody. Give the connected user create on leads, and let it pass required fields, validation and duplicate rules; "
    "or make a lead in that queue by hand."
)
NOT_REMOVED = (
    "Salesforce lets the connected user delete no lead of somebody else's. Delete it by hand, or give that user delete "
    "and Modify All on leads."
)


@contextmanager
def in_words(call: str, text: str) -> Iterator[None]:
    """Say it with this text where a rule of the account or a right to its leads stands against `call`."""
    try:
        yield
    except CrmError as error:
        against = error.outcome in (Outcome.REFUSED, Outcome.FORBIDDEN, Outcome.AGENT_REFUSED)
        if not against or error.text in (_NO_API, _RETIRED):
            raise
        raise CrmError(error.outcome, status=error.status, text=text, call=call) from None


_DAY_IS_USED_UP = 900.0  # seconds; the limit is one of 24 rolling hours and lets calls through again bit by bit
_TOO_MANY_AT_ONCE = 5.0


def _errors(data: Any) -> Iterator[Fields]:
    """Errors are lists of objects; gateways answer otherwise."""
    for one in data if isinstance(data, list) else ():
        if isinstance(one, dict):
            yield Fields(one, strict=False)


def meaning(status: int, data: Any) -> tuple[Outcome, str] | None:
    """What an answer other than 2xx means, with words for the admin, which hold nothing of it; None: its status."""
    for error in _errors(data):
        if found := ERRORS.get(error.text("errorCode") or ""):
            return found
    return STATUSES.get(status)


def wait(data: Any) -> float | None:
    """Seconds to wait where a limit was met: that of a day, or that of calls at once."""
    for error in _errors(data):
        if error.text("errorCode") == "REQUEST_LIMIT_EXCEEDED":
            return _TOO_MANY_AT_ONCE if "Concurrent" in (error.text("message") or "") else _DAY_IS_USED_UP
    return None
