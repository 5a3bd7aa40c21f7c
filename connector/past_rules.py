"""How each rule fared in a decision, told again from the little that the decision keeps and the rules of its version.

Every configuration that was ever applied is kept as it was written and with its rules as they were read, so the rules
of a past decision are at hand whatever was changed since; and what a decision keeps of its lead is enough although the
person may have been erased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from connector.config_build import rules_as_written
from connector.configuration import current
from connector.tables import config_versions
from routing.model import Role, Rule
from routing.rules import RuleSet, retold


def _anonymous(why: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in why.items() if key != "lead"}


@dataclass
class PastRules:
    """The rules of a tenant's past versions, each compiled when first asked for."""

    conn: sa.Connection
    tenant_id: UUID
    _known: dict[int, RuleSet | None] = field(default_factory=dict)

    def tried(self, row: Any) -> tuple[Sequence[Mapping[str, Any]], str | None]:
        """The rules that a decision tried, each as :meth:`routing.rules.Tried.as_json` gives it; and, where they cannot
        be told any more, why not."""
        record: Mapping[str, Any] = row.record
        if "rules" not in record:
            # Decisions made before rules were told from their version hold every rule and its tests themselves.
            return record.get("tried", ()), None
        rules = self._rules(row.config_version)
        if rules is None:
            return (), f"version {row.config_version} of the configuration cannot be read any more"
        tries = retold(rules, Role(row.role), record["rules"])
        if tries is None:
            return (), f"version {row.config_version} of the configuration does not lead to what was recorded"
        return [tried.as_json() for tried in tries], None

    def forgotten(self, row: Any) -> dict[str, Any] | None:
        """The record of a decision without the lead's own values; None when it has none.

        What was tested and how it came out is told as before, as long as the rules of then can be read.
        """
        record: Mapping[str, Any] = row.record
        if "rules" not in record:
            tried = [rule | {"why": [_anonymous(why) for why in rule["why"]]} for rule in record.get("tried", ())]
            return None if tried == record.get("tried", []) else {**record, "tried": tried}
        kept, rules = record["rules"], self._rules(row.config_version)
        mine = kept | {"facts": {}} if rules is None else rules.without_values(Role(row.role), kept)
        return None if mine == kept else {**record, "rules": mine}

    def _rules(self, version: int) -> RuleSet | None:
        if version not in self._known:
            try:
                found: Sequence[Rule] | None = self._as_kept(version)
                found = self._as_written(version) if found is None else found
                self._known[version] = None if found is None else RuleSet(found)
            except ValueError:
                self._known[version] = None
        return self._known[version]

    def _as_kept(self, version: int) -> list[Rule] | None:
        """From what was kept beside the document when it was applied; None for a version of an earlier Turnlock."""
        c = config_versions.c
        # By way of the whole row, which has no such key on a database that stopped before the column: one statement.
        row = sa.func.to_jsonb(sa.literal_column(config_versions.name), type_=JSONB)
        kept = self.conn.execute(
            sa.select(row["rules"]).where(c.tenant_id == self.tenant_id, c.version == version)
        ).scalar_one_or_none()
        if kept is None:
            return None
        return [Rule(rule["name"], at, Role(rule["role"]), rule["when"], ()) for at, rule in enumerate(kept, 1)]

    def _as_written(self, version: int) -> Sequence[Rule] | None:
        found = current(self.conn, self.tenant_id, version)
        return None if found is None else rules_as_written(found[1])
