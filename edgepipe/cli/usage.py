"""Converts typer's usage errors to errors of edgepipe, printed in three lines like every other error."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from edgepipe.errors import UserError

_VERBS_ELSEWHERE = {
    "help": "edgepipe",
    "run": "edgepipe chat",
    "load": "edgepipe serve",
    "unload": "edgepipe stop",
    "pull": "edgepipe models pull",
    "list": "edgepipe models list",
    "ls": "edgepipe models list",
    "rm": "edgepipe models rm",
    "remove": "edgepipe models rm",
    "delete": "edgepipe models rm",
    "start": "edgepipe node start",
    "join": "edgepipe node join",
    "invite": "edgepipe node invite",
    "models ls": "edgepipe models list",
    "models remove": "edgepipe models rm",
    "models delete": "edgepipe models rm",
    "node ls": "edgepipe status",
    "node list": "edgepipe status",
    "node status": "edgepipe status",
    "peers ls": "edgepipe peers list",
    "peers rm": "edgepipe peers remove",
}
"""Verbs of other programs, and the commands of edgepipe for them."""


def bad_usage(error: Exception, args: Sequence[str]) -> UserError | None:
    """Convert typer's error about a verb, flag or value to a UserError. Return None for any other error.

    Typer has moved its error classes between modules, so this checks for their methods.
    """
    if not hasattr(error, "format_message"):
        return None
    refusal: Any = error
    message = str(refusal.format_message()).rstrip(".")
    context: Any = getattr(error, "ctx", None)
    path = "edgepipe" if context is None else context.command_path
    fact = "" if context is None else _possible(context)
    for count in (1, 2):  # these words name no verb, so they are wrong
        if (verb := " ".join(args[:count])) in _VERBS_ELSEWHERE:
            words = [_VERBS_ELSEWHERE[verb], shlex.join(_as_here(verb, args[count:]))]
            return UserError(f"there is no verb '{verb}'", next_step=" ".join(words).rstrip())
    return UserError(message[:1].lower() + message[1:], fact=fact, next_step=f"{path} --help")


def _as_here(verb: str, words: Sequence[str]) -> list[str]:
    """Translate a verb's arguments: ``run MODEL PROMPT`` is ``chat MODEL --prompt PROMPT``, and ``help`` a flag."""
    if verb == "help":
        return [*words, "--help"]
    if verb == "run" and len(words) > 1 and not any(word.startswith("-") for word in words):
        return [words[0], "--prompt", " ".join(words[1:])]
    return list(words)


def _possible(context: Any) -> str:
    """List a group's verbs, or show a verb's usage."""
    if verbs := getattr(context.command, "commands", None):
        return f"commands: {', '.join(verbs)}"
    return "usage: " + " ".join(context.get_usage().split()).removeprefix("Usage: ")
