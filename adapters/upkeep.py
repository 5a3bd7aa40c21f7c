"""What adapters share around lists, subscriptions and connection checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from adapters.base import Finding, Hook, Subscribed, Unreadable
from adapters.outcome import CrmError, Fault, Outcome
from adapters.payload import Fields, ref
from routing.model import AgentSeen, Lead, UnassignedDefinition

if TYPE_CHECKING:
    from adapters.client import Answer, Client

_NOTHING = "The CRM has nothing there. Correct the base address: it is the CRM's own, without a path of its API."

_NOT_TAKEN = "The CRM does not take this call. See that its version and its apps are those that its page names."

T = TypeVar("T")
Next = tuple[str, Mapping[str, Any]]  # path and query of one page

MAX_PAGES = 1000
_OVERLAP = 10  # rows that may go from a list while one of its pages is read
MAX_SKEW = 60.0  # seconds between the CRM's clock and ours before a check complains
_RESTART = 10.0  # seconds between two looks whether the CRM is back behind its proxy
# What keeps every other call of a check from getting further than the one that it happened to.
_SAYS_IT_ALL = frozenset({Outcome.REAUTHORISE, Outcome.WAIT, Outcome.REDIRECTED, Outcome.PRIVATE_HOST})


def http_date(value: str | None) -> datetime | None:
    """The time of an HTTP date (RFC 9110, 5.6.7) as aware UTC, None when there is none that can be read."""
    try:
        found = parsedate_to_datetime(value or "")
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (TypeError, ValueError, OverflowError, IndexError):
        return None


def pages(
    get: Callable[[str, Mapping[str, Any]], Answer],
    first: Next,
    read: Callable[[Fields], tuple[list[T], Next | None]],
    most: int = MAX_PAGES,
) -> Iterator[list[T]]:
    """The pages of a list, at most `most`. `read` makes of an answer its rows and the path and query of the next page.

    Raises:
        CrmError: also when a page leads back to one already read, since the list would never end.
    """
    seen: list[Next] = []
    following: Next | None = first
    for _ in range(most):
        if following is None:
            return
        seen.append(following)
        answer = get(*following)
        with answer.reading():
            rows, following = read(Fields(answer.data, strict=False))
            if following in seen:
                raise Unreadable("endless_list")
        yield rows


def overlapping(
    client: Client,
    path: str,
    query: Mapping[str, Any],
    read: Callable[[Fields], list[T]],
    *,
    by: str,
    size: int,
    most: int = MAX_PAGES,
) -> Iterator[list[T]]:
    """The pages of a list that is read by an offset, which the query calls `by`; one below `size` rows is the last.

    `read` makes of an answer its rows. Each page begins a little before the end of the one before, because a row that
    goes meanwhile moves the later ones up.
    """
    start = 0

    def page(data: Fields) -> tuple[list[T], Next | None]:
        nonlocal start
        rows = read(data)
        start += size - _OVERLAP
        return rows, (path, {**query, by: str(start)}) if len(rows) >= size else None

    return pages(lambda link, params: client.get(link, params=params), (path, {**query, by: "0"}), page, most)


def elsewhere(status: int, own: bool) -> float | None:
    """Seconds to wait where a 404 is not the CRM's own (`own`), so that it says nothing of a lead; None: it is.

    A proxy answers so while the container of a self-hosted CRM restarts, and a server that knows the host by no name.
    """
    return _RESTART if status in (404, 410) and not own else None


def not_there(crm: str) -> str:
    """What the admin is told where something else answers in the place of this CRM."""
    return (
        f"What answers at the base address is not {crm}: it restarts behind its proxy, or the address is another. "
        "Turnlock tries again; if it stays so, correct the base address."
    )


def unless_gone(call: Callable[[], Answer]) -> Answer | None:
    """The answer, or None when the CRM has no such object (any more)."""
    try:
        return call()
    except CrmError as error:
        if error.outcome is not Outcome.GONE:
            raise
        return None


def remove(call: Callable[[], object], *, or_else: Callable[[], object]) -> bool:
    """Remove what a CRM has, or have it switched off by `or_else` where that is refused; whether there was anything.

    Raises the refusal where both are refused.
    """
    try:
        call()
    except CrmError as first:
        if first.outcome is Outcome.GONE:
            return False
        if not _refused(first):
            raise
        try:
            or_else()
        except CrmError as second:
            raise (first if _refused(second) else second) from None
    return True


def _refused(error: CrmError) -> bool:
    """Whether a CRM will not do this one thing; an account that is not paid for (402) is another matter."""
    forbidden = error.outcome is Outcome.FORBIDDEN and error.status != 402
    return forbidden or error.outcome in (Outcome.REFUSED, Outcome.CONFLICT)


def leads_one_by_one(
    refs: Iterable[str], get: Callable[[str], Answer], make: Callable[[Fields], Lead]
) -> dict[str, Lead]:
    """The leads of a CRM that has no reading of several, by ref; those that are gone are left out."""
    found: dict[str, Lead] = {}
    for wanted in dict.fromkeys(refs):
        answer = unless_gone(partial(get, ref(wanted)))
        if answer is None:
            continue
        with answer.reading():
            lead = make(Fields(answer.data, strict=False))
        if lead.ref == wanted:
            found[wanted] = lead
    return found


def in_halves(refs: Sequence[str], read: Callable[[Sequence[str]], list[T]]) -> list[T]:
    """What `read` finds of these; in halves where the answer is too big to be read. Raises where that of one is."""
    try:
        return read(refs)
    except CrmError as error:
        half = len(refs) // 2
        if error.fault is not Fault.TOO_BIG or not half:
            raise
    return in_halves(refs[:half], read) + in_halves(refs[half:], read)


def each_once(agents: Iterable[Iterable[AgentSeen]]) -> Iterator[AgentSeen]:
    """The agents of the pages of a list, each once though a list may move while it is read."""
    seen: set[str] = set()
    try:
        for page in agents:
            for agent in page:
                if agent.ref not in seen:
                    seen.add(agent.ref)
                    yield agent
    except CrmError as error:
        if error.outcome is not Outcome.GONE:
            raise
        # Every CRM has users: it is the address that is wrong, and nobody who is gone.
        raise CrmError(Outcome.ANSWER_UNREADABLE, status=error.status, text=_NOTHING) from None


def unassigned(
    leads: Iterable[Iterable[Lead]],
    definition: UnassignedDefinition,
    *,
    since: datetime,
    until: datetime | None = None,
    changed: bool = False,
) -> Iterator[list[str]]:
    """The pages of a sweep: refs of the leads of these pages that look unassigned, each once.

    Their time of creation (of their last change, where `changed`) lies between `since` and `until`; a lead that shows
    none is let through.
    """

    def wanted(lead: Lead) -> bool:
        time = (lead.updated_at if changed else lead.created_at) or since
        return time >= since and (until is None or time <= until) and definition.covers(lead)

    return fresh_refs([lead.ref for lead in page if wanted(lead)] for page in leads)


def fresh_refs(refs: Iterable[Iterable[str]]) -> Iterator[list[str]]:
    """The pages of a sweep without what an earlier one had, and without empty ones."""
    seen: set[str] = set()
    for page in refs:
        if found := [one for one in dict.fromkeys(page) if one not in seen]:
            seen.update(found)
            yield found


def ours(hooks: Iterable[Hook], url: str) -> list[Hook]:
    """Hooks of this installation: at the address of `url` but for the last part, the tenant's token."""
    site = url.rpartition("/")[0] + "/"
    return [h for h in hooks if h.url.rpartition("/")[0] + "/" == site]


