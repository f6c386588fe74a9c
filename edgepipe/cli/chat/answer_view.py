"""Prints an answer as it arrives, as plain text or as Markdown; finished blocks are drawn once."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Protocol

from edgepipe.cli.output import make_console
from edgepipe.safe_text import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_REDRAW_S = 0.1  # draws the unfinished block at most ten times a second
_FENCES = ("```", "~~~")
_SPINS_PER_S = 8
_KEPT = "\n\t"  # control characters that an answer may contain
_ERASE_LINE = "\r\x1b[K"


class AnswerView(Protocol):
    """View of one answer. Use as a context manager: leaving it prints the rest."""

    def __enter__(self) -> AnswerView:
        """Begin at the start of a line."""
        ...

    def __exit__(self, *exc_info: object) -> None:
        """Show the rest and end the line."""
        ...

    def show(self, text: str) -> None:
        """Show the next piece; this removes the line of ``wait``."""
        ...

    def wait(self, why: str, *, news: bool = False) -> None:
        """Show below the text why no text arrives. ``news``: important enough for a line amid plain text."""
        ...


class NoView:
    """View that shows nothing."""

    def __enter__(self) -> NoView:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return

    def show(self, text: str) -> None:
        """Nothing."""

    def wait(self, why: str, *, news: bool = False) -> None:
        """Nothing."""


class PlainView:
    """View that prints text as it is, except control characters: a model cannot move the cursor."""

    def __init__(self) -> None:
        self._begun = False
        self._waits = ""  # the line on a terminal that explains a pause

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._erase()
        if self._begun:
            print(flush=True)

    def wait(self, why: str, *, news: bool = False) -> None:
        """Print the note on its own line, if the output is a terminal."""
        if why == self._waits or not sys.stdout.isatty() or (self._begun and not news):
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


class MarkdownView:
    """View that prints each finished Markdown block once, and redraws the unfinished block as it grows."""

    def __init__(self, console: Console | None = None, *, redraw_s: float = _REDRAW_S) -> None:
        self._redraw_s = redraw_s
        self._console = console or make_console()
        self._open = ""  # text of the unfinished block
        self._waits = ""  # the note below it during a pause
        self._live: Live | None = None
        self._drawn_s = 0.0

    def __enter__(self) -> MarkdownView:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()
        self._print(self._open)
        self._open = self._waits = ""

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

    def _print(self, markdown: str) -> None:
        if markdown.strip():
            self._console.print(_markdown(markdown))
            self._console.print()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        picture = self._tail(_markdown(self._open)) if self._open.strip() else Text()
        if self._waits:
            line = Text(self._waits, style="dim", no_wrap=True, overflow="ellipsis")
            picture = Group(*([picture] if self._open.strip() else []), Spinner(self._spinner(), line, style="dim"))
        if self._live is None:
            self._live = Live(
                picture, console=self._console, auto_refresh=bool(self._waits), refresh_per_second=_SPINS_PER_S,
                transient=True, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start(refresh=True)
        else:
            self._live.update(picture, refresh=True)
        self._drawn_s = time.monotonic()

    def _spinner(self) -> str:
        return "dots" if self._console.encoding.startswith("utf") else "line"

    def _tail(self, picture: RenderableType) -> RenderableType:
        """Return the last lines that fit the terminal: a line that scrolled away cannot be redrawn."""
        from rich.segment import SegmentLines

        lines = self._console.render_lines(picture, pad=False)
        room = max(1, self._console.size.height - 2 - bool(self._waits))
        return SegmentLines(lines[-room:], new_lines=True)

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


def make_view(*, markdown: bool) -> AnswerView:
    """Choose the view: Markdown on a terminal if wanted, else plain text."""
    console = make_console()
    return MarkdownView(console) if markdown and console.is_terminal else PlainView()
