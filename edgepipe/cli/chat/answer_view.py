"""Prints an answer as it arrives, as plain text or as Markdown; finished blocks are drawn once."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Literal, Self, get_args

from edgepipe.cli.output import make_console
from edgepipe.safe_text import visible
from edgepipe.units import format_duration_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType
    from rich.live import Live

_REDRAW_S = 0.1  # draws the unfinished block at most ten times a second
_FENCES = ("```", "~~~")
_SPINS_PER_S = 8
_KEPT = "\n\t"  # control characters that an answer may contain
_ERASE_LINE = "\r\x1b[K"
_THINKING = "thinking"
_THOUGHT_LINES = 6  # lines of folded reasoning that are drawn while it arrives
_THOUGHT_CHARS = 4096  # characters kept for these lines

Thinking = Literal["fold", "show", "hide"]
"""Reasoning on the screen: its last lines until it ends and then one line, all of it, or none."""

THINKING: tuple[Thinking, ...] = get_args(Thinking)


class AnswerView:
    """View of one answer; this one shows nothing. Use as a context manager: leaving it prints the rest."""

    def __enter__(self) -> Self:
        """Begin at the start of a line."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Show the rest and end the line."""

    def show(self, text: str) -> None:
        """Show the next piece; this removes the line of ``wait``."""

    def think(self, text: str) -> None:
        """Show the next piece of reasoning."""

    def thought(self, seconds: float) -> None:
        """End the reasoning, which took so long."""

    def wait(self, why: str, *, news: bool = False) -> None:
        """Show below the text why no text arrives. ``news``: important enough for a line amid plain text."""


class PlainView(AnswerView):
    """View that prints text as it is, except control characters: a model cannot move the cursor.

    A pipe gets the answer alone: reasoning to show goes to stderr.
    """

    def __init__(self, thinking: Thinking = "fold") -> None:
        self._thinking: Thinking = thinking
        self._begun = False
        self._waits = ""  # the line on a terminal that explains a pause
        self._news = ""  # the same on a terminal that cannot erase it

    def __exit__(self, *exc_info: object) -> None:
        self._erase()
        if self._begun:
            print(flush=True)

    def wait(self, why: str, *, news: bool = False) -> None:
        """Print the note on its own line, if the output is a terminal."""
        if why == self._waits or not sys.stdout.isatty() or (self._begun and not news):
            return
        if make_console().is_dumb_terminal:
            if news and why != self._news:
                self._begin_line()
                print(why, flush=True)
                self._news = why
            return
        if self._begun and not self._waits:
            print()
        self._erase()
        self._waits = why
        print(why[: shutil.get_terminal_size().columns - 1], end="", flush=True)

    def _erase(self) -> None:
        if self._waits:
            print(_ERASE_LINE, end="", flush=True)
        self._waits = ""

    def show(self, text: str) -> None:
        """Print the piece."""
        self._erase()
        self._begun = True
        print(visible(text, keep=_KEPT), end="", flush=True)

    def think(self, text: str) -> None:
        """Print the piece of reasoning, or that the model thinks."""
        if self._thinking == "show":
            self._begin_line()
            self._dim(text, end="")
        else:
            self.wait(_THINKING)

    def thought(self, seconds: float) -> None:
        """Print how long it took; below reasoning that is shown, also a blank line."""
        self._erase()
        if self._thinking == "show":
            self._dim(f"\n{thought_line(seconds)}\n")
        elif self._thinking == "fold" and sys.stdout.isatty():
            self._begin_line()
            self._dim(thought_line(seconds))

    def _begin_line(self) -> None:
        self._erase()
        if self._begun:
            print(flush=True)
        self._begun = False

    @staticmethod
    def _dim(text: str, *, end: str = "\n") -> None:
        console = make_console(stderr=not sys.stdout.isatty())
        console.print(visible(text, keep=_KEPT), end=end, style="dim", markup=False, soft_wrap=True)