def reconcile(
    hooks: Iterable[Hook],
    url: str,
    topics: Iterable[str],
    *,
    create: Callable[[str], Hook],
    enable: Callable[[Hook], Hook],
    remove: Callable[[Hook], object],
) -> Subscribed:
    """Leave exactly one active hook of ours at `url` for each topic; hooks of others are not touched.

    Stale ones go first, because CRMs limit how many may stand. A hook that the CRM refuses is told in ``by_hand``.

    Raises:
        CrmError: any other failure; running it again continues where it stopped.
    """
    topics = list(topics)
    kept: dict[str, Hook] = {}
    by_hand = []
    for hook in sorted(ours(hooks, url), key=lambda h: not h.active):
        if hook.url == url and hook.topic in topics and hook.topic not in kept:
            kept[hook.topic] = hook
            continue
        try:
            remove(hook)
        except CrmError as error:  # it is in nobody's way: what it sends is not taken, or a reason to read
            if not _refused(error):
                raise
            by_hand.append(f"remove hook {hook.hook_ref} in the CRM, which does not let Turnlock ({error.status})")
    for topic in topics:
        try:
            if topic not in kept:
                kept[topic] = create(topic)
            elif not kept[topic].active:
                kept[topic] = enable(kept[topic])
        except CrmError as error:
            if error.outcome is not Outcome.REFUSED:
                raise
            said = error.own_text or f"the CRM refuses this hook ({error.status}); remove one that is no longer used"
            by_hand.append(f"{topic}: {said}")
    return Subscribed(tuple(kept[t] for t in topics if t in kept), tuple(by_hand))


