"""One packed weight in the layout of the CPU's kernels (``kinds``), and its values without the kernels.

Weights keep their codes; scales and offsets are float16 times one power of two for the whole weight, rounded once.
Weights of floats keep their values, in 16 bits where those hold them.

I in features, O out features, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.weights.resident import cpu_group
from edgepipe_torch.cpu.calls import Product
from edgepipe_torch.cpu.frame import SEGMENT
from edgepipe_torch.cpu.kinds import (
    NUM_FACTORS,
    OFFSET_FACTOR,
    SCALE_FACTOR,
    SUM_FACTOR,
    TILE,
    ZERO,
    Kind,
    input_factor,
)
from edgepipe_torch.cpu.layout import integer_levels
from edgepipe_torch.cpu.weight_memory import WeightMemory

_TOP_EXPONENT = 15  # largest scale: below 2**15, so that float16 holds the largest 2**29 of range as normal numbers
_NORMAL_EXPONENT = 126  # 2 to this power, or to its negative, is a normal float32
NUMBERS = {  # kinds of weights of floats, by type
    torch.bfloat16: Kind(bits=16, number="i16"),
    torch.float16: Kind(bits=16, number="half"),
    torch.float32: Kind(bits=32, number="float"),
}
_VALUES_AT_ONCE = 1 << 15  # torch starts no threads of its own for so few


class TiledWeight:
    """One packed weight [O, I] in the kernels' layout. Lanes of the last tile without an output are zero."""

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        group: int,
        kind: Kind,
        zero: int,
        order: npt.NDArray[np.int32] | None = None,
        memory: WeightMemory | None = None,
    ) -> None:
        """Allocate the planes, to be filled. Columns are a multiple of 8, and so are the groups.

        ``memory``: None for torch's.
        """
        self.shape = shape
        self.group = group
        self.kind = kind
        self.zero = zero
        rows, inputs = shape
        self.num_tiles, self.num_groups = -(-rows // TILE), inputs // group
        units = inputs // (8 * kind.unit)
        self.low = self._new(units * kind.words, torch.int32, memory)  # codes; or numbers, of [tiles, I, 16]
        high = {16: torch.int16, 32: torch.int32}.get(kind.high_bits)
        self.high = None if high is None else self._new(units, high, memory)
        self.scale = self._new(0 if kind.number else self.num_groups, torch.float16, memory)
        self.offset = self._new(self.num_groups, torch.float16, memory) if kind.added else None
        self.order = None if order is None else torch.from_numpy(np.ascontiguousarray(order, np.int32))
        self.factors = np.zeros(NUM_FACTORS, np.float32)

    def new_group_values(self) -> Tensor:
        """Return an empty argument of ``set_scales``."""
        return self._new(self.num_groups, torch.float32)

    def set_scales(self, scale: Tensor, offset: Tensor | None) -> None:
        """Round scales, and the offsets of an added form, [tiles, G, 16] float32. Overwrite both.

        Raises ValueError if a value is infinite or NaN.
        """
        if self.kind.scale_exponent:
            scale.mul_(2.0**self.kind.scale_exponent)
        exponent = _store_halves(self.scale, scale)
        for index in range(SUM_FACTOR):
            self.factors[index] = input_factor(self.kind, index) * 2.0**exponent
        self.factors[SCALE_FACTOR] = 2.0 ** (self.kind.gain_exponent + exponent)
        self.factors[ZERO] = self.zero
        self.factors[SUM_FACTOR] = -self.zero * 2.0**exponent
        if self.offset is not None and offset is not None:
            offset_exponent = _store_halves(self.offset, offset)
            self.factors[SUM_FACTOR] = 2.0**offset_exponent
            self.factors[OFFSET_FACTOR] = 2.0 ** (offset_exponent - exponent)

    @property
    def numbers(self) -> Tensor:
        """View the values of a weight of floats as [tiles, I, 16]."""
        dtype = next(dtype for dtype, kind in NUMBERS.items() if kind == self.kind)
        return self.low.view(-1).view(dtype).view(self.num_tiles, self.shape[1], TILE)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.low, self.high, self.scale, self.offset, self.order)
        return sum(array.nbytes for array in arrays if array is not None)

    def values(self, ids: Tensor) -> Tensor:
        """Return rows ids [n] int64 as [n, I] float32, in the order of the product's inputs, by torch's operations."""
        tile, lane = ids // TILE, ids % TILE
        if self.kind.number:
            return self.numbers[tile, :, lane].float()
        high = None if self.high is None else self.high[tile, :, lane].numpy()
        codes = torch.from_numpy(integer_levels(self.kind, self.low[tile, :, lane].numpy(), high))
        if self.kind.floats:
            levels = (((codes & 128) << 24) | ((codes & 127) << 20)).view(torch.float32)
        else:
            levels = codes.to(torch.float32) - float(self.factors[ZERO])
        grouped = levels.view(len(ids), -1, self.group) * float(self.factors[SCALE_FACTOR])
        grouped = grouped * self.scale[tile, :, lane].to(torch.float32)[:, :, None]
        if self.offset is not None:
            added = self.offset[tile, :, lane].to(torch.float32) * float(self.factors[SUM_FACTOR])
            grouped = grouped + added[:, :, None]
        return self.in_order(grouped.flatten(1))

    def in_order(self, columns: Tensor) -> Tensor:
        """Return stored columns [n, I] in the order of the product's inputs."""
        if self.order is None:
            return columns
        out = torch.empty_like(columns)
        out[:, self.order.long()] = columns
        return out

    def segment(self, product: Product, *, column: int, bias: Tensor | None) -> npt.NDArray[np.int64]:
        """Return the kernels' fields, with addresses of this object's arrays. ``column``: of the first output."""
        rows, inputs = self.shape
        values = {
            "work": product.work.address,
            "low": self.low.data_ptr(),
            "high": 0 if self.high is None else self.high.data_ptr(),
            "scale": self.scale.data_ptr(),
            "offset": 0 if self.offset is None else self.offset.data_ptr(),
            "order": 0 if self.order is None else self.order.data_ptr(),
            "bias": 0 if bias is None else bias.data_ptr(),
            "factors": self.factors.ctypes.data,
            "inputs": inputs,
            "groups": inputs // self.group,
            "blocks": self.group // 8,
            "outputs": rows,
            "column": column,
        }
        return np.array([values.get(name, 0) for name in SEGMENT], np.int64)

    @property
    def inputs_key(self) -> tuple[object, ...]:
        """What the prepared inputs depend on."""
        order = None if self.order is None else self.order.numpy().tobytes()
        return (self.factors.tobytes(), self.group, order)

    def _new(self, words: int, dtype: torch.dtype, memory: WeightMemory | None = None) -> Tensor:
        """Return tiles [tiles, words, 16] whose lanes are empty, or zero where they have no output."""
        shape = (self.num_tiles, words, TILE)
        tiles = torch.empty(shape, dtype=dtype) if memory is None else memory.empty(shape, dtype)
        if unused := self.num_tiles * TILE - self.shape[0]:
            tiles[-1, :, TILE - unused :] = 0
        return tiles


