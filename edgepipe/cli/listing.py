"""Table without lines that keeps words, bars and numbers whole in narrow terminals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_GAP = 2  # columns of the terminal between two columns of the table
_BROKEN = 12  # least width of a column with a word that must break
_WORD = re.compile(r"(?:^\s+)?(?:▕[^▏]*▏|\S+)")  # the first with its indent; a bar is one word


class Listing(Table):
    """Table whose columns break between words. Columns for which there is no room follow below, in a second table."""

    def __init__(self) -> None:
        super().__init__(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one table, or several if the terminal is narrow; each begins with the first column."""
        most = options.max_width
        least = _leasts(self.columns, most)
        for group in _groups(least, most):
            columns = [self.columns[index] for index in group]
            yield self._part(columns, _widths(columns, [least[index] for index in group], most))

    def _part(self, columns: Sequence[Column], widths: Sequence[int]) -> Table:
        part = Table(
            box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim", show_header=self.show_header
        )
        for column, width in zip(columns, widths, strict=True):
            part.add_column(
                column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow, width=width
            )
        for cells in zip(*(column.cells for column in columns), strict=True):
            part.add_row(*cells)
        return part


def _leasts(columns: Sequence[Column], most: int) -> list[int]:
    """Return the least width of each column. A word that has no room beside the first column may break, too."""
    first, *others = (_least(column) for column in columns)
    first = first if first < most or columns[0].no_wrap else _BROKEN
    room = most - _GAP - first
    return [
        first,
        *(
            least if least <= room or column.no_wrap else _BROKEN
            for least, column in zip(others, columns[1:], strict=True)
        ),
    ]


def _groups(least: Sequence[int], most: int) -> list[list[int]]:
    """Distribute the columns over tables of at most ``most`` columns of the terminal; each begins with the first."""
    groups = [[0]]
    for index in range(1, len(least)):
        if len(groups[-1]) > 1 and _total([least[each] for each in (*groups[-1], index)]) > most:
            groups.append([0])
        groups[-1].append(index)
    return groups


def _widths(columns: Sequence[Column], least: Sequence[int], most: int) -> list[int]:
    """Return a width for each column: its text's, less if it must break. The widest columns become narrower first."""
    widths = [_longest(column) for column in columns]
    while _total(widths) > most and max(widths) > 1:
        loose = [index for index, width in enumerate(widths) if width > least[index]] or range(len(widths))
        widths[max(loose, key=lambda index: widths[index])] -= 1
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _least(column: Column) -> int:
    """Return the width of the longest word; of the whole text in a column that never breaks."""
    if column.no_wrap:
        return _longest(column)
    return max((cell_len(word) for text in _texts(column) for word in _WORD.findall(text)), default=1)


def _longest(column: Column) -> int:
    return max((cell_len(line) for text in _texts(column) for line in text.splitlines()), default=1) or 1


def _texts(column: Column) -> list[str]:
    return [_plain(column.header), *map(_plain, column.cells)]


def _plain(cell: RenderableType) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)
