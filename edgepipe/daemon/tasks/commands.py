"""The closed list of commands that may run as tasks, and their arguments (PURE).

Arguments never pass a shell. A model's name comes after ``--``, and no name is accepted that could be an option or a
path outside the store.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgepipe.errors import RequestInvalid
from edgepipe.spec.kv_forms import KV_FORMS
from edgepipe.wire.tasks import NO_CHOICES, ServeChoices

MOST_NAME_CHARS = 256
# Names of known models, ORG/NAME[@REVISION][:TYPE] of the hub, and addresses of its pages.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+ -]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCommand:
    """One command that a task may run."""

    words: tuple[str, ...]
    takes_model: bool
    flags: tuple[str, ...] = ()
    in_store: bool = False  # it takes the folder of models
    drafts: frozenset[str] = frozenset()  # it takes choices of serving, these drafts among them


COMMANDS: Mapping[str, TaskCommand] = {
    "pull": TaskCommand(words=("models", "pull"), takes_model=True, flags=("--json", "--progress"), in_store=True),
    "remove": TaskCommand(words=("models", "rm"), takes_model=True, flags=("--json", "--yes"), in_store=True),
    "replicate": TaskCommand(words=("models", "replicate"), takes_model=True, flags=("--json", "--progress")),
    "serve": TaskCommand(
        words=("serve",),
        takes_model=True,
        flags=("--json", "--progress"),
        drafts=frozenset({"auto", "lookup", "mtp", "off"}),
    ),
    "list": TaskCommand(words=("models", "list"), takes_model=False, flags=("--json",), in_store=True),
    "fits": TaskCommand(words=("models", "list"), takes_model=False, flags=("--json", "--known")),
    "plan": TaskCommand(words=("plan",), takes_model=True, flags=("--json",), drafts=frozenset({"mtp", "off"})),
    "doctor": TaskCommand(words=("doctor",), takes_model=False, flags=("--json",)),
    "drain": TaskCommand(words=("node", "drain"), takes_model=False),
}
"""Keys are kinds of tasks."""


def arguments_of(
    kind: str, model: str, choices: ServeChoices = NO_CHOICES, *, data_dir: Path, models_dir: Path
) -> Sequence[str]:
    """Return the command line of a task. Raises RequestInvalid for an unknown kind or choice, or an unsafe name."""
    command = COMMANDS.get(kind)
    if command is None:
        raise RequestInvalid(
            "there is no such task", fact=f"tasks are {', '.join(COMMANDS)}", next_step="send one of these kinds"
        )
    if command.takes_model:
        _check_name(model)
    elif model:
        raise RequestInvalid(f"the task '{kind}' takes no model", next_step="send it without a model")
    store = ("--models-dir", str(models_dir)) if command.in_store else ()
    return (
        *(sys.executable, "-P", "-m", "edgepipe.cli", *command.words),
        *(*command.flags, *_choice_flags(kind, command, choices), "--data-dir", str(data_dir), *store),
        *(("--", model) if command.takes_model else ()),
    )


def _choice_flags(kind: str, command: TaskCommand, choices: ServeChoices) -> Sequence[str]:
    given = {
        "--kv": choices.kv,
        "--context": str(choices.context or ""),
        "--concurrency": str(choices.concurrency or ""),
        "--draft": choices.draft,
    }
    flags = [word for flag, value in given.items() if value for word in (flag, value)]
    if flags and not command.drafts:
        raise RequestInvalid(f"the task '{kind}' takes no choices of serving", next_step="send it without choices")
    if choices.kv not in ("", "auto", *KV_FORMS) or choices.draft not in {"", *command.drafts}:
        raise RequestInvalid(
            f"the task '{kind}' has no such choice",
            fact=f"kv is auto, {' or '.join(KV_FORMS)}, draft {', '.join(sorted(command.drafts))}",
            next_step="send one of these",
        )
    return flags


def _check_name(model: str) -> None:
    parts = re.split(r"[/:@]", model)
    if len(model) <= MOST_NAME_CHARS and _NAME.fullmatch(model) and "--" not in model and ".." not in parts:
        return
    raise RequestInvalid(
        "this is no name of a model",
        fact="a name has letters, digits and . _ - / : @ +, and at most 256 of them",
        next_step="send a name such as qwen3:8b or org/name",
    )
