"""An explanation (:func:`connector.explain.explain`) as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connector.cli.output import agent, say, table, when

Json = Mapping[str, Any]

_HOW = {
    "line": "first in line",
    "owed": "was owed a turn",
    "give_next": "given next by an admin",
    "rank": "first by rank, the rotation is off",
    "agent": "named by the rule",
    "default_agent": "the queue's default agent",
    "existing_owner": "has this person already",
    "same_household": "has this household already",
    "chosen": "chosen for a test",
}
_TIMES = (("seconds_to_decide", "decision"), ("seconds_to_owner", "owner in the CRM"))
_RESULT = {"matched": "yes", "failed": "no", "missing": "no, it is missing", "not_comparable": "no, not comparable"}


def tell(told: Json) -> None:
    """Print all of it."""
    lead = told["lead"]
    say(f"Lead {', '.join(lead['refs'])} of {told['tenant']} ({lead['lead_id']})")
    for row in told["standing"]:
        say(f"  {row['role']}: {_standing(row)}")
    if not told["standing"]:
        say("  not decided yet")
    if not told["sending"]:
        say(f"  sending to the CRM is stopped; `turnlock outbox start {told['tenant']}`")
    if told["crm_paused_until"]:
        say(f"  calls to the CRM are paused until {when(told['crm_paused_until'])}")
    for event in told["open_events"]:
        say(f"  event {event['event_id']} of {when(event['received_at'])}: {event['text']}")
    for row in told["returns"]:
        say(f"  return: {_return(row)}")
    for number, decision in enumerate(told["decisions"], 1):
        _decision(number, decision)
    _shadows(told["shadows"])


def _standing(row: Json) -> str:
    text = str(row["state"])
    if row["agent"]:
        text += f", {agent(row['agent'])}"
    if row["state"] == "assigned":
        text += ", confirmed by the CRM" if row["confirmed"] else ", not confirmed by the CRM"
    if row["reason"]:
        text += f" ({row['reason']}{': ' + row['remedy'] if row['remedy'] else ''})"
    return f"{text}, since {when(row['since'])}"


def _return(row: Json) -> str:
    text = f"{agent(row['agent'])}, {row['reason'].replace('_', ' ')}, asked {when(row['asked_at'])}: {row['state']}"
    if row["outcome"]:
        text += ", the lead goes nowhere" if row["outcome"] == "void" else ", the lead goes to somebody else"
    by = f" by {row['decided_by']}, {when(row['decided_at'])}" if row["decided_by"] else ""
    return f"{text}{by}{': ' + row['why'] if row['why'] else ''}"


def _decision(number: int, d: Json) -> None:
    what = f"{d['outcome']} to {agent(d['agent'])}" if d["agent"] else d["outcome"]
    say("", f"Decision {number}, {d['role']}, {when(d['decided_at'])}: {what}")
    if d["reason"]:
        say(f"  reason: {d['reason']}{': ' + d['remedy'] if d['remedy'] else ''}")
    told = f"{d['told_by']['source']}, {d['told_by']['kind']}, " if d["told_by"] else ""
    say(f"  cause: {d['cause']} ({told}received {when(d['received_at']) or 'by hand'})")
    say(f"  by: {_by(d)}, version {d['config_version']} of the configuration")
    took = [f"{d[key]:.3f} s to the {what}" for key, what in _TIMES if d[key] is not None]
    if took:
        say(f"  from its receipt: {', '.join(took)}")
    if d["modes"]:
        say(f"  staged for this lead: {', '.join(f'{flag} {mode}' for flag, mode in d['modes'].items())}")
    if d["agent"]:
        say(f"  why them: {_HOW.get(d['how'], d['how'])}{_turn(d)}")
    tell_rules(d["rules"])
    if d["rules_not_shown"]:
        say(f"  rules tried: {d['rules_not_shown']}")
    tell_paths(d["paths"])
    _writes(d)
    _shadows(d["shadows"], indent=2)


def _by(d: Json) -> str:
    if d["rule"]:
        return f"rule {d['rule']!r}"
    if d["how"] == "existing_owner":
        return "the same person as on another lead, which comes before all rules"
    return f"no rule, the default queue {d['queue']}" if d["queue"] else "no rule and no default queue"


def _shadows(shadows: list[Json], indent: int = 0) -> None:
    for one in shadows:
        to = f"{one['outcome']} to {agent(one['agent'])}" if one["agent"] else one["outcome"] or "failed"
        beside = (
            f"; {one['text']}" if one["text"] else ", the same" if one["seq"] and one["flag"] != "write_back" else ""
        )
        crm = f"; the CRM gave it to {agent(one['crm_agent'])}" if one["crm_agent"] else ""
        say(f"{' ' * indent}shadow of {one['flag']}: {to}{beside}{crm}")


def _turn(d: Json) -> str:
    if d["turn"] is None:
        return ", without a turn"
    void = f" (given back: {d['turn_void']})" if d["turn_void"] else ""
    return f", turn {d['turn']} of queue {d['queue']}{void}"


def tell_rules(rules: list[Json]) -> None:
    """Print the rules that were tried, each with its tests."""
    if not rules:
        return
    say("  rules tried:")
    rows = []
    for rule in rules:
        tests = "; ".join(_test(why) for why in rule["tests"]) or "matches every lead"
        more = f"; {rule['omitted']} more tests" if rule["omitted"] else ""
        rows.append((rule["precedence"], rule["rule"], "matched" if rule["matched"] else "no", tests + more))
    table(("#", "rule", "", "why"), rows, indent=4)


def _test(why: Json) -> str:
    value = why["value"]
    shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    test = f"{why['field']} {why['test'].replace('_', ' ')} {shown}"
    text = f"not ({test})" if why["not"] else test
    has = why["lead"]
    said = f", the lead has {', '.join(map(str, has)) if isinstance(has, list) else has}" if has is not None else ""
    return f"{text}: {_RESULT.get(why['result'], why['result'])}{said}"


def tell_paths(paths: list[Json]) -> None:
    """Print the queues and agents that were looked at."""
    for path in paths:
        _path(path)


def _path(path: Json) -> None:
    why = f": {path['why']}" if path["why"] else ""
    remedy = f" ({path['detail'] or path['remedy']})" if path["detail"] or path["remedy"] else ""
    if path["kind"] != "queue":
        who = agent(path["agent"]) if path["agent"] else "none is known"
        say(f"  looked at {path['kind'].replace('_', ' ')} {who}{why}{remedy}")
        return
    moved = path["position_after"] is not None
    position = f", position {path['position_before']} -> {path['position_after']}" if moved else ""
    what = f"{path['queue']}, in {path['within']}" if path["within"] else f"queue {path['queue']}"
    say(f"  looked at {what}{position}{why}{remedy}")
    rows = []
    for member in path["members"]:
        state = "lost a turn" if member["lost_turn"] else "passed over" if member["passed_over"] else member["state"]
        reason = f"{member['skip']}: {member['detail']}" if member["skip"] else member["detail"]
        place = None if member["place_before"] is None else f"{member['place_before']} -> {member['place_after']}"
        rows.append((place, agent(member["agent"]), state, reason, member["remedy"]))
    columns = ("place", "member", "", "why", "what would change it")
    table(columns, rows, none="no member was recorded", indent=4)


def _writes(d: Json) -> None:
    if d["outcome"] == "assigned" and not d["writes"]:
        say("  write-back: none; it was off, so the CRM was not told")
        return
    if not d["writes"]:
        return
    say("  write-back:")
    rows = []
    for write in d["writes"]:
        end = when(write["closed_at"]) or f"due {when(write['due_at'])}" if write["state"] != "parked" else ""
        took = None if write["seconds"] is None else f"{write['seconds']:.3f} s"
        rows.append(
            (write["kind"], write["state"], when(write["ordered_at"]), end, took, write["attempt"], write["text"])
        )
    table(("what", "", "ordered", "ended", "took", "failed tries", "in words"), rows, indent=4)


__all__ = ["tell", "tell_paths", "tell_rules"]
