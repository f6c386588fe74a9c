"""Questions to a person: each with a default that Enter accepts, a way back, and a flag that answers it beforehand."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from edgepipe.cli.output import columns, make_console, wrapped
from edgepipe.errors import ConfigInvalid
from edgepipe.safe_text import one_line, visible

if TYPE_CHECKING:
    from questionary import Question

BACK = "<"
_BACK_HINT = "(< goes back)"
_POINTER = " »  "  # before a choice, with one column to spare


class Back(Exception):
    """The person wants the step before; never leaves the wizard."""


class Quit(Exception):
    """The person has had enough; never leaves the wizard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer of several."""

    value: str
    text: str


class Asking(Protocol):
    """Whoever answers. All raise Back and Quit."""

    def choose(self, question: str, choices: Sequence[Choice], *, default: str) -> str:
        """One of the choices' values."""
        ...

    def text(
        self, question: str, *, default: str = "", check: Callable[[str], str] = lambda _: "", flags: str = ""
    ) -> str:
        """A line; ``check`` says what is wrong with it (empty: nothing), ``flags`` what would have answered it."""
        ...

    def confirm(self, question: str, *, default: bool) -> bool:
        """Yes or no."""
        ...


class Terminal:
    """A person at a terminal."""

    def __init__(self) -> None:
        """Raises ConfigInvalid where nobody sits."""
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigInvalid(
                "the setup asks questions, and there is no terminal here", next_step="edgepipe setup --yes"
            )

    def choose(self, question: str, choices: Sequence[Choice], *, default: str) -> str:
        """With the arrow keys."""
        import questionary

        width = columns(sys.stdout) - len(_POINTER)
        lines = [wrapped(one_line(choice.text), first="", width=width).split("\n") for choice in choices]
        titles = [f"\n{' ' * (2 + len(_POINTER))}".join(parts) for parts in lines]
        options = [questionary.Choice(title, value=choice.value) for title, choice in zip(titles, choices, strict=True)]
        options.append(questionary.Choice("go back", value=BACK))
        return _answer(questionary.select(question, options, default=default, instruction="(arrows, Enter)"))

    def text(
        self, question: str, *, default: str = "", check: Callable[[str], str] = lambda _: "", flags: str = ""
    ) -> str:
        """Typed; ``<`` goes back."""
        import questionary

        def validate(line: str) -> bool | str:
            return True if line.strip().endswith(BACK) else check(line.strip()) or True

        return _answer(questionary.text(question, default=default, instruction=_BACK_HINT, validate=validate)).strip()

    def confirm(self, question: str, *, default: bool) -> bool:
        """``y``, ``n``, or ``<``."""
        letters = "Y/n" if default else "y/N"

        def check(line: str) -> str:
            return "" if line.lower() in ("", "y", "yes", "n", "no") else "y or n"

        answer = self.text(f"{question} [{letters}]", check=check).lower()
        return default if not answer else answer.startswith("y")


class Defaults:
    """Nobody: every question gets its default."""

    def choose(self, question: str, choices: Sequence[Choice], *, default: str) -> str:
        """The default."""
        return default

    def text(
        self, question: str, *, default: str = "", check: Callable[[str], str] = lambda _: "", flags: str = ""
    ) -> str:
        """The default. Raises ConfigInvalid where there is none."""
        if wrong := check(default):
            wanted = question.rstrip(":?").lower()
            raise ConfigInvalid(f"a {wanted} is needed", fact=wrong, next_step=flags or "edgepipe setup --help")
        return default

    def confirm(self, question: str, *, default: bool) -> bool:
        """The default."""
        return default


def filled(text: str) -> str:
    """Say what is wrong with an empty line; a ``check`` for ``Asking.text``."""
    return "" if text else "type something"


def _answer(question: Question) -> str:
    try:
        answer: str = question.unsafe_ask()  # the other way of asking prints a sentence of its own at ^C
    except (KeyboardInterrupt, EOFError):
        raise Quit from None
    if answer.strip().endswith(BACK):  # typed behind a default, too
        raise Back
    return answer


def say(text: str = "", *, style: str = "") -> None:
    """A line of the wizard, wrapped below its own beginning."""
    console = make_console()
    for part in visible(text, keep="\n").split("\n"):
        indent = " " * (len(part) - len(part.lstrip()))
        console.print(_wrapped(part.strip(), indent, console.width), style=style or None)


def done(text: str) -> None:
    """Something that is as it should be."""
    _marked("✓", "green", text)


def note(text: str) -> None:
    """Something that is neither good nor bad."""
    _marked("·", "dim", text)


def warn(text: str, *, remedy: str = "") -> None:
    """Something that is not, and what to do."""
    _marked("!", "yellow", text)
    if remedy:
        say(f"       {remedy}", style="dim")


def _marked(mark: str, style: str, text: str) -> None:
    console = make_console()
    body = _wrapped(one_line(text), " " * 7, console.width).lstrip()
    console.print(f"     {mark} ", style=style, end="")
    console.print(body, soft_wrap=True)


def _wrapped(text: str, indent: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
