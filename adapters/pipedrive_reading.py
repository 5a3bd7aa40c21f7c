"""What Pipedrive sends, in Turnlock's words: events, leads, agents, pages. Pure; the calls are in ``pipedrive.py``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from adapters import payload
from adapters.base import Event, EventKind, Team, Unreadable
from adapters.budget import Left, left_by
from adapters.payload import Fields
from adapters.upkeep import Next
from routing.model import AgentSeen, Lead

# https://pipedrive.readme.io/docs/guide-for-webhooks-v2
KINDS: Mapping[str, EventKind] = MappingProxyType(
    {
        "create": EventKind.LEAD_CREATED,
        "change": EventKind.LEAD_CHANGED,
        "delete": EventKind.LEAD_DELETED,
    }
)


@dataclass(frozen=True, slots=True)
class Thing:
    """What a tenant works with as leads: its name in events, its path, and the key that joins a note to it."""

    entity: str
    path: str
    note_key: str
    numbered: bool = True  # a lead's id is a UUID

    def note_ref(self, ref: str) -> str | int:
        """An id of this as notes take it."""
        return int(ref) if self.numbered else ref


# Leads are served by version 1 of the API alone, deals and persons by version 2 alone
# (https://pipedrive.readme.io/docs/pipedrive-api-v2-migration-guide).
THINGS: Mapping[str, Thing] = MappingProxyType(
    {
        "lead": Thing("lead", "/api/v1/leads", "lead_id", numbered=False),
        "deal": Thing("deal", "/api/v2/deals", "deal_id"),
        "person": Thing("person", "/api/v2/persons", "person_id"),
    }
)
# What no rule can look at. A change of these alone would cost a reading for nothing.
_NOISE = re.compile("(next|last)_activity_.*|.*_count|(update|stage_change)_time|was_seen|cc_email|picture_id")
_CUSTOM = re.compile("[0-9a-f]{40}")  # https://pipedrive.readme.io/docs/core-api-concepts-custom-fields
_UNREACHABLE = (
    "Pipedrive cannot reach Turnlock. TURNLOCK_PUBLIC_URL must be https with a certificate that everybody trusts, "
    "reachable from the internet, without a redirect, and `turnlock serve` must run; then install again"
)
#: What is left to do by hand where no hook can be made.
NO_ADMIN = (
    "Pipedrive lets the connected user make no webhooks. Connect an admin (an app needs the scope admin) and install "
    "again, or as an admin add three under Tools and apps, Webhooks: event actions create, change and delete, event "
    "object {entity}, version 2.0, endpoint URL {url}, HTTP Auth username {user}, and as HTTP Auth password the one "
    "that you then give to `turnlock tenant secret <tenant> hook_password`"
)
_NO_SCOPE = "The app lacks a scope for this: add it at Pipedrive, then run `turnlock connect` again."
_UNPAID = "Pipedrive says that the company's subscription does not allow this. Renew it or choose another plan."
_SPENT = (
    "The company's API tokens of today are used up. Pipedrive takes calls again after midnight; Turnlock then goes on."
)
_BLOCKED = "Pipedrive blocks all calls of Turnlock for a while, because of too many. Turnlock tries again later."
_PLACE = ("locality", "admin_area_level_1", "admin_area_level_2", "postal_code", "country", "route", "street_number")


def events_of(body: Fields) -> list[Event]:
    """What one delivery tells. ``meta.id`` alone is not taken for unique: the key names its object and time as well."""
    meta = body.object("meta")
    if (meta.text("version") or "").partition(".")[0] != "2":
        raise Unreadable("not_version_2")  # somebody made the hook by hand, with version 1.0
    action, entity = meta.required_text("action"), meta.required_text("entity")
    ref, account = _whole(meta.ref("entity_id")), meta.optional_ref("company_id")
    key = f"{account}:{entity[:40]}:{ref}:{action[:40]}:{meta.ref('id')}:{(meta.text('timestamp') or '')[:40]}"
    kind = KINDS.get(action) if entity in THINGS else None
    skipped = (
        kind is EventKind.LEAD_CHANGED and not meta.has("merged_from_id") and (_own(meta, body) or _is_noise(body))
    )
    if kind is None or skipped:
        return [Event(EventKind.UNKNOWN, key, account=account)]
    at = Fields(meta.data, strict=False).time("timestamp")
    found = [Event(kind, key, ref=ref, occurred_at=at, account=account)]
    # A merge is a deletion of the one and a change of the other, each of which names its counterpart.
    for name, what in (("merged_to_id", EventKind.LEAD_CHANGED), ("merged_from_id", EventKind.LEAD_DELETED)):
        if (other := meta.optional_ref(name)) and _whole(other) != ref:
            found.append(Event(what, f"{key}:{other}", ref=_whole(other), occurred_at=at, account=account))
    return found


def _own(meta: Fields, body: Fields) -> bool:
    """Our own write, come back: by the API, and by the user whose hook this is. A lead that this gave back to the
    user is looked at all the same: we never do that, so it was another program of theirs.
    """
    user = meta.optional_ref("webhook_owner_id")
    ours = meta.text("change_source") == "api" and user is not None and meta.optional_ref("user_id") == user
    return ours and body.object("data").optional_ref("owner_id") != user


def _is_noise(body: Fields) -> bool:
    changed = body.object("previous").data
    return bool(changed) and all(_NOISE.fullmatch(name) for name in changed)


def _whole(ref: str) -> str:
    """A number in one spelling, a UUID as it is."""
    return str(int(ref)) if ref.isascii() and ref.isdigit() else ref


def data_of(answer: Any) -> Any:
    """What an answer holds. A success says so in its body, too.

    Raises:
        Unreadable: it does not.
    """
    body = Fields(answer, strict=False)
    if body.flag("success") is not True:
        raise Unreadable("no_success")
    return body.data.get("data")


def row_of(answer: Any) -> Fields:
    """The one object of an answer."""
    return Fields(data_of(answer), strict=False)


def rows_of(answer: Any) -> list[Fields]:
    """The list of an answer; ``data`` is null where there is nothing."""
    data = data_of(answer)
    if data is not None and not isinstance(data, list):
        raise Unreadable("wrong_type")
    return [Fields(row, strict=False) for row in data or ()]


def following(data: Fields, path: str, query: Mapping[str, Any]) -> Next | None:
    """The next page: by ``next_cursor`` (version 2), else by ``next_start``, which stands in one of two places or
    nowhere.
    """
    more = data.object("additional_data")
    if cursor := more.text("next_cursor"):
        return path, {**query, "cursor": cursor}
    for place in (more.object("pagination"), more):
        if place.flag("more_items_in_collection"):
            here = (place.number("start") or 0) + (place.number("limit") or int(query["limit"]))
            return path, {**query, "start": str(int(place.number("next_start") or here))}
    return None


def is_there(row: Fields) -> bool:
    """Whether somebody may receive it: what is archived or deleted counts as gone."""
    return not (row.flag("is_archived") or row.flag("is_deleted"))


def owner_of(row: Fields, nobody: Collection[str]) -> str | None:
    """The owner, None where it is one of those who stand for nobody. Pipedrive knows no lead without an owner."""
    if not row.has("owner_id"):
        raise payload.missing("owner_id")  # nobody is guessed
    owner = row.optional_ref("owner_id")
    return None if owner in nobody else owner


def lead_of(
    thing: Thing,
    row: Fields,
    behind: Fields | None,
    said: Mapping[str, str],
    nobody: Collection[str],
    labels: Mapping[str, str],
) -> Lead:
    """A lead, deal or person with the person behind it, None where it has none that is visible."""
    who = behind or Fields({}, strict=False)
    own = _custom(row)
    custom = {**_custom(who), **own}
    place = _place(custom, said.get("address_field") or "-", who)
    street = " ".join(payload.unique((place.text("street_number"), place.text("route"))))
    about = {k: row.text(k) for k in ("title", "origin", "channel", "status", "pipeline_id", "currency")}
    values = Fields({k: _plain(v) for k, v in custom.items()} | {k: v for k, v in about.items() if v}, strict=False)
    value = row.object("value").number("amount") if thing.entity == "lead" else row.number("value")
    emails = sorted(who.objects("emails"), key=lambda e: not e.flag("primary"))
    phones = sorted(who.objects("phones"), key=lambda p: not p.flag("primary"))
    stage = row.text("stage_id")
    return Lead(
        ref=_whole(row.ref("id")),
        owner_ref=owner_of(row, nobody),
        source=row.text("source_name") or row.text("origin"),
        type=values.text(said.get("type_field") or "-"),
        stage=stage,
        price=value or None,  # 0 stands for "not filled"
        street=street or place.text("value"),
        city=place.text("locality"),
        county=place.text("admin_area_level_2"),
        state=place.text("admin_area_level_1"),
        zip=place.text("postal_code"),
        country=place.text("country"),
        form=row.text("origin_id"),
        campaign=row.text("channel_id"),
        tags=payload.unique(labels.get(str(label), str(label)) for label in row.items("label_ids")),
        emails=payload.unique(payload.email(e.text("value") or "") for e in emails),
        phones=payload.unique(payload.phone(p.text("value") or "") for p in phones),
        custom=MappingProxyType(values.scalars(values.data)),
        created_at=row.time("add_time"),
        updated_at=row.time("update_time"),
        name=who.text("name") or row.text("title"),
    )


def _custom(row: Fields) -> dict[str, Any]:
    """Custom fields by their keys: at the top of a lead (version 1), else under ``custom_fields``."""
    found = {k: v for k, v in row.data.items() if _CUSTOM.fullmatch(k[:40]) and (len(k) == 40 or k[40] == "_")}
    return found | dict(row.object("custom_fields").data)


def _plain(value: Any) -> Any:
    """The value of a field of several parts, money or an address, say."""
    return value.get("value") if isinstance(value, dict) else value


def _place(custom: Mapping[str, Any], key: str, who: Fields) -> Fields:
    """The address: the field that the admin named, whole or in parts beside it, else the contact's postal address."""
    found = custom.get(key)
    if isinstance(found, dict):
        return Fields(found, strict=False)
    if found:
        return Fields({"value": found} | {part: custom.get(f"{key}_{part}") for part in _PLACE}, strict=False)
    return who.object("postal_address")


