"""A kill run that finds nothing proves nothing unless it finds what is wrong: each seeded bug, by name."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest

from tests.kill.invariants import PROMISES
from tests.kill.mutants import MUTANTS, Mutant
from tests.kill.rig import KillRun
from tests.kill.source import SOURCE, copy_source

# Each is a run of its own.
pytestmark = pytest.mark.timeout(300)


def changed_lines(before: Path, after: Path) -> int:
    """How many lines the patches of a mutant touch: a line put in the place of another counts once."""
    total = 0
    for path in sorted(after.rglob("*.py")):
        old, new = (before / path.relative_to(after)).read_text().splitlines(), path.read_text().splitlines()
        marks = [line[:1] for line in unified_diff(old, new, lineterm="", n=0) if line[:3] not in ("---", "+++")]
        total += max(marks.count("-"), marks.count("+"))
    return total


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_seeded_bugs_are_small_and_fit_the_source_of_today(mutant: Mutant, tmp_path: Path) -> None:
    copy = copy_source(tmp_path / "source", mutant.patches)
    assert 0 < changed_lines(SOURCE, copy) <= 10
    assert {mutant.breaks, *mutant.too} <= set(PROMISES)


@pytest.mark.proof
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_kill_run_fails_by_the_name_of_the_promise_that_a_seeded_bug_breaks(mutant: Mutant, tmp_path: Path) -> None:
    report = KillRun(tmp_path, copy_source(tmp_path / "source", mutant.patches), mutant.size).run()
    print(f"\n{mutant.name}: {report}")
    assert mutant.breaks in report.names
    assert report.names <= {mutant.breaks, *mutant.too}
