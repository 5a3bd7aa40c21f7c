"""The leads of the past under a draft: who would have got what, beside who did. Nothing is written.

Each lead is decided again by the code that decides, in the order in which they came, from the lines as they stood at
the beginning of that time, with the draft's members, weights and rules. Who was away is known as far as decisions
recorded it: deactivations, pauses, leave and holidays hold from the decision that saw them to the next one of that
queue that did not. The draft's own leave and holidays, its working hours, quiet hours and caps hold by the clock of
then. Facts of a lead are those that were read last. What happened to single turns then happens again at its time:
see :mod:`connector.past_moves`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from connector import config_kept
from connector.configuration import known_agents, move_members
from connector.database import new_id
from connector.draft import Draft, rehearse
from connector.errors import TurnlockError
from connector.naming import Json, Names, iso
from connector.past_loads import PastLoads
from connector.past_moves import Move, moved, moves_since
from connector.paths import line_around
from connector.runtime import Runtime, Tenant
from connector.trial import snapshot
from routing import kin, saving
from routing import tables as t
from routing.decide import Bench, Case, Decision, Outcome, Waiting
from routing.facts import Identities, identities, lead_from_json
from routing.ledger import Kind
from routing.model import Agent, Flag, Lead, Role, Skip

_PAGE = 2000
# Ids of decisions are made by the clock of a worker, their times by the database's: the two may differ by this much.
_CLOCKS_APART = timedelta(hours=1)
_AWAY = frozenset({Skip.PAUSED, Skip.HOLIDAY, Skip.LEAVE})
# Given back for one of these, a lead goes to somebody who has not had it.
_TO_OTHERS = frozenset({"returned", "refused"})
# By whom a lead was had already; their own client goes to them on their day off, too.
_HAD = ("existing_owner", "same_household")


@dataclass(slots=True)
class _Lead:
    """One lead: what became of it, and what becomes of it by the draft."""

    lead_id: UUID
    lead: Lead | None
    came: datetime
    actual: Any = None
    draft: Decision | None = None
    held_then: bool = False
    held_now: bool = False
    # Why it was given back, by whoever has it by the draft and whoever had it; None once it is decided anew.
    back: str | None = None
    back_then: str | None = None
    decided_at: datetime | None = None
    declined: frozenset[UUID] = frozenset()
    recorded: dict[str, UUID] = field(default_factory=dict)
    known_by: Identities = field(default=Identities())


def replay_past(runtime: Runtime, tenant: Tenant, text: str | bytes | None, since: timedelta | datetime) -> Json:
    """Decide the leads since then again by `text` (None: by the configuration in force), JSON-safe.

    Raises :class:`connector.config.ConfigProblems` for a draft that cannot be used.
    """
    if text is None:
        with runtime.engine.connect() as conn:
            version = config_kept.in_force(conn, tenant.tenant_id)
            if not version:
                raise TurnlockError(f"{tenant.name!r} has no configuration yet; give a draft with --config")
            kept = config_kept.kept(runtime, conn, tenant, version)
            text = config_kept.text_again(kept, known_agents(conn, tenant.tenant_id))
    draft = rehearse(runtime, tenant, text)
    with snapshot(runtime) as conn:
        now = conn.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
        start = now - since if isinstance(since, timedelta) else since
        names = Names.load(conn, tenant.tenant_id)
        names = Names(names.agents, dict(names.queues) | {str(q): s.name for q, s in draft.after.items()})
        moves = moves_since(conn, tenant.tenant_id, runtime.stages(conn), start)
        past = _Past(conn, tenant.tenant_id, draft, start, moves)
        for row in _decisions(conn, tenant.tenant_id, start):
            past.take(row)
        past.move_until(now)
        refs = _refs(conn, tenant.tenant_id, list(past.leads))
    return _result(tenant, names, past, refs, start, now)


def _decisions(conn: sa.Connection, tenant_id: UUID, start: datetime) -> Iterator[Any]:
    """Every decision about an owner since then, in order, with the lead's facts. By key, a page at a time."""
    d, f = t.decisions.c, t.lead_facts.c
    query = (
        sa.select(
            d.decision_id, d.lead_id, d.decided_at, d.outcome, d.reason, d.rule, d.queue_id, d.agent_id, d.turn,
            d.record["paths"].label("paths"), d.record["how"].astext.label("how"), f.facts,
        )
        .outerjoin(t.lead_facts, (f.tenant_id == d.tenant_id) & (f.lead_id == d.lead_id))
        .where(d.tenant_id == tenant_id, d.role == Role.OWNER.value, d.decided_at >= start)
        .order_by(d.decision_id)
        .limit(_PAGE)
    )  # fmt: skip
    # UUIDv7 begins with the milliseconds since 1970.
    last = UUID(int=int((start - _CLOCKS_APART).timestamp() * 1000) << 80)
    held: list[Any] = []
    while True:
        rows = list(conn.execute(query.where(d.decision_id > last)))
        if rows:
            last = rows[-1].decision_id
        held += rows
        held.sort(key=lambda row: (row.decided_at, row.turn or 0, row.decision_id))
        # The last ones wait for the next page: ids of one unit do not come in the order of its turns.
        ready = len(held) if len(rows) < _PAGE else max(len(held) - _PAGE // 2, 0)
        yield from held[:ready]
        held = held[ready:]
        if len(rows) < _PAGE:
            return


def _refs(conn: sa.Connection, tenant_id: UUID, lead_ids: list[UUID]) -> dict[UUID, str]:
    r = t.lead_refs.c
    found: dict[UUID, str] = {}
    for first in range(0, len(lead_ids), _PAGE):
        some = sa.cast(lead_ids[first : first + _PAGE], sa.ARRAY(sa.Uuid))
        rows = conn.execute(
            sa.select(r.lead_id, r.ref)
            .where(r.tenant_id == tenant_id, r.lead_id == sa.any_(some))
            .order_by(r.created_at, r.ref.desc())
        )
        found |= {row.lead_id: row.ref for row in rows}
    return found


def _there(agent: Agent) -> Agent:
    """Nobody is away until a decision says so: what holds today says nothing about then."""
    return replace(agent, active=True, refused=False, paused_by_crm=False, paused_by_admin=False, paused_until=None)


class _Past:
    """Replays decisions, one after the other."""

    def __init__(
        self, conn: sa.Connection, tenant_id: UUID, draft: Draft, start: datetime, moves: Sequence[Move]
    ) -> None:
        self._conn, self._tenant_id, self._draft = conn, tenant_id, draft
        self._agents: dict[UUID, Agent] = {agent_id: _there(one) for agent_id, one in draft.agents.items()}
        self._bench = Bench(draft.plan, self._agents, dict(draft.after), datetime.min.replace(tzinfo=UTC))
        self._loads = PastLoads(conn, tenant_id, self._bench, self._agents, start)
        self._recalled: set[UUID] = set()
        # Who was seen to be a member of a queue, as its decisions tell.
        self._members: dict[str, set[str]] = {
            str(q): {str(p.agent_id) for p in state.line.places} for q, state in draft.before.items()
        }
        self._held: dict[UUID, _Lead] = {}
        self._owners: dict[bytes, dict[UUID, tuple[datetime, UUID]]] = {}
        self._shared: Counter[bytes] = Counter()
        self._moves = deque(moves)
        self.leads: dict[UUID, _Lead] = {}
        #: Turns and leads given back then and by the draft; and credits, charges and the like that were repeated, and
        #: those that could not be: the agent is no member of that line by the draft.
        self.counts = Counter[str]()

    def take(self, row: Any) -> None:
        """One decision of the past: what it tells of who was there, and its lead if it is new or was given back."""
        self.move_until(row.decided_at)
        if row.turn is not None:
            turns = {UUID(path["queue"]): path["position"][1] for path in row.paths or () if "position" in path}
            for queue_id, turn in (turns | {row.queue_id: row.turn}).items():
                if queue_id not in self._recalled:
                    self._recall(queue_id, turn, row.decision_id)
        self._learn(row)
        self._bench.now = row.decided_at
        self._bench.absent.clear()  # found out for the instant and the agents of before
        self._loads.at(row.decided_at)
        stuck: set[UUID | None] = set()
        for waiting in sorted(self._held.values(), key=lambda one: (one.came, one.lead_id)):
            home = waiting.draft.queue_id if waiting.draft else None
            if home not in stuck:  # behind one who still waits, nobody of the same queue is served
                self._decide(waiting, row.decided_at)
                stuck |= {home} if waiting.lead_id in self._held else set()
        one = self.leads.get(row.lead_id)
        fresh = one is None
        if one is None:
            lead = None if row.facts is None else lead_from_json(row.facts)
            one = self.leads[row.lead_id] = _Lead(row.lead_id, lead, row.decided_at)
            if lead is not None:
                households = Flag.HOUSEHOLDS in self._draft.plan.flags
                country = self._draft.config.country
                one.known_by = identities(self._tenant_id, lead, households=households, country=country)
                self._shared.update(one.known_by.all)
        one.actual, one.back_then = row, None
        one.held_then |= row.outcome == Outcome.HELD.value
        if row.how in _HAD:
            one.recorded[row.how] = row.agent_id
        if one.lead is not None and (fresh or one.back is not None):
            self._decide(one, row.decided_at)

    def move_until(self, now: datetime) -> None:
        """Let happen again what happened to single turns until `now`."""
        while self._moves and self._moves[0].at <= now:
            move = self._moves.popleft()
            one = None if move.lead_id is None else self.leads.get(move.lead_id)
            if one is not None:
                self._give_back(one, move)
            elif move.queue_id in self._recalled:  # else it is in the line that will be recalled
                done = self._move(move.queue_id, move.kind, move.data)
                self.counts["repeated" if done else "not_repeated"] += 1

    def _move(self, queue_id: UUID | None, kind: Kind, data: Mapping[str, Any]) -> bool:
        after = None if queue_id is None else moved(self._bench.lines.get(queue_id), kind, data)
        if queue_id is not None and after is not None:
            self._bench.lines[queue_id] = after
        return after is not None

    def _give_back(self, one: _Lead, move: Move) -> None:
        """A lead of this time was given back then."""
        one.back_then = move.reason
        draft = one.draft
        if draft is None:
            return
        self.counts["given_back_then"] += 1
        agent_id, to_others = draft.agent_id, move.reason in _TO_OTHERS
        if agent_id is None or one.back is not None or (move.reason == "refused" and agent_id != move.agent_id):
            return
        self.counts["given_back"] += 1
        one.back = move.reason
        one.declined |= {agent_id} if to_others else frozenset()
        if draft.pick is not None:
            owed = {"turn": draft.pick.turn, "agent": str(agent_id), "owed": str(new_id())}
            self._move(draft.queue_id, Kind.VOID, owed)
        assert one.decided_at is not None and one.lead is not None  # noqa: S101, PT018 - both are there with a draft
        self._loads.took_back(agent_id, one.lead, one.decided_at)
        for digest in one.known_by.all:
            self._owners.get(digest, {}).pop(one.lead_id, None)

    def _recall(self, queue_id: UUID, turn: int, decision_id: UUID) -> None:
        """The first turn of a line in this time: how it stood then, with the members of the draft."""
        self._recalled.add(queue_id)
        after = self._draft.after.get(queue_id)
        if after is None or Flag.ROTATION not in self._draft.plan.flags:
            return
        before, _ = line_around(self._conn, self._tenant_id, queue_id, turn, decision_id)
        if before is None:
            return
        self._members.setdefault(str(queue_id), set()).update(str(p.agent_id) for p in before.places)
        moves = saving.Moves(before, after.next_rank, "replay")
        move_members(moves, {p.agent_id: p.weight for p in after.line.places}, weighted=True)
        self._bench.lines[queue_id] = moves.line

    def _learn(self, row: Any) -> None:
        """Who was away at this decision, and who of its queues was not."""
        for path in row.paths or ():
            if "unavailable" in path:
                away = {out["agent"]: out["skip"] for out in path["unavailable"]}
                members = self._members.setdefault(path["queue"], set())
                members.update(away)
                for agent in members:
                    self._seen(agent, away.get(agent))
            elif path.get("agent") is not None:
                self._seen(path["agent"], path.get("why"))
        if row.agent_id is not None and row.how not in _HAD:
            self._seen(str(row.agent_id), None)
            if row.queue_id is not None:
                self._members.setdefault(str(row.queue_id), set()).add(str(row.agent_id))

    def _seen(self, agent: str, skip: str | None) -> None:
        known = self._agents.get(UUID(agent))
        if known is not None:
            active, paused = skip != Skip.DEACTIVATED, skip in _AWAY
            if (known.active, known.paused_by_admin) != (active, paused):
                self._agents[known.agent_id] = replace(known, active=active, paused_by_admin=paused)

    def _decide(self, one: _Lead, now: datetime) -> None:
        assert one.lead is not None  # noqa: S101 - one without facts is never decided
        case = Case(
            one.lead_id,
            one.lead,
            waits=one.came if one.lead_id in self._held else None,
            existing_owner=self._owner(one, one.known_by.personal, "existing_owner"),
            household_owner=self._owner(one, one.known_by.household, "same_household"),
            declined=one.declined,
        )
        one.draft, one.decided_at, one.back = self._bench.decide(case), now, None
        self._loads.gave(one.draft, one.lead, now)
        if one.draft.outcome is Outcome.HELD:
            one.held_now = True
            self._held[one.lead_id] = one
        else:
            self._held.pop(one.lead_id, None)
        self._bench.ahead = [
            Waiting(x.draft.queue_id, x.draft.rule, x.declined, x.came, x.lead_id)
            for x in self._held.values()
            if x.draft is not None and not self._draft.plan.is_quiet(x.draft.queue_id, now)
        ]
        self._bench.members = {
            queue_id: {place.agent_id: place.weight for place in line.places}
            for queue_id, line in self._bench.lines.items()
            if not self._draft.plan.is_quiet(queue_id, now)
        }
        if one.draft.agent_id is not None:
            for digest in one.known_by.all:
                self._owners.setdefault(digest, {})[one.lead_id] = (now, one.draft.agent_id)

    def _owner(self, one: _Lead, digests: frozenset[bytes], how: str) -> UUID | None:
        mute = one.known_by.mute({d for d in one.known_by.all if self._shared[d] > kin.SHARED_BY_MANY})
        others = [self._owners.get(digest, {}) for digest in digests - mute]
        known = [had for leads in others for lead_id, had in leads.items() if lead_id != one.lead_id]
        # Of leads from before this time only what was recorded is known.
        return kin.latest_owner(known, self._agents) or one.recorded.get(how)


# -- side by side -----------------------------------------------------------------------------------------------------


def _result(
    tenant: Tenant, names: Names, past: _Past, refs: Mapping[UUID, str], start: datetime, now: datetime
) -> Json:
    known = [one for one in past.leads.values() if one.draft is not None]
    # What was given back nobody had in the end.
    was = Counter(str(one.actual.agent_id) for one in known if one.actual.agent_id and one.back_then is None)
    is_ = Counter(str(one.draft.agent_id) for one in known if one.draft and one.draft.agent_id and one.back is None)
    total_was, total_is = was.total(), is_.total()
    agents = [
        {
            "agent": names.agent(agent),
            "actual": was[agent],
            "actual_share": round(was[agent] / total_was, 5) if total_was else None,
            "draft": is_[agent],
            "draft_share": round(is_[agent] / total_is, 5) if total_is else None,
            "difference": is_[agent] - was[agent],
        }
        for agent in sorted({*was, *is_}, key=lambda a: (-is_[a], -was[a], a))
    ]
    leads = [_pair(names, refs, one) for one in known]
    differ = [one for one in leads if one["differs"]]
    return {
        "tenant": tenant.name,
        "since": iso(start),
        "until": iso(now),
        "leads": len(known),
        "unknown": len(past.leads) - len(known),
        "same": len(leads) - len(differ),
        "agents": agents,
        "held": {
            "actual": sum(one.held_then for one in known),
            "draft": sum(one.held_now for one in known),
            "actual_still": sum(one["actual"]["outcome"] == Outcome.HELD for one in leads),
            "draft_still": sum(one["draft"]["outcome"] == Outcome.HELD for one in leads),
        },
        "left": {
            "actual": sum(one["actual"]["outcome"] == Outcome.LEFT for one in leads),
            "draft": sum(one["draft"]["outcome"] == Outcome.LEFT for one in leads),
        },
        "given_back": {"actual": past.counts["given_back_then"], "draft": past.counts["given_back"]},
        "moves": {"repeated": past.counts["repeated"], "not_repeated": past.counts["not_repeated"]},
        "differences": differ,
    }


def _pair(names: Names, refs: Mapping[UUID, str], one: _Lead) -> Json:
    d, row = one.draft, one.actual
    assert d is not None  # noqa: S101 - only decided ones are shown
    reason = d.reason.value if d.reason else None
    actual = _side(names, row.outcome, row.reason, row.rule, row.queue_id, row.agent_id, one.back_then)
    draft = _side(names, d.outcome.value, reason, d.rule, d.queue_id, d.agent_id, one.back)
    differs = (row.agent_id, row.outcome, one.back_then) != (d.agent_id, d.outcome.value, one.back)
    return {
        "lead": refs.get(one.lead_id),
        "came": iso(one.came),
        "differs": differs,
        "actual": actual,
        "draft": draft,
    }


def _side(
    names: Names,
    outcome: str,
    reason: str | None,
    rule: str | None,
    queue_id: UUID | None,
    agent_id: UUID | None,
    given_back: str | None,
) -> Json:
    return {
        "outcome": outcome,
        "reason": reason,
        "rule": rule,
        "queue": names.queue(queue_id),
        "agent": names.agent(agent_id),
        "given_back": given_back,
    }
