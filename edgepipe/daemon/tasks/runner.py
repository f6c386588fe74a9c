"""Runs tasks as child processes, reads what they print, and ends them with the node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from edgepipe.clock import Clock
from edgepipe.cluster.changes import Changes
from edgepipe.daemon.tasks.book import TaskBook
from edgepipe.daemon.tasks.output import TaskOutput
from edgepipe.errors import RequestInvalid
from edgepipe.ids import IdSource
from edgepipe.plain_words import plain
from edgepipe.wire.tasks import NO_CHOICES, ServeChoices, TaskState

logger = logging.getLogger(__name__)

_TOLD_EVERY_S = 0.25  # shortest time between two reports of progress
_INTERRUPTED_S = 10.0  # time that a command has to end after SIGINT
_MOST_LINE_BYTES = 1 << 16
_DEGRADED = 8  # exit code of a command that found problems: doctor

Arguments = Callable[[str, str, ServeChoices], Sequence[str]]
"""Returns the command line of a task, of its kind, model and choices. Raises RequestInvalid."""


class Tasks:
    """The tasks of a node. Their processes end with ``stop``."""

    def __init__(self, *, arguments: Arguments, clock: Clock, ids: IdSource, tasks: asyncio.TaskGroup) -> None:
        self._arguments = arguments
        self._clock = clock
        self._ids = ids
        self._tasks = tasks
        self._book = TaskBook()
        self._changes = Changes()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._cancelled: set[str] = set()
        self._stopping = False

    def start(self, kind: str, model: str, choices: ServeChoices = NO_CHOICES) -> TaskState:
        """Start a task, or let it wait. Return it, or the same task that has not ended yet.

        Raises RequestInvalid, QueueFull.
        """
        self._arguments(kind, model, choices)  # raises its error before anything is remembered
        task = self._book.add(self._ids.new("task"), kind=kind, model=model, choices=choices, now_us=self._now_us())
        self._start_waiting()
        return self._book.get(task.task_id)

    def get(self, task_id: str) -> TaskState:
        """Return a task with its result. Raises RequestInvalid."""
        return self._book.get(task_id)

    def cancel(self, task_id: str) -> TaskState:
        """Send a running task SIGINT, or drop a waiting one. Raises RequestInvalid for an unknown task."""
        task = self._book.get(task_id)
        if task.state == "waiting":
            self._end(task_id, "cancelled")
        elif not task.ended and task_id not in self._cancelled:
            self._cancelled.add(task_id)
            if (process := self._processes.get(task_id)) is not None:
                self._tasks.create_task(_interrupt(process), name=f"cancel:{task_id}")
        return self._book.get(task_id)

    async def watch(self) -> AsyncGenerator[tuple[TaskState, ...]]:
        """Yield all tasks, newest first, and again after each change, a few times a second at most."""
        async for _ in self._changes.watch():
            yield self._book.list()
            await asyncio.sleep(_TOLD_EVERY_S)

    async def stop(self) -> None:
        """End all tasks."""
        self._stopping = True
        await asyncio.gather(*(_interrupt(process) for process in self._processes.values()))

    def _start_waiting(self) -> None:
        for task in () if self._stopping else self._book.startable():
            self._book.started(task.task_id)
            self._tasks.create_task(self._run(task), name=f"task:{task.kind}")
        self._changes.notify()

    async def _run(self, task: TaskState) -> None:
        output = TaskOutput()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._arguments(task.kind, task.model, task.choices),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_MOST_LINE_BYTES,
                start_new_session=True,  # ^C reaches the node alone, which ends its tasks
            )
        except (OSError, RequestInvalid) as error:
            self._end(task.task_id, "failed", error=[plain(error) if isinstance(error, OSError) else str(error)])
            return
        self._processes[task.task_id] = process
        if task.task_id in self._cancelled or self._stopping:
            self._tasks.create_task(_interrupt(process), name=f"cancel:{task.task_id}")
        try:
            code = await self._follow(task.task_id, process, output)
        finally:
            if process.returncode is None:
                process.kill()
            self._processes.pop(task.task_id, None)
        if task.task_id in self._cancelled or self._stopping:
            self._cancelled.discard(task.task_id)
            self._end(task.task_id, "cancelled", error=output.error)
        elif code == 0 or (code == _DEGRADED and output.result):
            self._end(task.task_id, "done", result=output.result)
        else:
            error = output.error or [f"the command ended with exit code {code}"]
            self._end(task.task_id, "failed", result=output.result, error=error)

    async def _follow(self, task_id: str, process: asyncio.subprocess.Process, output: TaskOutput) -> int:
        """Read what the command prints until it ends. Return its exit code."""
        assert process.stdout is not None
        assert process.stderr is not None

        async def errors(stream: asyncio.StreamReader) -> None:
            async for line in _lines(stream):
                output.error_line(line)

        async with asyncio.TaskGroup() as readers:
            readers.create_task(errors(process.stderr), name="task:stderr")
            async for line in _lines(process.stdout):
                if (progress := output.line(line)) is not None:
                    self._book.progressed(
                        task_id,
                        phase=progress.phase,
                        bytes_done=progress.bytes_done,
                        bytes_total=progress.bytes_total,
                    )
                    self._changes.notify()
        return await process.wait()

    def _end(self, task_id: str, state: str, *, result: bytes = b"", error: Sequence[str] = ()) -> None:
        self._book.ended(task_id, state=state, now_us=self._now_us(), result=result, error=error)
        logger.info("task %s task=%s", state, task_id)
        self._start_waiting()

    def _now_us(self) -> int:
        return int(self._clock.wall_s() * 1e6)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield the lines of a stream, with their line breaks. A longer line than the bound is left out."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # the line is too long; the stream has dropped it
            continue
        if not line:
            return
        yield line.decode(errors="replace")


async def _interrupt(process: asyncio.subprocess.Process) -> None:
    """Send SIGINT, and SIGKILL if the process does not end."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(_INTERRUPTED_S):
            await process.wait()
    except TimeoutError:
        process.kill()
