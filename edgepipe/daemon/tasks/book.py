"""Keeps the tasks that run, wait or have ended (PURE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgepipe.errors import QueueFull, RequestInvalid
from edgepipe.wire.tasks import NO_CHOICES, ServeChoices, TaskState

MOST_RUNNING = 4  # a pull uses one core for checksums
MOST_TASKS = 100  # remembered, those that run or wait included


class TaskBook:
    """All tasks of this node, oldest first."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskState] = {}

    def add(self, task_id: str, *, kind: str, model: str, now_us: int, choices: ServeChoices = NO_CHOICES) -> TaskState:
        """Add a task that waits. Return the same task instead if that one has not ended.

        Raises QueueFull.
        """
        for task in self._tasks.values():
            if (task.kind, task.model, task.choices) == (kind, model, choices) and not task.ended:
                return task
        if len(self._tasks) >= MOST_TASKS:
            self._forget_one()
        task = TaskState(task_id=task_id, kind=kind, model=model, choices=choices, state="waiting", begun_us=now_us)
        self._tasks[task_id] = task
        return task

    def get(self, task_id: str) -> TaskState:
        """Return a task with its result. Raises RequestInvalid."""
        if (task := self._tasks.get(task_id)) is None:
            raise RequestInvalid(
                "there is no such task", fact="the newest 100 are remembered", next_step="edgepipe ps    (lists them)"
            )
        return task

    def startable(self) -> Sequence[TaskState]:
        """Return the waiting tasks that may start now, in the order of their requests."""
        running = sum(task.state == "running" for task in self._tasks.values())
        waiting = [task for task in self._tasks.values() if task.state == "waiting"]
        return waiting[: max(0, MOST_RUNNING - running)]

    def started(self, task_id: str) -> None:
        """Note that a task's process starts."""
        self._change(task_id, state="running")

    def progressed(self, task_id: str, *, phase: str, bytes_done: int, bytes_total: int) -> None:
        """Note a task's progress."""
        self._change(task_id, phase=phase, bytes_done=bytes_done, bytes_total=bytes_total)

    def ended(self, task_id: str, *, state: str, now_us: int, result: bytes = b"", error: Sequence[str] = ()) -> None:
        """Note a task's end. ``state``: done, failed or cancelled."""
        self._change(task_id, state=state, ended_us=now_us, result=result, error=tuple(error))

    def list(self) -> tuple[TaskState, ...]:
        """Return all tasks, newest first, without results."""
        return tuple(replace(task, result=b"") for task in reversed(self._tasks.values()))

    def _change(self, task_id: str, **fields: Any) -> None:
        self._tasks[task_id] = replace(self._tasks[task_id], **fields)

    def _forget_one(self) -> None:
        oldest = next((task.task_id for task in self._tasks.values() if task.ended), None)
        if oldest is None:
            raise QueueFull(
                "too many tasks wait", fact=f"{MOST_TASKS} have not ended", next_step="cancel some, or wait"
            )
        del self._tasks[oldest]