def agent_of(user: Fields, nobody: Collection[str]) -> AgentSeen:
    """A user (https://developers.pipedrive.com/docs/api/v1/Users). Whoever stands for nobody is given nothing."""
    ref = _whole(user.ref("id"))
    apps = [access.text("app") for access in user.objects("access")]
    sells = not user.has("access") or "sales" in apps
    active = user.flag("active_flag") is True and not user.flag("is_deleted") and user.flag("activated") is not False
    return AgentSeen(
        ref=ref,
        name=user.text("name") or user.text("email") or ref,
        email=user.text("email"),
        active=active and sells and ref not in nobody,
        zone=user.zone("timezone_name"),
    )


def teams_of(rows: Iterable[Fields], active: Collection[str]) -> list[Team]:
    """Teams that are in use, with those of their members who are active agents."""
    return [
        Team(
            row.ref("id"),
            row.text("name") or row.ref("id"),
            tuple(ref for ref in payload.unique(str(user) for user in row.items("users")) if ref in active),
        )
        for row in rows
        if row.flag("active_flag") and not row.flag("deleted_flag")
    ]


def refs_of(text: str) -> tuple[str, ...]:
    """Ids that an admin wrote with commas between."""
    return payload.unique(part.strip() for part in text.split(",") if part.strip().isdigit())


