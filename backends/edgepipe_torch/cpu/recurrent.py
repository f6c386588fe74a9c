"""One token of recurrent layers by compiled kernels: the rows of a step, each with the slots that it reads and writes.

N rows with one token, C channels of the convolution, F features of the input product, W of the output product.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv
from edgepipe_torch.cpu.calls import KernelCalls, Native
from edgepipe_torch.cpu.ir_text import float_bits
from edgepipe_torch.cpu.recurrent_phase import STEP_JOB
from edgepipe_torch.layers.linear import Workspace
from edgepipe_torch.layers.recurrent import MixerWeights, State

_PLACES = ("x", "into", "out_of", "z", "first", "second")  # parts of the input product


class CompiledStep:
    """See ``StepKernel``."""

    def __init__(
        self,
        kernels: KernelCalls,
        function: Native,
        spec: Recurrent,
        weights: MixerWeights,
        workspace: Workspace,
        *,
        eps: float,
    ) -> None:
        """``function``: of the mixer's form. ``eps``: of the model's norms."""
        self._kernels = kernels
        self._function = function
        self._workspace = workspace
        self._spec = spec
        self._starts = _starts(spec)
        self._width = spec.channels if isinstance(spec, ShortConv) else self._starts["width"]
        self._owned = (weights, taps := weights.taps.t().contiguous())
        pointers = {"weight": taps, "bias": weights.bias, "norm": weights.norm}
        pointers |= {"steps": weights.steps, "rates": weights.rates, "skips": weights.skips}
        values = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in pointers.items()}
        values |= {"channels": spec.channels, "calls": kernels.openmp, "epsilon": float_bits(eps), **_counts(spec)}
        self._job = np.array([values.get(name, 0) for name in STEP_JOB], np.int64)

    def run(self, made: Tensor, states: State, read: Tensor, write: Tensor, *, threads: int) -> Tensor:
        """See ``StepKernel``."""
        count = made.shape[0]
        mixed = self._workspace.get("convolved", count, self._spec.channels)
        out = mixed if len(states) == 1 else self._workspace.get("recurrent heads", count, self._width)
        kernels, job = self._kernels, self._job.copy() if self._kernels.recording else self._job
        values = {name: made.data_ptr() + 4 * self._starts.get(name, 0) for name in _PLACES}
        values |= {
            "rows": count,
            "stride": made.stride(0),
            "read": read.data_ptr(),
            "write": write.data_ptr(),
            "threads": threads if kernels.parallel else 1,
            "last": states[0].data_ptr(),
            "mixed": mixed.data_ptr(),
            "memory": states[-1].data_ptr(),
            "out": out.data_ptr(),
        }
        for name, value in values.items():
            job[_FIELD[name]] = value
        kernels.run(self._function, (job.ctypes.data,), (job, self, made, mixed, out, read, write, *states))
        return out


_FIELD = {name: index for index, name in enumerate(STEP_JOB)}


def _starts(spec: Recurrent) -> Mapping[str, int]:
    """Return the first features of the input product's parts; ``width``: of the heads' outputs together."""
    match spec:
        case DeltaNet():
            width = spec.value_heads * spec.value_dim
            second = spec.channels + width
            return {"z": spec.channels, "second": second, "first": second + spec.value_heads, "width": width}
        case Mamba2():
            width = spec.heads * spec.head_dim
            return {"x": width, "first": width + spec.channels, "width": width}
        case ShortConv():
            return {"out_of": spec.channels, "x": 2 * spec.channels}


def _counts(spec: Recurrent) -> Mapping[str, int]:
    match spec:
        case DeltaNet():
            return {"heads": spec.value_heads, "groups": spec.key_heads, "tiled": int(spec.tiled)}
        case Mamba2():
            low, high = spec.dt_limits
            limits = {"low": float_bits(low), "high": float_bits(high)}
            return {"heads": spec.heads, "groups": spec.groups, **limits}
        case ShortConv():
            return {}
