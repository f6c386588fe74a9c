"""The compute thread: the only thread that uses the device."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from edgepipe.backend.cost import SliceCost, StepWork
from edgepipe.backend.protocol import Backend, Prepared, Ticket, WaitingBackend
from edgepipe.backend.types import Activations, LogitEdits, StepOutput, TokenIds
from edgepipe.clock import Clock
from edgepipe.stage.step_mark import StepMark
from edgepipe.stage.step_times import StepTimes
from edgepipe.stage.step_waiter import StepWaiter, Wait

T = TypeVar("T")

_LIVES_S = 0.5  # interval at which a thread that waits looks whether the compute thread still runs


class Work(Protocol):
    """One step on one slice, for the compute thread, which calls the methods."""

    prepared: Prepared
    slice_index: int
    demand: StepWork  # determines the step's time on the device

    @property
    def place(self) -> tuple[int, int]:
        """Counter of the epoch, and the step."""
        ...

    def take_inputs(self) -> TokenIds | Activations:
        """Return and drop the inputs. Called once, so that the backend frees the memory when it is done."""
        ...

    def edits(self) -> LogitEdits | None:
        """Return the logit edits for the device. Called before the submit, if the backend picks candidates."""
        ...

    def wanted(self) -> bool:
        """Return False if the epoch has ended; the step is then dropped."""
        ...

    def done(self, output: StepOutput, span: StepSpan) -> None:
        """Take the output of the computed step."""
        ...

    def failed(self, error: Exception) -> None:
        """Take the backend's error."""
        ...


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step's time on the device, in monotonic seconds."""

    submitted_s: float  # call of submit
    begun_s: float  # the device was free for it: the previous step was collected
    collected_s: float  # return of collect
    idle_s: float  # seconds that the device idled before it


@dataclass(frozen=True, slots=True)
class _Outstanding:
    work: Work
    ticket: Ticket
    submitted_s: float
    idle_s: float


