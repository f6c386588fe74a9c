"""Runs the wizard's steps, forward and back."""

from __future__ import annotations

import typer

from edgepipe import __version__
from edgepipe.cli.wizard.asking import Back, Quit, say
from edgepipe.cli.wizard.state import Setup
from edgepipe.cli.wizard.steps import STEPS, show_end

_INTERRUPTED = 130


def run_setup(setup: Setup) -> None:
    """Run all steps.

    Raises errors that a step cannot handle, at the end the failure of a flag's request, and typer.Exit(130) if the
    person stops.
    """
    say(f"edgepipe {__version__} · setup    (Enter accepts a default · < goes back · ^C stops)\n")
    index = 0
    try:
        while index < len(STEPS):
            try:
                STEPS[index](setup)
                index += 1
            except Back:
                index = max(0, index - 1)
    except (Quit, KeyboardInterrupt):
        say("\nstopped; 'edgepipe setup' continues where it stopped")
        raise typer.Exit(_INTERRUPTED) from None
    show_end(setup)
    if setup.failure is not None:
        raise setup.failure
