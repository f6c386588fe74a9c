"""A picture that is redrawn in place, also after the terminal became narrower."""

from __future__ import annotations

from typing import Any

from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment


class ResizedLive(Live):
    """``Live`` that erases all rows of its last picture.

    A terminal that becomes narrower breaks the lines drawn before: the picture then has more rows than were drawn, and
    ``Live`` would leave the uppermost standing.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lengths: list[int] = []  # widths of the lines drawn last, in columns

    def refresh(self) -> None:
        """Draw the picture in place of the last one."""
        with self._lock:
            if more := broken_rows(self._lengths, width=self.console.width):
                erase_and_up = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
                self.console.control(Control(ControlType.CARRIAGE_RETURN, *(erase_and_up * more)))
            lines = self.console.render_lines(self.get_renderable(), pad=False)
            self._lengths = [Segment.get_line_length(line) for line in lines]
            super().refresh()


def broken_rows(lengths: list[int], *, width: int) -> int:
    """Return the rows that lines of these lengths take beyond one each, in a terminal of ``width`` columns."""
    return sum((length - 1) // max(1, width) for length in lengths if length)
