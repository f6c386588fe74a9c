"""Products with packed weights on a CPU, in float32: values are widened in registers, never in memory.

Weights keep their codes; scales and offsets are float16 times one power of two for the whole weight, rounded once.
The layout is that of ``cpu_code``. Without the compiled kernels, torch widens blocks of rows of the same layout.

T rows, I in features, O out features, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.model.packed import Floats, Packed
from edgepipe.model.packed_form import CODEBOOKS
from edgepipe_torch.cpu_code import (
    NUM_FACTORS,
    OFFSET_FACTOR,
    SCALE_FACTOR,
    SEGMENT,
    SUM_FACTOR,
    TILE,
    ZERO,
    Kind,
    input_factor,
)
from edgepipe_torch.cpu_kernels import CpuKernels, cpu_kernels
from edgepipe_torch.linear import Workspace

_CHUNK_VALUES = 1 << 18  # repacked at once
_WIDE_ROWS = 256  # widened at once without kernels
_INTEGER_LEVELS = {  # codebook: bits, zero and unit of its levels as integers; those of NF4 are rounded
    "iq4": (8, 128, 1.0),
    "e2m1": (5, 12, 0.5),
    "nf4": (8, 128, 1 / 127),
}
_TOP_EXPONENT = 15  # largest scale: below 2**15, so that float16 holds the largest 2**29 of range as normal numbers


class PackedWeight:
    """One packed weight [O, I] in the kernels' layout."""

    def __init__(self, weight: Packed) -> None:
        """Repack ``weight``. Its columns are a multiple of 8, and so are its groups."""
        self.shape = weight.shape
        self.group = weight.form.group
        levels = _Levels(weight)
        self.kind = levels.kind
        rows, inputs = weight.shape
        tiles, groups = -(-rows // TILE), inputs // self.group
        self._low = torch.zeros(tiles, inputs // 8 * self.kind.words, TILE, dtype=torch.int32)
        high_words = -(-inputs * self.kind.high_bits // 32)
        self._high = torch.zeros(tiles, high_words, TILE, dtype=torch.int32) if high_words else None
        self._scale = torch.zeros(tiles, groups, TILE, dtype=torch.float16)
        self._offset = torch.zeros(tiles, groups, TILE, dtype=torch.float16) if self.kind.added else None
        self.order = None if weight.order is None else torch.from_numpy(np.ascontiguousarray(weight.order, np.int32))
        step = max(TILE, _CHUNK_VALUES // inputs // TILE * TILE)
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for _ in threads.map(
                lambda start: self._fill_codes(start, levels, weight.rows(slice(start, start + step))),
                range(0, rows, step),
            ):
                pass
        scale, offset = levels.values()
        exponent = _fill_halves(self._scale, scale * np.float32(2.0**self.kind.scale_exponent))
        self.factors = np.zeros(NUM_FACTORS, np.float32)
        for index in range(8):
            self.factors[index] = input_factor(self.kind, index) * 2.0**exponent
        self.factors[SCALE_FACTOR] = 2.0 ** (self.kind.gain_exponent + exponent)
        self.factors[ZERO] = levels.zero
        self.factors[SUM_FACTOR] = -levels.zero * 2.0**exponent
        if self._offset is not None:
            offset_exponent = _fill_halves(self._offset, offset)
            self.factors[SUM_FACTOR] = 2.0**offset_exponent
            self.factors[OFFSET_FACTOR] = 2.0 ** (offset_exponent - exponent)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self._low, self._high, self._scale, self._offset, self.order)
        return sum(array.nbytes for array in arrays if array is not None)

    def values(self, ids: Tensor) -> Tensor:
        """Return rows ids [n] int64 as [n, I] float32, in the order of the product's inputs, by torch's operations."""
        tile, lane = ids // TILE, ids % TILE
        width = 8 if self.kind.bits == 8 else 4
        shifts = torch.arange(0, 32, width, dtype=torch.int32)
        words = self._low[tile, :, lane]
        codes = ((words[:, :, None] >> shifts) & ((1 << width) - 1)).flatten(1)
        if self._high is not None:
            codes += self._high_codes(self._high[tile, :, lane]) << 4
        if self.kind.floats:
            levels = (((codes & 128) << 24) | ((codes & 127) << 20)).view(torch.float32)
        else:
            levels = codes.to(torch.float32) - float(self.factors[ZERO])
        grouped = levels.view(len(ids), -1, self.group) * float(self.factors[SCALE_FACTOR])
        grouped = grouped * self._scale[tile, :, lane].to(torch.float32)[:, :, None]
        if self._offset is not None:
            added = self._offset[tile, :, lane].to(torch.float32) * float(self.factors[SUM_FACTOR])
            grouped = grouped + added[:, :, None]
        return self.in_order(grouped.flatten(1))

    def in_order(self, columns: Tensor) -> Tensor:
        """Return stored columns [n, I] in the order of the product's inputs."""
        if self.order is None:
            return columns
        out = torch.empty_like(columns)
        out[:, self.order.long()] = columns
        return out

    def segment(self, kernels: CpuKernels, *, column: int, bias: Tensor | None) -> npt.NDArray[np.int64]:
        """Return the kernels' fields, with addresses of this object's arrays. ``column``: of the first output."""
        rows, inputs = self.shape
        values = {
            "work": kernels.work_address(self.kind),
            "low": self._low.data_ptr(),
            "high": 0 if self._high is None else self._high.data_ptr(),
            "scale": self._scale.data_ptr(),
            "offset": 0 if self._offset is None else self._offset.data_ptr(),
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
        return (self.factors[: SUM_FACTOR + 1].tobytes(), self.group, order)

    def _fill_codes(self, start: int, levels: _Levels, rows: Packed) -> None:
        """Store the codes of rows ``start`` and up; ``start`` is a multiple of 16."""
        low, high = levels.planes(rows)
        _fill_tiles(self._low, start, np.ascontiguousarray(low).view("<i4"))
        if self._high is not None and high is not None:
            _fill_tiles(self._high, start, _high_words(high, self.kind.high_bits))

    def _high_codes(self, words: Tensor) -> Tensor:
        """Return the high bits [n, I] of words [n, W]."""
        bits = self.kind.high_bits
        places = torch.tensor([(4 * place + 4) % 32 for place in range(8)], dtype=torch.int32)
        blocks = torch.arange(0, 4, bits, dtype=torch.int32)
        found = (words[:, :, None, None] >> (blocks[:, None] + places)) & ((1 << bits) - 1)
        return found.flatten(1)[:, : self.shape[1]]


class _Levels:
    """Integer codes with one zero, or float8 codes, of any packed form."""

    def __init__(self, weight: Packed) -> None:
        self._weight = weight
        book = weight.form.codebook
        self._table: npt.NDArray[np.uint8] | None = None
        self._gain = np.float32(1)
        self.zero = weight.zero if isinstance(weight.zero, int) else 0
        if book == "e4m3":
            self.kind = Kind(bits=8, floats=True)
        elif book:
            bits, self.zero, gain = _INTEGER_LEVELS[book]
            self._gain = np.float32(gain)
            self._table = (np.rint(CODEBOOKS[book] / self._gain) + self.zero).astype(np.uint8)
            self.kind = Kind(bits=_known_bits(bits))
        else:
            added = weight.offset is not None or isinstance(weight.zero, np.ndarray)
            self.zero = 0 if added else self.zero
            self.kind = Kind(bits=_known_bits(weight.form.bits), added=added)

    def planes(self, rows: Packed) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8] | None]:
        """Return the bytes of the first plane, and the high bits [n, I] of a second, for some of the weight's rows."""
        if self._table is None and self.kind.bits != 8:  # stored as the kernels read it
            return rows.low, None if rows.high is None else _spread(rows.high, self.kind.high_bits)
        codes = rows.codes() if self._table is None else self._table[rows.codes()]
        return (codes, None) if self.kind.bits == 8 else _split_low(codes)

    def values(self) -> tuple[Floats, Floats]:
        """Return scales and offsets [O, G]; the latter only for an added form."""
        weight = self._weight
        scale: Floats = weight.scale.float32() * self._gain
        offset: Floats = np.zeros((1, 1), np.float32) if weight.offset is None else weight.offset.float32()
        zeros = weight.zeros() if self.kind.added else None
        if zeros is not None:
            offset = np.subtract(offset, scale * zeros.astype(np.float32), dtype=np.float32)
        return scale, offset


class PackedCpuLinear:
    """A ``Linear`` on a CPU whose parts are packed, each in a form of its own; parts of floats are float32."""

    def __init__(self, name: str, in_features: int, parts: Sequence[int], workspace: Workspace) -> None:
        self._name = name
        self._workspace = workspace
        self._in_features = in_features
        self._starts = [sum(parts[:index]) for index in range(len(parts))]
        self._out_features = sum(parts)
        self._packed: dict[int, PackedWeight] = {}  # by part
        self._wide: dict[int, Tensor] = {}  # by part: [O, I] float32
        self._bias: dict[int, Tensor] = {}  # by part: padded to whole tiles
        self._kernels = cpu_kernels()
        self._segments: list[npt.NDArray[np.int64]] = []
        self._first = 0  # address of the first segment
        self._slots = 0  # different prepared inputs
        self._slot = 0  # floats of a row's prepared inputs

    @property
    def num_bytes(self) -> int:
        """Memory of weights and biases."""
        tensors = sum(tensor.nbytes for tensor in (*self._wide.values(), *self._bias.values()))
        return tensors + sum(weight.num_bytes for weight in self._packed.values())

    @property
    def only_kernels(self) -> bool:
        """Whether products consist of kernels' calls, so that they can be recorded."""
        return self._kernels is not None and not self._wide and self._out_features % 16 == 0

    def fill_packed(self, part: int, weight: Packed) -> None:
        """Repack one part's weight [O, I]."""
        self._packed[part] = PackedWeight(weight)

    def fill(self, part: int, weight: Tensor) -> None:
        """Copy one part's weight [O, I], which is stored as floats."""
        self._wide[part] = weight.to(torch.float32, copy=True)

    def fill_bias(self, part: int, bias: Tensor) -> None:
        """Copy one part's bias [O]."""
        self._bias[part] = torch.zeros(-(-len(bias) // TILE) * TILE)
        self._bias[part][: len(bias)].copy_(bias)

    def finish(self) -> None:
        """Chain the packed parts for the kernels. Parts with the same inputs and factors share the prepared inputs."""
        if self._kernels is None or not self._packed:
            return
        slots: dict[tuple[object, ...], int] = {}
        for part, weight in sorted(self._packed.items()):
            fields = weight.segment(self._kernels, column=self._starts[part], bias=self._bias.get(part))
            fields[SEGMENT.index("prepares")] = int(weight.inputs_key not in slots)
            fields[SEGMENT.index("slot")] = slots.setdefault(weight.inputs_key, len(slots))
            if self._segments:
                self._segments[-1][SEGMENT.index("next")] = fields.ctypes.data
            self._segments.append(fields)
        self._slots = len(slots)
        most_groups = max(self._in_features // weight.group for weight in self._packed.values())
        self._slot = self._in_features + most_groups
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
        if self._kernels is not None and self._out_features % 16 == 0:
            self._kernels.swiglu(found, out)
            return out
        gate, up = found.chunk(2, dim=-1)
        return torch.mul(F.silu(gate, inplace=True), up, out=out)

    def take(self, ids: Tensor) -> Tensor:
        """Return rows ids [T] int64 of a weight with one part, as [T, I]."""
        weight = self._packed[0]
        if self._kernels is None:
            return weight.values(ids)
        out = torch.empty(len(ids), self._in_features)
        self._kernels.take(weight.kind, self._segments[0].ctypes.data, ids.contiguous(), out)
        return weight.in_order(out)

    def _multiply(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        x = x.contiguous()
        if self._kernels is None:
            self._multiply_by_torch(x, out, add=add)
        elif self._segments:
            scratch = self._workspace.get("packed inputs", self._slots * x.shape[0] * self._slot)
            threads = torch.get_num_threads()
            self._kernels.multiply(self._first, x, out, scratch, slot=self._slot, accumulate=add, threads=threads)
        for part, weight in self._wide.items():
            self._store(part, F.linear(x, weight), out, start=0, add=add)

    def _multiply_by_torch(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        for part, weight in self._packed.items():
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


def _split_low(codes: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Split codes [n, I] into their low halves [n, I / 2], the first in bits 0 to 3, and what is above [n, I]."""
    return (codes[:, 0::2] & np.uint8(15)) | (codes[:, 1::2] << np.uint8(4)), codes >> np.uint8(4)


def _spread(plane: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Return the high bits [n, I] of a ``Packed.high``."""
    wide = np.dtype(f"<u{8 // bits}")
    source = plane.astype(wide)
    codes = np.zeros_like(source)
    for index in range(8 // bits):
        codes |= ((source >> wide.type(index * bits)) & wide.type((1 << bits) - 1)) << wide.type(8 * index)
    return codes.view(np.uint8)


def _known_bits(bits: int) -> Literal[4, 5, 6, 8]:
    if bits not in (4, 5, 6, 8):
        raise ValueError(f"{bits} bits")
    return bits


def _fill_tiles(target: Tensor, start: int, rows: npt.NDArray[np.int32] | npt.NDArray[np.float16]) -> None:
    """Store rows [n, W] from row ``start`` (a multiple of 16) of tiles [tiles, W, 16]."""
    whole = len(rows) // TILE
    tile = start // TILE
    tensor = torch.from_numpy(rows)
    tiles = tensor[: whole * TILE].view(whole, TILE, rows.shape[1])
    target[tile : tile + whole].copy_(tiles.transpose(1, 2))
    if rest := len(rows) - whole * TILE:
        target[tile + whole][:, :rest].copy_(tensor[whole * TILE :].t())


def _high_words(bits_above: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    """Pack the high bits [n, I] of codes; see ``cpu_code``."""
    rows, inputs = bits_above.shape
    shared = 4 // bits
    blocks = np.zeros((rows, -(-inputs // 8 // shared) * shared), np.uint32)
    eights = np.ascontiguousarray(bits_above).view("<u8")  # the bits of 8 inputs, a byte for each
    for place in range(8):
        code = ((eights >> np.uint64(8 * place)) & np.uint64(15)).astype(np.uint32)
        blocks[:, : inputs // 8] |= code << np.uint32((4 * place + 4) % 32)
    words = blocks[:, 0::shared].copy()
    for index in range(1, shared):
        words |= blocks[:, index::shared] << np.uint32(index * bits)
    return words.view(np.int32)


def _fill_halves(target: Tensor, values: Floats) -> int:
    """Store values [O, G], over a power of two, as float16 in tiles; return its exponent."""
    largest = float(np.abs(values).max()) if values.size else 0.0
    exponent = int(np.frexp(largest)[1]) - _TOP_EXPONENT if largest else 0
    _fill_tiles(target, 0, np.ldexp(values, -exponent).astype(np.float16))
    return exponent
