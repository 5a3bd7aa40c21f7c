"""Lanes: leads for which the same flags count. While nothing is staged there is one, and nothing is asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import sqlalchemy as sa

from connector.reading import Item
from connector.runtime import Runtime
from routing import store
from routing.decide import Plan
from routing.model import Flag
from routing.rules import Search
from routing.stages import Mode, Stage, modes_of


@dataclass(frozen=True, slots=True)
class Watch:
    """A flag in shadow: since which run, and the plan by which its shadow decides."""

    flag: Flag
    run: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Planned:
    """The configuration by which leads were sorted into units, and what the rules said of each lead.

    ``modes`` are those of the flags that are staged for a lead, by event; ``watches`` the flags that are in shadow
    for all of these leads.
    """

    row: store.TenantRow
    plan: Plan
    watches: tuple[Watch, ...] = ()
    modes: Mapping[UUID, Mapping[Flag, Mode]] = field(default_factory=dict)
    choices: dict[UUID, tuple[UUID | None, Search | None]] = field(default_factory=dict)

    def choice(self, item: Item) -> tuple[UUID | None, Search | None]:
        """The queue that the item's lead is decided in first, and the rules tried; no queue when nothing is to route.

        Kept per event: what the rules say of a lead cannot change while the configuration is the same.
        """
        event_id: UUID = item.event.event_id
        if event_id not in self.choices:
            routable = self.row.unassigned.covers(item.lead) and item.event.kind != "lead_deleted"
            self.choices[event_id] = self.plan.first_choice(item.lead, item.role) if routable else (None, None)
        return self.choices[event_id]

    def lines_of(self, queue_ids: Iterable[UUID]) -> frozenset[UUID]:
        """These queues with the lines of all teams in them, also as the shadows see them."""
        plans = (self.plan, *(watch.plan for watch in self.watches))
        return frozenset[UUID]().union(*(plan.lines_of(queue_ids) for plan in plans))

    def watched(self, items: Sequence[Item]) -> Iterator[UUID]:
        """Further queues in which shadows decide these leads first."""
        for watch in self.watches:
            for item in items:
                if self.row.unassigned.covers(item.lead):
                    looks = Flag.RULES in watch.plan.flags - self.plan.flags
                else:
                    looks = watch.flag is Flag.WRITE_BACK and came_owned(item)
                queue_id = watch.plan.first_choice(item.lead, item.role)[0] if looks else None
                if queue_id is not None:
                    yield queue_id


def came_owned(item: Item) -> bool:
    """Whether a lead that Turnlock never knew came with an owner: the CRM's own routing was first."""
    return item.version == 0 and item.lead.owner_ref is not None and item.event.kind != "lead_deleted"


def lanes(
    runtime: Runtime, conn: sa.Connection | None, row: store.TenantRow, items: Sequence[Item]
) -> list[tuple[Planned, list[Item]]]:
    """Sort `items` by the flags that count for them, each lane with its plan and its shadows."""
    staged = row.shadowed | row.partly
    if not staged and all(not item.kept and item.event.flag_version in (0, row.flag_version) for item in items):
        return [(Planned(row, runtime.plan(conn, row)), list(items))]
    now = present(row, runtime.settings_at(conn, row.tenant_id, row.flag_version) if staged else {})
    sorted_: dict[tuple[frozenset[Flag], frozenset[Flag]], list[tuple[Item, dict[Flag, Mode]]]] = {}
    for item in items:
        stamp = item.event.flag_version
        # Turnlock's own events carry no stamp: they count as of now.
        stamped = runtime.settings_at(conn, row.tenant_id, stamp) if stamp not in (0, row.flag_version) else now
        found = modes_of(item.lead_id, item.lead.source, now=now, stamped=stamped, kept=item.kept)
        live = row.flags - {flag for flag, mode in found.items() if mode is not Mode.ON}
        beside = frozenset(flag for flag, mode in found.items() if mode is Mode.SHADOW)
        sorted_.setdefault((live, beside), []).append((item, found))
    return [
        (
            Planned(
                row,
                runtime.plan(conn, row, live),
                tuple(
                    Watch(flag, now[flag].run, runtime.plan(conn, row, live | {flag}))
                    for flag in Flag
                    if flag in beside
                ),
                {item.event.event_id: found for item, found in some if found},
            ),
            [item for item, _ in some],
        )
        for (live, beside), some in sorted_.items()
    ]


def present(row: store.TenantRow, settings: Mapping[Flag, Stage]) -> dict[Flag, Stage]:
    """The stage of every flag as the tenant's row has it; limits and runs from `settings`."""

    def mode(flag: Flag) -> Mode:
        return Mode.SHADOW if flag in row.shadowed else Mode.ON if flag in row.flags else Mode.OFF

    return {flag: settings.get(flag) or Stage(mode(flag)) for flag in Flag}
