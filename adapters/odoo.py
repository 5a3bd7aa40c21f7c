"""Odoo 18, modules CRM and Automation Rules (https://www.odoo.com/documentation/18.0/developer/reference/external_api.html).

What no page tells was seen on a running 18.0 Community; the traffic is kept in ``tests/fixtures/odoo/captured``.

What shapes this module: a rule posts *inside the open transaction*, once, for at most a second and unsigned, also of a
change that is then taken back. So a delivery is only a reason to read, a moment later. Every error of the application
is a 200. An owner that is no number clears the owner; an archived user is accepted. There is no conditional write. A
wide rule posts twenty times for one lead; ours looks at the owner alone. Leads made through the API belong to its user.

Not captured, but read: notes, and followers, who stand for collaborators (addons/mail/models/mail_thread.py), and
sales teams (addons/sales_team/models/crm_team.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from adapters import odoo_rpc as rpc
from adapters import odoo_rules as rules
from adapters import payload, upkeep
from adapters.base import (
    Adapter,
    Capability,
    Credentials,
    Event,
    EventKind,
    Finding,
    OwnerWrite,
    Subscribed,
    Team,
    WebhookRequest,
)
from adapters.odoo_reading import agent_of, lead_fields, lead_of
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Client

_LEAD = "crm.lead"
_NO_ADDRESS = "Odoo sends the agent a message and needs a sender: give the connected user an e-mail address in Odoo."
_OWN_ONLY = "give the connected user the right Sales: User: All Documents; it sees only leads of its own"
_NO_APP = "Odoo makes no automation rules yet: install its app Automation Rules (base_automation), then install again"
_BY_HAND = (
    "Odoo lets only a user with the right Administration: Settings make automation rules. Connect such a user and "
    "install again, or as an administrator add a rule under Settings, Technical, Automation Rules: model "
    "Lead/Opportunity, trigger On create and edit, when updating Salesperson, no filter, action Send Webhook "
    "Notification to {url} with the fields Created on, Last Updated on, Last Updated by, Salesperson"
)


class Odoo(Adapter):
    """See the module's text."""

    name = "odoo"
    capabilities = frozenset(
        {
            Capability.BATCH_READ,
            Capability.WEBHOOK_API,
            Capability.NULL_OWNER,
            Capability.NOTES,
            Capability.COLLABORATORS,
            Capability.SWEEP,
            Capability.SWEEP_CHANGES,
            Capability.TEST_LEAD,
            Capability.TEAMS,
        }
    )
    default_base_url = None
    hook_secret = None
    topics: ClassVar[Mapping[str, EventKind]] = MappingProxyType({rules.TOPIC: EventKind.LEAD_CHANGED})
    missing_is_final_after = 60.0  # a long import is one transaction
    settle = 0.2
    max_batch = rpc.PAGE

    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        """Nothing to look at: the token in the address is all that guards the hook."""

    def parse(self, request: WebhookRequest) -> list[Event]:
        """One event. Its time is the lead's in the transaction that posts, so a reading can be told from before it."""
        body = Fields(payload.read_json(request.body), strict=True)
        if body.required_text("_model") != _LEAD:
            return [Event(EventKind.UNKNOWN, f"unknown:{hashlib.sha256(request.body).hexdigest()}", key_is_final=False)]
        ref = body.ref("_id")
        told = rpc.shown(body.data)
        made, written = told.time("create_date"), told.time("write_date")
        kind = EventKind.LEAD_CREATED if made and made == written else EventKind.LEAD_CHANGED
        return [Event(kind, f"lead:{ref}", key_is_final=False, ref=ref, occurred_at=written)]

    def asks_to_wait(self, status: int, headers: Mapping[str, str], data: Any) -> float | None:
        """Odoo tells of a record that is gone in a 200: a 404 comes from somewhere else."""
        return upkeep.elsewhere(status, False)

    def words(self, status: int, headers: Mapping[str, str], data: Any) -> str | None:
        """What is not Odoo at all."""
        return upkeep.not_there("Odoo") if self.asks_to_wait(status, headers, data) else None

    def headers(self, credentials: Credentials) -> Mapping[str, str]:
        """None: the key stands in each call."""
        return {}

    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        """``search_read`` by id, archived ones too; what is not committed yet or not visible is left out."""
        found: dict[str, Lead] = {}
        wanted = [int(ref) for ref in dict.fromkeys(refs) if ref.isascii() and ref.isdigit()]
        for start in range(0, len(wanted), rpc.PAGE):
            domain = [["id", "in", wanted[start : start + rpc.PAGE]]]
            rows = rpc.search(client, _LEAD, domain, lead_fields(client), lambda row: row, context=rpc.ALSO_ARCHIVED)
            tagged = [tag for row in rows for tag in row.items("tag_ids")]
            followed = [one for row in rows for one in row.items("message_partner_ids")]
            # Neither is worth a lead: a user who may not read them reads leads without.
            none: Mapping[int, str] = {}
            tags = rpc.if_allowed(partial(rpc.names_of, client, "crm.tag", tagged), none)
            users = rpc.if_allowed(partial(rpc.users_of, client, followed), none)
            leads: list[Lead] = rpc.reading(partial(list, map(partial(lead_of, tags=tags, users=users), rows)))
            found |= {lead.ref: lead for lead in leads}
        return {ref: lead for ref, lead in found.items() if ref in refs}

    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        """``write`` of ``user_id`` as a number: Odoo takes anything else for nobody."""
        if not (agent_ref.isascii() and agent_ref.isdigit() and lead.ref.isdigit()):
            raise CrmError(Outcome.REFUSED, call=f"{_LEAD} write")
        try:
            rpc.execute(client, _LEAD, "write", [[int(lead.ref)], {"user_id": int(agent_ref)}], write=True)
        except CrmError as error:
            if rpc.told_of(error, "name").endswith(".MissingError") and "res.users(" in rpc.told_of(error, "message"):
                refused = CrmError(Outcome.REFUSED, status=200, call=f"{_LEAD} write")  # it is the agent who is missing
                raise refused from None
            raise _for_the_admin(client, error) from None
        return OwnerWrite()

    def add_collaborator(self, client: Client, lead: Lead, agent_ref: str) -> None:
        """``message_subscribe``: a follower more. Followers are partners; each user is one."""
        partner = rpc.partner_of(client, agent_ref)
        if partner is None:
            raise CrmError(Outcome.REFUSED, call=f"{_LEAD} message_subscribe")
        rpc.execute(
            client, _LEAD, "message_subscribe", [[int(payload.ref(lead.ref))]], write=True, partner_ids=[partner]
        )

    def find_note(self, client: Client, ref: str, marker: str) -> bool:
        """``search`` of the lead's messages."""
        domain = [["model", "=", _LEAD], ["res_id", "=", int(payload.ref(ref))], ["body", "ilike", marker]]
        return bool(rpc.ids(client, "mail.message", domain))

    def add_note(self, client: Client, ref: str, subject: str, body: str) -> None:
        """``message_post`` of an internal note, which sends nobody a message."""
        said = {"body": payload.note_html(subject, body), "body_is_html": True}
        kind = {"message_type": "comment", "subtype_xmlid": "mail.mt_note"}
        try:
            rpc.execute(client, _LEAD, "message_post", [[int(payload.ref(ref))]], write=True, **said, **kind)
        except CrmError as error:
            raise _for_the_admin(client, error) from None

    def add_test_lead(self, client: Client, name: str, email: str, definition: UnassignedDefinition) -> str:
        """``create``, with nobody as its owner: else the lead would be the connected user's."""
        values = {"name": name, "contact_name": name, "type": "lead", "user_id": False, "email_from": email}
        made = rpc.execute(client, _LEAD, "create", [values], write=True)
        return rpc.reading(lambda: payload.ref(made))

    def remove_test_lead(self, client: Client, ref: str) -> None:
        """``unlink``, which needs *Sales: Administrator*; the lead of any other user is archived."""
        rules.away(client, _LEAD, ref)

    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        """All internal users, archived ones too."""
        return upkeep.each_once(rpc.listing(client, "res.users", [_INTERNAL], _USER, agent_of, rpc.ALSO_ARCHIVED))

    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        """``search_read`` by id."""
        if not (ref.isascii() and ref.isdigit()):
            return None
        domain = [_INTERNAL, ["id", "=", int(ref)]]
        return next(iter(rpc.search(client, "res.users", domain, _USER, agent_of, context=rpc.ALSO_ARCHIVED)), None)

    def list_teams(self, client: Client) -> Iterator[Team]:
        """Sales teams."""
        working = {agent.ref for agent in self.list_agents(client) if agent.active}

        def team(row: Fields) -> Team:
            members = payload.unique(payload.ref(user) for user in row.items("member_ids"))
            return Team(row.ref("id"), row.text("name") or row.ref("id"), tuple(m for m in members if m in working))

        for page in rpc.listing(client, "crm.team", [], ("id", "name", "member_ids"), team):
            yield from page

    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Open leads created since."""
        return _sweep(client, "create_date", since, definition)

    def changed_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        """Open leads written since; jobs of Odoo write to every open lead."""
        return _sweep(client, "write_date", since, definition)

    def subscribe(self, client: Client, url: str) -> Subscribed:
        """One rule that looks at the salesperson alone; by hand where the user may not make rules."""
        try:
            if not rules.can_be_made(client):
                return Subscribed(by_hand=(_NO_APP,))
            return upkeep.reconcile(
                rules.hooks(client),
                url,
                self.topics,
                create=lambda topic: rules.create(client, url),
                enable=lambda hook: rules.create(client, url, instead_of=hook),
                remove=lambda hook: rules.remove(client, hook),
            )
        except CrmError as error:
            if error.outcome is not Outcome.FORBIDDEN or error.status != 200:
                raise
            return Subscribed(by_hand=(_BY_HAND.format(url=url),))

    def unsubscribe(self, client: Client, url: str) -> int:
        """Remove every rule that posts to `url`; none where the user may not see any: made by hand, it goes by hand."""
        standing = upkeep.if_visible(lambda: rules.hooks(client))
        return sum(rules.remove(client, hook) for hook in standing if hook.url == url)

    def check(self, client: Client, url: str | None) -> list[Finding]:
        """Login, clock, the user's address, leads, agents, and the rule where the user may see it."""

        def user() -> Iterator[Finding]:
            answer, version = rpc.call(client, "common", "version", [], write=False)
            with answer.reading():
                what = Fields(version, strict=False).text("server_version") or "unknown version"
            yield Finding("user", True, f"{rpc.uid(client)} on Odoo {what}")
            yield upkeep.clock(upkeep.http_date(answer.headers.get("Date")), client.now())
            address = _own_address(client)
            yield Finding("address", address, "there" if address else "missing", "" if address else _NO_ADDRESS)
            # What this user may not see would look as if it were gone.
            group = [[rpc.uid(client)], "sales_team.group_sale_salesman_all_leads"]
            ask = partial(rpc.execute, client, "res.users", "has_group", group, write=False)
            sees = rpc.if_allowed(ask, None) is not False
            yield Finding("rights", sees, "all leads" if sees else "own leads only", "" if sees else _OWN_ONLY)

        def leads() -> Iterator[Finding]:
            rpc.search(client, _LEAD, [], ("id", "user_id"), lead_of, limit=1)
            yield Finding("leads", True, "readable")

        def hooks() -> Iterator[Finding]:
            try:
                yield upkeep.hooks_alive(rules.hooks(client), url, self.topics)
            except CrmError as error:
                if error.outcome is not Outcome.FORBIDDEN or error.status != 200:
                    raise
                yield Finding("hooks", True, "not visible to this user; see Automation Rules in Odoo")

        return upkeep.probes(
            ("user", user),
            ("leads", leads),
            ("notes", lambda: upkeep.notes(lambda: self.find_note(client, "0", "[turnlock:]"))),
            ("agents", lambda: [upkeep.agents(sum(a.active for a in self.list_agents(client)))]),
            ("hooks", hooks),
        )


