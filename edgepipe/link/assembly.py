"""PURE: joins chunks of frames to steps of one class. Knows order, repeats and sizes; knows no time and no sockets."""

from __future__ import annotations

from collections import deque

import numpy as np

from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import StepId
from edgepipe.link.pacing import MOST_PIECE_BYTES
from edgepipe.link.protocol import StepBytes


class _Arriving:
    """A partly known step: its size from the plan, bytes from the link, or both."""

    __slots__ = ("buffer", "filled", "held", "step")

    def __init__(self, step: StepId) -> None:
        self.step = step
        self.buffer: StepBytes | None = None  # created when the plan has given the size
        self.held: list[bytes] = []  # chunks that came before
        self.filled = 0

    def put(self, data: bytes) -> None:
        if self.buffer is None:
            self.held.append(data)
        else:
            end = self.filled + len(data)
            if end > self.buffer.nbytes:
                raise _misfit(self.step, end, self.buffer.nbytes)
            self.buffer[self.filled : end] = np.frombuffer(data, np.uint8)
        self.filled += len(data)

    def takes_whole(self, chunk: int, data: bytes) -> bool:
        """Take a chunk that is the whole step, whose size is known, and return True; otherwise take nothing."""
        buffer = self.buffer
        if buffer is None or chunk or self.filled or len(data) != buffer.nbytes or len(data) > MOST_PIECE_BYTES:
            return False
        buffer[:] = np.frombuffer(data, np.uint8)
        self.filled = len(data)
        return True

    def size(self, num_bytes: int) -> None:
        if self.filled > num_bytes:
            raise _misfit(self.step, self.filled, num_bytes)
        held, self.held, self.filled = self.held, [], 0
        self.buffer = np.empty(num_bytes, np.uint8)
        for data in held:
            self.put(data)

    def whole(self) -> StepBytes | None:
        return self.buffer if self.buffer is not None and self.filled == self.buffer.nbytes else None


class Assembler:
    """Joins a class's steps that plans announce with bytes that a link brings.

    At most ``window`` steps may be arriving or waiting to be taken. Plans and frames each come in step order. So at
    most one step becomes whole per call, and steps become whole in order.
    """

    def __init__(self, *, window: int) -> None:
        self.window = window
        self.repeats = 0  # chunks that came again
        self.complete = StepId(0)  # every step up to here has arrived
        self.held_bytes = 0  # size of the steps without a plan
        self._steps: deque[_Arriving] = deque()  # incomplete steps, ascending
        self._waiting = 0  # complete steps that are not taken yet
        self._last = (StepId(0), 0)  # the newest step and chunk
        self._planned = StepId(0)

    @property
    def credits(self) -> int:
        """How many steps beyond ``complete`` may be sent, including those that are arriving."""
        return self.window - self._waiting

    @property
    def arriving(self) -> StepId | None:
        """The step with some bytes but without a plan; None without such a step."""
        return next((arriving.step for arriving in self._steps if arriving.buffer is None), None)

    def awaits(self, step: StepId) -> bool:
        """Return whether the step has a plan or some bytes, and is not whole."""
        return bool(self._steps) and any(known.step == step for known in self._steps)

    def expect(self, step: StepId, num_bytes: int) -> StepBytes | None:
        """Take a step's size from its plan; return the step's bytes if all are there.

        Raises RemoteProtocolError if more bytes came, or if a step came without a plan.
        """
        self._planned = step
        arriving = next((known for known in self._steps if known.buffer is None), None)
        if arriving is None:
            arriving = _Arriving(step)
            self._steps.append(arriving)
        if arriving.step < step:
            raise RemoteProtocolError(f"activations of step {arriving.step} came without a plan")
        if arriving.step > step:
            raise _gap(step, arriving.step)
        self.held_bytes -= arriving.filled
        arriving.size(num_bytes)
        if arriving.whole() is None and self._last[0] > step:
            raise _misfit(step, arriving.filled, num_bytes)
        return self._finish(arriving)

    def add(self, step: StepId, chunk: int, data: bytes) -> StepBytes | None:
        """Take one chunk from the link; return the step's bytes if this completes it.

        Repeats are dropped. Raises RemoteProtocolError for a gap, an oversized step or one beyond the credits.
        """
        if (step, chunk) <= self._last:
            self.repeats += 1
            return None
        first = self._steps[0] if self._steps and self._waiting < self.window else None
        if first is not None and first.step == step and first.takes_whole(chunk, data):
            self._last = (step, chunk)
            return self._finish(first)  # decodes come like that, behind their plan: nothing else has to be checked
        if not data or len(data) > MOST_PIECE_BYTES:
            raise RemoteProtocolError(
                f"a chunk of step {step} has {len(data)} bytes", fact=f"1 to {MOST_PIECE_BYTES} are allowed"
            )
        arriving = self._at(step, chunk)
        arriving.put(data)
        if arriving.buffer is None:
            self.held_bytes += len(data)
        self._last = (step, chunk)
        return self._finish(arriving)

    def taken(self) -> None:
        """Free the place of one whole step in the window: compute has taken it."""
        self._waiting -= 1

    def _at(self, step: StepId, chunk: int) -> _Arriving:
        """Return the step that a new chunk belongs to."""
        last_step, last_chunk = self._last
        if step == last_step:
            if chunk != last_chunk + 1:
                raise RemoteProtocolError(
                    f"a chunk of step {step} is missing", fact=f"{chunk} came, {last_chunk + 1} was due"
                )
            return self._find(step)
        if chunk != 0:
            raise RemoteProtocolError(f"step {step} begins with chunk {chunk}", fact="chunks count from 0")
        return self._begin(step)

    def _begin(self, step: StepId) -> _Arriving:
        for known in self._steps:
            if known.step < step and known.buffer is not None:
                raise _gap(known.step, step)
        if self._waiting + sum(1 for known in self._steps if known.filled) >= self.window:
            raise RemoteProtocolError(f"step {step} was sent beyond the credits", fact=f"{self.window} steps may wait")
        if step <= self._planned:
            return self._find(step)
        arriving = _Arriving(step)
        self._steps.append(arriving)
        return arriving

    def _find(self, step: StepId) -> _Arriving:
        for known in self._steps:
            if known.step == step:
                return known
        raise RemoteProtocolError(f"step {step} brings more activations than were planned")

    def _finish(self, arriving: _Arriving) -> StepBytes | None:
        whole = arriving.whole()
        if whole is not None:
            self._steps.remove(arriving)
            self.complete = arriving.step
            self._waiting += 1
        return whole


def _gap(missing: StepId, came: StepId) -> RemoteProtocolError:
    return RemoteProtocolError(f"activations of step {missing} are missing", fact=f"those of step {came} came first")


def _misfit(step: StepId, came: int, planned: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the activations of step {step} do not have the planned size",
        fact=f"{came} bytes came, {planned} were planned",
    )
