"""Products with packed weights on a CPU, in float32: values are widened in registers, never in memory.

Without the compiled kernels, torch widens blocks of rows of the same layout. Experts and routers of floats have such
kernels, too: a row's result does not depend on the rows beside it.

T rows, I in features, O out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.backend.types import PackedProducts
from edgepipe.spec.packed import Packed
from edgepipe_torch.cpu.calls import KernelCalls, Product
from edgepipe_torch.cpu.frame import SEGMENT, SUM_WORDS
from edgepipe_torch.cpu.kernels import CpuKernels, Kernels, cpu_kernels
from edgepipe_torch.cpu.kinds import TILE, Kind
from edgepipe_torch.cpu.repack import repack
from edgepipe_torch.cpu.tiled_weight import NUMBERS, TiledWeight, tile_floats
from edgepipe_torch.cpu.weight_memory import WeightMemory
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.linear import ReadWeight, Workspace

_WIDE_ROWS = 256  # widened at once without kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What the kernels need of a product, beside its inputs."""

    kernels: KernelCalls
    first: int  # address of the first segment
    slot: int  # floats of a row's prepared inputs for one slot
    pitch: int  # floats of a row's prepared inputs for all slots


def multiplies_floats(kernels: Kernels) -> TypeGuard[CpuKernels]:
    """Return whether kernels multiply with weights of float32; they are compiled and checked if they are new."""
    if not isinstance(kernels, CpuKernels):
        return False
    try:
        kernels.product(NUMBERS[torch.float32])
    except KernelsUnavailable:
        return False
    return True


