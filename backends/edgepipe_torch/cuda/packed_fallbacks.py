"""Weights that own kernels do not compute with: floats, torch's 4-bit product, and widening by torch operations.

T rows, I in features, O out features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.spec.packed import GroupValues, Packed
from edgepipe.spec.packed_form import CODEBOOKS
from edgepipe_torch.cuda.packed_tiles import torch_type, upload

_SCRATCH_BYTES = 32 << 20  # widened out features: so many bytes stay in the cache of large devices
_STEP = 128  # out features; matrix products compute blocks of so many
_TABLE_SHAPE = 4  # a weight of one part with so many times more out features than inputs is a table


class WideWeights:
    """Floats in the compute dtype."""

    def __init__(self, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def multiply(self, x: Tensor, out: Tensor, *, bias: Tensor | None, add: bool) -> None:
        multiply_wide(x, self.weight, out, bias=bias, add=add)

    def take(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Int4Weights:
    """torch's product with 4-bit weights: ``(code - 8) * scale + zero``, both bf16 per group. Needs sm_80."""

    _INNER_TILES = 8
    _INPUTS = 16 * _INNER_TILES  # a multiple of it

    def __init__(self, out_features: int, in_features: int, group: int, device: torch.device) -> None:
        self._codes = torch.empty(out_features, in_features // 2, dtype=torch.uint8, device=device)
        self._scales = torch.empty(in_features // group, out_features, 2, dtype=torch.bfloat16, device=device)
        self._group = group
        self._missing = out_features
        self._packed: Tensor | None = None

    @classmethod
    def accepts(cls, weight: Packed, out_features: int, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether torch's kernel computes with such a weight here."""
        form = weight.form
        fits = form.bits == 4 and not form.codebook and form.group in (32, 64, 128, 256) and not form.ordered
        fits = fits and dtype == torch.bfloat16 and out_features % 8 == 0 and weight.shape[1] % cls._INPUTS == 0
        merged = weight.shape[0] < out_features
        fits = fits and (merged or out_features < _TABLE_SHAPE * weight.shape[1])  # its layout gives no rows back
        return fits and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8

    @property
    def num_bytes(self) -> int:
        return (self._codes if self._packed is None else self._packed).nbytes + self._scales.nbytes

    def fill(self, first: int, weight: Packed) -> None:
        """Repack after the last part."""
        rows = slice(first, first + weight.shape[0])
        low = torch.from_numpy(np.ascontiguousarray(weight.low)).to(self._codes.device)
        self._codes[rows] = low << 4 | low >> 4  # the kernel keeps even inputs in the upper bits
        scale = weight.scale.float32()
        offset = np.zeros_like(scale) if weight.offset is None else weight.offset.float32()
        zeros = weight.zeros()
        centre = np.float32(8) if zeros is None else np.float32(8) - zeros.astype(np.float32)
        for place, values in enumerate((scale, offset + centre * scale)):
            self._scales[:, rows, place] = torch.from_numpy(values).t().to(self._scales)
        self._missing -= weight.shape[0]
        if not self._missing:
            self._packed = torch.ops.aten._convert_weight_to_int4pack(self._codes, self._INNER_TILES)
            self._codes = self._codes[:0].clone()

    def multiply(self, x: Tensor, out: Tensor, *, bias: Tensor | None, add: bool) -> None:
        found = torch.ops.aten._weight_int4pack_mm(x.contiguous(), self._packed, self._group, self._scales)
        if bias is not None:
            found += bias
        if add:
            out += found
        else:
            out.copy_(found)


class UnpackedWeights:
    """Arrays as in ``Packed``, on any device and in any dtype; torch operations widen blocks of out features."""

    def __init__(self, weight: Packed, out_features: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """``weight``: the first part, which decides the types of the arrays."""
        self._form = weight.form
        self._shape = (out_features, weight.shape[1])
        self._dtype = dtype
        self._device = device
        self._arrays = {
            name: torch.empty(out_features, array.shape[1], dtype=torch_type(array.dtype.name), device=device)
            for name, array in _arrays(weight).items()
        }
        self._order = None if weight.order is None else torch.from_numpy(weight.order).to(device)
        self._levels = torch.from_numpy(CODEBOOKS[weight.form.codebook]).to(device) if weight.form.codebook else None

    @property
    def num_bytes(self) -> int:
        order = 0 if self._order is None else self._order.nbytes
        return sum(array.nbytes for array in self._arrays.values()) + order

    def fill(self, first: int, weight: Packed) -> None:
        """Raises RuntimeError if arrays are of other types than those of the first part."""
        arrays = _arrays(weight)
        if {name: torch_type(array.dtype.name) for name, array in arrays.items()} != {
            name: array.dtype for name, array in self._arrays.items()
        }:
            raise RuntimeError("merged weights differ in the types of their scales")
        for name, array in arrays.items():
            self._arrays[name][first : first + weight.shape[0]] = upload(array, self._device)

    def multiply(self, x: Tensor, out: Tensor, *, bias: Tensor | None, add: bool) -> None:
        step = rows_at_once(*self._shape)
        for start in range(0, self._shape[0], step):
            part = slice(start, start + step)
            widened = self._widen({name: array[part] for name, array in self._arrays.items()})
            multiply_wide(x, widened, out[:, part], bias=None if bias is None else bias[part], add=add)

    def take(self, ids: Tensor) -> Tensor:
        return self._widen({name: array[ids] for name, array in self._arrays.items()})

    def _widen(self, arrays: dict[str, Tensor]) -> Tensor:
        """Return the values [R, I] of selected rows, in the order of the product's inputs."""
        form = self._form
        codes = _unpack(arrays["low"], 4)
        if "high" in arrays:
            codes = codes | _unpack(arrays["high"], form.bits - 4) << 4
        levels = codes.float() if self._levels is None else self._levels[codes.int()]
        levels = levels.view(len(codes), -1, form.group)
        if "zeros" in arrays:
            levels -= arrays["zeros"].float().unsqueeze(-1)
        levels *= self._group_floats(arrays, "scale")
        if "offset" in arrays:
            levels += self._group_floats(arrays, "offset")
        found = levels.flatten(1).to(self._dtype)
        return found if self._order is None else torch.empty_like(found).index_copy_(1, self._order.long(), found)

    def _group_floats(self, arrays: dict[str, Tensor], name: str) -> Tensor:
        base = arrays[name]
        values = (base.int() << 16).view(torch.float32) if base.dtype == torch.int16 else base.float()
        if f"{name} factor" in arrays:
            factor = arrays[f"{name} factor"].float()
            values = values.repeat_interleave(factor.shape[1] // values.shape[1], dim=1) * factor
        return values.unsqueeze(-1)


def _arrays(weight: Packed) -> dict[str, npt.NDArray[Any]]:
    """Return a weight's arrays by row."""
    named: dict[str, npt.NDArray[Any] | None] = {"low": weight.low, "high": weight.high, "zeros": weight.zeros()}

    def add(name: str, values: GroupValues | None) -> None:
        if values is not None:
            named[name], named[f"{name} factor"] = values.base, values.factor

    add("scale", weight.scale)
    add("offset", weight.offset)
    return {name: array for name, array in named.items() if array is not None}


def _unpack(plane: Tensor, bits: int) -> Tensor:
    """Return the codes [R, I] uint8 of a plane [R, I * bits / 8]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device)
    return ((plane.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def rows_at_once(out_features: int, in_features: int) -> int:
    """Return how many out features are widened at a time."""
    step = max(_STEP, _SCRATCH_BYTES // (2 * in_features) // _STEP * _STEP)
    return min(step, out_features)


def multiply_wide(x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None, add: bool) -> None:
    """Write the product of x [T, I] and weight [O, I] to out [T, O], or add it."""
    if add:
        out.addmm_(x, weight.t())
        if bias is not None:
            out += bias
    elif bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out=out)