def probe(where: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of `look`; a failed call is one too, so one check reports every problem."""
    found: list[Finding] = []
    try:
        found.extend(look())
    except CrmError as error:
        found.append(_failed(where, error))
    return found


def probes(*looks: tuple[str, Callable[[], Iterable[Finding]]]) -> list[Finding]:
    """The findings of several :func:`probe`; after one that says it all (a wrong key) the others are not asked.

    They would only say it again, and there are CRMs that lock out who tries a wrong key too often.
    """
    found: list[Finding] = []
    stopped = ""
    for where, look in looks:
        if stopped:
            found.append(Finding(where, False, "not asked", f"mend {stopped} first"))
            continue
        try:
            found.extend(look())
        except CrmError as error:
            found.append(_failed(where, error))
            nobody_there = error.outcome is Outcome.NOT_SENT and error.status is None
            stopped = where if nobody_there or error.outcome in _SAYS_IT_ALL else ""
    return found


def _failed(where: str, error: CrmError) -> Finding:
    # What a check asks for is always there, and no check is parked.
    own = {Outcome.GONE: _NOTHING, Outcome.REFUSED: error.own_text or _NOT_TAKEN}
    fix = own.get(error.outcome, error.text)
    said = None if error.status == 200 else error.status  # some CRMs tell of an error in a success
    return Finding(where, False, str(said or error.fault or error.outcome), fix)


def clock(theirs: datetime | None, here: datetime) -> Finding:
    """Whether the CRM's clock and ours agree to a minute; signatures and sweeps depend on it."""
    if theirs is None:
        return Finding("clock", True, "the CRM does not tell its time")
    skew = abs((theirs - here).total_seconds())
    fix = "" if skew <= MAX_SKEW else "synchronise the clock of the computer that the database runs on (NTP)"
    return Finding("clock", not fix, f"{skew:.0f} s apart from the CRM's", fix)


def agents(active: int) -> Finding:
    """Whether anybody can receive leads."""
    fix = "" if active else "connect with a user who sees all agents, and activate some in the CRM"
    return Finding("agents", active > 0, f"{active} active", fix)


def notes(find: Callable[[], bool]) -> Iterable[Finding]:
    """Whether notes can be looked for, as `find` does before a repeat. An owner never waits for a note."""
    find()
    return [Finding("notes", True, "readable")]


def lost(hooks: Iterable[Hook], url: str, topics: Iterable[str]) -> tuple[str, ...]:
    """Topics without an active hook at `url`, in order."""
    return tuple(sorted(set(topics) - {h.topic for h in hooks if h.active and h.url == url}))


def lacks_right(error: CrmError) -> bool:
    """Whether the connected user may not do it (403); an account that is not paid for (402) is another matter."""
    return error.outcome is Outcome.FORBIDDEN and error.status == 403


def if_visible(look: Callable[[], list[Hook]]) -> list[Hook]:
    """The hooks that `look` reads; none where the connected user may not see them (403, or as a 200 says it)."""
    try:
        return look()
    except CrmError as error:
        if error.outcome is not Outcome.FORBIDDEN or error.status == 402:
            raise
        return []


def lost_if_visible(look: Callable[[], Iterable[Hook]], url: str, topics: Iterable[str]) -> tuple[str, ...]:
    """As :func:`lost`, of the hooks that `look` reads; nothing where the connected user may not see them (403)."""
    try:
        return lost(look(), url, topics)
    except CrmError as error:
        if not lacks_right(error):
            raise
        return ()


def hooks_alive(hooks: Iterable[Hook], url: str | None, topics: Iterable[str]) -> Finding:
    """Whether every topic has an active hook at `url`; without `url` only that hooks can be read."""
    if url is None:
        return Finding("hooks", True, "readable")
    lacking = lost(hooks, url, topics)
    what = f"no active hook for {', '.join(lacking)}" if lacking else "all active"
    return Finding("hooks", not lacking, what, "run `turnlock install`" if lacking else "")
