"""One batch from its check to its final status: reads lines, keeps a window of them under way, records results."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from edgepipe.children.warm_child import ChildEnded, WarmChild
from edgepipe.clock import Clock
from edgepipe.errors import CapacityError, EdgepipeError, ModelUnknown, QueueFull
from edgepipe.gateway.batches.checking import check_input, question_for, result_of
from edgepipe.gateway.batches.line_runner import LineRefused, LineRunner
from edgepipe.gateway.batches.lines import Outcome, Place, RawLine
from edgepipe.gateway.batches.open_store import OpenStore
from edgepipe.gateway.batches.records import Batch, BatchError, CheckedInput
from edgepipe.gateway.batches.store import Store
from edgepipe.gateway.batches.window import Window, ends_line, is_fault
from edgepipe.gateway.loading import ModelLoads
from edgepipe.gateway.models import ModelTable
from edgepipe.gateway.shares import Shares
from edgepipe.units import format_bytes

logger = logging.getLogger(__name__)
_CHECK_S = 900.0  # a million lines take some 20 s
_LARGE_BYTES = 128 << 10  # inputs of this size and more are read by a child process
_MOST_REPORT_BYTES = 64 << 10  # bound on what the check of an input reports
_MAX_CHECKS = 3  # attempts
_LOOK_S = 1.0  # interval of checks for time and room
_STORE_PAUSE_S = 5.0  # pause after a failed write
_FEW_LINES, _FEW_BYTES = 64, 1 << 20  # more lines are read when fewer, and fewer bytes, wait for their start


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTools:
    """What every batch's run needs."""

    store: OpenStore
    lines: LineRunner
    models: ModelTable
    loads: ModelLoads
    checker: WarmChild
    disk: Shares  # bytes of files by user
    clock: Clock
    changed: Callable[[Batch], None] = lambda _: None  # takes each new form of a batch

    def now_s(self) -> int:
        """Return whole seconds since 1970."""
        return int(self.clock.wall_s())


