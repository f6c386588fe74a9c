"""Questions to a person. Each has a default that Enter accepts, a way back, and a flag that answers it in advance."""

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
_POINTER = " »  "  # mark before a choice, and one spare column


class Back(Exception):
    """The person wants the previous step. The wizard handles it."""


class Quit(Exception):
    """The person wants to stop. The wizard handles it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedChoice:
    """One of several possible answers."""

    value: str
    text: str


class Asking(Protocol):
    """Source of answers. All methods raise Back and Quit."""

    def choose(self, question: str, choices: Sequence[AskedChoice], *, default: str) -> str:
        """Return the value of one of the choices."""
        ...

    def text(
        self, question: str, *, default: str = "", check: Callable[[str], str] = lambda _: "", flags: str = ""
    ) -> str:
        """Return a line. ``check`` describes an error in it (empty: none); ``flags``: the flags that answer it."""
        ...

    def confirm(self, question: str, *, default: bool) -> bool:
        """Return yes or no."""
        ...


class Terminal:
    """Answers of a person at a terminal."""

    def __init__(self) -> None:
        """Raise ConfigInvalid without a terminal."""
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigInvalid(
                "the setup asks questions, and there is no terminal here", next_step="edgepipe setup --yes"
            )

    def choose(self, question: str, choices: Sequence[AskedChoice], *, default: str) -> str:
        """Let the person choose with the arrow keys."""
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
        """Let the person type a line; ``<`` goes back."""
        import questionary

        def validate(line: str) -> bool | str:
            return True if line.strip().endswith(BACK) else check(line.strip()) or True

        return _answer(questionary.text(question, default=default, instruction=_BACK_HINT, validate=validate)).strip()

    def confirm(self, question: str, *, default: bool) -> bool:
        """Let the person type ``y``, ``n`` or ``<``."""
        letters = "Y/n" if default else "y/N"

        def check(line: str) -> str:
            return "" if line.lower() in ("", "y", "yes", "n", "no") else "y or n"

        answer = self.text(f"{question} [{letters}]", check=check).lower()
        return default if not answer else answer.startswith("y")


class Defaults:
    """Answers every question with its default."""

    def choose(self, question: str, choices: Sequence[AskedChoice], *, default: str) -> str:
        """Return the default."""
        return default

    def text(
        self, question: str, *, default: str = "", check: Callable[[str], str] = lambda _: "", flags: str = ""
    ) -> str:
        """Return the default. Raises ConfigInvalid without a valid default."""
        if wrong := check(default):
            wanted = question.rstrip(":?").lower()
            raise ConfigInvalid(f"a {wanted} is needed", fact=wrong, next_step=flags or "edgepipe setup --help")
        return default

    def confirm(self, question: str, *, default: bool) -> bool:
        """Return the default."""
        return default


def filled(text: str) -> str:
    """Refuse an empty line; a ``check`` for ``Asking.text``."""
    return "" if text else "type a value"


def check_name(text: str) -> str:
    """Return why a text is no name of a machine or a cluster; empty: it is one."""
    from edgepipe.config import load_config

    try:
        load_config({"name": text}, environ={})
    except ConfigInvalid as error:
        return error.next_step
    return ""


def _answer(question: Question) -> str:
    try:
        answer: str = question.unsafe_ask()  # ``ask`` would print its own message at ^C
    except (KeyboardInterrupt, EOFError):
        raise Quit from None
    if answer.strip().endswith(BACK):  # a person may type it after a default
        raise Back
    return answer


def say(text: str = "", *, style: str = "") -> None:
    """Print a line of the wizard; continuation lines keep its indent."""
    console = make_console()
    for part in visible(text, keep="\n").split("\n"):
        indent = " " * (len(part) - len(part.lstrip()))
        console.print(_wrapped(part.strip(), indent, console.width), style=style or None)


def done(text: str) -> None:
    """Print a success."""
    _marked("✓", "green", text)


def note(text: str) -> None:
    """Print information."""
    _marked("·", "dim", text)


def warn(text: str, *, remedy: str = "") -> None:
    """Print a problem and its remedy."""
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
