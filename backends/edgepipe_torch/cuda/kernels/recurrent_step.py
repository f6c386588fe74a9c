"""One token of recurrent layers on CUDA: which mixers the kernels compute, and their launches.

N rows, H heads with a matrix each, C channels of a convolution, W numbers that a mixer returns.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv
from edgepipe_torch.cuda.kernels.driver import SHARED_BYTES, THREADS, Module
from edgepipe_torch.cuda.kernels.products import WARPS
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.recurrent import Mixer, State, StepKernel

_MOST_NUMBERS = 64 * THREADS  # size limit of a head's matrix: a thread holds its part in registers
_MOST_BLOCKS = 2048  # limit of a convolution's blocks
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForm:
    """What the kernels are compiled for."""

    kind: Literal["delta", "mamba", "gate"]
    taps: int
    wide: bool  # rows are float32, else bf16
    rows: int = 0  # rows of a head's matrix
    columns: int = 0

    @property
    def files(self) -> tuple[str, ...]:
        """The sources."""
        return "common.cuh", "recurrent.cuh", f"{self.kind}_step.cu"

    @property
    def functions(self) -> tuple[str, ...]:
        """The kernels."""
        found = {
            "delta": ("convolve_step", "delta_step"),
            "mamba": ("convolve_step", "mamba_step", "gate_groups"),
            "gate": ("gate_step",),
        }
        return found[self.kind]

    @property
    def macros(self) -> dict[str, str]:
        """Names and values to define."""
        names = {"delta": ("KEY_DIM", "VALUE_DIM"), "mamba": ("HEAD_DIM", "STATE_DIM"), "gate": ()}[self.kind]
        sizes = dict(zip(names, (self.rows, self.columns), strict=False))
        values = {"TAPS": self.taps, "WIDE_ROWS": int(self.wide), **sizes}
        return {name: str(value) for name, value in values.items()}

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block of ``delta_step``: a query, a key, and two sums of each warp for each column."""
        return _FLOAT_BYTES * (2 * self.rows + 2 * WARPS * self.columns)


def step_form(spec: Recurrent, dtype: torch.dtype) -> StepForm:
    """Return what to compile for a mixer whose rows have a type. Raises KernelsUnavailable."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise KernelsUnavailable(f"own kernels of recurrent layers need bf16 or float32, not {dtype}")
    if spec.taps < 2:
        raise KernelsUnavailable("own kernels need convolutions of two taps or more")
    wide = dtype == torch.float32
    match spec:
        case DeltaNet():
            kind, rows, columns = "delta", spec.key_dim, spec.value_dim
        case Mamba2():
            kind, rows, columns = "mamba", spec.head_dim, spec.state_dim
        case ShortConv():
            return StepForm(kind="gate", taps=spec.taps, wide=wide)
    form = StepForm(kind=kind, taps=spec.taps, wide=wide, rows=rows, columns=columns)
    if rows % WARPS or columns % 32 or rows * columns > _MOST_NUMBERS or form.shared_bytes > SHARED_BYTES:
        raise KernelsUnavailable(
            f"own kernels need heads of multiples of {WARPS} and 32 numbers, {_MOST_NUMBERS} at most,"
            f" not {rows} by {columns}"
        )
    return form


class MixerStep:
    """The kernels of one form on one device."""

    def __init__(self, module: Module, form: StepForm) -> None:
        self._module = module
        self._form = form

    def of(self, mixer: Mixer) -> StepKernel:
        """Return the kernel of a mixer. Sizes alone decide the launches, so that a graph may hold them."""
        match mixer.spec:
            case DeltaNet():
                return _DeltaStep(self._module, self._form, mixer, mixer.spec)
            case Mamba2():
                return _MambaStep(self._module, self._form, mixer, mixer.spec)
            case ShortConv():
                return _GateStep(self._module, self._form, mixer)


class _Step:
    """Launches that mixers share."""

    def __init__(self, module: Module, form: StepForm, mixer: Mixer) -> None:
        self._module = module
        self._form = form
        self._eps = mixer.eps
        self._weights = mixer.weights

    def _rows(self, made: Tensor, read: Tensor, write: Tensor) -> _Rows:
        assert made.dtype == (torch.float32 if self._form.wide else torch.bfloat16)
        assert made.stride(1) == 1
        assert read.dtype == write.dtype == torch.int64
        assert read.shape == write.shape == made.shape[:1]
        assert read.is_contiguous()
        assert write.is_contiguous()
        return _Rows(
            made=made.data_ptr(),
            read=read.data_ptr(),
            write=write.data_ptr(),
            made_stride=made.stride(0),
            count=made.shape[0],
        )

    def _convolution(self, last: Tensor) -> _Convolution:
        weights = self._weights
        assert last.dtype == torch.float32
        assert last.is_contiguous()
        assert last.shape[1:] == (self._form.taps - 1, weights.taps.shape[0])
        return _Convolution(
            weight=weights.taps.data_ptr(),
            bias=None if weights.bias is None else weights.bias.data_ptr(),
            last=last.data_ptr(),
            channels=weights.taps.shape[0],
        )

    def _heads(self, memory: Tensor, *, heads: int, groups: int) -> _Heads:
        weights = self._weights
        assert weights.steps is not None
        assert weights.rates is not None
        assert weights.norm is not None
        assert memory.dtype == torch.float32
        assert memory.is_contiguous()
        assert memory.shape[1:] == (heads, self._form.rows, self._form.columns)
        return _Heads(
            dt_bias=weights.steps.data_ptr(),
            rates=weights.rates.data_ptr(),
            skips=None if weights.skips is None else weights.skips.data_ptr(),
            norm=weights.norm.data_ptr(),
            memory=memory.data_ptr(),
            heads=heads,
            groups=groups,
            eps=self._eps,
        )

    def _mixed(self, rows: _Rows, last: Tensor, first: int) -> Tensor:
        """Convolve a row's channels from number ``first`` on. Returns [N, C] float32."""
        by = self._convolution(last)
        mixed = torch.empty(rows.count, by.channels, dtype=torch.float32, device=last.device)
        self._launch(
            "convolve_step",
            _blocks(mixed),
            (rows, by, ctypes.c_int(first), _pointer(mixed)),
        )
        return mixed

    def _launch(
        self, function: str, blocks: int, arguments: tuple[ctypes._CDataType, ...], shared_bytes: int = 0
    ) -> None:
        self._module.launch(function, blocks=blocks, shared_bytes=shared_bytes, arguments=arguments)


