"""A command line that typer refuses, told in three lines as every other error."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from edgepipe.errors import UserError

_VERBS_ELSEWHERE = {
    "help": "edgepipe",
    "run": "edgepipe chat",
    "pull": "edgepipe models pull",
    "list": "edgepipe models list",
    "ls": "edgepipe models list",
    "rm": "edgepipe models rm",
    "start": "edgepipe node start",
    "join": "edgepipe node join",
    "invite": "edgepipe node invite",
}
"""What other programs call a verb, and how it is called here."""


def bad_usage(error: Exception, args: Sequence[str]) -> UserError | None:
    """What typer says of a wrong verb, flag or value, as an error of ours; None for any other error.

    Typer has moved these classes from one module to another, so they are known by what they offer.
    """
    if not hasattr(error, "format_message"):
        return None
    refusal: Any = error
    message = str(refusal.format_message()).rstrip(".")
    context: Any = getattr(error, "ctx", None)
    path = "edgepipe" if context is None else context.command_path
    fact = "" if context is None else _possible(context)
    if args and args[0] in _VERBS_ELSEWHERE:  # at the top there is no such verb, so that is what is wrong
        words = [_VERBS_ELSEWHERE[args[0]], shlex.join(_as_here(args[0], args[1:]))]
        return UserError(f"there is no verb '{args[0]}'", next_step=" ".join(words).rstrip())
    return UserError(message[:1].lower() + message[1:], fact=fact, next_step=f"{path} --help")


def _as_here(verb: str, words: Sequence[str]) -> list[str]:
    """``run MODEL PROMPT`` is ``chat MODEL --prompt PROMPT`` here, and help a flag; other verbs take the same words."""
    if verb == "help":
        return [*words, "--help"]
    if verb == "run" and len(words) > 1 and not any(word.startswith("-") for word in words):
        return [words[0], "--prompt", " ".join(words[1:])]
    return list(words)


def _possible(context: Any) -> str:
    """The verbs of a group, the pattern of a verb."""
    if verbs := getattr(context.command, "commands", None):
        return f"commands: {', '.join(verbs)}"
    return "usage: " + " ".join(context.get_usage().split()).removeprefix("Usage: ")