class MarkdownView(AnswerView):
    """View that prints each finished Markdown block once, and redraws the unfinished block as it grows."""

    def __init__(
        self, console: Console | None = None, *, thinking: Thinking = "fold", redraw_s: float = _REDRAW_S
    ) -> None:
        self._thinking: Thinking = thinking
        self._redraw_s = redraw_s
        self._console = console or make_console()
        self._open = ""  # text of the unfinished block
        self._thoughts = ""  # reasoning that is not printed
        self._waits = ""  # the note below it during a pause
        self._live: Live | None = None
        self._drawn_s = 0.0

    def __exit__(self, *exc_info: object) -> None:
        self._stop()
        self._print(self._open)
        self._open = self._thoughts = self._waits = ""

    def wait(self, why: str, *, news: bool = False) -> None:
        """Show an animated line below the unfinished block."""
        if why != self._waits:
            self._stop()
            self._waits = why
            self._draw()

    def show(self, text: str) -> None:
        """Add the piece, print the blocks that it completes, and redraw the rest from time to time."""
        if self._waits:
            self._stop()
            self._waits, self._drawn_s = "", 0.0
        finished, self._open = split_blocks(self._open + visible(text, keep=_KEPT))
        if finished:
            self._stop()
            self._print(finished)
        if self._open.strip() and time.monotonic() - self._drawn_s >= self._redraw_s:
            self._draw()

    def think(self, text: str) -> None:
        """Draw the last lines of reasoning that folds. Print finished lines of reasoning to show."""
        if self._thinking == "hide":
            self.wait(_THINKING)
            return
        if self._open:
            self._stop()
            self._print(self._open)
            self._open = ""
        news = self._waits != _THINKING
        self._thoughts, self._waits = self._thoughts + visible(text, keep=_KEPT), _THINKING
        if self._thinking == "show":
            finished, end, rest = self._thoughts.rpartition("\n")
            if end:
                self._stop()
                self._print_dim(finished)
            self._thoughts = rest
        else:
            self._thoughts = self._thoughts[-_THOUGHT_CHARS:]
        if news or time.monotonic() - self._drawn_s >= self._redraw_s:
            self._draw()

    def thought(self, seconds: float) -> None:
        """Replace reasoning that folds by one line; end reasoning to show with that line."""
        self._stop()
        if self._thinking == "show" and self._thoughts:
            self._print_dim(self._thoughts)
        self._thoughts, self._waits, self._drawn_s = "", "", 0.0
        if self._thinking != "hide":
            self._print_dim(f"{thought_line(seconds)}\n")

    def _print_dim(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def _print(self, markdown: str) -> None:
        if markdown.strip():
            self._console.print(_markdown(markdown))
            self._console.print()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.spinner import Spinner
        from rich.text import Text

        from edgepipe.cli.chat.resized_live import ResizedLive

        parts = list(self._unfinished())
        if self._waits:
            line = Text(self._waits, style="dim", no_wrap=True, overflow="ellipsis")
            parts.append(Spinner(self._spinner(), line, style="dim"))
        picture = Group(*parts)
        if self._live is None:
            self._live = ResizedLive(
                picture, console=self._console, auto_refresh=bool(self._waits), refresh_per_second=_SPINS_PER_S,
                transient=True, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start(refresh=True)
        else:
            self._live.update(picture, refresh=True)
        self._drawn_s = time.monotonic()

    def _spinner(self) -> str:
        return "dots" if self._console.encoding.startswith("utf") else "line"

    def _unfinished(self) -> Iterator[RenderableType]:
        """Yield what may still change: the unfinished block, or reasoning."""
        from rich.text import Text

        room = max(1, self._console.size.height - 2 - bool(self._waits))
        if self._open.strip():
            yield self._tail(_markdown(self._open), room)
        if self._thoughts.strip():
            most = _THOUGHT_LINES if self._thinking == "fold" else room
            yield self._tail(Text(self._thoughts.strip("\n"), style="dim"), min(most, room))

    def _tail(self, picture: RenderableType, most: int) -> RenderableType:
        """Return the last lines that fit the terminal: a line that scrolled away cannot be redrawn."""
        from rich.segment import SegmentLines

        lines = self._console.render_lines(picture, pad=False)
        return SegmentLines(lines[-most:], new_lines=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def split_blocks(text: str) -> tuple[str, str]:
    """Split Markdown at the last blank line outside fenced blocks: text that later text cannot change, and the rest."""
    fence, cut, position = "", 0, 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        bare = line.strip()
        if fence:
            if bare.startswith(fence) and not bare.strip(fence[0]):
                fence, cut = "", position if line.endswith("\n") else cut
        elif bare.startswith(_FENCES):
            fence = bare[: len(bare) - len(bare.lstrip(bare[0]))]
        elif not bare and line.endswith("\n") and not _continues(text[position:]):
            cut = position
    return text[:cut], text[cut:]


def _continues(following: str) -> bool:
    """Return whether text after a blank line may belong to the list above; also true before it arrives."""
    return not following or following[0] in " \t-*+0123456789"


def _markdown(text: str) -> RenderableType:
    from rich.markdown import Markdown

    return Markdown(text, code_theme="ansi_dark", hyperlinks=False)


def thought_line(seconds: float) -> str:
    """Format how long a model thought: ``thought for 4.0 s``."""
    return f"thought for {format_duration_s(seconds)}"


def make_view(*, markdown: bool, thinking: Thinking = "fold") -> AnswerView:
    """Choose the view: Markdown on a terminal if wanted, else plain text."""
    console = make_console()
    if markdown and console.is_terminal:
        return MarkdownView(console, thinking=thinking)
    return PlainView(thinking)
