"""Compile the CPU's kernels in this process with llvmlite.

Code is compiled for this machine's CPU when a weight first needs it, and kept on disk. That takes about a second for
each kind of weight, with its check.
"""

from __future__ import annotations

import importlib
import logging
import platform
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from edgepipe.config import kernel_dir
from edgepipe.spec.kv_forms import KV_4BIT
from edgepipe_torch.cpu.calls import HeadKernels, KernelCalls, Native, Product
from edgepipe_torch.cpu.checking import head_error, product_error, step_error
from edgepipe_torch.cpu.frame import frame_module
from edgepipe_torch.cpu.group_code import group_functions
from edgepipe_torch.cpu.integer_code import ByteProducts, has_integer_products, integer_code
from edgepipe_torch.cpu.kinds import Kind
from edgepipe_torch.cpu.kv4_code import packed_head_module
from edgepipe_torch.cpu.product_code import ProductCode
from edgepipe_torch.cpu.recurrent_checking import recurrent_error
from edgepipe_torch.cpu.recurrent_code import StepForm, recurrent_module
from edgepipe_torch.cpu.repack import repack_error
from edgepipe_torch.cpu.repack_code import REPACK_ARGUMENTS, repack_module
from edgepipe_torch.cpu.step_code import head_module, vector_module
from edgepipe_torch.layers.compiled_code import CodeCache, KernelsUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NEEDED = ("avx2", "fma", "f16c")  # x86 instructions; without f16c, LLVM would call a library for float16
_INSTALL = "edgepipe update --extra torch"


class Compiler:
    """Compiles modules for this machine's CPU."""

    def __init__(self, llvm: Any, folder: Path, *, width: int = 0) -> None:
        """``llvm``: llvmlite's binding; ``folder`` keeps compiled code; ``width``: floats of a vector, 0: of this CPU.

        Raises KernelsUnavailable if the CPU lacks instructions.
        """
        self._llvm = llvm
        features = llvm.get_host_cpu_features()
        if _is_x86() and not all(features.get(name) for name in _NEEDED):
            raise KernelsUnavailable("this CPU has no AVX2, FMA and F16C")
        wide = bool(features.get("avx512f"))
        self.instructions = ("AVX-512" if wide else "AVX2") if _is_x86() else "Neon"
        self.width = width or (16 if wide else 8 if _is_x86() else 4)
        self.byte_products: ByteProducts = _byte_products(features, self.width) if _is_x86() else ""
        self._target = llvm.Target.from_default_triple()
        self._cpu, self._flags = llvm.get_host_cpu_name(), features.flatten()
        target = f"{llvm.llvm_version_info} {self._target.triple} {self._cpu} {self._flags}"
        self._code = CodeCache(folder, target, suffix=".o")
        self._engines: list[Any] = []  # own the code

    def compile(self, text: str) -> Any:
        """Return an engine with the functions of a module; it owns their code. Raises RuntimeError."""
        llvm = self._llvm
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self._new_machine())  # it frees the machine
        engine.add_object_file(llvm.ObjectFileRef.from_data(self._code.get(text, self._object_code)))
        engine.finalize_object()
        self._engines.append(engine)
        return engine

    def _object_code(self, text: str) -> bytes:
        llvm = self._llvm
        module = llvm.parse_assembly(text)
        module.verify()
        machine = self._new_machine()
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        return machine.emit_object(module)

    def _new_machine(self) -> Any:
        return self._target.create_target_machine(cpu=self._cpu, features=self._flags, opt=3, jit=True)