def is_admin(user: Fields) -> bool:
    """Whether a user sees everybody's leads: a hook tells of nothing that its user may not see."""
    return any(access.flag("admin") and access.text("app") in ("sales", "global") for access in user.objects("access"))


def words_for(status: int, headers: Mapping[str, str], data: Any) -> str | None:
    """What the admin is told of an error, where its body or its lack says what the remedy is; None elsewhere."""
    told = data if isinstance(data, dict) else {}
    errors, said = told.get("errors"), told.get("error")
    if status == 402:
        return _UNPAID
    if status == 403 and data is None:
        return _BLOCKED
    if status == 429 and is_spent(headers):
        return _SPENT
    if status == 400 and isinstance(errors, dict) and "subscription_url" in errors:
        return _UNREACHABLE
    return _NO_SCOPE if status == 403 and said == "Scope and URL mismatch" else None


def is_spent(headers: Mapping[str, str]) -> bool:
    """Whether the day's API tokens are used up."""
    return headers.get("x-daily-ratelimit-token-remaining") == "0"


def left_of(headers: Mapping[str, str]) -> Mapping[str, Left]:
    """What an answer says is left of the day's API tokens; Pipedrive does not always tell."""
    said = left_by(headers, "x-daily-ratelimit-token-remaining", "x-daily-ratelimit-token-limit")
    return {} if said is None else {"daily": said}
