"""Compile the CPU's kernels in this process with llvmlite, and call them.

Code is compiled for this machine's CPU when a weight first needs it (about 0.7 s for each kind of weight), and kept on
disk. Threads are those of torch's OpenMP pool, through ``GOMP_parallel``; without that symbol products run on one
thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import logging
import platform
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import platformdirs
from torch import Tensor

from edgepipe_torch.cpu_code import CALL_FIELDS, Kind, ProductCode, frame_module
from edgepipe_torch.cpu_step_code import head_module, vector_module

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32  # SHA-256 before the code, against files cut short by a crash
_NEEDED = ("avx2", "fma", "f16c")  # of x86: without f16c, LLVM would call a library for float16


class Native:
    """A compiled function with 64-bit arguments. Calls release the interpreter's lock."""

    def __init__(self, engine: Any, name: str, num_arguments: int) -> None:
        self.address: int = engine.get_function_address(name)
        self.call: Callable[..., None] = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_arguments)(self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKernels:
    """Functions for heads of one size, with addresses as arguments; see ``cpu_step_code``."""

    rotate: Native
    attend: Native


class Recording:
    """Calls of kernels, to repeat with the same addresses. It owns the arrays behind them."""

    def __init__(self) -> None:
        self.owned: list[object] = []
        self._calls: list[tuple[int, ...]] = []
        self._table: npt.NDArray[np.int64] | None = None

    def add(self, function: Native, arguments: tuple[int, ...]) -> None:
        """Record a call."""
        unused = (0,) * (CALL_FIELDS - 1 - len(arguments))
        self._calls.append((function.address, *arguments, *unused))

    def table(self) -> npt.NDArray[np.int64]:
        """Return the calls [n, CALL_FIELDS]."""
        if self._table is None:
            self._table = np.array(self._calls, np.int64)
        return self._table


class CpuKernels:
    """The compiled functions of one process."""

    def __init__(self, llvm: Any, folder: Path) -> None:
        """``llvm``: llvmlite's binding; ``folder`` keeps compiled code."""
        self._llvm = llvm
        features = llvm.get_host_cpu_features()
        self._wide = bool(features.get("avx512f"))
        self._width = 16 if self._wide else 8 if _is_x86() else 4
        target = llvm.Target.from_default_triple()
        cpu, flags = llvm.get_host_cpu_name(), features.flatten()
        self._machine = target.create_target_machine(cpu=cpu, features=flags, opt=3, jit=True)
        self._code = CodeCache(folder, f"{llvm.llvm_version_info} {self._machine.triple} {cpu} {flags}")
        self._engines: list[Any] = []  # own the code
        self._kinds: dict[Kind, tuple[Native, Native]] = {}  # work, take
        self._heads: dict[int, HeadKernels] = {}
        self._recording: Recording | None = None
        self._calls = _openmp()
        frame, vectors = self._compile(frame_module()), self._compile(vector_module())
        self._multiply, self._replay = Native(frame, "multiply", 10), Native(frame, "replay", 2)
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
        """Repeat recorded calls."""
        table = recording.table()
        self._replay.call(table.ctypes.data, len(table))

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
        arguments = (x.data_ptr(), weight.data_ptr(), out.data_ptr(), *shape, _float_bits(epsilon))
        self.run(self._normalise, arguments, (x, weight, out))

    def swiglu(self, x: Tensor, out: Tensor) -> None:
        """Write silu(x[:, :I]) * x[:, I:] of x [T, 2 I] to out [T, I]; I is a multiple of 8."""
        self.run(self._swiglu, (x.data_ptr(), out.data_ptr(), out.shape[0], out.shape[1]), (x, out))

    def heads(self, head_dim: int) -> HeadKernels:
        """Return the kernels for heads of a size, a multiple of 8."""
        if head_dim not in self._heads:
            engine = self._compile(head_module(head_dim))
            self._heads[head_dim] = HeadKernels(rotate=Native(engine, "rotate", 7), attend=Native(engine, "attend", 1))
        return self._heads[head_dim]

    def work_address(self, kind: Kind) -> int:
        """Return the address of a kind's function, for segments; compile it first if it is new."""
        return self._compiled(kind)[0].address

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

    def take(self, kind: Kind, segment: int, ids: Tensor, out: Tensor) -> None:
        """Write the rows ids [T] int64 of a segment's weight to out [T, I] float32."""
        self._compiled(kind)[1].call(segment, ids.data_ptr(), ids.shape[0], out.data_ptr())

    def _compiled(self, kind: Kind) -> tuple[Native, Native]:
        if kind not in self._kinds:
            # As many sums as 32 or 16 registers hold.
            row_counts, panel_counts = ((8, 4, 2, 1), (12, 4, 2, 1)) if self._wide else ((4, 2, 1), (6, 4, 2, 1))
            code = ProductCode(kind, width=self._width, row_counts=row_counts, panel_counts=panel_counts)
            engine = self._compile(code.module())
            self._kinds[kind] = Native(engine, f"work_{kind.name}", 9), Native(engine, f"take_{kind.name}", 4)
        return self._kinds[kind]

    def _compile(self, text: str) -> Any:
        """Return an engine with the functions of a module; it owns their code."""
        llvm = self._llvm
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self._machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(self._code.get(text, self._object_code)))
        engine.finalize_object()
        self._engines.append(engine)
        return engine

    def _object_code(self, text: str) -> bytes:
        llvm = self._llvm
        module = llvm.parse_assembly(text)
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        builder = llvm.create_pass_builder(self._machine, options)
        builder.getModulePassManager().run(module, builder)
        return self._machine.emit_object(module)


class CodeCache:
    """Compiled code on disk, by the text it was compiled from. A file that cannot be used costs only time."""

    def __init__(self, folder: Path, target: str) -> None:
        """``target``: what else the code depends on, such as the CPU and the compiler's version."""
        self._folder = folder
        self._target = target

    def get(self, text: str, compile_text: Callable[[str], bytes]) -> bytes:
        """Return the code of a text; compile it if it is new."""
        path = self._folder / f"{hashlib.sha256(f'{self._target} {text}'.encode()).hexdigest()[:32]}.o"
        with suppress(OSError):
            stored = path.read_bytes()
            digest, code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
            if hashlib.sha256(code).digest() == digest:
                return code
        code = compile_text(text)
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = path.with_suffix(f".{secrets.token_hex(4)}")
            part.write_bytes(hashlib.sha256(code).digest() + code)
            part.replace(path)
        return code


@cache
def cpu_kernels() -> CpuKernels | None:
    """Return this process's kernels; None where llvmlite or the CPU's instructions are missing."""
    try:
        llvm = importlib.import_module("llvmlite.binding")
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features()
        if _is_x86() and not all(features.get(name) for name in _NEEDED):
            return None
        return CpuKernels(llvm, Path(platformdirs.user_cache_dir("edgepipe", appauthor=False)) / "kernels")
    except (ImportError, OSError, RuntimeError) as exc:
        logger.info("packed weights on this CPU are computed by torch: %s", exc)
        return None


@cache
def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


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
