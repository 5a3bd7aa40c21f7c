"""Records a queue's ledger from a running Turnlock: leads through the webhook, moves by an admin, a CRM that answers.

``python -m tests.routing.record_ledger FILE`` wrote ``tests/fixtures/ledger/capacity_and_returns.json``, once. A
recording stands for the ledgers that installations have and is never made again: this refuses a file that exists. New
kinds of entries get a recording of their own, by a script that makes them.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from cryptography.fernet import Fernet

from connector import returns, turns
from connector.embedded import EmbeddedPostgres
from connector.process import open_runtime
from connector.sandbox import Sandbox
from connector.settings import Settings
from routing import store
from routing.ledger import checkpoint
from tests import homes
from tests.rig import Rig, until

NOTE = (
    "Recorded once, from a running Turnlock: caps, skip policies, credits, debits, turns given next, moves to the "
    "back, reorders, new weights, returned leads and leads that settled first. NEVER regenerate it: it stands for the "
    "ledgers that installations have. If it does not replay any more, the code has changed what past entries mean, "
    "and the code is wrong."
)
ROUNDS = 84
AGENTS = ("12", "13", "14", "15", "16")
WHO = {"actor": "admin@example.com", "why": "by hand"}


def config(away: str | None, weights: dict[str, int]) -> str:
    """One agent is on leave, one off hours now and then; all but one have a cap."""
    leave = "leave: [{from: 2020-01-01, to: 2099-01-01}]"
    agents = {
        "12": "caps: {open: 9}",
        "13": "caps: {hour: 60}",
        "14": "hours: {mon: []}" if away == "14" else "",
        "15": "caps: {day: 45, open: 12}",
        "16": leave if away == "16" else "",
    }
    said = "".join(f"  '{ref}': {{{value}}}\n" for ref, value in agents.items() if value)
    members = ", ".join(f"{{agent: '{ref}', weight: {weight}}}" for ref, weight in weights.items())
    return (
        "default_queue: All\ncaps_zone: UTC\nreturns: {per_day: 1000}\nsettle: {sources: {Slow: 1}}\n"
        f"agents:\n{said}queues:\n  All:\n    members: [{members}]\n"
        "    skip_policy: {leave: average, off_hours: lose_turn, paused: lose_turn}\n"
    )


def play(rig: Rig, chance: random.Random) -> None:
    """Some hundred leads, and between them everything that moves a line."""
    weights = {"12": 3, "13": 2, "14": 1, "15": 1, "16": 1}
    paused: set[str] = set()
    away: str | None = None
    owned: list[str] = []
    queue_id = UUID(str(rig.one("SELECT queue_id FROM queues WHERE tenant_id = :t AND name = 'All'")))

    def by_hand(what: Any, given: Any) -> None:
        what(rig.runtime, rig.tenant, queue_id, given, **WHO)

    for number in range(ROUNDS):
        refs = [rig.create() for _ in range(chance.randint(1, 4))]
        if number % 12 == 5:
            refs.append(rig.create(source="Slow"))
        for ref in refs:
            until(lambda ref=ref: rig.owner(ref) or rig.standing(ref)["state"] == "held", what="a decision")
        rig.settle_owners()
        owned += [ref for ref in refs if rig.standing(ref)["state"] == "assigned"]
        ref = chance.choice(AGENTS)
        match number % 14:
            case 0:
                by_hand(turns.credit, rig.agent_id(ref))
            case 1:
                by_hand(turns.debit, rig.agent_id(ref))
            case 2:
                by_hand(turns.give_next, rig.agent_id(ref))
            case 3:
                by_hand(turns.send_to_back, rig.agent_id(ref))
            case 4:
                by_hand(turns.reorder, [rig.agent_id(one) for one in chance.sample(AGENTS, 3)])
            case 5:
                weights[ref] = chance.choice([1, 2, 3, 5, 33])
                turns.reweight(rig.runtime, rig.tenant, "All", rig.agent_id(ref), weights[ref], **WHO)
            case 6 | 12:
                give_back(rig, owned.pop(chance.randrange(len(owned))), void=chance.random() < 0.5)
            case 7 | 10:
                if ref in paused:
                    rig.pause(ref, False)
                    paused.discard(ref)
                elif len(paused) < 2:
                    rig.pause(ref)
                    paused.add(ref)
            case 8 | 11:
                away = chance.choice([None, "14", "16"])
                rig.configure(config(away, weights))
            case 9 | 13:
                closed = owned[: len(owned) // 2]
                owned = owned[len(owned) // 2 :]
                rig.sandbox.edit_leads([int(one) for one in closed], stage="Closed")
    rig.configure(config(None, weights))
    for ref in paused:
        rig.pause(ref, False)
    rig.sandbox.edit_leads([int(one) for one in owned], stage="Closed")
    rig.settle()


def give_back(rig: Rig, ref: str, *, void: bool) -> None:
    asked = returns.ask(rig.runtime, rig.tenant, rig.lead_id(ref), returns.ReturnReason.BOGUS, actor="agent")
    returns.approve(rig.runtime, rig.tenant, UUID(asked["return_id"]), void=void, actor="admin@example.com")
    rig.settle_owners()


def recorded(rig: Rig) -> dict[str, Any]:
    """The ledger with the present line; beside each turn why the unavailable were, and whether its lead had settled."""
    rows = rig.rows(
        sa.text(
            "SELECT l.seq, l.kind, l.at, l.actor, l.reason, l.data, d.record, d.cause, x.settles_at FROM ledger l "
            "LEFT JOIN decisions d ON d.tenant_id = l.tenant_id AND d.decision_id = (l.data->>'decision')::uuid "
            "LEFT JOIN leads x ON x.tenant_id = d.tenant_id AND x.lead_id = d.lead_id "
            "WHERE l.tenant_id = :t ORDER BY l.seq"
        ).bindparams(t=rig.tenant.tenant_id)
    )
    entries = []
    for row in rows:
        entry = {"seq": row.seq, "kind": row.kind, "at": row.at.isoformat(), "actor": row.actor, "reason": row.reason}
        if row.record is not None:
            out = [one for path in row.record.get("paths", ()) for one in path.get("unavailable", ())]
            beside = {"cause": row.cause, "settled": row.settles_at is not None}
            entry["beside"] = beside | {"skips": {one["agent"]: one["skip"] for one in out}}
        entries.append(entry | {"data": row.data})
    with rig.runtime.engine.connect() as conn:
        tenant = store.tenant_row(conn, rig.tenant.tenant_id)
        queue_ids = list(conn.execute(sa.text("SELECT queue_id FROM queues")).scalars())
        (queue,) = store.load_queues(conn, tenant.tenant_id, tenant.flags, queue_ids).values()
    return {"note": NOTE, "present": checkpoint(queue.line), "entries": entries}


def main() -> int:
    """Record into a new file."""
    path = Path(sys.argv[1])
    if path.exists():
        print(f"{path} exists: a recording is never made again")
        return 1
    with homes.passing() as folder:
        key = Fernet.generate_key().decode()
        settings = Settings(home=folder / "db", secret_keys=(key,), allow_private_hosts=True)
        with (
            EmbeddedPostgres(settings.home),
            open_runtime(settings, upgrade=True, threads=12) as runtime,
            Sandbox(retry_scale=0.001) as sandbox,
        ):
            rig = Rig(runtime, sandbox, "generic")
            rig.start_web()
            rig.add_tenant(config=config(None, {"12": 3, "13": 2, "14": 1, "15": 1, "16": 1}))
            rig.start_worker()
            try:
                play(rig, random.Random(20261130))
                rig.audit()
                found = recorded(rig)
            finally:
                rig.stop()
    head = [f'"{name}": {json.dumps(found[name])}' for name in ("note", "present")]
    lines = ",\n".join(json.dumps(entry) for entry in found["entries"])
    path.write_text("{\n" + ",\n".join(head) + ',\n"entries": [\n' + lines + "\n]}\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
