"""Places on the map: points, circles and polygons, for rules that ask where a property lies.

Coordinates are degrees of WGS 84, kept as whole numbers of 10^-7 degrees (about a centimetre), so that "inside" is
computed exactly. A circle is measured on a sphere of the Earth's mean radius (6371.0088 km, IUGG 1980) by the haversine
formula: within 0.6 % of the distance on the ellipsoid. The edges of a polygon are straight lines on the map of latitude
and longitude; a point on an edge is inside; where edges cross, the even-odd rule holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

Point = tuple[int, int]
"""Latitude and longitude in units of 10^-7 degrees."""

UNITS = 10**7
EARTH_KM = 6371.0088
KM_PER_MILE = 1.609344
MAX_POINTS = 1_000
MAX_KM = 20_040  # half of the way round: every place lies within it


def point_of(latitude: Decimal, longitude: Decimal) -> Point | None:
    """The point at these degrees, None where there is none (beyond 90 or 180 degrees, or no finite number)."""
    if not (latitude.is_finite() and longitude.is_finite() and abs(latitude) <= 90 and abs(longitude) <= 180):
        return None
    return round(latitude * UNITS), round(longitude * UNITS)


def kilometres(a: Point, b: Point) -> float:
    """The great-circle distance of two points."""
    (lat_a, lon_a), (lat_b, lon_b) = ((math.radians(lat / UNITS), math.radians(lon / UNITS)) for lat, lon in (a, b))
    half = math.sin((lat_b - lat_a) / 2) ** 2 + math.cos(lat_a) * math.cos(lat_b) * math.sin((lon_b - lon_a) / 2) ** 2
    return 2 * EARTH_KM * math.asin(min(1.0, math.sqrt(half)))


@dataclass(frozen=True, slots=True)
class Circle:
    """All points within ``km`` of ``centre``, its edge included."""

    centre: Point
    km: float

    def covers(self, point: Point) -> bool:
        """Whether `point` lies in it."""
        return kilometres(self.centre, point) <= self.km


@dataclass(frozen=True, slots=True)
class Polygon:
    """What the closed line through ``corners`` encloses, itself included. The last corner joins the first."""

    corners: tuple[Point, ...]
    low: Point
    high: Point

    def covers(self, point: Point) -> bool:
        """Whether `point` lies in it: a ray to the east crosses its edges an odd number of times."""
        lat, lon = point
        if not (self.low[0] <= lat <= self.high[0] and self.low[1] <= lon <= self.high[1]):
            return False
        inside = False
        for (lat_a, lon_a), (lat_b, lon_b) in pairwise((*self.corners, self.corners[0])):
            side = (lon_b - lon_a) * (lat - lat_a) - (lon - lon_a) * (lat_b - lat_a)
            if (
                side == 0
                and min(lat_a, lat_b) <= lat <= max(lat_a, lat_b)
                and min(lon_a, lon_b) <= lon <= max(lon_a, lon_b)
            ):
                return True
            # Each edge owns its lower end only, so that a ray through a corner counts once.
            if (lat_a > lat) is not (lat_b > lat) and (side > 0) is (lat_b > lat_a):
                inside = not inside
        return inside


Area = Circle | Polygon


def polygon(corners: list[Point]) -> Polygon | str:
    """The polygon with these corners, the first of which may stand again as the last; or what is wrong with them."""
    if len(corners) > 1 and corners[0] == corners[-1]:
        corners = corners[:-1]
    if len(set(corners)) < 3:
        return "has fewer than three corners"
    ring = [*corners, corners[0]]
    if any(abs(a[1] - b[1]) > 180 * UNITS for a, b in pairwise(ring)):
        return "crosses the 180th meridian"
    lats, lons = zip(*corners, strict=True)
    (lat, lon), *others = corners
    if all((a[1] - lon) * (b[0] - lat) == (b[1] - lon) * (a[0] - lat) for a, b in pairwise(others)):
        return "encloses nothing: its corners lie on one line"
    return Polygon(tuple(corners), (min(lats), min(lons)), (max(lats), max(lons)))