class CpuKernels(KernelCalls):
    """The compiled functions of one process. Each is compared with float64 results when it is compiled."""

    def __init__(self, compiler: Compiler) -> None:
        """Raises KernelsUnavailable, also if the functions that every model needs compute wrong values here."""
        self._compiler = compiler
        self._kinds: dict[tuple[Kind, int], Product | KernelsUnavailable] = {}
        # Keys: the head's sizes, and the form of the KV.
        self._heads: dict[tuple[int, int, str], HeadKernels | KernelsUnavailable] = {}
        self._repacks: dict[str, Native | KernelsUnavailable] = {}  # keys are GGUF types
        self._recurrent: dict[StepForm, Native | KernelsUnavailable] = {}
        super().__init__(self._compile(frame_module(group_functions())), self._compile(vector_module()))
        _refuse_wrong("norms and SwiGLU", step_error(self))

    def heads(self, head_dim: int, value_width: int = 0, *, kv: str = "") -> HeadKernels:
        """Return the kernels for heads of a size, a multiple of 8; see ``head_module``.

        kv  form of the KV; empty: float32

        Raises KernelsUnavailable.
        """
        form = head_dim, value_width, kv
        if form not in self._heads:
            name = f"heads of {head_dim}{f' with {kv} KV' if kv else ''}"
            self._heads[form] = _result_or_reason(name, lambda: self._load_heads(*form))
        return _or_raise(self._heads[form])

    @property
    def byte_products(self) -> ByteProducts:
        """The products in integers that are possible."""
        return self._compiler.byte_products

    def product(self, kind: Kind, digits: int = 0) -> Product:
        """Return a kind's functions; compile and check them if they are new. Raises KernelsUnavailable.

        digits  bytes of an input, which is rounded to an integer where that is possible; 0: inputs stay float32
        """
        form = kind, digits if has_integer_products(kind, self.byte_products) else 0
        if form not in self._kinds:
            self._kinds[form] = _result_or_reason(f"weights of {kind.bits} bits", lambda: self._load_product(*form))
        return _or_raise(self._kinds[form])

    def repack(self, scheme: str) -> Native:
        """Return the function that repacks blocks of a type of BLOCK_CODES. Raises KernelsUnavailable."""
        if scheme not in self._repacks:
            what = f"the layout of {scheme}"
            self._repacks[scheme] = _result_or_reason(what, lambda: self._load_repack(scheme))
        return _or_raise(self._repacks[scheme])

    def recurrent(self, form: StepForm) -> Native:
        """Return the function that computes one token of recurrent layers. Raises KernelsUnavailable."""
        if form not in self._recurrent:
            self._recurrent[form] = _result_or_reason(form.name, lambda: self._load_recurrent(form))
        return _or_raise(self._recurrent[form])

    def _load_product(self, kind: Kind, digits: int) -> Product:
        width = self._compiler.width
        code = ProductCode(kind, width=width, most_rows=most_rows(width), shuffles=_is_x86())
        if digits:
            code = integer_code(kind, width=width, digits=digits, products=self.byte_products)
        engine = self._compile(code.module())
        found = Product(
            work=Native(engine, f"work_{kind.name}", 9),
            take=Native(engine, f"take_{kind.name}", 4),
            prepare=Native(engine, f"prepare_{kind.name}", 5).address if digits else self.prepare,
            by=f"own kernels ({self._compiler.instructions}{f', inputs of {8 * digits} bits' if digits else ''})",
            digits=digits,
        )
        _refuse_wrong(f"products {kind.name}", product_error(self, kind, found))
        return found

    def _load_repack(self, scheme: str) -> Native:
        found = Native(self._compile(repack_module(scheme)), "repack", len(REPACK_ARGUMENTS))
        _refuse_wrong(f"layout of {scheme}", repack_error(found, scheme))
        return found

    def _load_recurrent(self, form: StepForm) -> Native:
        found = Native(self._compile(recurrent_module(form)), "step", 1)
        _refuse_wrong(form.name, recurrent_error(self, form, found))
        return found

    def _load_heads(self, head_dim: int, value_width: int, kv: str) -> HeadKernels:
        text = packed_head_module(kv, head_dim, value_width) if kv else head_module(head_dim, value_width)
        engine = self._compile(text)
        rotate = Native(engine, "rotate", 9 if kv else 7)
        keep = Native(engine, "keep", 6) if kv == KV_4BIT else None
        found = HeadKernels(rotate=rotate, attend=Native(engine, "attend", 1), keep=keep)
        _refuse_wrong(f"attention of {head_dim}", head_error(self, (head_dim, value_width), found, kv=kv))
        return found

    def _compile(self, text: str) -> Any:
        try:
            return self._compiler.compile(text)
        except RuntimeError as exc:  # llvmlite's exception
            raise KernelsUnavailable(f"LLVM does not compile own kernels for this CPU: {exc}") from exc


Kernels = CpuKernels | KernelsUnavailable
"""A process's kernels, or the reason for their absence."""


def most_rows(width: int) -> tuple[int, int]:
    """Return how many rows share a weight unpacked in registers, and in a panel: sums fit in 32 or 16 registers."""
    return (8, 12) if width == 16 else (5, 6)


@cache
def cpu_kernels() -> Kernels:
    """Return this process's kernels, or the reason for their absence."""
    return _result_or_reason("packed weights", lambda: CpuKernels(Compiler(_llvm(), kernel_dir())))


def _llvm() -> Any:
    """Return llvmlite's binding. Raises KernelsUnavailable."""
    try:
        llvm = importlib.import_module("llvmlite.binding")
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    except (ImportError, OSError, RuntimeError) as exc:
        raise KernelsUnavailable(f"llvmlite, which compiles own kernels, is missing: {exc}", remedy=_INSTALL) from exc
    return llvm


def _refuse_wrong(what: str, error: float) -> None:
    """Raise KernelsUnavailable for an error above 1, or NaN."""
    if not error <= 1:
        raise KernelsUnavailable(f"own kernels compute wrong values here: {what}, {error:.3g} times the rounding")


def _result_or_reason(what: str, load: Callable[[], T]) -> T | KernelsUnavailable:
    """Return what ``load`` returns, or why kernels are not used, which is logged."""
    try:
        return load()
    except KernelsUnavailable as exc:
        logger.warning("torch computes %s: %s", what, exc)
        return exc


def _or_raise(found: T | KernelsUnavailable) -> T:
    if isinstance(found, KernelsUnavailable):
        raise found
    return found


def _byte_products(features: Mapping[str, bool], width: int) -> ByteProducts:
    """Return which products of bytes an x86 processor adds in vectors of ``width`` floats."""
    if (width == 16 or features.get("avx512vl")) and features.get("avx512vnni"):
        return "fours"
    if width == 16:
        return ""
    return "fours" if features.get("avxvnni") else "pairs"


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
