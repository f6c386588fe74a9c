"""Ask before a command that cannot be undone."""

from __future__ import annotations

import sys

import typer

from edgepipe.errors import ConfigInvalid


def confirm(question: str, *, yes: bool, command: str) -> None:
    """Ask unless ``yes``. Raises ConfigInvalid without a terminal, typer.Abort if the answer is no.

    ``command``: what to type where no person can answer.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigInvalid("there is no terminal to confirm at", next_step=command)
    typer.confirm(question, abort=True)
