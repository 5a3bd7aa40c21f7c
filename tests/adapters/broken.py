"""Adapters with one fault each, and the checks that must find it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import count, islice
from typing import Any
from xml.etree import ElementTree

from adapters.base import HOOK_TOPIC, Adapter, Event, OwnerWrite, Rejected, Subscribed, Unreadable, WebhookRequest
from adapters.client import Client, CrmError
from adapters.espocrm import EspoCrm
from adapters.followupboss import FollowUpBoss
from adapters.frappe import Frappe
from adapters.generic import Generic
from adapters.odoo import Odoo
from adapters.pipedrive import Pipedrive
from adapters.salesforce import Salesforce
from adapters.twenty import Twenty
from routing.model import AgentSeen, Lead, UnassignedDefinition
from tests.adapters.kit import Kit, kit


class AcceptsAll(FollowUpBoss):
    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        return


class AnswersABool(FollowUpBoss):
    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> Any:  # type: ignore[override]
        try:
            super().verify(request, secrets, now)
        except Rejected:
            return False
        return True


class AcceptsWithoutSecret(FollowUpBoss):
    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        if any(secrets):
            super().verify(request, secrets, now)


class ForgetsTheBase64(FollowUpBoss):
    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        given = request.headers.get("fub-signature", "")
        if not any(hmac.new(s, request.body, hashlib.sha256).hexdigest() == given for s in secrets if s):
            raise Rejected("bad_signature")


class Reserialises(FollowUpBoss):
    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        compact = json.dumps(json.loads(request.body), separators=(",", ":")).encode()
        super().verify(replace(request, body=compact), secrets, now)


class TakesAnyPassword(Pipedrive):
    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        if not request.headers.get("authorization", "").startswith("Basic dHVybmxvY2s6"):
            raise Rejected("bad_password")


class ForgetsTime(Generic):
    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        at = request.headers.get("webhook-timestamp", "")
        super().verify(request, secrets, datetime.fromtimestamp(int(at), now.tzinfo) if at.isdecimal() else now)


class TriesOneSecretOnly(Generic):
    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        super().verify(request, secrets[:1], now)


class TellsTheSecret(FollowUpBoss):
    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        try:
            super().verify(request, secrets, now)
        except Rejected as error:
            raise Rejected("bad_signature") from ValueError(f"not signed with {secrets!r}: {error}")


class ComparesText(FollowUpBoss):
    def verify(self, request: WebhookRequest, secrets: Sequence[bytes], now: datetime) -> None:
        given = request.headers.get("fub-signature", "")
        signed = base64.b64encode(request.body)
        if not any(hmac.compare_digest(hmac.new(s, signed, "sha256").hexdigest(), given) for s in secrets if s):
            raise Rejected("bad_signature")


class FailsTheWholeBatch(Generic):
    def parse(self, request: WebhookRequest) -> list[Event]:
        return [e for e in super().parse(request) if e.problem is None]


class NewKeyEachTime(Generic):
    numbers = count()

    def parse(self, request: WebhookRequest) -> list[Event]:
        return [replace(e, key=f"{e.key}:{next(self.numbers)}") for e in super().parse(request)]


class TrustsJson(FollowUpBoss):
    def parse(self, request: WebhookRequest) -> list[Event]:
        body = json.loads(request.body)
        return super().parse(replace(request, body=json.dumps(body, allow_nan=False).encode()))


class RetriesEverything(Generic):
    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        for _ in range(2):
            try:
                return super().set_owner(client, lead, agent_ref)
            except CrmError:
                continue
        return super().set_owner(client, lead, agent_ref)


class BelievesEveryWrite(FollowUpBoss):
    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        client.put(f"/people/{lead.ref}", json={"assignedUserId": int(agent_ref)})
        return OwnerWrite(owner_ref=agent_ref)


class OverwritesHumans(Generic):
    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        now = self.fetch_leads(client, [lead.ref]).get(lead.ref, lead)
        return super().set_owner(client, now, agent_ref)


class StopsAtTheFirstPage(FollowUpBoss):
    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        return islice(super().list_agents(client), 100)

    def unassigned_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        return islice(super().unassigned_since(client, since, definition), 1)


class HidesTheDeactivated(Generic):
    def list_agents(self, client: Client) -> Iterator[AgentSeen]:
        return (a for a in super().list_agents(client) if a.active)


class ReadsOneByOne(Generic):
    def fetch_leads(self, client: Client, refs: Sequence[str]) -> Mapping[str, Lead]:
        return {r: held for ref in refs for r, held in super(ReadsOneByOne, self).fetch_leads(client, [ref]).items()}


class SubscribesBlindly(FollowUpBoss):
    def subscribe(self, client: Client, url: str) -> Subscribed:
        for topic in self.topics:
            client.post("/webhooks", json={"event": topic, "url": url})
        return Subscribed()


class LeaksTheAnswer(FollowUpBoss):
    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        try:
            return super().get_agent(client, ref)
        except CrmError as error:
            raise CrmError(error.outcome, text=str(error.data)) from None


class AssumesShapes(FollowUpBoss):
    def get_agent(self, client: Client, ref: str) -> AgentSeen | None:
        return AgentSeen(ref=ref, name=client.get(f"/users/{ref}").data["name"])


class BelievesTheUnsigned(Odoo):
    def parse(self, request: WebhookRequest) -> list[Event]:
        return [replace(e, lead=Lead(ref=e.ref or ""), key_is_final=True) for e in super().parse(request)]


class ReadsDocumentTypes(Salesforce):
    def parse(self, request: WebhookRequest) -> list[Event]:
        try:
            read = ElementTree.tostring(ElementTree.fromstring(request.body))
        except (ElementTree.ParseError, ValueError):
            raise Unreadable("not_xml") from None
        return super().parse(replace(request, body=read))


class IgnoresTheAddress(EspoCrm):
    def parse(self, request: WebhookRequest) -> list[Event]:
        return super().parse(replace(request, headers={**request.headers, HOOK_TOPIC: "Lead.create"}))


class WritesWithoutCondition(Frappe):
    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        now = self.fetch_leads(client, [lead.ref])[lead.ref]
        return super().set_owner(client, now, agent_ref)


class WaitsForNothing(EspoCrm):
    def asks_to_wait(self, status: int, headers: Mapping[str, str], data: Any) -> float | None:
        return 60.0 if status == 403 else None


class LooksAtNewLeadsOnly(Odoo):
    def changed_since(
        self, client: Client, since: datetime, definition: UnassignedDefinition
    ) -> Iterator[Sequence[str]]:
        return self.unassigned_since(client, since, definition)


class TakesErrorsForResults(Twenty):
    def set_owner(self, client: Client, lead: Lead, agent_ref: str) -> OwnerWrite:
        super().set_owner(client, lead, agent_ref)
        return OwnerWrite()


def _of(name: str, adapter: type[Adapter]) -> Callable[[], Kit]:
    return lambda: kit(name, adapter())


_FUB = ("fixtures_give_their_events", "leads_are_read_and_missing_ones_are_absent")
_GENERIC = ("accepts_good_deliveries", "odd_answers_raise_only_crm_errors")

# fault -> the broken adapter, checks that must fail it, checks that it passes
BROKEN: Mapping[str, tuple[Callable[[], Kit], tuple[str, ...], tuple[str, ...]]] = {
    "accepts all": (
        _of("followupboss", AcceptsAll),
        (
            "rejects_a_missing_or_empty_signature",
            "rejects_a_flipped_signature",
            "rejects_a_changed_body",
            "white_space_in_the_body_matters",
            "rejects_without_a_secret",
            "rejects_another_secret",
            "two_secrets_live_until_one_is_removed",
            "any_bytes_raise_only_the_declared_errors",
        ),
        ("accepts_good_deliveries", *_FUB),
    ),
    "answers a bool": (
        _of("followupboss", AnswersABool),
        ("accepts_good_deliveries", "rejects_a_flipped_signature", "rejects_without_a_secret"),
        _FUB,
    ),
    "accepts without a secret": (
        _of("followupboss", AcceptsWithoutSecret),
        ("rejects_without_a_secret",),
        ("accepts_good_deliveries", "rejects_a_flipped_signature", *_FUB),
    ),
    "forgets the base64": (
        _of("followupboss", ForgetsTheBase64),
        ("accepts_good_deliveries", "two_secrets_live_until_one_is_removed"),
        ("rejects_a_changed_body", *_FUB),
    ),
    "re-serialises": (
        _of("followupboss", Reserialises),
        ("accepts_good_deliveries", "white_space_in_the_body_matters", "any_bytes_raise_only_the_declared_errors"),
        _FUB,
    ),
    "takes any password": (
        _of("pipedrive", TakesAnyPassword),
        ("rejects_a_flipped_signature", "rejects_another_secret", "two_secrets_live_until_one_is_removed"),
        ("accepts_good_deliveries", "rejects_a_missing_or_empty_signature"),
    ),
    "no freshness": (
        _of("generic", ForgetsTime),
        ("rejects_what_is_too_old_or_too_new",),
        ("rejects_a_flipped_signature", *_GENERIC),
    ),
    "one secret only": (_of("generic", TriesOneSecretOnly), ("two_secrets_live_until_one_is_removed",), _GENERIC),
    "tells the secret": (
        _of("followupboss", TellsTheSecret),
        ("rejects_a_changed_body", "rejects_another_secret"),
        ("accepts_good_deliveries", *_FUB),
    ),
    "compares text": (
        _of("followupboss", ComparesText),
        ("any_bytes_raise_only_the_declared_errors", "rejects_a_flipped_signature"),
        ("accepts_good_deliveries", "rejects_a_changed_body", *_FUB),
    ),
    "drops the bad element": (
        _of("generic", FailsTheWholeBatch),
        ("a_batch_keeps_its_order_and_isolates_what_is_bad", "a_required_field_that_is_gone_or_wrong_parks"),
        _GENERIC,
    ),
    "a new key each time": (
        _of("generic", NewKeyEachTime),
        ("the_same_delivery_has_the_same_keys", "fixtures_give_their_events"),
        _GENERIC,
    ),
    "trusts json": (
        _of("followupboss", TrustsJson),
        ("hostile_bodies_park", "any_bytes_raise_only_the_declared_errors"),
        _FUB,
    ),
    "retries everything": (
        _of("generic", RetriesEverything),
        ("a_write_is_sent_once_whatever_comes_back",),
        ("the_same_owner_twice_is_harmless", *_GENERIC),
    ),
    "believes every write": (
        _of("followupboss", BelievesEveryWrite),
        ("a_write_answers_the_owner_that_is_stored",),
        ("the_same_owner_twice_is_harmless", *_FUB),
    ),
    "overwrites humans": (
        _of("generic", OverwritesHumans),
        ("a_conditional_write_yields_to_a_human",),
        ("the_same_owner_twice_is_harmless", *_GENERIC),
    ),
    "stops at the first page": (
        _of("followupboss", StopsAtTheFirstPage),
        ("agents_are_listed_to_the_end_with_deactivated_ones", "the_sweep_finds_each_unassigned_lead_once"),
        _FUB,
    ),
    "hides the deactivated": (
        _of("generic", HidesTheDeactivated),
        ("agents_are_listed_to_the_end_with_deactivated_ones",),
        ("the_crms_own_pause_is_seen", *_GENERIC),
    ),
    "reads one by one": (_of("generic", ReadsOneByOne), ("leads_are_read_in_batches",), _GENERIC),
    "subscribes blindly": (_of("followupboss", SubscribesBlindly), ("subscriptions_are_reconciled",), _FUB),
    "leaks the answer": (_of("followupboss", LeaksTheAnswer), ("errors_tell_no_secret_and_no_person",), _FUB),
    "believes what nobody signed": (
        _of("odoo", BelievesTheUnsigned),
        ("what_nobody_signed_is_only_a_reason_to_read",),
        ("leads_are_read_and_missing_ones_are_absent", "extra_fields_are_ignored"),
    ),
    "reads document types": (
        _of("salesforce", ReadsDocumentTypes),
        ("hostile_bodies_park",),
        ("fixtures_give_their_events", "a_batch_keeps_its_order_and_isolates_what_is_bad"),
    ),
    "ignores the address": (
        _of("espocrm", IgnoresTheAddress),
        ("an_unknown_topic_is_ignored", "fixtures_give_their_events"),
        ("accepts_good_deliveries", "leads_are_read_and_missing_ones_are_absent"),
    ),
    "writes without its condition": (
        _of("frappe", WritesWithoutCondition),
        ("a_conditional_write_yields_to_a_human",),
        ("the_same_owner_twice_is_harmless", "accepts_good_deliveries"),
    ),
    "takes every no for not now": (
        _of("espocrm", WaitsForNothing),
        ("a_write_is_sent_once_whatever_comes_back",),
        ("the_same_owner_twice_is_harmless", "accepts_good_deliveries"),
    ),
    "looks at new leads only": (
        _of("odoo", LooksAtNewLeadsOnly),
        ("the_sweep_of_changes_finds_old_leads_that_lost_their_owner",),
        ("the_sweep_finds_each_unassigned_lead_once",),
    ),
    "takes errors for results": (
        _of("twenty", TakesErrorsForResults),
        ("a_conditional_write_yields_to_a_human",),
        ("the_same_owner_twice_is_harmless", "accepts_good_deliveries"),
    ),
    "assumes shapes": (_of("followupboss", AssumesShapes), ("odd_answers_raise_only_crm_errors",), _FUB),
}
