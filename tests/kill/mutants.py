"""Seeded bugs: each a small change of today's source that the happy path does not show and a kill run must.

They are the bugs that lead routers really had: checked before the lock, two commits where there should be one, done
before it is done. Where the database would refuse the result, the bug takes that guard away as well: what is proved
is that the run sees it, not that the constraint does.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.kill.rig import Size
from tests.kill.source import Patch


@dataclass(frozen=True)
class Mutant:
    """A seeded bug: what it changes, the promise it breaks, others that fall with it, and the run that shows it."""

    name: str
    breaks: str
    patches: tuple[Patch, ...]
    size: Size
    too: frozenset[str] = frozenset()


# Bursts on one queue, decided by several threads of two workers at once, which come to it together: luck alone would
# leave a bug unseen one time in many.
_BUSY = Size(leads=300, kills=6, quiet=30, gathered=True)

MUTANTS = (
    Mutant(
        name="position read without a lock",
        breaks="turns_not_gapless",
        patches=(
            Patch(
                "routing/store.py",
                "    .order_by(t.queues.c.queue_id)\n    .with_for_update(key_share=True)\n",
                "    .order_by(t.queues.c.queue_id)\n",
            ),
            Patch(
                "routing/saving.py",
                '            t.queues.c.position == sa.bindparam("was", type_=sa.BigInteger),\n',
                "",
            ),
            Patch(
                "migrations/versions/r0003_rotation.py",
                "    CONSTRAINT turns_pk PRIMARY KEY (tenant_id, queue_id, turn),\n",
                "",
            ),
        ),
        size=_BUSY,
        too=frozenset({"off_rotation"}),
    ),
    Mutant(
        # What an ORM does that finds the members in its identity map: the row was locked, the values are old.
        name="members loaded before the lock",
        breaks="off_rotation",
        patches=(
            Patch(
                "connector/units.py",
                "        with runtime.busy.asking(wanted) as held:\n",
                "        early = store.load_queues(conn, tenant_id, planned.plan.flags, wanted)\n"
                "        with runtime.busy.asking(wanted) as held:\n",
            ),
            Patch(
                "connector/units.py",
                "        self._bench = self._bench_of(",
                "        for queue_id, queue in self._known.queues.items():\n"
                "            line = replace(queue.line, places=early[queue_id].line.places)\n"
                "            self._known.queues[queue_id] = replace(queue, line=line)\n"
                "        self._bench = self._bench_of(",
            ),
        ),
        size=_BUSY,
    ),
    Mutant(
        name="assignment and position in two transactions",
        breaks="turns_not_gapless",
        patches=(
            Patch(
                "connector/units.py",
                "            asks += saving.moved_lines("
                "tenant_id, self._bench.queues, self._bench.lines, saved.drafts, self._now)\n",
                "            self.lines = (self._bench.queues, self._bench.lines, saved.drafts, self._now)\n",
            ),
            Patch(
                "connector/decide.py",
                "            else:\n                self._sent.update(",
                "            else:\n"
                "                with unit(self._runtime.engine) as (conn, now):\n"
                "                    saving.save_lines(conn, tenant.tenant_id, *attempt.lines)\n"
                "                self._sent.update(",
            ),
        ),
        # Killed where the second of the two stands still: what the first has committed stays behind alone.
        size=Size(leads=60, kills=2, points=("R5 position moved",), each_point=2, quiet=30),
    ),
    Mutant(
        name="outbox marked done before the call",
        breaks="crm_differs",
        patches=(
            Patch(
                "connector/writeback.py",
                "            try:\n                written = self._write(",
                "            confirm(runtime, job, lead)\n            try:\n                written = self._write(",
            ),
        ),
        # Killed while the write is on its way, which then never arrives. A second event about a lead would be decided
        # anew: the CRM shows nobody, though all seems to be done.
        size=Size(leads=60, kills=2, points=("S2 read, not sent",), each_point=2, quiet=30, edited=False),
    ),
    Mutant(
        # "Nobody has it in the CRM, so it is mine to give": the state here is not asked, and no key stands against it.
        name="no unique key on the lead",
        breaks="double_assignment",
        patches=(
            Patch(
                "connector/units.py",
                "        standing = self._known.roles.get((item.lead_id, Role.OWNER))\n        event_id",
                "        standing = self._known.roles.get((item.lead_id, Role.OWNER))\n"
                "        standing = None if self._row.unassigned.covers(item.lead) else standing\n        event_id",
            ),
            Patch("connector/units.py", "open_write=item.lead_id in self._open_writes,", "open_write=False,"),
            Patch("connector/units.py", "stale=self._versions[item.lead_id] != item.version,", "stale=False,"),
            Patch(
                "migrations/versions/r0001_base.py",
                "CREATE UNIQUE INDEX assignments_active_uq",
                "CREATE INDEX assignments_active_uq",
            ),
            Patch(
                "migrations/versions/r0001_base.py",
                "    CONSTRAINT decisions_seq_uq UNIQUE (tenant_id, lead_id, role, seq),\n",
                "",
            ),
            Patch(
                "migrations/versions/r0001_base.py",
                "    CONSTRAINT outbox_epoch_uq UNIQUE (tenant_id, lead_id, role, epoch, kind),\n",
                "",
            ),
        ),
        size=_BUSY,
        too=frozenset({"owner_rows"}),
    ),
    Mutant(
        # The server itself is refused when it is set so: this is what a session may still do.
        name="synchronous_commit off",
        breaks="lost_after_2xx",
        patches=(
            Patch(
                "connector/database.py",
                '            "lock_timeout": LOCK_TIMEOUT,\n',
                '            "synchronous_commit": "off",\n            "lock_timeout": LOCK_TIMEOUT,\n',
            ),
            Patch("connector/database.py", '    weak = {"off"} |', "    weak = set() |"),
        ),
        size=Size(leads=300, kills=0, postgres_kills=6, quiet=30, faults=False),
    ),
)
