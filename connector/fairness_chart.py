"""A fairness report as a picture: for each agent what they were to expect and what they got, as SVG."""

from __future__ import annotations

from html import escape
from typing import Any

from connector.naming import Json

_ROW, _LEFT, _WIDTH, _TOP, _RIGHT = 44, 210, 520, 76, 290
_EXPECTED, _ACTUAL, _INK, _LINE = "#b8c4d6", "#2563a8", "#1f2937", "#d5dae2"


def chart(report: Json) -> str:
    """The last period of `report` as one SVG document, with a title and a text for each bar for screen readers."""
    period = report["periods"][-1] if report["periods"] else {"start": report["since"], "turns": 0, "agents": []}
    rows = period["agents"]
    most = max([1.0, *(max(row["expected"], row["actual"]) for row in rows)])
    height = _TOP + _ROW * max(len(rows), 1) + 24
    width = _LEFT + _WIDTH + _RIGHT
    of = f"queue {report['queue']}" if report["queue"] else "all queues"
    rule = f", rule {report['rule']}" if report["rule"] else ""
    title = f"{report['tenant']}, {of}{rule}: {period['turns']} turns from {period['start']} to {report['until']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{_INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="16" font-weight="600">{escape(title)}</text>',
        f'<rect x="16" y="42" width="12" height="12" fill="{_EXPECTED}"/><text x="34" y="53">expected by weight</text>',
        f'<rect x="176" y="42" width="12" height="12" fill="{_ACTUAL}"/><text x="194" y="53">turns had and kept</text>',
        f'<line x1="{_LEFT}" y1="{_TOP - 8}" x2="{_LEFT}" y2="{height - 16}" stroke="{_LINE}"/>',
    ]
    if not rows:
        parts.append(f'<text x="16" y="{_TOP + 24}">No lead was assigned in this time.</text>')
    for number, row in enumerate(rows):
        parts += _bars(row, _TOP + _ROW * number, most)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bars(row: Any, top: int, most: float) -> list[str]:
    expected, actual = (round(_WIDTH * max(row[key], 0) / most, 1) for key in ("expected", "actual"))
    name = row["agent"]["name"]
    shown = name if len(name) <= 22 else f"{name[:21]}…"
    difference = f"{row['difference']:+.1f}"
    beside = f", {row['without_turn']} without a turn" if row["without_turn"] else ""
    says = f"{name}: expected {row['expected']:.1f}, had {row['actual']}, difference {difference}{beside}"
    return [
        f"<g><title>{escape(says)}</title>",
        f'<text x="{_LEFT - 12}" y="{top + 20}" text-anchor="end">{escape(shown)}</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{expected}" height="13" fill="{_EXPECTED}"/>',
        f'<rect x="{_LEFT}" y="{top + 15}" width="{actual}" height="13" fill="{_ACTUAL}"/>',
        f'<text x="{_LEFT + max(expected, actual) + 10}" y="{top + 19}">{row["actual"]} of {row["expected"]:.1f} '
        f"({difference}){beside}</text></g>",
    ]
