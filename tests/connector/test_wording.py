"""What agents read in their CRM: the tenant's language, an admin's templates, and a task with a due time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from connector.config import ConfigProblems, digest, export, parse
from connector.config_diff import changes
from connector.wording import LANGUAGES, OF_A_TASK, PLACEHOLDERS, why, wrong_in
from tests.rig import ABC, ANA, Rig, until

TASKS = frozenset({"tasks"})


def config(text: str, capabilities: frozenset[str] = TASKS) -> Any:
    return parse("version: 1\ndefault_queue: null\n" + text, known_agents=[], capabilities=capabilities)


# -- texts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_says_all_there_is_to_say(language: str) -> None:
    words = LANGUAGES[language]
    values = dict.fromkeys(PLACEHOLDERS, "x") | {"minutes": "5"}
    for template in (words.subject, words.note, words.place):
        assert list(wrong_in(template, PLACEHOLDERS)) == []
        assert template.format_map(values)
    assert list(wrong_in(words.task, PLACEHOLDERS + OF_A_TASK)) == []
    assert "5" in words.task.format_map(values)
    reasons = {
        why(words, how, rule) for how, rule in ((None, "R"), (None, None), ("existing_owner", "R"), ("chosen", None))
    }
    assert len(reasons) == 4


def test_who_was_passed_over_is_in_no_default_text() -> None:
    texts = [text for words in LANGUAGES.values() for text in (words.subject, words.note, words.task)]
    assert not any("passed_over" in text for text in texts)


@pytest.mark.parametrize(
    ("template", "count"),
    [
        ("For {agent} {why}{place}. {{sic}}", 0),
        ("{agnet} {queue} {nobody}", 2),
        ("{}", 1),
        ("{agent.name}", 1),
        ("{agent!r} {turn:>5}", 2),
        ("{agent", 1),
        ("agent}", 1),
        ("{minutes}", 1),
    ],
)
def test_what_is_wrong_with_a_template_is_told_all_at_once(template: str, count: int) -> None:
    assert len(list(wrong_in(template, PLACEHOLDERS))) == count


# -- the configuration --------------------------------------------------------------------------------------------

SPANISH = """
language: es
note: {subject: Lead, text: 'Para {agent}: {why}{place}'}
task: {within_minutes: 5, text: 'Llamar en {minutes} min'}
"""


def test_a_wording_reads_back_as_it_was_written_and_counts_as_a_change() -> None:
    plain, said = config(""), config(SPANISH)
    assert config(export(said, []).partition("default_queue: null\n")[2]) == said
    assert digest(said) != digest(plain)
    assert {change.path for change in changes(plain, said, [])} == {"language", "note", "task"}
    assert config("language: en\n") == plain


def test_every_problem_of_a_wording_is_told_with_its_line_and_fix() -> None:
    with pytest.raises(ConfigProblems) as caught:
        config(
            "language: it\nnote:\n  text: 'For {agnet}, {foo}'\n  body: x\n"
            "task:\n  within_minutes: 0\n  text: '{minutes} {'\n",
            frozenset(),
        )
    told = caught.value.problems
    assert sorted(problem.line for problem in told) == [3, 5, 5, 6, 7, 8, 9]
    text = "\n".join(f"{problem.what}; {problem.fix}" for problem in told)
    for part in ('"es"', "{agnet}", "{foo}", "1 to 10080", "no tasks", "{{ or }}"):
        assert part in text, part


# -- in the CRM ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crm", ["followupboss", "hubspot"])
def test_agents_read_the_tenants_words_and_have_a_task_that_is_due(make_rig: Callable[..., Rig], crm: str) -> None:
    rig = make_rig(crm, config=ABC + SPANISH)
    began = datetime.now(UTC)
    ref = rig.create(source="Zillow")
    owner = rig.wait_owner(ref)
    until(lambda: rig.sandbox.lead(int(ref))["tasks"], what="a task")  # type: ignore[index]
    rig.settle()
    lead = rig.sandbox.lead(int(ref))
    assert lead is not None
    (note,), (task,) = lead["notes"], lead["tasks"]
    assert note["subject"] == "Lead"
    assert note["body"].startswith("Para Ana Alvarez: por la cola predeterminada, turno 1 de la cola «All» [turnlock:")
    assert str(task["agent"]) == owner == ANA
    assert f"{task['text']} {task['body']}".startswith("Llamar en 5 min [turnlock:")
    due = datetime.fromisoformat(task["due"])
    assert timedelta(minutes=5) - timedelta(seconds=1) <= due - began <= timedelta(minutes=6)


def test_a_template_that_asks_for_it_names_who_was_passed_over(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=ABC + "note: {text: 'Passed over: {passed_over}. Rule: {rule}. Source: {source}.'}\n")
    rig.pause(ANA)
    ref = rig.create(source="Zillow")
    rig.wait_owner(ref)
    rig.settle()
    lead = rig.sandbox.lead(int(ref))
    assert lead is not None
    assert lead["notes"][0]["body"].startswith("Passed over: Ana Alvarez. Rule: . Source: Zillow. [turnlock:")
    assert lead["tasks"] == []


def test_a_task_that_is_taken_out_of_the_configuration_is_not_made_any_more(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(config=ABC + "task: {within_minutes: 5}\n")
    rig.sandbox.fault("status", status=429, retry_after="60", method="POST", path="/tasks$")
    ref = rig.create()
    rig.wait_owner(ref)
    until(lambda: rig.one("SELECT count(*) FROM breakers WHERE tenant_id = :t AND lane = 'note'"), what="the pause")
    assert rig.assign() is not None  # no owner waits for a task
    rig.configure(ABC)
    rig.sandbox.clear_faults()
    rig.due_now()
    rig.settle()
    tasks = sa.text("SELECT state, reason FROM outbox WHERE tenant_id = :t AND kind = 'task'")
    assert {tuple(row) for row in rig.rows(tasks.bindparams(t=rig.tenant.tenant_id))} == {("stale", "not_wanted")}
    assert rig.sandbox.lead(int(ref))["tasks"] == []  # type: ignore[index]
