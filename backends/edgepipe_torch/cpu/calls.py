"""Call the CPU's compiled kernels, and record calls.

Threads are those of torch's OpenMP pool, through ``GOMP_parallel``; without that symbol products run on one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from edgepipe_torch.cpu.frame import CALL_FIELDS
from edgepipe_torch.cpu.ir_text import float_bits
from edgepipe_torch.layers.compiled_code import KernelsUnavailable


class Native:
    """A compiled function with 64-bit arguments. Calls release the interpreter's lock."""

    def __init__(self, engine: Any, name: str, num_arguments: int) -> None:
        """Raises KernelsUnavailable if there is no such function."""
        self.address: int = engine.get_function_address(name)
        if not self.address:
            raise KernelsUnavailable(f"the compiled code has no function {name}")
        self.call: Callable[..., None] = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_arguments)(self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Functions of one kind of weight; see ``product_code``."""

    work: Native  # called by ``KernelCalls.multiply``, through a segment
    take: Native  # segment, ids [T] int64, T, out [T, I] float32
    prepare: int  # address of the function that prepares inputs
    by: str  # description for people: "own kernels (AVX2)"
    digits: int = 0  # bytes of an input, which is rounded to an integer; 0: it stays float32


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKernels:
    """Functions for heads of one size and form, with addresses as arguments; see ``step_code``, ``kv_code``."""

    rotate: Native
    attend: Native
    keep: Native | None = None  # only for a form whose newest keys have lower bits apart


class Recording:
    """Calls of kernels, to repeat with the same addresses, and torch's work between them. It owns the arrays."""

    def __init__(self) -> None:
        self.owned: list[object] = []
        self._calls: list[tuple[int, ...]] = []  # calls since the last work
        self._parts: list[npt.NDArray[np.int64] | Callable[[], None]] = []

    def add(self, function: Native, arguments: tuple[int, ...]) -> None:
        """Record a call."""
        unused = (0,) * (CALL_FIELDS - 1 - len(arguments))
        self._calls.append((function.address, *arguments, *unused))

    def add_work(self, work: Callable[[], Tensor], result: Tensor) -> None:
        """Record torch's work. ``result``: what it returned, where later calls read; it stays."""

        def repeat() -> None:
            found = work()
            if found.data_ptr() != result.data_ptr():
                result.copy_(found)

        self._end_calls()
        self.owned.append(result)
        self._parts.append(repeat)

    def parts(self) -> Sequence[npt.NDArray[np.int64] | Callable[[], None]]:
        """Return calls [n, CALL_FIELDS] and work, in order."""
        self._end_calls()
        return self._parts

    def _end_calls(self) -> None:
        if self._calls:
            self._parts.append(np.array(self._calls, np.int64))
            self._calls = []


class KernelCalls:
    """Calls of the functions that every model needs, and of others."""

    def __init__(self, frame: Any, vectors: Any) -> None:
        """``frame``, ``vectors``: engines of ``frame_module`` and ``vector_module``. Raises KernelsUnavailable."""
        self._recording: Recording | None = None
        self._calls = _openmp()
        self._multiply, self._replay = Native(frame, "multiply", 10), Native(frame, "replay", 2)
        self.prepare: int = Native(frame, "prepare", 5).address
        """Address of the function that prepares inputs of float32 products."""
        self._groups, self._join = Native(frame, "multiply_groups", 10), Native(vectors, "join", 7)
        self._normalise, self._swiglu = Native(vectors, "normalise", 8), Native(vectors, "swiglu", 4)

    @property
    def parallel(self) -> bool:
        """Whether products can run on several threads."""
        return self._calls is not None

    @property
    def openmp(self) -> int:
        """Address of the three functions that kernels need for several threads; 0 without."""
        return ctypes.addressof(self._calls) if self._calls is not None else 0

    @contextmanager
    def record(self) -> Generator[Recording]:
        """Record all calls of kernels within the context, which also run."""
        recording = self._recording = Recording()
        try:
            yield recording
        finally:
            self._recording = None

    def replay(self, recording: Recording) -> None:
        """Repeat recorded calls and work."""
        for part in recording.parts():
            if callable(part):
                part()
            else:
                self._replay.call(part.ctypes.data, len(part))

    def compute(self, work: Callable[[], Tensor]) -> Tensor:
        """Run torch's work, and record it as a whole, with the kernels that it calls. Return its result."""
        recording, self._recording = self._recording, None
        try:
            found = work()
        finally:
            self._recording = recording
        if recording is not None:
            recording.add_work(work, found)
        return found

    def run(self, function: Native, arguments: tuple[int, ...], owned: tuple[object, ...] = ()) -> None:
        """Call a function. ``owned``: arrays at its addresses, kept by a recording."""
        if self._recording is not None:
            self._recording.add(function, arguments)
            self._recording.owned += owned
        function.call(*arguments)

    @property
    def recording(self) -> bool:
        """Whether calls are recorded: arrays at their addresses must stay."""
        return self._recording is not None

    def normalise(self, x: Tensor, weight: Tensor, out: Tensor, epsilon: float) -> None:
        """Write the RMSNorm of x [T, H] or, per head, of x [T, heads, D] to out, which may be x.

        The last two axes lie without gaps. The last is a multiple of 8.
        """
        inner = x.shape[1] if x.dim() == 3 else 1
        shape = (x.shape[0], inner, weight.shape[0], x.stride(0))
        arguments = (x.data_ptr(), weight.data_ptr(), out.data_ptr(), *shape, float_bits(epsilon))
        self.run(self._normalise, arguments, (x, weight, out))

    def swiglu(self, x: Tensor, out: Tensor) -> None:
        """Write silu(x[:, :I]) * x[:, I:] of x [T, 2 I] to out [T, I]; I is a multiple of 8."""
        self.run(self._swiglu, (x.data_ptr(), out.data_ptr(), out.shape[0], out.shape[1]), (x, out))

    def multiply(
        self,
        segments: int,
        x: Tensor,
        out: Tensor,
        scratch: Tensor,
        *,
        slot: int,
        accumulate: bool,
        threads: int,
    ) -> None:
        """Multiply x [T, I] with a chain of segments into out [T, O], or add to it. All float32, rows without gaps.

        ``scratch``: at least T * slot floats for each slot of the segments.
        """
        team = threads if self._calls is not None else 1
        rows, columns = out.shape
        places = (segments, x.data_ptr(), rows, out.data_ptr(), columns, int(accumulate), scratch.data_ptr(), slot)
        self.run(self._multiply, (*places, team, self.openmp), (x, out, scratch))

    def multiply_groups(
        self,
        groups: npt.NDArray[np.int64],
        x: Tensor,
        out: Tensor,
        scratch: Tensor,
        *,
        pitch: int,
        slot: int,
        threads: int,
    ) -> None:
        """Multiply the rows of x [P, I] into out [P, O], each group with a chain of segments of its own.

        groups   [n, 3] of ``group_code.GROUP``; together they hold all rows
        pitch    floats of a row's prepared inputs: slot floats for each slot of a chain
        scratch  at least P * pitch floats
        """
        team = threads if self._calls is not None else 1
        places = (groups.ctypes.data, len(groups), x.data_ptr(), out.data_ptr(), out.shape[1], scratch.data_ptr())
        self.run(self._groups, (*places, pitch, slot, team, self.openmp), (groups, x, out, scratch))

    def join(self, out: Tensor, places: Tensor, weights: Tensor, total: Tensor) -> None:
        """Add to each row of total [T, H] the rows places [T, K] int64 of out [P, H] times weights [T, K], in order.

        H is a multiple of 8. All lie without gaps.
        """
        addresses = (out.data_ptr(), places.data_ptr(), weights.data_ptr(), total.data_ptr())
        self.run(self._join, (*addresses, *places.shape, total.shape[1]), (out, places, weights, total))


def _openmp() -> Any | None:
    """Return the addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads, as an array; None without."""
    process = ctypes.CDLL(None)
    try:
        found = [
            ctypes.cast(getattr(process, name), ctypes.c_void_p).value
            for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        ]
    except AttributeError:
        return None
    return (ctypes.c_int64 * 3)(*[address or 0 for address in found])
