"""Forms of KV as codes: how vectors are rounded, and how they are read again. One form serves one kind of layer.

T tokens, D head dim. A vector is a head's key or value of one token. What it is stored as depends on it alone: chunks
of a prompt, truncation and copies of blocks leave the same codes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from edgepipe.spec.kv_forms import KV_8BIT, four_bits

HIGHEST_CODE = 127
SCALE_FACTOR = (1 + 2**-11) / HIGHEST_CODE  # rounding of a normal float16 is included: no code exceeds the highest
LEAST_SCALE = 2**-24  # the smallest float16: of zeros, and the rounding of scales near it

MIDDLE = 7.5  # a value of 4 bits is ``(code - MIDDLE) * scale``
FINE_STEPS = 16  # a code of 8 bits counts sixteenths of a scale; its upper 4 bits are the code of 4
FINE_MIDDLE = 127.5
SCALE_SHIFT = 20  # a scale is the upper bits of a float32, of which its byte counts up from ``LEAST_BITS``
LEAST_BITS = (127 - 20) << 3  # byte of 2**-20, the smallest scale; the largest scale is 3584
NO_SCALE = 255  # byte of a group with a NaN or an infinity, or with values beyond the scales


class Codes(NamedTuple):
    """Vectors of L tokens in one layer; see ``LayerHeads.entries``."""

    codes: Tensor  # [L, entries, n]: 8 bits: int8, n = D; 4 bits: uint8, n = D / 2
    scales: Tensor  # [L, entries] float16; 4 bits: [L, entries, groups] uint8


class WholeCodes(NamedTuple):
    """Vectors with 4 bits, and 4 bits more of each code: together the code of 8 bits, in the same scales."""

    codes: Codes  # the upper bits, with the scales
    rests: Tensor  # [L, entries, D / 2] uint8, in the order of the codes


class KVCodes(Protocol):
    """A form of KV for heads of one size."""

    def empty(self, vectors: tuple[int, ...], device: torch.device) -> Codes:
        """Return memory for vectors, of which each axis but the last is given."""
        ...

    def encode(self, kv: Tensor) -> Codes:
        """Round kv [..., D]. A vector with a NaN or an infinity is read as NaN."""
        ...

    def widen(self, found: Codes, dtype: torch.dtype) -> Tensor:
        """Return vectors [..., D], turned."""
        ...

    def steps(self, found: Codes) -> Tensor:
        """Return the distance of neighbouring codes for each value, [..., D] or [..., 1] float32."""
        ...

    def turned(self, vectors: Tensor) -> Tensor:
        """Rotate vectors [..., n] as the form's own are: queries before they meet keys, sums of values back again."""
        ...


class EightBits:
    """int8 codes with one float16 scale: a value is ``code * scale``."""

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim

    def empty(self, vectors: tuple[int, ...], device: torch.device) -> Codes:
        codes = torch.zeros((*vectors, self._head_dim), dtype=torch.int8, device=device)
        return Codes(codes, torch.zeros(vectors, dtype=torch.float16, device=device))

    def encode(self, kv: Tensor) -> Codes:
        highest = kv.abs().amax(-1).float()
        scales = (highest * SCALE_FACTOR + LEAST_SCALE).half()
        scales += scales - scales  # NaN where infinite
        return Codes((kv / scales.float().unsqueeze(-1)).round_().to(torch.int8), scales)

    def widen(self, found: Codes, dtype: torch.dtype) -> Tensor:
        return found.codes.to(dtype) * found.scales.to(dtype).unsqueeze(-1)

    def steps(self, found: Codes) -> Tensor:
        return found.scales.float().unsqueeze(-1)

    def turned(self, vectors: Tensor) -> Tensor:
        return vectors