class _DeltaStep(_Step):
    """See ``StepKernel``; the input product has queries, keys and values, then z, beta, alpha."""

    def __init__(self, module: Module, form: StepForm, mixer: Mixer, spec: DeltaNet) -> None:
        super().__init__(module, form, mixer)
        self._spec = spec

    def run(self, made: Tensor, states: State, read: Tensor, write: Tensor, *, threads: int) -> Tensor:
        """See ``StepKernel``; ``threads`` are a CPU's."""
        last, memory = states
        spec, rows = self._spec, self._rows(made, read, write)
        heads = self._heads(memory, heads=spec.value_heads, groups=spec.key_heads)
        heads.tiled = spec.tiled
        out = made.new_empty(rows.count, spec.value_heads * spec.value_dim)
        mixed = self._mixed(rows, last, 0)
        given = (rows, heads, _pointer(mixed), _pointer(out))
        self._launch("delta_step", rows.count * spec.value_heads, given, self._form.shared_bytes)
        return out


class _MambaStep(_Step):
    """See ``StepKernel``; the input product has z, x, B, C, dt."""

    def __init__(self, module: Module, form: StepForm, mixer: Mixer, spec: Mamba2) -> None:
        super().__init__(module, form, mixer)
        self._spec = spec

    def run(self, made: Tensor, states: State, read: Tensor, write: Tensor, *, threads: int) -> Tensor:
        """See ``StepKernel``; ``threads`` are a CPU's."""
        last, memory = states
        spec, rows = self._spec, self._rows(made, read, write)
        heads = self._heads(memory, heads=spec.heads, groups=spec.groups)
        heads.low, heads.high = spec.dt_limits
        width = spec.heads * spec.head_dim
        out = made.new_empty(rows.count, width)
        mixed = self._mixed(rows, last, width)
        summed = torch.empty(rows.count, width, dtype=torch.float32, device=made.device)
        self._launch("mamba_step", rows.count * spec.heads, (rows, heads, _pointer(mixed), _pointer(summed)))
        self._launch(
            "gate_groups",
            rows.count * spec.groups,
            (rows, heads, _pointer(summed), _pointer(out)),
            _FLOAT_BYTES * WARPS,
        )
        return out


class _GateStep(_Step):
    """See ``StepKernel``; the input product has B, C, x."""

    def run(self, made: Tensor, states: State, read: Tensor, write: Tensor, *, threads: int) -> Tensor:
        """See ``StepKernel``; ``threads`` are a CPU's."""
        rows, by = self._rows(made, read, write), self._convolution(states[0])
        out = made.new_empty(rows.count, by.channels)
        self._launch("gate_step", _blocks(out), (rows, by, _pointer(out)))
        return out


def _blocks(numbers: Tensor) -> int:
    """Return how many blocks compute so many numbers, in turns if they are many."""
    return min(-(-numbers.numel() // THREADS), _MOST_BLOCKS)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class _Rows(ctypes.Structure):
    """``Rows`` of recurrent.cuh."""

    count: int
    _fields_ = (
        ("made", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("write", ctypes.c_void_p),
        ("made_stride", ctypes.c_int),
        ("count", ctypes.c_int),
    )


class _Convolution(ctypes.Structure):
    """``Convolution`` of recurrent.cuh."""

    channels: int
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("channels", ctypes.c_int),
    )


class _Heads(ctypes.Structure):
    """``Heads`` of recurrent.cuh."""

    tiled: int
    low: float
    high: float
    _fields_ = (
        ("dt_bias", ctypes.c_void_p),
        ("rates", ctypes.c_void_p),
        ("skips", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("heads", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("tiled", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("low", ctypes.c_float),
        ("high", ctypes.c_float),
    )
