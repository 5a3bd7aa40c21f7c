"""Kill runs: kill -9 of everything, at every step and at any moment, and no promise broken.

``TURNLOCK_KILL_LEADS``, ``TURNLOCK_KILLS``, ``TURNLOCK_POSTGRES_KILLS`` and ``TURNLOCK_KILL_SEED`` make the long run
longer: 10000, 200, 5.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kill.guard import processes_of
from tests.kill.points import POINTS
from tests.kill.rig import KillRun, Report, Size
from tests.kill.source import SOURCE, copy_source
from tests.rig import until

_SLICE = (
    "W3 storing",
    "W4 committed, not answered",
    "R4 turn taken",
    "R6 committed, not known",
    "S3 done, not answered",
)


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)


def _held(tmp_path: Path, size: Size) -> Report:
    report = KillRun(tmp_path, copy_source(tmp_path / "source"), size).run()
    print(f"\n{report}")
    assert not report.broken, str(report)
    assert report.kills >= size.kills
    assert report.postgres_kills == size.postgres_kills
    assert set(report.met) == (set(size.points) if size.each_point else set())
    assert report.looks > 0
    return report


def test_ten_kills_break_no_promise(tmp_path: Path) -> None:
    _held(tmp_path, Size(leads=120, kills=10, points=_SLICE, each_point=1))


_HOUSE = """
import sys, time
from pathlib import Path
from tests.kill.house import House
with House(Path(sys.argv[1]), Path(sys.argv[2]), 1, 0.003) as house:
    house.start_crew()
    print(house.run, house.server.data, flush=True)
    time.sleep(60)
"""


def test_nothing_is_left_of_a_run_whose_test_is_killed_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOUSE, str(tmp_path), str(copy_source(tmp_path / "source"))]
    with subprocess.Popen(command, cwd=SOURCE, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        run, _, data = process.stdout.readline().strip().partition(" ")
        assert len(processes_of(run, data)) > 5
        process.kill()
    until(lambda: not processes_of(run, data), what="the end of all its processes")


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_many_kills_at_every_point_and_of_postgres_break_no_promise(tmp_path: Path) -> None:
    kills = _number("TURNLOCK_KILLS", 60)
    size = Size(
        leads=_number("TURNLOCK_KILL_LEADS", 2000),
        kills=kills,
        postgres_kills=_number("TURNLOCK_POSTGRES_KILLS", 3),
        each_point=max(1, kills // 30),
        seed=_number("TURNLOCK_KILL_SEED", 1),
    )
    assert size.kills >= len(POINTS) + 3
    _held(tmp_path, size)


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_kills_at_every_point_of_a_crm_with_whole_payloads_and_conditional_writes(tmp_path: Path) -> None:
    _held(tmp_path, Size(leads=300, kills=24, postgres_kills=1, each_point=1, crm="generic"))


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_kills_of_a_process_that_decides_what_it_stores_break_no_promise(tmp_path: Path) -> None:
    _held(tmp_path, Size(leads=300, kills=20, postgres_kills=1, points=(), one_process=True))
