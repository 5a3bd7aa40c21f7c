"""Computers whose clocks are minutes off: what time it is, the database says."""

from __future__ import annotations

import ast
import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.rig import ANA, BEN, CY, DEE, Rig, until
from tests.serving import SOURCE, Serving

# Every way in which Python code asks the computer what time it is; the monotonic clock only counts, and may.
_ASKS = {"now", "utcnow", "today", "time", "time_ns", "gmtime", "localtime"}
_WHOM = {"datetime", "date", "time", "dt"}


def asks_the_computer(text: str) -> list[int]:
    """Lines on which code asks the computer for the time."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in _ASKS
        and (ast.unparse(call.func.value).rpartition(".")[2] in _WHOM)
    ]


def test_nothing_asks_the_computer_what_time_it_is() -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{line}"
        for package in ("routing", "adapters", "connector")
        for path in sorted((SOURCE / package).rglob("*.py"))
        if "sandbox" not in path.parts  # stands for computers of others
        for line in asks_the_computer(path.read_text("utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize("code", ["datetime.now(UTC)", "time.time()", "datetime.datetime.utcnow()", "date.today()"])
def test_code_that_does_would_be_noticed(code: str) -> None:
    assert asks_the_computer(f"x = 1\ny = {code}\n") == [2]


# Put before everything else of a process (Python runs it by its name): its clock is so many seconds off.
SITE = """
import datetime, os, time
off = float(os.environ["CLOCK_OFF"])
real, real_time, real_ns = datetime.datetime, time.time, time.time_ns
class Kind(type):
    def __instancecheck__(cls, other): return isinstance(other, real)
    def __subclasscheck__(cls, other): return issubclass(other, real)
class datetime_off(real, metaclass=Kind):
    @classmethod
    def now(cls, tz=None): return real.now(tz) + datetime.timedelta(seconds=off)
    @classmethod
    def utcnow(cls): return real.utcnow() + datetime.timedelta(seconds=off)
    @classmethod
    def today(cls): return real.today() + datetime.timedelta(seconds=off)
datetime.datetime = datetime_off
time.time = lambda: real_time() + off
time.time_ns = lambda: real_ns() + int(off * 1e9)
"""


def off_in_python(folder: Path, seconds: int) -> dict[str, str]:
    """The environment of a process whose Python code reads a clock that is off."""
    (folder / "sitecustomize.py").write_text(SITE, "utf-8")
    return {"PYTHONPATH": str(folder), "CLOCK_OFF": str(seconds)}


def off_by_libfaketime(folder: Path, seconds: int) -> dict[str, str]:
    """The environment of a process whose compiled code reads it as well; Python alone where there is no libfaketime.

    `.ci/run` installs it where it may, and with TURNLOCK_CI set it must be there.
    """
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        assert not os.environ.get("TURNLOCK_CI"), "libfaketime is missing: apt-get install libfaketime"
        return off_in_python(folder, seconds)
    # Only what time it is: a monotonic clock counts from anywhere, and what waits for it must not be disturbed.
    return {"LD_PRELOAD": str(found[0]), "FAKETIME": f"{seconds:+d}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def hours_around(moment: datetime, first: timedelta, last: timedelta) -> str:
    """Weekly hours in UTC that are open from `first` to `last` around the moment, on every day that they touch."""
    start, end = moment + first, moment + last
    days = {(start + timedelta(days=n)).strftime("%a").lower() for n in (-1, 0, 1)}
    span = f"{start:%H:%M}-{end:%H:%M}"
    return "{" + ", ".join(f"{day}: ['{span}']" for day in sorted(days)) + "}"


@pytest.mark.parametrize("how", [off_in_python, pytest.param(off_by_libfaketime, marks=pytest.mark.proof)])
def test_workers_whose_clocks_are_ten_minutes_off_work_as_if_they_were_right(
    make_rig: Callable[..., Rig],
    serve: Callable[..., Serving],
    tmp_path: Path,
    how: Callable[[Path, int], dict[str, str]],
) -> None:
    # The generic CRM: both its deliveries and our calls carry the time under their signatures, good for five minutes.
    rig = make_rig(crm="generic", worker=False)
    now = rig.one("SELECT clock_timestamp() AT TIME ZONE 'UTC'")
    here, gone = (hours_around(now, timedelta(minutes=a), timedelta(minutes=b)) for a, b in ((-5, 5), (5, 15)))
    rig.configure(
        "default_queue: All\nqueues: {All: {members: ['12', '13', '14', '15']}}\n"
        f"agents:\n  '14': {{zone: UTC, hours: {here}}}\n  '15': {{zone: UTC, hours: {gone}}}\n"
    )
    ahead, behind = (serve(rig, worker=True, extra=how(tmp_path, off), ready=False) for off in (600, -600))
    for process in (ahead, behind):
        process.wait_ready()
    path = urlsplit(rig.hook_url).path
    rig.sandbox.webhook_faults(drop=1.0)
    refs = [rig.create() for _ in range(12)]

    def post(ref: str, process: Serving) -> None:
        assert rig.post(rig.delivery(ref, event=ref), event=ref, url=process.base + path).status == 200

    # Leases: while a write hangs at the CRM, nobody takes it over; a pause that the CRM asks for is as long as asked.
    rig.sandbox.fault("hold", method="PUT", apply=True, times=3)
    for number, ref in enumerate(refs[:6]):
        post(ref, (ahead, behind)[number % 2])
    assert rig.sandbox.wait_held(3)
    rig.sandbox.fault("status", status=429, retry_after="date:2", times=1)
    for number, ref in enumerate(refs[6:]):
        post(ref, (ahead, behind)[number % 2])
    began = time.monotonic()
    until(lambda: rig.one("SELECT count(*) FROM breakers WHERE tenant_id = :t AND reason LIKE '%crm_asked_to_wait'"))
    rig.sandbox.release()
    until(lambda: all(rig.owners(refs)), 30, "an owner for every lead")
    rig.settle()
    assert time.monotonic() - began >= 1.0
    # 14 is at work by the database's clock, 15 is not; by either of the wrong ones it would be the other way round.
    assert Counter(rig.turns()) == {ANA: 4, BEN: 4, CY: 4}
    assert all(rig.skips(ref) == {DEE: "off_hours"} for ref in refs)
    assert sorted(str(row["lead"]) for row in rig.owner_writes()) == sorted(refs)
    held = "SELECT count(*) FROM outbox WHERE due_at > clock_timestamp() + interval '1 minute'"
    assert rig.one(held) == 0
    rig.audit()