class ComputeThread:
    """Runs steps in the order of ``put``.

    Where the backend allows, it submits a step before it collects the previous one: also a step that arrives while the
    device computes, if the backend can wait on another thread (``WaitingBackend``). Functions passed to ``call`` run
    between steps, with no step outstanding. Functions passed to ``later`` run before the thread waits: the device gets
    its next step first.
    """

    def __init__(self, *, clock: Clock, name: str = "compute", mark: StepMark | None = None) -> None:
        """``mark``: always shows the oldest outstanding step."""
        self._mark = mark
        self.started = 0  # steps submitted
        self.finished = 0  # steps collected
        self._clock = clock
        self._backend: Backend | None = None
        self._waiting: WaitingBackend | None = None  # the backend, if it can wait on another thread
        self._times = StepTimes()
        self._jobs: SimpleQueue[Work | Callable[[], None] | Wait] = SimpleQueue()
        self._waiter = StepWaiter(name=f"{name}-wait", tell=self._jobs.put)
        self._wait: Wait | None = None  # for the oldest outstanding step, on the waiter's thread
        self._steps_put = 0  # steps in the queue of jobs, so far; written by the thread that calls ``put``
        self._steps_taken = 0
        self._outstanding: deque[_Outstanding] = deque()
        self._later: deque[Callable[[], object]] = deque()
        self._idle_since_s = clock.monotonic_s()
        self._open = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def limit_s(self) -> float:
        """Return the seconds that the current work may take before the device counts as hung."""
        return self._times.limit_s

    @property
    def backend(self) -> Backend:
        """Backend in use."""
        assert self._backend is not None, "use() comes first"
        return self._backend

    def use(self, backend: Backend) -> None:
        """Run steps on ``backend`` from now on."""
        self._backend = backend
        self._waiting = backend if isinstance(backend, WaitingBackend) else None

    def expect(self, costs: Mapping[int, SliceCost]) -> None:
        """Predict the times of newly loaded slices from the device's data sheet. Call it on the compute thread."""
        self._times.expect(costs)

    def put(self, work: Work) -> None:
        """Queue a step without blocking. The caller bounds the queue."""
        self._steps_put += 1
        self._jobs.put(work)

    @property
    def has_waiting(self) -> bool:
        """Whether a step waits that the device does not hold yet."""
        return self._steps_put > self._steps_taken

    def later(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` on this thread before it next waits or computes. Call it on the compute thread."""
        self._later.append(tell)

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the thread once all previous steps are collected. Raises the function's error."""
        if not self._thread.is_alive():
            raise RuntimeError("the compute thread is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                result = function()
            except BaseException as exc:
                loop.call_soon_threadsafe(_settle, future, None, exc)
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        self._jobs.put(job)
        return await future

    def wait_for(self, function: Callable[[], T]) -> T:
        """Run ``function`` as ``call`` does, and wait for its result on another thread. Raises the function's error.

        Raises RuntimeError if this thread ends before.
        """
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as exc:
                future.set_exception(exc)

        self._jobs.put(job)
        while not wait([future], timeout=_LIVES_S).done:
            if not self._thread.is_alive() and not future.done():
                raise RuntimeError("the compute thread is closed")
        return future.result()

    async def close(self) -> None:
        """Finish the queued work and end the thread. May be called twice."""
        if self._thread.is_alive():
            await self.call(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._waiter.close()
        self._open = False

    def _run(self) -> None:
        while self._open:
            job = self._next_job()
            if job is None:
                self._tell()
                self._collect()
            elif callable(job):
                self._tell()
                self._drain()
                self._times.calls(calling=True)
                job()
                self._times.calls(calling=False)
            else:
                if self.backend.max_submitted == 1:
                    self._tell()  # such a backend may compute the step in ``submit``
                self._submit(job)

    def _tell(self) -> None:
        while self._later:
            self._later.popleft()()

    def _next_job(self) -> Work | Callable[[], None] | None:
        """Return the next job; None if the oldest outstanding step must be collected first."""
        while not self._is_full:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                if self._outstanding and not self._waits_beside():
                    return None
                self._tell()
                job = self._jobs.get()
            if not isinstance(job, Wait):
                if not callable(job):
                    self._steps_taken += 1
                    if self._wait is not None:
                        self._waiter.note_wait(arrived=True)
                return job
            if job is self._wait:  # others were for steps that are collected
                self._waiter.note_wait(arrived=False)
                return None
        return None

    @property
    def _is_full(self) -> bool:
        """Whether the device takes no step before the oldest one is collected."""
        return bool(self._outstanding) and len(self._outstanding) >= self.backend.max_submitted

    def _waits_beside(self) -> bool:
        """Let the other thread wait for the oldest step. Return False if this thread waits sooner."""
        if self._wait is None and self._waiting is not None and self._waiter.pays:
            self._wait = self._waiter.begin(self._waiting, self._outstanding[0].ticket)
        return self._wait is not None

    def _mark_oldest(self) -> None:
        self._mark_at(self._outstanding[0].work if self._outstanding else None)

    def _mark_at(self, work: Work | None) -> None:
        if self._mark is not None:
            self._mark.write(*(work.place if work is not None else (0, 0)))

    def _submit(self, work: Work) -> None:
        if not work.wanted():
            return
        entered_s = self._clock.monotonic_s()
        idle_s = 0.0 if self._outstanding else entered_s - self._idle_since_s
        self.started += 1
        self._times.starts(work.slice_index, work.demand)
        self._mark_at(work)
        try:
            edits = work.edits() if self.backend.picks_candidates else None
            ticket = self.backend.submit(work.prepared, work.take_inputs(), edits)
        except Exception as exc:
            self.finished += 1  # counts as finished
            self._times.refused()
            self._mark_oldest()
            work.failed(exc)
            return
        self._times.submitted()
        self._outstanding.append(_Outstanding(work, ticket, entered_s, idle_s))
        self._mark_oldest()

    def _collect(self) -> None:
        could_take = not self._is_full and self._wait is None and not self.has_waiting
        self._wait, oldest = None, self._outstanding.popleft()
        try:
            output = self.backend.collect(oldest.ticket)
        except Exception as exc:
            self.finished += 1
            self._later.append(partial(self._times.ended, None))
            self._mark_oldest()
            oldest.work.failed(exc)
            return
        if could_take:
            self._waiter.note_wait(arrived=self.has_waiting)
        self._mark_oldest()
        now_s = self._clock.monotonic_s()
        begun_s, self._idle_since_s = max(oldest.submitted_s, self._idle_since_s), now_s
        self.finished += 1
        oldest.work.done(output, StepSpan(oldest.submitted_s, begun_s, now_s, oldest.idle_s))
        self._later.append(partial(self._times.ended, now_s - begun_s))  # nothing waits for that

    def _drain(self) -> None:
        while self._outstanding:
            self._collect()
        self._tell()


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
