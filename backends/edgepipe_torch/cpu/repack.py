"""Repack weights into the layout of the CPU's kernels, on all threads: compiled for common GGUF types, else by numpy.

numpy handles blocks of rows that stay in a core's cache. Both ways give the same bits.

I in features, O out features, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.spec.packed import Floats, Packed
from edgepipe.spec.packed_form import CODEBOOKS, PackedForm
from edgepipe.spec.tensors import StoredTensor, TensorInfo
from edgepipe.weights.gguf_blocks import LAYOUTS
from edgepipe.weights.gguf_packing import checked_row_bytes, pack_gguf, unusable_scale
from edgepipe.weights.resident import cpu_group
from edgepipe.weights.stored_weight import Rows
from edgepipe_torch.cpu.calls import Native
from edgepipe_torch.cpu.kinds import E2M1_ZERO, TILE, Kind
from edgepipe_torch.cpu.layout import planes_of
from edgepipe_torch.cpu.tiled_weight import TiledWeight, on_threads
from edgepipe_torch.cpu.weight_memory import WeightMemory

ReadBytes = Callable[[int, int], npt.NDArray[np.uint8]]
"""Reads bytes of a tensor: an offset and a number. Threads may call it at once."""
_CHUNK_VALUES = 1 << 18  # repacked at once by numpy
_READ_BYTES = 1 << 20  # read and repacked at once by compiled code
_CHECKED_ROWS, _CHECKED_BLOCKS = 2 * TILE + 5, 3
_INTEGER_LEVELS = {  # codebook: bits, zero and unit of its levels as integers; those of NF4 are rounded
    "iq4": (8, 128, 1.0),
    "nf4": (8, 128, 1 / 127),
}


def repack(weight: Packed, memory: WeightMemory | None = None) -> TiledWeight:
    """Repack a weight of any form. Its columns are a multiple of 8, and so are its groups.

    ``memory``: None for torch's.
    """
    levels = _Levels(weight)
    rows, inputs = weight.shape
    group = cpu_group(weight.form.group)
    found = TiledWeight(
        weight.shape, group=group, kind=levels.kind, zero=levels.zero, order=weight.order, memory=memory
    )
    parts = weight.form.group // group  # parts of a stored group; all have its scale
    scale = found.new_group_values()
    offset = found.new_group_values() if levels.kind.added else None

    def fill(start: int) -> None:
        part = weight.rows(slice(start, start + step))
        low, high = levels.planes(part)
        _fill_tiles(found.low, start, low)
        if found.high is not None and high is not None:
            _fill_tiles(found.high, start, high)
        scales = levels.scales(part)
        _fill_tiles(scale, start, np.repeat(scales, parts, axis=1))
        if offset is not None:
            _fill_tiles(offset, start, np.repeat(levels.offsets(part, scales), parts, axis=1))

    step = max(TILE, _CHUNK_VALUES // inputs // TILE * TILE)
    on_threads(fill, range(0, rows, step))
    found.set_scales(scale, offset)
    return found


def repack_blocks(
    info: TensorInfo, read: ReadBytes, function: Native, rows: Rows | None, memory: WeightMemory | None = None
) -> TiledWeight:
    """Repack rows of a tensor of a type of BLOCK_CODES, or all, by its compiled function.

    Unless rows change places, blocks pass from the file to the layout in parts that stay in a core's cache. Raises
    ModelInvalid if bytes and shape disagree or a scale is not finite.
    """
    layout, row_bytes = LAYOUTS[info.scheme], checked_row_bytes(info)
    run = slice(0, info.shape[0]) if rows is None else rows
    order = None if isinstance(run, slice) else np.ascontiguousarray(run, np.int64)
    begin, outputs = (run.start, run.stop - run.start) if isinstance(run, slice) else (0, len(run))
    inputs = info.shape[1]
    found = TiledWeight(
        (outputs, inputs), group=layout.form.group, kind=_kind_of(layout.form), zero=layout.zero or 0, memory=memory
    )
    scale = found.new_group_values()
    offset = found.new_group_values() if layout.form.offset == "added" else None
    per_row = inputs // BLOCKS_BY_NAME[info.scheme].block_values
    whole = None if order is None else read(0, info.num_bytes)
    step = max(1, _READ_BYTES // (row_bytes * TILE))

    def fill(tile: int) -> None:
        first, end = tile * TILE, min((tile + step) * TILE, outputs)
        part = read((begin + first) * row_bytes, (end - first) * row_bytes) if whole is None else whole
        function.call(
            part.ctypes.data,
            0 if order is None else order[first:end].ctypes.data,
            *(0 if tiles is None else tiles[tile].data_ptr() for tiles in (found.low, found.high, scale, offset)),
            per_row,
            end - first,
        )

    on_threads(fill, range(0, found.num_tiles, step))
    try:
        found.set_scales(scale, offset)
    except ValueError as exc:
        raise unusable_scale(info) from exc
    return found


def repack_error(function: Native, scheme: str) -> float:
    """Return 0 if a compiled function repacks random blocks exactly as numpy does, else infinity."""
    block, random = BLOCKS_BY_NAME[scheme], np.random.default_rng(0)
    shape = (_CHECKED_ROWS, _CHECKED_BLOCKS * block.block_values)
    blocks = random.integers(0, 256, (_CHECKED_ROWS * _CHECKED_BLOCKS, block.block_bytes), np.uint8)
    records = blocks.view(LAYOUTS[scheme].struct)
    for name in {"d", "m", "dmin"}.intersection(LAYOUTS[scheme].struct.names or ()):
        records[name] = random.uniform(-1, 1, records.shape).astype(np.float16).view(np.uint16)
    raw = StoredTensor(
        info=TensorInfo(name=scheme, shape=shape, scheme=scheme, num_bytes=blocks.nbytes), data=blocks.reshape(-1)
    )
    packed, order = pack_gguf(raw), random.permutation(_CHECKED_ROWS)

    def repacked(rows: Rows | None) -> TiledWeight:
        return repack_blocks(raw.info, lambda start, count: raw.data[start : start + count], function, rows)

    plain = same_bits(repacked(None), repack(packed))
    ordered = same_bits(repacked(order), repack(packed.rows(order)))
    return 0.0 if plain and ordered else float("inf")


def same_bits(one: TiledWeight, other: TiledWeight) -> bool:
    """Return whether two weights hold the same arrays."""
    pairs = [(one.low, other.low), (one.high, other.high), (one.scale, other.scale), (one.offset, other.offset)]
    factors = one.factors.tobytes() == other.factors.tobytes()
    return factors and all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


class _Levels:
    """Integer codes with one zero, or float8 codes, of any packed form."""

    def __init__(self, weight: Packed) -> None:
        book = weight.form.codebook
        self._table: npt.NDArray[np.uint8] | None = None
        self._gain = np.float32(1)
        self.zero = weight.zero if isinstance(weight.zero, int) else 0
        if book == "e4m3":
            self.kind = Kind(bits=8, floats=True)
        elif book == "e2m1":
            self.kind, self.zero, self._gain = Kind(bits=4, e2m1=True), E2M1_ZERO, np.float32(0.5)
        elif book:
            bits, self.zero, gain = _INTEGER_LEVELS[book]
            self._gain = np.float32(gain)
            self._table = (np.rint(CODEBOOKS[book] / self._gain) + self.zero).astype(np.uint8)
            self.kind = Kind(bits=_stored_bits(bits, weight.form.group))
        else:
            added = weight.offset is not None or isinstance(weight.zero, np.ndarray)
            self.zero = 0 if added else self.zero
            self.kind = Kind(bits=_stored_bits(weight.form.bits, weight.form.group), added=added)

    def planes(
        self, rows: Packed
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16] | npt.NDArray[np.int32] | None]:
        """Return the planes [n, W] and [n, U] of some of the weight's rows."""
        if self.kind.bits == 4:  # stored as the kernels read it
            return np.ascontiguousarray(rows.low).view("<i4"), None
        return planes_of(self.kind, rows.codes() if self._table is None else self._table[rows.codes()])

    def scales(self, rows: Packed) -> Floats:
        """Return the scales [n, G] of some of the weight's rows."""
        return rows.scale.float32() * self._gain

    def offsets(self, rows: Packed, scales: Floats) -> Floats:
        """Return the offsets [n, G] of some of an added form's rows."""
        offsets = np.zeros((1, 1), np.float32) if rows.offset is None else rows.offset.float32()
        zeros = rows.zeros()
        if zeros is None:
            return offsets
        return np.subtract(offsets, scales * zeros.astype(np.float32), dtype=np.float32)


def _kind_of(form: PackedForm) -> Kind:
    """Return the kind of a form without table, order or zeros by group."""
    return Kind(bits=_stored_bits(form.bits, form.group), added=form.offset == "added")


def _stored_bits(bits: int, group: int) -> Literal[4, 5, 6, 8]:
    """Return the bits of a code here: units of 5 and 6 bits would cross groups that 16 does not divide."""
    if bits not in (4, 5, 6, 8):
        raise ValueError(f"{bits} bits")
    return 8 if bits in (5, 6) and group % 16 else bits


def _fill_tiles(target: Tensor, start: int, rows: npt.NDArray[np.int32] | npt.NDArray[np.int16] | Floats) -> None:
    """Store rows [n, W] from row ``start`` (a multiple of 16) of tiles [tiles, W, 16]."""
    whole = len(rows) // TILE
    tile = start // TILE
    tensor = torch.from_numpy(rows)
    tiles = tensor[: whole * TILE].view(whole, TILE, rows.shape[1])
    target[tile : tile + whole].copy_(tiles.transpose(1, 2))
    if rest := len(rows) - whole * TILE:
        target[tile + whole][:, :rest].copy_(tensor[whole * TILE :].t())
