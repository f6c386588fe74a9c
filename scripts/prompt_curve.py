"""Draws how a long prompt's time to the first token falls as the ITL goal rises, as an SVG without a library."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import NamedTuple

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 40, 60
_COLOURS = ("#0072B2", "#D55E00", "#009E73")


class Line(NamedTuple):
    """One curve: a point for each goal."""

    name: str
    ttfts_s: Sequence[float]


def draw(path: Path, goals_ms: Sequence[float], lines: Sequence[Line], *, lone_s: float) -> None:
    """Write the chart: goals on a logarithmic axis, and the lone prompt's time as a dashed line."""
    top_s = 1.15 * max(lone_s, *[ttft_s for line in lines for ttft_s in line.ttfts_s])
    span = log(goals_ms[-1] / goals_ms[0])

    def x(goal_ms: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * log(goal_ms / goals_ms[0]) / span

    def y(ttft_s: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * ttft_s / top_s

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="Helvetica, Arial, '
        'sans-serif" font-size="13" role="img" aria-label="Time to the first token of a long prompt against the ITL '
        'goal">',
        f'  <rect width="{_WIDTH}" height="{_HEIGHT}" rx="14" fill="#ffffff"/>',
        f'  <path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#555" stroke-width="1.5"/>',
        f'  <text x="{_LEFT}" y="{_TOP - 14}" fill="#444">seconds to the first token</text>',
        f'  <text x="{(_LEFT + right) / 2:.0f}" y="{_HEIGHT - 14}" fill="#444" text-anchor="middle">'
        "--itl-goal, milliseconds</text>",
    ]
    for goal_ms in goals_ms:
        parts.append(
            f'  <text x="{x(goal_ms):.0f}" y="{bottom + 20}" fill="#444" text-anchor="middle">{goal_ms:g}</text>'
        )
    step_s = max(1, round(top_s / 6))
    for tick_s in range(0, int(top_s) + 1, step_s):
        parts.append(f'  <path d="M{_LEFT} {y(tick_s):.1f}H{right}" stroke="#e3e6ea"/>')
        parts.append(f'  <text x="{_LEFT - 10}" y="{y(tick_s) + 4:.1f}" fill="#444" text-anchor="end">{tick_s}</text>')
    parts.append(f'  <path d="M{_LEFT} {y(lone_s):.1f}H{right}" stroke="#555" stroke-dasharray="6 5"/>')
    labels = [("the prompt alone", "#555", y(lone_s))]
    for colour, line in zip(_COLOURS, lines, strict=False):
        points = " ".join(
            f"{x(goal_ms):.1f},{y(ttft_s):.1f}" for goal_ms, ttft_s in zip(goals_ms, line.ttfts_s, strict=True)
        )
        parts.append(f'  <polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        labels.append((line.name, colour, y(line.ttfts_s[-1])))
    below = -1e9
    for name, colour, at in sorted(labels, key=lambda label: label[2]):
        below = max(at, below + 18)  # labels of close curves do not overlap
        parts.append(f'  <text x="{right + 10}" y="{below + 4:.1f}" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")
