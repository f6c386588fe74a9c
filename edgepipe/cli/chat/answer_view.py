"""An answer as it comes: plain, or as Markdown that never draws twice what is complete."""

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

_REDRAW_S = 0.1  # the unfinished block at most ten times a second
_FENCES = ("```", "~~~")
_SPINS_PER_S = 8
_KEPT = "\n\t"  # of an answer's control characters
_ERASE_LINE = "\r\x1b[K"


class AnswerView(Protocol):
    """Shows one answer. Use as a context manager: leaving it completes the picture."""

    def __enter__(self) -> AnswerView:
        """Begin at the start of a line."""
        ...

    def __exit__(self, *exc_info: object) -> None:
        """Show what is left and end the line."""
        ...

    def show(self, text: str) -> None:
        """The next piece; it ends what ``wait`` shows."""
        ...

    def wait(self, why: str, *, news: bool = False) -> None:
        """Say on a live line below the text why nothing comes. ``news``: worth a line in the middle of plain text."""
        ...


class NoView:
    """Shows nothing."""

    def __enter__(self) -> NoView:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return

    def show(self, text: str) -> None:
        """Nothing."""

    def wait(self, why: str, *, news: bool = False) -> None:
        """Nothing."""


class PlainView:
    """Text as it is. Control characters a model may write cannot move the cursor."""

    def __init__(self) -> None:
        self._begun = False
        self._waits = ""  # the line on a terminal that says why nothing comes

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._erase()
        if self._begun:
            print(flush=True)

    def wait(self, why: str, *, news: bool = False) -> None:
        """Say it on a line of its own, where somebody looks."""
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
    """Finished blocks are printed for good; only the last, unfinished one is drawn again as it grows."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or make_console()
        self._open = ""  # of the block that is not finished
        self._waits = ""  # below it, while nothing comes
        self._live: Live | None = None
        self._drawn_s = 0.0

    def __enter__(self) -> MarkdownView:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()
        self._print(self._open)
        self._open = self._waits = ""

    def wait(self, why: str, *, news: bool = False) -> None:
        """A line that moves, below the unfinished block."""
        if why != self._waits:
            self._stop()
            self._waits = why
            self._draw()

    def show(self, text: str) -> None:
        """Take the piece, print the blocks that it completes, and draw the rest now and then."""
        if self._waits:
            self._stop()
            self._waits, self._drawn_s = "", 0.0
        finished, self._open = split_blocks(self._open + visible(text, keep=_KEPT))
        if finished:
            self._stop()
            self._print(finished)
        if self._open.strip() and time.monotonic() - self._drawn_s >= _REDRAW_S:
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
        """The last lines that the terminal has room for: what scrolls away could not be drawn again."""
        from rich.segment import SegmentLines

        lines = self._console.render_lines(picture, pad=False)
        room = max(1, self._console.size.height - 2 - bool(self._waits))
        return SegmentLines(lines[-room:], new_lines=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def split_blocks(text: str) -> tuple[str, str]:
    """What no later text can change, and the rest: Markdown cut at the last blank line that is in no fenced block."""
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
    """Whether what comes after a blank line may still belong to the list above it, or has not come yet."""
    return not following or following[0] in " \t-*+0123456789"


def _markdown(text: str) -> RenderableType:
    from rich.markdown import Markdown

    return Markdown(text, code_theme="ansi_dark", hyperlinks=False)


def make_view(*, markdown: bool) -> AnswerView:
    """Markdown where somebody looks at a terminal and wants it, else plain."""
    console = make_console()
    return MarkdownView(console) if markdown and console.is_terminal else PlainView()