class FourBits:
    """4-bit codes of the rotated vector, and a byte for the scale of each group.

    The rotation spreads a channel of large values over its block, so that all codes of a group are used. It also
    centres values, so no group needs a zero point. See ``docs/adr/kv-4bit.md``.
    """

    def __init__(self, head_dim: int, value_width: int = 0) -> None:
        """Raises ConfigInvalid for sizes that the form does not have."""
        self._head_dim = head_dim
        self.group, self.block = four_bits(head_dim, value_width)

    def empty(self, vectors: tuple[int, ...], device: torch.device) -> Codes:
        sizes = self._head_dim // 2, self._head_dim // self.group
        codes, scales = (torch.zeros((*vectors, size), dtype=torch.uint8, device=device) for size in sizes)
        return Codes(codes, scales)

    def encode(self, kv: Tensor) -> Codes:
        return self.encode_whole(kv).codes

    def encode_whole(self, kv: Tensor) -> WholeCodes:
        """Round kv [..., D] as ``encode`` does, and with 4 bits more."""
        groups = self.turned(kv.float()).unflatten(-1, (-1, self.group))
        scales = scale_bytes(groups.abs().amax(-1))
        raised = (groups / scale_values(scales).unsqueeze(-1)).add_(MIDDLE + 0.5).nan_to_num_(0.0)
        low, high = raised.mul_(FINE_STEPS).clamp_(0, 255).to(torch.uint8).chunk(2, dim=-1)
        codes, rests = low >> 4 | high & 0xF0, low & 0xF | high << 4
        return WholeCodes(Codes(codes.flatten(-2), scales), rests.flatten(-2))

    def widen(self, found: Codes, dtype: torch.dtype) -> Tensor:
        """See ``KVCodes``. A byte has a value of a group's first half and its counterpart of the second."""
        codes = self._parted(found.codes).to(dtype)
        return codes.sub_(MIDDLE).mul_(scale_values(found.scales).to(dtype).unsqueeze(-1)).flatten(-2)

    def widen_whole(self, found: WholeCodes, dtype: torch.dtype) -> Tensor:
        """Return vectors [..., D], turned, of codes with 8 bits."""
        codes = (self._parted(found.codes.codes) << 4 | self._parted(found.rests)).to(dtype)
        scales = (scale_values(found.codes.scales) / FINE_STEPS).to(dtype).unsqueeze(-1)
        return codes.sub_(FINE_MIDDLE).mul_(scales).flatten(-2)

    def _parted(self, codes: Tensor) -> Tensor:
        """Return codes [..., groups, group] of bytes [..., D / 2]."""
        pairs = codes.unflatten(-1, (-1, self.group // 2))
        return torch.cat([pairs & 15, pairs >> 4], -1)

    def steps(self, found: Codes) -> Tensor:
        return scale_values(found.scales).repeat_interleave(self.group, -1)

    def turned(self, vectors: Tensor) -> Tensor:
        """Multiply each block with the orthonormal Hadamard matrix, which is its own inverse.

        The sums have one order, on every device and for any number of vectors.
        """
        wide, half = vectors.float().unflatten(-1, (-1, self.block)), 1
        while half < self.block:
            first, second = wide.unflatten(-1, (-1, 2, half)).unbind(-2)
            wide, half = torch.stack([first + second, first - second], -2).flatten(-3), 2 * half
        return (wide * self.block**-0.5).flatten(-2).to(vectors.dtype)


def codes_of(form: str, head_dim: int, value_width: int = 0) -> KVCodes:
    """Return a form of KV for heads of one size. Raises ConfigInvalid for one that it does not keep.

    value_width  see ``LayerHeads``
    """
    return EightBits(head_dim) if form == KV_8BIT else FourBits(head_dim, value_width)


def scale_bytes(highest: Tensor) -> Tensor:
    """Return the byte of the scale nearest to that of groups with these largest values (float32).

    It is at most 1/16 too small, so the largest value is within half a scale of the last code's.
    """
    bits = (highest * (1 / MIDDLE)).view(torch.int32) & 0x7FFFFFFF
    found = (bits + (1 << SCALE_SHIFT - 1) >> SCALE_SHIFT) - LEAST_BITS
    return found.clamp_(0, NO_SCALE).to(torch.uint8)


def scale_values(scales: Tensor) -> Tensor:
    """Return the scales [...] float32 of bytes; NaN for ``NO_SCALE``."""
    found = (scales.to(torch.int32) + LEAST_BITS << SCALE_SHIFT).view(torch.float32)
    return found.masked_fill_(scales == NO_SCALE, torch.nan)
