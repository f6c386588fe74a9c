"""From step to step, and back."""

from __future__ import annotations

import typer

from edgepipe import __version__
from edgepipe.cli.wizard.asking import Back, Quit, say
from edgepipe.cli.wizard.state import Setup
from edgepipe.cli.wizard.steps import STEPS, show_end

_INTERRUPTED = 130


def run_setup(setup: Setup) -> None:
    """All steps. Raises what a step cannot mend, at the end what a flag asked for in vain, and typer.Exit(130) where
    the person stopped."""
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
        say("\nstopped; 'edgepipe setup' goes on where it was")
        raise typer.Exit(_INTERRUPTED) from None
    show_end(setup)
    if setup.failure is not None:
        raise setup.failure