def tile_floats(weight: Tensor, dtype: torch.dtype | None = None, *, memory: WeightMemory | None = None) -> TiledWeight:
    """Lay out a weight of floats [O, I], I a multiple of 8.

    dtype   None: the smallest that holds its values
    memory  None for torch's
    """
    rows, inputs = weight.shape
    kind = NUMBERS[dtype or _smallest_type(weight)]
    found = TiledWeight((rows, inputs), group=cpu_group(inputs), kind=kind, zero=0, memory=memory)
    found.factors[:SUM_FACTOR] = 1
    numbers, whole = found.numbers, rows // TILE
    numbers[:whole].copy_(weight[: whole * TILE].view(whole, TILE, inputs).transpose(1, 2))
    if rest := rows - whole * TILE:
        numbers[whole, :, :rest].copy_(weight[whole * TILE :].t())
    return found


def _smallest_type(weight: Tensor) -> torch.dtype:
    for dtype in (torch.bfloat16, torch.float16):
        if weight.dtype == dtype or torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return dtype
    return torch.float32


def _store_halves(target: Tensor, values: Tensor) -> int:
    """Store float32 values, over a power of two, as float16; return its exponent. Overwrite ``values``.

    Raises ValueError if a value is infinite or NaN.
    """
    floats = values.numpy()
    lowest, highest = (float(floats.min()), float(floats.max())) if floats.size else (0.0, 0.0)
    if not math.isfinite(lowest + highest):
        raise ValueError("a scale is no number")
    largest = max(-lowest, highest)
    exponent = math.frexp(largest)[1] - _TOP_EXPONENT if largest else 0
    half = exponent // 2 if abs(exponent) > _NORMAL_EXPONENT else 0
    flat, halves = values.view(-1), target.view(-1)

    def store(start: int) -> None:
        part = flat[start : start + _VALUES_AT_ONCE]
        for power in (exponent - half, half):
            if power:
                part.mul_(2.0**-power)
        halves[start : start + _VALUES_AT_ONCE].copy_(part)

    on_threads(store, range(0, len(flat), _VALUES_AT_ONCE))
    return exponent


def on_threads(work: Callable[[int], None], starts: range) -> None:
    """Call ``work`` with each start, on as many threads as torch has."""
    if len(starts) == 1:
        work(starts[0])
        return
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="repack") as threads:
        for _ in threads.map(work, starts):
            pass
