"""What agents read in their CRM: the default texts by language, and an admin's templates with named placeholders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from types import MappingProxyType
from typing import Any

#: What a template may name. Who was passed over is told only where a template asks for it.
PLACEHOLDERS = ("agent", "rule", "queue", "turn", "source", "why", "place", "passed_over")
#: What a task's text may name besides.
OF_A_TASK = ("minutes",)


@dataclass(frozen=True, slots=True)
class Words:
    """One language. ``place`` follows where a turn was taken; the others say why the lead is theirs."""

    subject: str
    note: str
    task: str
    by_rule: str
    by_default: str
    known: str
    for_a_test: str
    place: str


LANGUAGES: Mapping[str, Words] = MappingProxyType(
    {
        "de": Words(
            "Turnlock: warum dieser Lead Ihnen gehört",
            "Zugewiesen an {agent} {why}{place}.",
            "Neuer Lead: innerhalb von {minutes} Minuten Kontakt aufnehmen",
            "durch die Regel „{rule}“",
            "durch die Standardwarteschlange",
            "weil Sie diese Person schon betreuen",
            "weil Sie für einen Test gewählt wurden; es ist nichts zu tun",
            ", Zug {turn} der Warteschlange „{queue}“",
        ),
        "en": Words(
            "Turnlock: why this lead is yours",
            "Assigned to {agent} {why}{place}.",
            "New lead: make contact within {minutes} minutes",
            "by rule “{rule}”",
            "by the default queue",
            "because this person was already yours",
            "because you were chosen for a test; nothing is to be done",
            ", turn {turn} of queue “{queue}”",
        ),
        "es": Words(
            "Turnlock: por qué este lead es suyo",
            "Asignado a {agent} {why}{place}.",
            "Lead nuevo: contactar en {minutes} minutos",
            "por la regla «{rule}»",
            "por la cola predeterminada",
            "porque ya atendía a esta persona",
            "porque se le eligió para una prueba; no hay nada que hacer",
            ", turno {turn} de la cola «{queue}»",
        ),
        "fr": Words(
            "Turnlock : pourquoi ce lead est à vous",
            "Attribué à {agent} {why}{place}.",
            "Nouveau lead : prendre contact dans les {minutes} minutes",
            "par la règle « {rule} »",
            "par la file par défaut",
            "parce que vous suivez déjà cette personne",
            "parce que vous avez été choisi pour un essai ; il n'y a rien à faire",
            ", tour {turn} de la file « {queue} »",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Wording:
    """What the admin says about it. None: the default text of the language; no task."""

    language: str = "en"
    subject: str | None = None
    note: str | None = None
    task_minutes: int | None = None
    task: str | None = None

    def as_json(self) -> dict[str, Any]:
        """What was said, as it stands in a configuration."""
        note = {k: v for k, v in (("subject", self.subject), ("text", self.note)) if v is not None}
        task = {k: v for k, v in (("within_minutes", self.task_minutes), ("text", self.task)) if v is not None}
        found: dict[str, Any] = {"language": self.language} if self.language != "en" else {}
        return found | ({"note": note} if note else {}) | ({"task": task} if task else {})


def wording_of(given: Mapping[str, Any]) -> Wording:
    """From what :meth:`Wording.as_json` gave."""
    note, task = given.get("note", {}), given.get("task", {})
    return Wording(
        given.get("language", "en"), note.get("subject"), note.get("text"), task.get("within_minutes"), task.get("text")
    )


def wrong_in(template: str, known: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Everything that is wrong with a template: what, the name it is about ("" for none), and the fix."""
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError:
        yield "a brace stands alone", "", "write {{ or }} for a brace that is meant as one"
        return
    for _, name, form, conversion in parts:
        if not name:
            yield "a placeholder has no name", "", f"write one of {', '.join(known)} between the braces"
        elif name not in known:
            yield f"there is no placeholder {{{name[:50]}}}", name, f"use one of {', '.join(known)}"
        elif form or conversion:
            yield f"{{{name}}} has more in its braces than a name", "", f"write {{{name}}}"


def why(words: Words, how: str | None, rule: str | None) -> str:
    """Why the lead is theirs, in one half sentence."""
    if how == "chosen":
        return words.for_a_test
    if how == "existing_owner":
        return words.known
    return words.by_rule.format(rule=rule) if rule else words.by_default
