"""Automation rules of Odoo that post to an address (addons/base_automation/models/base_automation.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adapters import odoo_rpc as rpc
from adapters import payload, upkeep
from adapters.base import Hook
from adapters.outcome import CrmError, Outcome
from adapters.payload import Fields

if TYPE_CHECKING:
    from adapters.client import Client

#: The one thing that our rule looks at: who has the lead.
TOPIC = "owner_changed"
_LEAD, _RULE = "crm.lead", "base.automation"
_SENT = ("id", "user_id", "create_date", "write_date", "write_uid")  # what a delivery holds: nothing of a person


def can_be_made(client: Client) -> bool:
    """Whether this Odoo has automation rules: they are an app of their own."""
    return bool(rpc.ids(client, "ir.model", [["model", "=", _RULE]]))


def hooks(client: Client) -> list[Hook]:
    """Rules that post, each with its address. A rule that looks at more than one field is none of ours."""
    action, domain = "ir.actions.server", [["state", "=", "webhook"]]
    urls = dict(
        rpc.search(client, action, domain, ("id", "webhook_url"), lambda a: (a.ref("id"), a.text("webhook_url")))
    )
    if not urls:
        return []

    def read(rule: Fields) -> list[Hook]:
        narrow = rule.text("trigger") == "on_create_or_write" and len(rule.items("trigger_field_ids")) == 1
        topic = TOPIC if narrow else rule.text("trigger") or ""
        mine = [urls.get(payload.ref(action)) for action in rule.items("action_server_ids")]
        return [Hook(rule.ref("id"), topic, url, rule.flag("active") is True) for url in mine if url]

    fields = ("id", "active", "trigger", "trigger_field_ids", "action_server_ids")
    posting = [["action_server_ids", "in", [int(ref) for ref in urls]]]
    rules = rpc.search(client, _RULE, posting, fields, read, context=rpc.ALSO_ARCHIVED)
    return [hook for found in rules for hook in found]


def create(client: Client, url: str, instead_of: Hook | None = None) -> Hook:
    """Make the rule."""
    if instead_of is not None:
        remove(client, instead_of)
    of_leads = ["model", "=", _LEAD]
    models = rpc.ids(client, "ir.model", [of_leads])
    owner = rpc.ids(client, "ir.model.fields", [of_leads, ["name", "=", "user_id"]])
    sent = rpc.ids(client, "ir.model.fields", [of_leads, ["name", "in", list(_SENT)]])
    if not models or not owner:
        raise CrmError(Outcome.REFUSED, call="base.automation create", text="Odoo has no leads: install its CRM app.")
    action = {
        "name": "Turnlock",
        "model_id": models[0],
        "state": "webhook",
        "webhook_url": url,
        "webhook_field_ids": [[6, 0, sent]],
        "usage": "base_automation",
    }
    rule: dict[str, Any] = {
        "name": "Turnlock",
        "model_id": models[0],
        "trigger": "on_create_or_write",
        "trigger_field_ids": [[6, 0, owner[:1]]],
        "filter_domain": "[]",
        "active": True,
        "action_server_ids": [[0, 0, action]],
    }
    made = rpc.execute(client, _RULE, "create", [rule], write=True)
    return Hook(rpc.reading(lambda: payload.ref(made)), TOPIC, url, True)


def remove(client: Client, hook: Hook) -> bool:
    """Remove a rule, or archive it where that is refused; whether there was one."""
    return away(client, _RULE, hook.hook_ref)


def away(client: Client, model: str, ref: str) -> bool:
    """Remove a record, or archive it where that is refused; whether there was one."""
    numbers = [int(payload.ref(ref))]
    return upkeep.remove(
        lambda: rpc.execute(client, model, "unlink", [numbers], write=True),
        or_else=lambda: rpc.execute(client, model, "write", [numbers, {"active": False}], write=True),
    )
