"""An answer in a terminal that becomes narrower while it comes, and ``/help`` in a narrow one."""

from __future__ import annotations

import io

import pyte
import pytest
from rich.console import Console

from edgepipe.cli.chat.answer_view import MarkdownView
from edgepipe.cli.chat.resized_live import broken_rows


class _Terminal:
    """A terminal that breaks the lines on it when it becomes narrower, as most do."""

    def __init__(self, columns: int) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=True, width=columns, height=30, color_system=None)
        self._columns = columns
        self._screen = pyte.Screen(columns, 30)
        self._stream = pyte.Stream(self._screen)

    def lines(self) -> list[str]:
        """What stands on the screen."""
        self._stream.feed(self.file.getvalue().replace("\n", "\r\n"))
        self.file.seek(0)
        self.file.truncate()
        return [line.rstrip() for line in self._screen.display]

    def narrow(self, columns: int) -> None:
        """Make it narrower: lines that are too long break, and the cursor stays behind its text."""
        shown = self.lines()[: self._screen.cursor.y + 1]
        broken = [line[at : at + columns] for line in shown for at in range(0, max(1, len(line)), columns)]
        self._screen = pyte.Screen(columns, 30)
        self._stream = pyte.Stream(self._screen)
        self._stream.feed("\r\n".join(broken))
        self.console.width = columns


@pytest.mark.parametrize("columns", [40, 30, 21])
@pytest.mark.parametrize("waits", ["", "macbook asleep since 21:14; continuing on 2 machines"])
def test_no_line_stands_twice_after_the_terminal_became_narrower(columns: int, waits: str) -> None:
    words = [f"word{number:03}" for number in range(40)]
    terminal = _Terminal(80)
    with MarkdownView(terminal.console, redraw_s=0.0) as view:
        view.show("Above.\n\n" + " ".join(words[:20]))
        if waits:
            view.wait(waits)
        terminal.narrow(columns)
        view.show(" " + " ".join(words[20:]))
        text = " ".join(terminal.lines())
        assert [text.count(word) for word in words] == [1] * len(words)
    text = " ".join(terminal.lines())
    assert [text.count(word) for word in words] == [1] * len(words)
    assert text.count("Above.") == 1


def test_rows_of_broken_lines() -> None:
    assert broken_rows([80, 0, 41, 40, 3], width=40) == 2
    assert broken_rows([80, 40], width=80) == 0
