"""Tasks: commands of edgepipe that a node runs as child processes, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeChoices:
    """How a task serves a model, or plans to. Empty or 0: the command's default."""

    kv: str = ""  # "8bit" or "4bit"
    context: int = 0  # tokens per conversation
    concurrency: int = 0  # chats at the same time
    draft: str = ""  # "lookup" | "mtp" | "off"


NO_CHOICES = ServeChoices()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    """A task, from its request to its end."""

    task_id: str = ""
    kind: str = ""  # see ``daemon.tasks.commands``
    model: str = ""  # empty: the command takes none
    state: str = ""  # "waiting" | "running" | "done" | "failed" | "cancelled"
    begun_us: int = 0  # wall clock, when it was asked for
    ended_us: int = 0  # wall clock; 0: it has not ended
    phase: str = ""  # present activity, for people
    bytes_done: int = 0  # bytes of this phase
    bytes_total: int = 0  # 0: not known
    result: bytes = b""  # JSON that the command printed, in ASCII; empty in lists
    error: tuple[str, ...] = ()  # last lines that a failed command printed on stderr
    choices: ServeChoices = NO_CHOICES  # choices of serve and plan

    @property
    def ended(self) -> bool:
        """Whether the task has ended, in whatever way."""
        return self.state not in ("waiting", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskList:
    """All remembered tasks, newest first, without results."""

    tasks: tuple[TaskState, ...] = ()
