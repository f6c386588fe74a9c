"""The whole command line with every verb loaded, for tests that walk it."""

from __future__ import annotations

from typing import Any

from typer.main import get_command

from edgepipe.cli.main import make_app
from edgepipe.cli.verbs import VERBS


def every_verb() -> Any:
    """``edgepipe`` as a group of commands, whose help and options a test may read."""
    root: Any = get_command(make_app())
    root.commands = {name: verb.load() for name, verb in VERBS.items()}
    return root
