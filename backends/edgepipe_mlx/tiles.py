"""Cuts long prompt chunks, so that attention's scores stay small."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.backend.step_layout import RowLayout


def tile_rows(rows: tuple[RowLayout, ...], max_scores: int) -> tuple[RowLayout, ...]:
    """Cut rows so that a part's queries times its keys (of one head) are at most ``max_scores``.

    A part sees the keys up to its own end only, so cutting changes no result and saves what causality would throw away.
    """
    tiles: list[RowLayout] = []
    for row in rows:
        size = max(1, max_scores // row.length)
        start = row.length - row.num_tokens
        for at in range(0, row.num_tokens, size):
            count = min(size, row.num_tokens - at)
            tiles.append(replace(row, first_row=row.first_row + at, num_tokens=count, length=start + at + count))
    return tuple(tiles)
