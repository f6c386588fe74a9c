"""Packed weights in the tiles that the kernels read, laid out on the device by torch operations.

A tile has 16 out features and 128 inputs; ``kernels/packed.cu`` describes the places of its bits. Both dimensions
are padded, with zeros for codes and scales.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.spec.packed import GroupValues, Packed
from edgepipe_torch.cuda.kernels.forms import TILE_INPUTS, TILE_ROWS, KernelForm, kernel_form

_VALUES_AT_ONCE = 1 << 23  # about 10 bytes each while the planes are rearranged


class TiledWeight:
    """A packed weight [O, I] on a device. Rows come in pieces, the first at a multiple of 16 out features."""

    def __init__(self, form: KernelForm, out_features: int, in_features: int, device: torch.device) -> None:
        self.form = form
        self.out_features = out_features
        self.in_features = in_features
        self.device = device
        self.zero: int | None = None  # zero of all groups
        self.row_tiles = -(-out_features // TILE_ROWS)
        self.input_tiles = -(-in_features // TILE_INPUTS)
        group, span = form.group, form.span
        self.groups_per_tile = TILE_INPUTS // group if 0 < group < TILE_INPUTS else 1
        if group == 0:
            self.group_tiles = 1
        else:
            self.group_tiles = -(-in_features // max(group, TILE_INPUTS))
        self.spans = -(-in_features // span) if span else 0
        words = (self.row_tiles, self.input_tiles, TILE_ROWS, 4)
        self.low = self._zeros(*words, 4, dtype=torch.int32)
        self.high = self._zeros(*words, form.bits - 4, dtype=torch.int32) if form.bits > 4 else None
        self.scale, self.scale_base = self._floats(form.scale.base, form.scale.factor)
        self.offset, self.offset_base = (
            self._floats(form.added.base, form.added.factor) if form.offset == "added" else (None, None)
        )
        self.zeros = self._groups(torch.uint8) if form.offset == "zeros" else None

    @property
    def num_bytes(self) -> int:
        """Device memory."""
        tensors = (self.low, self.high, self.scale, self.scale_base, self.offset, self.offset_base, self.zeros)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def fill(self, first: int, weight: Packed) -> None:
        """Copy the out features ``first`` and up, a multiple of 16.

        Raises RuntimeError if scales or zeros are of another kind than those of other pieces.
        """
        zero = weight.zero if isinstance(weight.zero, int) else None
        if kernel_form(weight) != self.form or self.zero not in (None, zero):
            raise RuntimeError("merged weights differ in the types of their scales or in their zeros")
        self.zero = zero
        rows = weight.shape[0]
        step = max(TILE_ROWS, _VALUES_AT_ONCE // (self.input_tiles * TILE_INPUTS) // TILE_ROWS * TILE_ROWS)
        for start in range(0, rows, step):
            tiles = slice((first + start) // TILE_ROWS, -(-(first + min(start + step, rows)) // TILE_ROWS))
            part = slice(start, start + step)
            self.low[tiles] = self._plane(weight.low[part], 4)
            if self.high is not None and weight.high is not None:
                self.high[tiles] = self._plane(weight.high[part], self.form.bits - 4)
        tiles = slice(first // TILE_ROWS, -(-(first + rows) // TILE_ROWS))
        self._fill_floats(tiles, weight.scale, self.scale, self.scale_base)
        if weight.offset is not None and self.offset is not None:
            self._fill_floats(tiles, weight.offset, self.offset, self.offset_base)
        if self.zeros is not None and isinstance(weight.zero, np.ndarray):
            self.zeros[tiles] = self._by_group(weight.zero, self.groups_per_tile, self.group_tiles)

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _groups(self, dtype: torch.dtype) -> Tensor:
        return self._zeros(self.row_tiles, self.group_tiles, TILE_ROWS, self.groups_per_tile, dtype=dtype)

    def _floats(self, base: str, factor: str) -> tuple[Tensor, Tensor | None]:
        base_type = torch_type(base)
        if not factor:
            return self._groups(base_type), None
        bases = self._zeros(self.row_tiles, self.spans, TILE_ROWS, dtype=base_type)
        return self._groups(torch_type(factor)), bases

    def _fill_floats(self, tiles: slice, values: GroupValues, groups: Tensor, bases: Tensor | None) -> None:
        if values.factor is None or bases is None:
            groups[tiles] = self._by_group(values.base, self.groups_per_tile, self.group_tiles)
            return
        groups[tiles] = self._by_group(values.factor, self.groups_per_tile, self.group_tiles)
        bases[tiles] = self._by_group(values.base, 1, self.spans).squeeze(-1)

    def _by_group(self, array: npt.NDArray[np.generic], each: int, tiles: int) -> Tensor:
        """Rearrange values by group [O, G] to [row tiles, group tiles, 16, groups of a tile]."""
        rows = -(-array.shape[0] // TILE_ROWS) * TILE_ROWS
        padded = self._zeros(rows, each * tiles, dtype=torch_type(array.dtype.name))
        padded[: array.shape[0], : array.shape[1]] = upload(array, self.device)
        return padded.view(-1, TILE_ROWS, tiles, each).transpose(1, 2)

    def _plane(self, plane: npt.NDArray[np.uint8], bits: int) -> Tensor:
        """Rearrange a plane [O, I * bits / 8] to words [row tiles, input tiles, 16, t, bits]."""
        rows = -(-plane.shape[0] // TILE_ROWS) * TILE_ROWS
        padded = self._zeros(rows, self.input_tiles * TILE_INPUTS * bits // 8, dtype=torch.uint8)
        padded[: plane.shape[0], : plane.shape[1]] = upload(plane, self.device)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=self.device)
        codes = (padded.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        shared = 4 // bits  # words of a lane, of 4, that share a word of this plane
        # inputs of a tile: word (which of the shared, within), 16s + 4t + 2r + h
        codes = codes.view(-1, TILE_ROWS, self.input_tiles, bits, shared, 2, 4, 2, 2)
        # A code begins at bit bits * (2s + r + 4 * within) + 16h of its word.
        ordered = codes.permute(0, 2, 1, 6, 3, 8, 4, 5, 7).to(torch.int32)  # ... t, which, h, within, s, r
        places = torch.arange(shared * 4, dtype=torch.int32, device=self.device) * bits
        halves = (ordered.flatten(-3) << places).sum(-1, dtype=torch.int32)
        return halves[..., 0] | halves[..., 1] << 16


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return a copy on the device; bits of bf16 as int16."""
    given = np.ascontiguousarray(array)
    if given.dtype == np.uint16:
        given = given.view(np.int16)
    return torch.from_numpy(given if given.flags.writeable else given.copy()).to(device)


def torch_type(name: str) -> torch.dtype:
    """Return torch's type for a numpy type's name; bits of bf16 are kept as int16."""
    kinds = {
        "float16": torch.float16,
        "float32": torch.float32,
        "uint16": torch.int16,
        "int8": torch.int8,
        "uint8": torch.uint8,
    }
    return kinds[name]
