"""What all stored formats share: their parts, scales, and the order of nibbles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.spec.packed import Codes, GroupValues, Packed
from edgepipe.spec.packed_form import PackedForm
from edgepipe.spec.quantisation import WeightFormat

FLOATS = ("F16", "BF16", "F32")
GROUPS = (16, 32, 64, 128, 256)
CHUNK_VALUES = 1 << 17  # codes unpacked at once: temporary arrays stay in the cache
_DTYPES = {
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "U32": "<u4",
    "I8": "i1",
    "U8": "u1",
    "F8_E4M3": "u1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """One stored tensor of a weight."""

    shape: tuple[int, ...] | None  # dimensions of 1 do not count; None: a short text of any length
    types: tuple[str, ...]  # storage types that are read

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Return whether a stored tensor's shape is right."""
        if self.shape is None:
            return len(shape) == 1 and shape[0] <= 1 << 16
        return _squeezed(shape) == _squeezed(self.shape) or joined_experts(shape, len(self.shape)) == self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArrays:
    """A weight's stored tensors, read."""

    name: str
    shape: tuple[int, int]  # [O, I]
    stored: WeightFormat
    arrays: Mapping[str, npt.NDArray[Any]]  # arrays by suffix, in the shapes of ``parts``; BF16 and F8 as bits

    def invalid(self, fact: str) -> ModelInvalid:
        """Return the error for values that cannot be right."""
        return ModelInvalid(f"weight '{self.name}' cannot be read", fact=fact, next_step="pull the model again")

    def scales(self, values: npt.NDArray[Any]) -> GroupValues:
        """Return scales or offsets [O, I / group] as stored. Raises ModelInvalid if one is not finite."""
        result = GroupValues(base=np.ascontiguousarray(values))
        if not np.isfinite(result.float32()).all():
            raise self.invalid("a scale is not a finite number")
        return result


class StoredFormat(ABC):
    """One format: a value without state."""

    scale_part = "scales"
    """Suffix of the part whose type is ``WeightFormat.scale``."""
    index_part = ""
    """Suffix of the part that ``WeightFormat.indexed`` announces; empty: the format has none."""

    @abstractmethod
    def label(self, stored: WeightFormat) -> str:
        """Return the format's name for people."""

    @abstractmethod
    def fault(self, stored: WeightFormat) -> str:
        """Return what is wrong with the values themselves; empty: nothing."""

    def misfit(self, stored: WeightFormat, shape: tuple[int, int]) -> str:
        """Return why a weight [O, I] cannot be stored so; empty: it can."""
        return group_misfit(stored, shape)

    @abstractmethod
    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        """Return the stored tensors by suffix of the module's name, in reading order."""

    @abstractmethod
    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        """Return the packed form."""

    @abstractmethod
    def pack(self, weight: StoredArrays) -> Packed:
        """Pack the stored tensors. Raises ModelInvalid for values that cannot be right."""


def decode(name: str, part: StoredPart, data: npt.NDArray[np.uint8], scheme: str) -> npt.NDArray[Any]:
    """Return a part's bytes as an array of its shape. Raises ModelInvalid if they disagree."""
    if scheme not in part.types:
        raise ModelInvalid(f"tensor '{name}' has type {scheme}", fact=f"{' or '.join(part.types)} is read here")
    values = data.view(_DTYPES[scheme])
    if part.shape is None:
        return values
    if values.size != np.prod(part.shape, dtype=np.int64):
        raise ModelInvalid(f"tensor '{name}' cannot be read", fact=f"{data.nbytes} bytes, shape {list(part.shape)}")
    return values.reshape(part.shape)


def group_of(stored: WeightFormat, shape: tuple[int, int]) -> int:
    """Return the inputs that share a scale."""
    return stored.group or shape[1]


def group_misfit(stored: WeightFormat, shape: tuple[int, int]) -> str:
    """Return why the groups do not divide the inputs; empty: they do."""
    if shape[1] % group_of(stored, shape):
        return f"groups of {stored.group} do not divide {shape[1]} inputs"
    return f"{shape[1]} inputs are not a multiple of 8" if shape[1] % 8 else ""


def scale_bits(stored: WeightFormat) -> int:
    """Return the bits of a base scale in the packed form."""
    return 32 if stored.scale == "F32" else 16


def unpack_words(words: npt.NDArray[np.int32], bits: int) -> Codes:
    """Return the codes [R, C * 32 / bits] of words [R, C], the first code in the lowest bits. ``bits``: 4 or 8."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2] = packed & np.uint8(15)
    codes[:, 1::2] = packed >> np.uint8(4)
    return codes


def byte_planes(codes: Codes) -> tuple[Codes, Codes]:
    """Return both planes of codes of 8 bits [O, I], as ``split_planes`` does."""
    low, high = np.empty((2, codes.shape[0], codes.shape[1] // 2), np.uint8)
    for rows in row_chunks(codes.shape):
        low[rows], high[rows] = pair_nibbles(codes[rows]), pair_nibbles(codes[rows] >> np.uint8(4))
    return low, high


def row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield runs of rows of a matrix [O, I] that hold about ``CHUNK_VALUES`` values."""
    step = max(1, CHUNK_VALUES // shape[1])
    for start in range(0, shape[0], step):
        yield slice(start, start + step)


def pair_nibbles(codes: Codes) -> Codes:
    """Return the lower nibbles of neighbours 2j and 2j + 1 in byte j. codes [R, I], result [R, I / 2]."""
    words = np.ascontiguousarray(codes).view("<u2")
    return ((words & np.uint16(0x0F)) | ((words >> np.uint16(4)) & np.uint16(0xF0))).astype(np.uint8)


def joined_experts(shape: tuple[int, ...], dims: int = 2) -> tuple[int, ...]:
    """Return the shape with the experts' rows [E, O, ...] one below the other, if it then has so many dimensions."""
    return (shape[0] * shape[1], *shape[2:]) if len(shape) == dims + 1 else shape


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if dim != 1)
