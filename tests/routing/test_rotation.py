"""Known answers of the rotation, and each move by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from math import floor
from uuid import UUID

import pytest

from routing.rotation import (
    UNIT,
    How,
    Line,
    MoveRefused,
    Owed,
    OwedKind,
    Place,
    debit,
    first_by_rank,
    give_next,
    join,
    leave,
    new_line,
    next_up,
    owe,
    pick,
    place_of,
    reorder,
    returned_average,
    reweight,
    send_to_back,
    standing,
    withdraw,
)
from tests.routing.line_model import agent

NAMES = "ABCDEFGH"
IDS = {name: agent(number) for number, name in enumerate(NAMES)}
A, B, C, D = (IDS[name] for name in "ABCD")
ONE, TWO, THREE = (UUID(int=number) for number in (1, 2, 3))


def fresh(*weights: int) -> Line:
    return new_line([(IDS[name], weight) for name, weight in zip(NAMES, weights, strict=False)])


def name(agent_id: UUID) -> str:
    return next(name for name, known in IDS.items() if known == agent_id)


def serve(line: Line, *available: str, lose: Iterable[UUID] = ()) -> tuple[str, Line]:
    """Winners of one lead for each of `available` (``"AC"``: only A and C may take it), and the line after them."""
    won = ""
    for there in available:
        picked, line = pick(line, [IDS[letter] for letter in there], lose)
        won += name(picked.agent_id) if picked else "-"
    return won, line


def shown(ids: Iterable[UUID]) -> str:
    return "".join(name(one) for one in ids)


# -- known answers --------------------------------------------------------------------------------------------


def test_skipped_member_keeps_their_place_and_is_served_once() -> None:
    won, _ = serve(fresh(1, 1, 1), "ABC", *["AC"] * 6, *["ABC"] * 5)
    assert won == "ACACACABCABC"


@pytest.mark.parametrize(
    ("weights", "leads", "counts"),
    [((1, 1, 1), 60, (15, 15, 30)), ((5, 1, 1), 600, (201, 99, 300))],
)
def test_mixed_lead_kinds_starve_nobody(weights: tuple[int, ...], leads: int, counts: tuple[int, ...]) -> None:
    won, _ = serve(fresh(*weights), *["ABC", "C"] * (leads // 2))
    assert tuple(Counter(won)[letter] for letter in "ABC") == counts


def test_percentages_are_exact() -> None:
    won, _ = serve(fresh(50, 100, 100), *["ABC"] * 250)
    assert Counter(won) == {"A": 50, "B": 100, "C": 100}


def test_weights_interleave() -> None:
    won, _ = serve(fresh(5, 1, 1), *["ABC"] * 7)
    assert won == "ABAACAA"


def test_newcomer_stands_at_the_back() -> None:
    _, line = serve(fresh(1, 1, 1), "ABC")
    won, _ = serve(join(line, D, rank=3), *["ABCD"] * 4)
    assert won == "BCAD"


def test_removal_moves_nobody_else() -> None:
    _, line = serve(fresh(1, 1, 1, 1), *["ABCD"] * 2)
    won, _ = serve(leave(line, A), *["BCD"] * 4)
    assert won == "CDBC"


def test_turns_given_back_are_served_first() -> None:
    won, line = serve(fresh(1, 1, 1), *["ABC"] * 4)
    assert won == "ABCA"
    won, line = serve(owe(owe(line, ONE, A), TWO, A), *["ABC"] * 4)
    assert won == "AABC"
    assert line.position == 8


def test_strides_are_whole_numbers() -> None:
    assert all(UNIT % weight == 0 for weight in range(1, 101))
    assert len(str(UNIT)) == 41


# -- a pick ---------------------------------------------------------------------------------------------------


def test_nobody_available_consumes_no_turn() -> None:
    line = owe(fresh(1, 0), ONE, B)
    for available in ([], [B], [C]):
        assert pick(line, available) == (None, line)
    assert pick(Line(0, 0, ()), [A]) == (None, Line(0, 0, ()))


def test_weight_zero_is_never_picked_and_keeps_what_is_owed() -> None:
    line = give_next(fresh(0, 1), ONE, A)
    picked, line = pick(line, [A, B])
    assert picked is not None
    assert (picked.agent_id, picked.how, picked.passed_over) == (B, How.LINE, (A,))
    assert [row.owed_id for row in line.owed] == [ONE]


def test_pick_tells_who_was_passed_over_in_line_order() -> None:
    picked, line = pick(fresh(1, 1, 1, 1), [C, D])
    assert picked is not None
    assert (picked.agent_id, picked.turn, picked.passed_over) == (C, 1, (A, B))
    picked, _ = pick(line, [C])
    assert picked is not None
    assert picked.passed_over == (A, B, D)


def test_give_next_comes_first_and_is_charged_owed_turns_are_not() -> None:
    line = give_next(owe(fresh(1, 1, 1), ONE, B), TWO, C)
    picked, line = pick(line, [A, B, C])
    assert picked is not None
    assert (picked.agent_id, picked.how, picked.owed_id, picked.turn) == (C, How.GIVE_NEXT, TWO, 1)
    assert (place_of(line, C).tag, place_of(line, C).last) == (UNIT, 1)
    tags = line.places
    picked, line = pick(line, [A, B, C])
    assert picked is not None
    assert (picked.agent_id, picked.how, picked.owed_id, picked.turn) == (B, How.OWED, ONE, 2)
    assert line.places == tags
    assert line.owed == ()
    assert serve(line, *["ABC"] * 4)[0] == "ABCA"


def test_owed_turns_wait_for_their_member_oldest_first() -> None:
    line = owe(owe(owe(fresh(1, 1, 1), ONE, C), TWO, B), THREE, C)
    picked, line = pick(line, [A, B])
    assert picked is not None
    assert (picked.agent_id, picked.owed_id, picked.passed_over) == (B, TWO, (C,))
    picked, line = pick(line, [A, B])
    assert picked is not None
    assert (picked.how, picked.agent_id, picked.passed_over) == (How.LINE, A, (C,))
    assert serve(line, *["ABC"] * 3)[0] == "CCB"


def test_owed_turn_is_kept_also_where_absence_costs_a_turn() -> None:
    picked, line = pick(owe(fresh(1, 1), ONE, A), [B], lose_turn=[A])
    assert picked is not None
    assert (picked.agent_id, picked.how, picked.lost) == (B, How.LINE, (A,))
    assert serve(line, "AB")[0] == "A"
    assert [row.owed_id for row in line.owed] == [ONE]


def test_lose_turn_debits_absentees_who_would_win() -> None:
    picked, line = pick(fresh(1, 1, 1), [B, C], [A])
    assert picked is not None
    assert (picked.agent_id, picked.lost, picked.passed_over) == (B, (A,), ())
    assert place_of(line, A).tag == UNIT
    # A's absence costs A a turn in each round: back, A has no arrears, where a member who keeps their turn has one.
    won, line = serve(line, *["BC"] * 5, lose=[A])
    assert won == "CBCBC"
    won, _ = serve(line, *["ABC"] * 6)
    assert Counter(won) == {"A": 2, "B": 2, "C": 2}


def test_lose_turn_ends_also_for_the_heaviest_absentee() -> None:
    picked, line = pick(fresh(100, 1), [B], [A])
    assert picked is not None
    assert picked.agent_id == B
    assert set(picked.lost) == {A}
    assert serve(line, *["AB"] * 101)[0].count("B") == 1


def test_floor_moves_with_the_assignment_only() -> None:
    _, line = serve(fresh(1, 1, 1), *["ABC"] * 3)
    assert line.floor == 0
    picked, line = pick(line, [A], lose_turn=[B, C])
    assert picked is not None
    assert line.floor == UNIT
    assert debit(line, A).floor == send_to_back(line, A, 9).floor == line.floor


# -- showing --------------------------------------------------------------------------------------------------


def test_next_up_is_what_happens() -> None:
    line = owe(fresh(5, 1, 1), ONE, C)
    picks = next_up(line, [A, B, C], 8)
    assert shown(p.agent_id for p in picks) == "CABAACAA"
    assert [p.turn for p in picks] == list(range(1, 9))
    assert next_up(line, [D], 3) == []


def test_standing_is_the_order_of_next_service() -> None:
    _, line = serve(fresh(1, 1, 1), "ABC")
    assert shown(standing(line)) == "BCA"
    assert shown(standing(line, [A, C])) == "CA"
    _, line = serve(fresh(5, 1, 1, 0), "ABC")
    assert shown(standing(line)) == "BACD"
    assert standing(Line(0, 0, ())) == ()


def test_standing_names_everyone_also_beyond_its_horizon() -> None:
    line = new_line([(agent(number), 100) for number in range(12)] + [(agent(12), 1)])
    _, line = pick(line, [agent(12)])
    everyone = [place.agent_id for place in line.places]
    assert len(standing(line, everyone)) == 13
    assert standing(line) == standing(line, everyone)
    assert standing(line)[-1] == agent(12)


def test_first_by_rank_takes_no_turn() -> None:
    line = fresh(0, 1, 1)
    assert first_by_rank(line.places, [A, B, C]) == B
    assert first_by_rank(reversed_places(line), [C, B]) == B
    assert first_by_rank(line.places, [A]) is None


def reversed_places(line: Line) -> list[Place]:
    return list(reversed(line.places))


# -- moves ----------------------------------------------------------------------------------------------------


def test_join_and_weight_from_zero_go_to_the_back_by_their_own_stride() -> None:
    # The last of A, B is due at 2 UNIT, the mean start is UNIT / 2: a light newcomer is due last, too. A heavy one is
    # a tenth of a UNIT beyond the mean instead: behind everyone would be 14 own turns.
    _, line = serve(fresh(1, 1), "AB")
    assert place_of(join(line, C, rank=2), C) == Place(C, 2, 1, UNIT, 1)
    assert place_of(join(line, C, rank=2, weight=10), C) == Place(C, 2, 10, UNIT // 2 + UNIT // 10, 1)
    line = join(line, C, rank=2, weight=0)
    assert place_of(reweight(line, C, 1, rank=3), C) == Place(C, 3, 1, UNIT, 1)
    # What was charged before weight 0 is not brought along.
    line = reweight(debit(debit(fresh(1, 1), A), A), A, 0)
    assert place_of(reweight(line, A, 1, rank=2), A) == Place(A, 2, 1, 0, 0)


def test_first_member_joins_at_the_floor() -> None:
    assert join(Line(7, UNIT, ()), A, rank=4).places == (Place(A, 4, 1, UNIT, 7),)


def test_who_leaves_and_joins_again_is_a_newcomer() -> None:
    line = owe(fresh(1, 1, 1), ONE, A)
    line = join(leave(line, A), A, rank=3)
    assert line.owed == ()
    assert serve(line, *["ABC"] * 3)[0] == "BCA"


def test_newcomer_does_not_wait_for_the_debits_of_a_colleague() -> None:
    line = fresh(1, 1, 1)
    for _ in range(50):
        line = debit(line, A)
    assert serve(join(line, D, rank=3), *["ABCD"] * 6)[0] == "BCBCDB"


def test_send_to_back_is_behind_who_was_just_served() -> None:
    assert serve(send_to_back(fresh(1, 1, 1), A, rank=3), *["ABC"] * 3)[0] == "BCA"
    _, line = serve(fresh(1, 1, 1), *["ABC"] * 2)
    assert shown(standing(send_to_back(line, A, rank=3))) == "CBA"
    # Twice changes nothing, and who is charged ahead is not brought nearer.
    twice = send_to_back(send_to_back(line, A, rank=3), A, rank=4)
    assert shown(standing(twice)) == "CBA"
    ahead = debit(debit(debit(line, A), A), A)
    assert place_of(send_to_back(ahead, A, rank=3), A).tag == place_of(ahead, A).tag


def test_reweight_keeps_the_lag_in_turns() -> None:
    # Starts 0 and UNIT, mean UNIT / 2: B lags half a turn. At weight 2 half a turn is a quarter of UNIT.
    _, line = serve(fresh(1, 1), "AB")
    assert place_of(reweight(line, B, 2), B).tag == UNIT // 4
    assert place_of(reweight(line, A, 2), A).tag == UNIT * 3 // 4
    assert reweight(line, A, 1) == line
    back = reweight(reweight(line, B, 0), B, 1, rank=5)
    assert place_of(back, B) == Place(B, 5, 1, UNIT, 1)


def test_reweight_rounds_down_once() -> None:
    # Start 1 of 3 UNIT in the sum, weights 1: mean UNIT / 3, lag -2/3 of a turn, new tag UNIT / 3 + 2 UNIT / 21. One
    # added to A's tag makes that no whole number.
    _, line = serve(fresh(1, 1, 1), "A")
    line = replace(line, places=tuple(replace(p, tag=p.tag + 1) if p.agent_id == A else p for p in line.places))
    exact = Fraction(UNIT + 1, 3) + Fraction(2 * (UNIT + 1), 21)
    assert exact.denominator > 1
    assert place_of(reweight(line, A, 7), A).tag == floor(exact)


def test_reweight_may_lead_below_zero_and_still_serves_once() -> None:
    _, line = serve(fresh(100, 100, 1), "A", "C")
    line = reweight(line, B, 1)
    assert place_of(line, B).tag < 0
    assert serve(line, *["ABC"] * 40)[0].count("B") == 1


def test_reorder_deals_the_same_tags() -> None:
    _, line = serve(fresh(1, 1, 1, 1), *["ABCD"] * 2)
    assert shown(standing(line)) == "CDAB"
    dealt = reorder(line, [B, D, A, C], rank=4)
    assert shown(standing(dealt)) == "BDAC"
    assert sorted(p.tag for p in dealt.places) == sorted(p.tag for p in line.places)
    assert [p.rank for p in dealt.places] == [4, 5, 6, 7]


def test_reorder_deals_no_one_more_than_a_turn() -> None:
    line = fresh(1, 100, 100)
    _, line = serve(line, "A")
    dealt = reorder(line, [B, A, C], rank=3)
    assert serve(dealt, *["ABC"] * 6)[0].count("C") >= 2
    assert reorder(fresh(0, 0), [B, A], rank=2).places == (Place(B, 2, 0), Place(A, 3, 0))


def test_debit_and_average() -> None:
    line = debit(fresh(1, 1, 0), A)
    assert serve(line, *["ABC"] * 3)[0] == "BAB"
    assert debit(line, C) == line
    _, line = serve(fresh(1, 1, 1), *["AC"] * 5)
    assert place_of(line, B).tag == 0
    assert place_of(returned_average(line, B), B).tag == line.floor > 0


def test_withdraw() -> None:
    line = give_next(owe(fresh(1, 1), ONE, B), TWO, B)
    assert withdraw(withdraw(line, TWO), ONE) == fresh(1, 1)
    with pytest.raises(MoveRefused, match="not waiting"):
        withdraw(line, THREE)


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (lambda line: join(line, A, rank=9), "already a member"),
        (lambda line: join(line, D, rank=2), "given out before"),
        (lambda line: join(line, D, rank=9, weight=101), "0 to 100"),
        (lambda line: reweight(line, A, -1), "0 to 100"),
        (lambda line: reweight(line, D, 1), "not a member"),
        (lambda line: reweight(reweight(line, A, 0), A, 1), "next rank"),
        (lambda line: reweight(reweight(line, A, 0), A, 1, rank=1), "given out before"),
        (lambda line: leave(line, D), "not a member"),
        (lambda line: send_to_back(line, A, rank=2), "given out before"),
        (lambda line: reorder(line, [A, B], rank=9), "every member"),
        (lambda line: reorder(line, [A, B, B], rank=9), "every member"),
        (lambda line: reorder(line, [A, B, C], rank=2), "given out before"),
        (lambda line: debit(line, D), "not a member"),
        (lambda line: returned_average(line, D), "not a member"),
        (lambda line: owe(line, ONE, D), "not a member"),
        (lambda line: give_next(owe(line, ONE, A), ONE, B), "already in the line"),
    ],
)
def test_moves_that_are_refused(move, message: str) -> None:
    with pytest.raises(MoveRefused, match=message):
        move(fresh(1, 1, 1))


@pytest.mark.parametrize(
    "parts",
    [
        {"position": -1},
        {"floor": -1},
        {"places": (Place(A, 0, 1), Place(A, 1, 1))},
        {"places": (Place(A, 0, 1), Place(B, 0, 1))},
        {"places": (Place(A, 0, 101),)},
        {"places": (Place(A, 0, 1, last=1),)},
        {"owed": (Owed(ONE, A, OwedKind.OWED),)},
        {"places": (Place(A, 0, 1),), "owed": (Owed(ONE, A, OwedKind.OWED), Owed(ONE, A, OwedKind.GIVE_NEXT))},
    ],
)
def test_lines_that_cannot_be(parts: dict) -> None:
    with pytest.raises(MoveRefused):
        Line(**{"position": 0, "floor": 0, "places": ()} | parts)


def test_places_are_kept_in_order_of_rank() -> None:
    assert Line(0, 0, (Place(B, 1, 1), Place(A, 0, 1))) == Line(0, 0, (Place(A, 0, 1), Place(B, 1, 1)))


def test_unknown_agents_in_available_are_ignored() -> None:
    picked, line = pick(fresh(1), [D, A], [B])
    assert picked is not None
    assert (picked.agent_id, len(line.places)) == (A, 1)
