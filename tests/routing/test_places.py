"""Circles and polygons: exact, and the same as slower ways to say it."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.places import KM_PER_MILE, UNITS, Circle, Point, Polygon, kilometres, point_of, polygon


def at(lat: float | str, lon: float | str) -> Point:
    found = point_of(Decimal(str(lat)), Decimal(str(lon)))
    assert found is not None
    return found


def area(*corners: tuple[float, float]) -> Polygon:
    found = polygon([at(*corner) for corner in corners])
    assert isinstance(found, Polygon)
    return found


AUSTIN, DALLAS, SYDNEY, LONDON = (
    at(30.2672, -97.7431),
    at(32.7767, -96.797),
    at(-33.8688, 151.2093),
    at(51.5074, -0.1278),
)


@pytest.mark.parametrize(("a", "b", "km"), [(AUSTIN, DALLAS, 293.1), (LONDON, SYDNEY, 16993.9), (AUSTIN, AUSTIN, 0)])
def test_distances_are_those_of_the_globe(a: Point, b: Point, km: float) -> None:
    assert kilometres(a, b) == kilometres(b, a) == pytest.approx(km, rel=0.001)


def test_a_degree_of_the_equator_and_the_180th_meridian() -> None:
    assert kilometres(at(0, 0), at(0, 1)) == pytest.approx(math.pi * 6371.0088 / 180)
    assert kilometres(at(0, 179.5), at(0, -179.5)) == pytest.approx(kilometres(at(0, 0), at(0, 1)))
    assert kilometres(at(90, 0), at(90, 135)) == pytest.approx(0, abs=1e-9)


def test_a_circle_has_its_edge() -> None:
    far = kilometres(AUSTIN, DALLAS)
    assert Circle(AUSTIN, far).covers(DALLAS)
    assert not Circle(AUSTIN, far - 0.001).covers(DALLAS)
    assert Circle(AUSTIN, 183 * KM_PER_MILE).covers(DALLAS)


@pytest.mark.parametrize(("lat", "lon"), [(91, 0), (0, 181), ("NaN", 0), (0, "Infinity"), (-90.1, 0)])
def test_what_is_no_place(lat: float | str, lon: float | str) -> None:
    assert point_of(Decimal(lat), Decimal(lon)) is None


HORSESHOE = [(0, 0), (0, 6), (6, 6), (6, 4), (2, 4), (2, 2), (6, 2), (6, 0)]


@pytest.mark.parametrize(
    ("point", "inside"),
    [
        ((1, 3), True), ((3, 3), False), ((3, 1), True), ((3, 5), True), ((0, 0), True), ((6, 5), True), ((4, 2), True),
        ((4, 3), False), ((6, 3), False), ((7, 1), False), ((2, 3), True), ((0, -1), False), ((6, 7), False),
    ],
)  # fmt: skip
def test_inside_outside_and_on_the_edge(point: tuple[float, float], inside: bool) -> None:
    assert area(*HORSESHOE).covers(at(*point)) is inside
    assert area(*reversed(HORSESHOE)).covers(at(*point)) is inside
    assert area(*HORSESHOE, HORSESHOE[0]).covers(at(*point)) is inside


def test_a_hair_from_the_edge() -> None:
    slope = area((0, 0), (0, 3), (1, 0))  # its long edge has no end in whole numbers
    assert slope.covers(at("0.3333333", "1.9999999"))
    assert not slope.covers(at("0.3333334", "2.0000001"))


@pytest.mark.parametrize(
    ("corners", "wrong"),
    [
        ([(0, 0), (1, 1)], "fewer than three"),
        ([(0, 0), (1, 1), (0, 0), (1, 1)], "fewer than three"),
        ([(0, 0), (1, 1), (3, 3)], "one line"),
        ([(0, 170), (0, -170), (5, 180)], "180th meridian"),
    ],
)
def test_what_is_no_polygon(corners: list[tuple[float, float]], wrong: str) -> None:
    found = polygon([at(*corner) for corner in corners])
    assert isinstance(found, str)
    assert wrong in found


def winding(corners: tuple[Point, ...], point: Point) -> bool:
    """Even-odd by the crossings themselves, in fractions; true for a point on an edge. Slow, and another way."""
    lat, lon = point
    crossings = []
    for (a, b), (c, d) in pairwise((*corners, corners[0])):
        if a == c:
            if lat == a and min(b, d) <= lon <= max(b, d):
                return True
            continue
        if min(a, c) <= lat <= max(a, c):
            cross = b + Fraction(d - b, c - a) * (lat - a)
            if cross == lon:
                return True
            if lat != max(a, c):
                crossings.append(cross)
    return sum(cross > lon for cross in crossings) % 2 == 1


small = st.tuples(st.integers(-4, 4), st.integers(-4, 4))


@settings(max_examples=300, deadline=None)
@given(st.lists(small, min_size=3, max_size=8), small)
def test_the_ray_agrees_with_exact_fractions(corners: list[Point], point: Point) -> None:
    found = polygon(list(corners))
    if isinstance(found, Polygon):
        assert found.covers(point) is winding(found.corners, point)


@settings(max_examples=100, deadline=None)
@given(st.lists(small, min_size=3, max_size=8), small, st.integers(0, 7))
def test_where_the_list_begins_does_not_count(corners: list[Point], point: Point, turn: int) -> None:
    one, two = polygon(list(corners)), polygon(corners[turn:] + corners[:turn])
    if isinstance(one, Polygon) and isinstance(two, Polygon):
        assert one.covers(point) is two.covers(point)


def test_a_point_is_kept_to_a_centimetre() -> None:
    assert at("30.123456789", 0)[0] == 301234568
    assert UNITS == 10**7