class PackedCpuLinear:
    """A ``Linear`` on a CPU whose parts are packed, each in a form of its own, or floats."""

    def __init__(
        self,
        name: str,
        in_features: int,
        parts: Sequence[int],
        workspace: Workspace,
        kernels: Kernels | None = None,
        *,
        tiled_floats: bool = False,
        memory: WeightMemory | None = None,
        digits: int = 0,
    ) -> None:
        """``kernels``: None for this process's. ``tiled_floats``: kernels multiply parts of floats, too, not torch.

        ``memory``: of weights that ``fill`` lays out; None for torch's. ``digits``: see ``CpuKernels.product``. In
        features are a multiple of 8.
        """
        self._name = name
        self._workspace = workspace
        self._in_features = in_features
        self._starts = [sum(parts[:index]) for index in range(len(parts))]
        self._out_features = sum(parts)
        self._tiled: dict[int, TiledWeight] = {}  # keys are parts
        self._wide: dict[int, Tensor] = {}  # [O, I] float32 of each part
        self._bias: dict[int, Tensor] = {}  # bias of each part, padded to whole tiles
        self._kernels = kernels or cpu_kernels()
        self._tiled_floats = tiled_floats
        self._memory = memory
        self._digits = digits
        self._found: dict[int, Product | KernelsUnavailable] = {}  # keys are parts
        self._segments: list[npt.NDArray[np.int64]] = []
        self._first = 0  # address of the first segment
        self._slots = 0  # different prepared inputs
        self._slot = 0  # floats of a row's prepared inputs

    @property
    def out_features(self) -> int:
        """Out features of all parts."""
        return self._out_features

    @property
    def num_bytes(self) -> int:
        """Memory of weights and biases."""
        tensors = sum(tensor.nbytes for tensor in (*self._wide.values(), *self._bias.values()))
        return tensors + sum(weight.num_bytes for weight in self._tiled.values())

    @property
    def only_kernels(self) -> bool:
        """Whether products consist of kernels' calls, so that they can be recorded."""
        found = all(isinstance(product, Product) for product in self._found.values())
        return found and not self._wide and self._out_features % 16 == 0

    @property
    def chain(self) -> Chain | None:
        """The product as kernels see it; None if it does not consist of kernels' calls."""
        if not isinstance(self._kernels, CpuKernels) or not self.only_kernels:
            return None
        return Chain(kernels=self._kernels, first=self._first, slot=self._slot, pitch=self._slots * self._slot)

    @property
    def products(self) -> set[PackedProducts]:
        """How the packed parts are multiplied."""
        return {
            PackedProducts(by=product.by) if isinstance(product, Product) else product.instead("torch (blocks widened)")
            for part, product in self._found.items()
            if not self._tiled[part].kind.number
        }

    def fill(self, part: int, weight: ReadWeight) -> None:
        """Take one part's weight [O, I]: tiled, packed, or floats."""
        if isinstance(weight, Packed):
            weight = repack(weight, self._memory)
        elif isinstance(weight, Tensor) and self._tiled_floats:
            weight = tile_floats(weight, memory=self._memory)
        if isinstance(weight, TiledWeight):
            self._tiled[part] = weight
        else:
            assert isinstance(weight, Tensor)
            self._wide[part] = weight.to(torch.float32, copy=True)

    def fill_bias(self, part: int, bias: Tensor) -> None:
        """Copy one part's bias [O]."""
        self._bias[part] = torch.zeros(-(-len(bias) // TILE) * TILE)
        self._bias[part][: len(bias)].copy_(bias)

    def finish(self) -> None:
        """Chain the parts that kernels multiply. Parts with the same inputs and factors share the prepared inputs."""
        slots: dict[tuple[object, ...], int] = {}
        for part, weight in sorted(self._tiled.items()):
            product = self._found[part] = self._product(weight.kind)
            if isinstance(product, KernelsUnavailable):
                continue
            fields = weight.segment(product, column=self._starts[part], bias=self._bias.get(part))
            key = (product.prepare, *weight.inputs_key)
            fields[SEGMENT.index("prepare")] = 0 if key in slots else product.prepare
            fields[SEGMENT.index("slot")] = slots.setdefault(key, len(slots))
            if self._segments:
                self._segments[-1][SEGMENT.index("next")] = fields.ctypes.data
            self._segments.append(fields)
        if self._segments:
            self._slots = len(slots)
            most_groups = max(self._in_features // weight.group for weight in self._tiled.values())
            self._slot = self._in_features + SUM_WORDS * most_groups
            self._first = self._segments[0].ctypes.data

    def rows(self, x: Tensor) -> Tensor:
        """Multiply x [T, I]. See ``Linear``."""
        out = self._workspace.get(f"{self._name} rows", x.shape[0], self._out_features)
        self._multiply(x, out, add=False)
        return out

    def add_to(self, x: Tensor, total: Tensor) -> None:
        """Add the product of x [T, I] to total [T, O], whose rows lie without gaps."""
        self._multiply(x, total, add=True)

    def swiglu(self, x: Tensor) -> Tensor:
        """Return silu(first part) * second part. See ``Linear``."""
        found = self.rows(x)
        out = self._workspace.get(f"{self._name} swiglu", x.shape[0], self._out_features // 2)
        if isinstance(self._kernels, CpuKernels) and self._out_features % 16 == 0:
            self._kernels.swiglu(found, out)
            return out
        gate, up = found.chunk(2, dim=-1)
        return torch.mul(F.silu(gate, inplace=True), up, out=out)

    def take(self, ids: Tensor) -> Tensor:
        """Return rows ids [T] int64 of a weight with one part, as [T, I]."""
        weight, product = self._tiled[0], self._found[0]
        if isinstance(product, KernelsUnavailable):
            return weight.values(ids)
        ids, out = ids.contiguous(), torch.empty(len(ids), self._in_features)
        product.take.call(self._first, ids.data_ptr(), len(ids), out.data_ptr())
        return weight.in_order(out)

    def _product(self, kind: Kind) -> Product | KernelsUnavailable:
        if isinstance(self._kernels, KernelsUnavailable):
            return self._kernels
        try:
            return self._kernels.product(kind, self._digits)
        except KernelsUnavailable as exc:
            return exc

    def _multiply(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        x = x.contiguous()
        if self._segments and isinstance(self._kernels, CpuKernels):
            scratch = self._workspace.get("packed inputs", self._slots * x.shape[0] * self._slot)
            threads = torch.get_num_threads()
            self._kernels.multiply(self._first, x, out, scratch, slot=self._slot, accumulate=add, threads=threads)
        for part, weight in self._tiled.items():
            if not isinstance(self._found[part], Product):
                self._multiply_by_torch(part, weight, x, out, add=add)
        for part, weight in self._wide.items():
            self._store(part, F.linear(x, weight), out, start=0, add=add)

    def _multiply_by_torch(self, part: int, weight: TiledWeight, x: Tensor, out: Tensor, *, add: bool) -> None:
        for start in range(0, weight.shape[0], _WIDE_ROWS):
            ids = torch.arange(start, min(start + _WIDE_ROWS, weight.shape[0]))
            self._store(part, F.linear(x, weight.values(ids)), out, start=start, add=add)

    def _store(self, part: int, product: Tensor, out: Tensor, *, start: int, add: bool) -> None:
        """Store the outputs ``start`` and up of a part, with their bias."""
        first = self._starts[part] + start
        if part in self._bias:
            product += self._bias[part][start : start + product.shape[1]]
        target = out[:, first : first + product.shape[1]]
        if add:
            target += product
        else:
            target.copy_(product)


class RouterLinear(PackedCpuLinear):
    """The product of a router: its weight stays float32."""

    def fill(self, part: int, weight: ReadWeight) -> None:
        """Take one part's weight [O, I] of floats."""
        assert isinstance(weight, Tensor)
        super().fill(part, tile_floats(weight, torch.float32))