# -- rows ------------------------------------------------------------------------------------------------------------

_USER = ("id", "login", "name", "email", "active", "tz")
_INTERNAL = ["share", "=", False]  # no portal users


def _sweep(client: Client, field: str, since: datetime, definition: UnassignedDefinition) -> Iterator[list[str]]:
    """By id: a list that is read so loses nothing while leads are assigned."""
    young = since.astimezone(UTC).replace(microsecond=0)  # times are shown cut to seconds
    domain: list[Any] = [[field, ">=", f"{young:%Y-%m-%d %H:%M:%S}"], ["active", "=", True], ["probability", "<", 100]]
    if not definition.user_refs:
        domain.append(["user_id", "=", False])
    leads = rpc.listing(client, _LEAD, domain, ("id", "user_id", "create_date", "write_date"), lead_of)
    return upkeep.unassigned(leads, definition, since=young, changed=field == "write_date")


def _for_the_admin(client: Client, error: CrmError) -> CrmError:
    """`error`, or what lies behind it: whatever sends a message is refused to a user without an address."""
    if rpc.told_of(error, "name").endswith(".UserError") and not _own_address(client):
        return CrmError(Outcome.FORBIDDEN, status=200, call=_LEAD, text=_NO_ADDRESS)
    return error


def _own_address(client: Client) -> bool:
    return any(rpc.search(client, "res.users", [["id", "=", rpc.uid(client)]], _USER, lambda u: u.text("email")))