class BatchRun:
    """The run of one batch. ``note`` says why it does not advance, for people; empty while it does."""

    def __init__(self, batch: Batch, tools: BatchTools) -> None:
        self._tools = tools
        self._batch = batch
        self.note = ""
        self.num_under_way = 0  # lines
        self._wake = asyncio.Event()
        self._window = Window()
        self._place = Place()
        self._at_end = False  # no line is left to read
        self._lines: deque[RawLine] = deque()  # read, not under way
        self._under_way: dict[int, tuple[RawLine, asyncio.Task[None]]] = {}  # keys are line numbers
        self._unwritten: list[Outcome] = []  # results that are not durable; at most a window of them
        self._attempts = Counter[int]()  # failed attempts by line number
        self._no_start_until_s = 0.0  # time of the event loop

    @property
    def batch(self) -> Batch:
        """The batch as it is on the disk."""
        return self._batch

    @batch.setter
    def batch(self, batch: Batch) -> None:
        self._batch = batch
        self._tools.changed(batch)

    async def run(self) -> None:
        """Work until the batch has its final status. A disk without room delays that."""
        while not self.batch.is_final:
            try:
                await self._advance()
            except EdgepipeError as exc:
                self.note = str(exc)
                logger.warning("batch=%s waits: %s", self.batch.batch_id, exc)
                await self._wait(_STORE_PAUSE_S)

    def changed(self, batch: Batch) -> None:
        """Take a change that a client asked for."""
        self.batch = batch
        self._wake.set()

    async def _advance(self) -> None:
        """Do the work of the batch's status, until the status changes. Raises EdgepipeError."""
        match self.batch.status:
            case "validating":
                await self._check()
            case "in_progress":
                await self._work()
            case "finalizing" if not self.batch.all_lines_done:
                await self._write_off()
            case _:
                await self._finish()

    async def _change(self, change: Callable[[Batch], Batch]) -> None:
        batch_id = self.batch.batch_id
        self.batch = await self._tools.store.do(lambda store: store.change(batch_id, change))

    async def _check(self) -> None:
        """Read the whole input, and look for its model."""
        batch, now_s = self.batch, self._tools.now_s()
        path, num_bytes = await self._tools.store.do(lambda store: store.input_of(batch))
        try:
            result = self._with_known_model(await self._checked(path, is_large=num_bytes > _LARGE_BYTES))
        except (TimeoutError, ChildEnded) as exc:
            self._attempts[0] += 1
            if self._attempts[0] < _MAX_CHECKS:
                raise CapacityError("the batch's input could not be read: this machine is overloaded") from exc
            error = BatchError(
                code="file_unreadable", message="the input could not be read: this machine is overloaded"
            )
            result = CheckedInput(errors=(error,))
        self.batch = await self._tools.store.do(lambda store: store.checked(batch, result, now_s=now_s))

    async def _checked(self, path: Path, *, is_large: bool) -> CheckedInput:
        """Read the input: a small one in a thread, which holds the interpreter's lock for some milliseconds."""
        endpoint, owner = self.batch.endpoint, self.batch.owner
        if not is_large:
            return await asyncio.to_thread(check_input, path, endpoint=endpoint)
        question = question_for(path, endpoint=endpoint)
        answer = await self._tools.checker.ask(question, owner=owner, within_s=_CHECK_S, most_bytes=_MOST_REPORT_BYTES)
        await self._tools.checker.end()  # its memory is free while the lines run
        return result_of(answer)

    def _with_known_model(self, result: CheckedInput) -> CheckedInput:
        """Refuse a batch whose model no node serves or has on its disk."""
        loads = self._tools.loads
        if result.errors or (result.model and loads.can_load(loads.meant(result.model))):
            return result
        try:
            self._tools.models.get(result.model or None)
        except ModelUnknown as exc:
            return CheckedInput(errors=(BatchError(code=exc.code, message=str(exc)),))
        except EdgepipeError:
            return result  # it comes
        return result

    async def _work(self) -> None:
        """Run lines until all are done, the time is over or the batch is cancelled."""
        self._place, self._at_end = Place(), False
        self._lines.clear()
        self._unwritten.clear()  # an earlier attempt failed: its lines are read again
        failure: EdgepipeError | None = None
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch_models(), name="batch-models")
            try:
                while self.batch.status == "in_progress":
                    self._wake.clear()
                    await self._refill()
                    self._start(tasks)
                    await self._record()
                    await self._end_if_due()
                    if self.batch.status == "in_progress" and (self.note or not self._unwritten):
                        await self._wait(self._until_next_start_s())
            except EdgepipeError as exc:  # a value, because the task group would wrap it
                failure = exc
            finally:
                watch.cancel()
                for _, task in self._under_way.values():
                    task.cancel()
        if failure is not None:
            raise failure
        await self._record()

    async def _end_if_due(self) -> None:
        now_s = self._tools.now_s()
        if now_s >= self.batch.expires_s:
            await self._change(lambda batch: batch.finalizing("expired", now_s=now_s))
        elif self._at_end and not (self._lines or self._under_way or self._unwritten):
            await self._change(lambda batch: batch.finalizing("completed", now_s=now_s))

    async def _refill(self) -> None:
        """Read lines before they are needed."""
        while not self._at_end and len(self._lines) < _FEW_LINES and _num_bytes(self._lines) < _FEW_BYTES:
            place = self._place
            found, self._place = await self._next_lines(place)
            self._lines += [line for line in found if line.number not in self._under_way]
            self._at_end = self._place == place
            if self._at_end or found:
                return

    async def _next_lines(self, place: Place) -> tuple[list[RawLine], Place]:
        batch = self.batch
        return await self._tools.store.do(lambda store: store.next_lines(batch, place))

    def _start(self, tasks: asyncio.TaskGroup) -> None:
        if asyncio.get_running_loop().time() < self._no_start_until_s or not self._has_disk():
            return
        self._window.widen(num_engines=self._tools.models.num_engines(self.batch.model))
        busy_bytes = _num_bytes(line for line, _ in self._under_way.values())
        while self._lines:
            line = self._lines[0]
            num_lines = len(self._under_way) + len(self._unwritten)
            if not self._window.has_room(num_lines=num_lines, num_bytes=busy_bytes, next_bytes=line.num_bytes):
                return
            self._lines.popleft()
            busy_bytes += line.num_bytes
            task = tasks.create_task(self._run_line(line), name=f"line:{self.batch.batch_id}:{line.number}")
            self._under_way[line.number] = line, task
            self.num_under_way = len(self._under_way)

    def _has_disk(self) -> bool:
        most_bytes = self._tools.store.settings.most_bytes
        if self._tools.disk.held < most_bytes:
            return True
        self.note = (
            f"all {format_bytes(most_bytes)} for files of batches are in use; "
            "delete files, or raise the setting files_limit_bytes"
        )
        return False

    async def _run_line(self, line: RawLine) -> None:
        outcome = None
        try:
            outcome = await self._tools.lines.run(self.batch, line)
        except (LineRefused, QueueFull):
            self._window.refused(num_lines=len(self._under_way) - 1)
            if len(self._under_way) == 1:
                self._pause(_LOOK_S)
        except EdgepipeError as exc:
            outcome = self._after(exc, line)
        except Exception:
            logger.exception("a line of a batch failed: batch=%s line=%d", self.batch.batch_id, line.number)
            outcome = self._tools.lines.not_run(
                self.batch, line, code="internal_error", message="internal error of edgepipe; its log has the details"
            )
        finally:
            del self._under_way[line.number]
            self.num_under_way = len(self._under_way)
            self._wake.set()
        if outcome is None:
            self._lines.appendleft(line)
            return
        self._unwritten.append(outcome)
        if outcome.succeeded:
            self._window.answered()
            self.note = ""

    def _after(self, error: EdgepipeError, line: RawLine) -> Outcome | None:
        """Return the result of a line that has failed for good; None if it runs again later."""
        self._attempts[line.number] += is_fault(error)
        if ends_line(error, attempts=self._attempts[line.number]):
            return self._tools.lines.failed(self.batch, line, error)
        self.note = str(error)
        self._pause(self._window.failed())
        return None

    def _pause(self, seconds: float) -> None:
        until_s = asyncio.get_running_loop().time() + seconds
        self._no_start_until_s = max(self._no_start_until_s, until_s)

    def _until_next_start_s(self) -> float:
        """Return the seconds until a paused batch may go on, at most ``_LOOK_S``."""
        left_s = self._no_start_until_s - asyncio.get_running_loop().time()
        return min(left_s, _LOOK_S) if left_s > 0 else _LOOK_S

    async def _watch_models(self) -> None:
        """Try again soon after a change of the served models."""
        while True:
            await self._tools.models.changed()
            soon_s = asyncio.get_running_loop().time() + _LOOK_S
            self._no_start_until_s = min(self._no_start_until_s, soon_s)

    async def _record(self) -> None:
        """Make results durable. If the disk is full, keep them and try again later."""
        if not self._unwritten or self.batch.is_final:
            return
        batch, outcomes = self.batch, list(self._unwritten)
        try:
            self.batch = await self._tools.store.do(lambda store: store.record(batch.batch_id, outcomes))
        except CapacityError as exc:
            if self.batch.status != "in_progress":
                raise
            if self.note != str(exc):
                logger.warning("batch=%s waits: %s", batch.batch_id, exc)
            self.note = str(exc)
            self._pause(_STORE_PAUSE_S)
            return
        del self._unwritten[: len(outcomes)]
        for outcome in outcomes:
            self._attempts.pop(outcome.number, None)
        self._tools.disk.add(batch.owner, sum(len(outcome.entry) for outcome in outcomes))

    async def _write_off(self) -> None:
        """Write the lines that did not run in time to the error file."""
        place = Place()
        while True:
            before = place
            lines, place = await self._next_lines(before)
            if place == before:
                break
            batch = self.batch
            message = f"it did not run within the completion window of {batch.completion_window}"
            self._unwritten = [
                self._tools.lines.not_run(batch, line, code="batch_expired", message=message) for line in lines
            ]
            await self._record()
        await self._finish()

    async def _finish(self) -> None:
        batch, now_s = self.batch, self._tools.now_s()

        def finish(store: Store) -> Batch:
            return store.finish(batch, lambda now: now.ended(now_s=now_s), now_s=now_s)

        self.batch = await self._tools.store.do(finish)
        logger.info(
            "batch=%s %s: %d lines answered, %d failed",
            batch.batch_id,
            self.batch.status,
            self.batch.completed,
            self.batch.failed,
        )

    async def _wait(self, seconds: float) -> None:
        """Wait for news, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()


def _num_bytes(lines: Iterable[RawLine]) -> int:
    return sum(line.num_bytes for line in lines)
