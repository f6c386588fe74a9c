"""Products of float32 weights in the fastest measured layouts (docs/experiments.md has the figures).

A decode step reads every weight for a few rows, so its cost is the number of bytes and any repacking.

``HalfLinear``   weights exact in bf16 or fp16: stored in fp16, half the bytes.
``TiledLinear``  other weights: ``[tiles, in, W]``. From 4 rows on, a plain ``x @ W.T`` repacks the weight each time;
                 one batched product over tiles of about 48 outputs does not.

T rows, I in features, O out features, W tile width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe_torch.layers.linear import ReadWeight, Workspace

_BEST_WIDTH = 48  # measured: 48 beats 32, 64, 96 and 192 at 1 to 16 rows with one and two threads
_MIN_WIDTH, _MAX_WIDTH = 16, 128


def tile_width(parts: Sequence[int]) -> int:
    """Return the tile width for merged parts with these out features. It divides each of several parts."""
    common = math.gcd(*parts)
    widths = [width for width in range(_MIN_WIDTH, _MAX_WIDTH + 1) if common % width == 0]
    aligned = [width for width in widths if width % 16 == 0]
    if not aligned and len(parts) == 1 and common > _MAX_WIDTH:
        return _BEST_WIDTH
    return min(aligned or widths or [common], key=lambda width: abs(width - _BEST_WIDTH))


class TiledLinear:
    """float32 on a CPU: weight ``[tiles, I, W]``."""

    def __init__(self, name: str, in_features: int, parts: Sequence[int], workspace: Workspace) -> None:
        self._name = name
        self._workspace = workspace
        self._width = tile_width(parts)
        self._out_features = sum(parts)
        self._starts = [sum(parts[:index]) // self._width for index in range(len(parts))]  # tiles
        self._num_tiles = -(-self._out_features // self._width)
        self._weight = torch.empty(self._num_tiles, in_features, self._width)
        self._bias: Tensor | None = None  # [tiles, 1, W]

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def fill(self, part: int, weight: ReadWeight) -> None:
        assert isinstance(weight, Tensor)
        width, start = self._width, self._starts[part]
        whole = weight.shape[0] // width
        tiles = weight[: whole * width].view(whole, width, -1).transpose(1, 2)
        self._weight[start : start + whole].copy_(tiles)
        if rest := weight.shape[0] - whole * width:  # pad a single part with zeros if the width does not divide it
            self._weight[-1].zero_()
            self._weight[-1][:, :rest].copy_(weight[whole * width :].t())

    def fill_bias(self, part: int, bias: Tensor) -> None:
        if self._bias is None:
            self._bias = torch.zeros(self._num_tiles, 1, self._width)
        at = self._starts[part] * self._width
        self._bias.view(-1)[at : at + len(bias)].copy_(bias)

    def rows(self, x: Tensor) -> Tensor:
        tiles = self._product(x)
        if x.shape[0] == 1:
            return tiles.view(1, -1)[:, : self._out_features]
        out = self._workspace.get(f"{self._name} rows", x.shape[0], self._num_tiles * self._width)
        self._by_tile(out).copy_(tiles)
        return out[:, : self._out_features]

    def add_to(self, x: Tensor, total: Tensor) -> None:
        if self._num_tiles * self._width != self._out_features:
            total.add_(self.rows(x))
            return
        self._by_tile(total).add_(self._product(x))

    def swiglu(self, x: Tensor) -> Tensor:
        tiles = self._product(x)
        half = self._num_tiles // 2
        gate, up = tiles[:half], tiles[half:]
        F.silu(gate, inplace=True)
        out = self._workspace.get(f"{self._name} swiglu", x.shape[0], half * self._width)
        torch.mul(gate, up, out=self._by_tile(out))
        return out

    def finish(self) -> None:
        """Do nothing; the weight is complete."""

    def take(self, ids: Tensor) -> Tensor:
        return self._weight[ids // self._width, :, ids % self._width]

    def _product(self, x: Tensor) -> Tensor:
        """Return the product [tiles, T, W] with bias."""
        out = self._workspace.get(self._name, self._num_tiles, x.shape[0], self._width)
        torch.bmm(x.expand(self._num_tiles, -1, -1), self._weight, out=out)
        return out if self._bias is None else out.add_(self._bias)

    def _by_tile(self, rows: Tensor) -> Tensor:
        """View [T, O] as [tiles, T, W]."""
        return rows.view(rows.shape[0], -1, self._width).transpose(0, 1)


class HalfLinear:
    """float32 on an x86 CPU with an fp16 weight, which FBGEMM's kernel widens on the fly; sums are float32.

    fp16 has more mantissa than bf16. Only values below 2**-14 may lose bits, at most 2**-25 each, less than the
    rounding of float32 sums. A weight with a value too large for fp16 stays float32.
    """

    def __init__(self, name: str, in_features: int, parts: Sequence[int], workspace: Workspace) -> None:
        self._name = name
        self._workspace = workspace
        self._starts = [sum(parts[:index]) for index in range(len(parts))]
        self._shape = (sum(parts), in_features)
        self._wide: Tensor | None = None  # float32 [O, I] during filling
        self._bias: Tensor | None = None
        self._packed: Any = None  # FBGEMM's object

    @property
    def num_bytes(self) -> int:
        size = 2 if self._wide is None else 4
        return size * self._shape[0] * self._shape[1] + (0 if self._bias is None else self._bias.nbytes)

    def fill(self, part: int, weight: ReadWeight) -> None:
        assert isinstance(weight, Tensor)
        if self._wide is None:
            self._wide = torch.empty(self._shape)
        at = self._starts[part]
        self._wide[at : at + weight.shape[0]].copy_(weight)

    def fill_bias(self, part: int, bias: Tensor) -> None:
        if self._bias is None:
            self._bias = torch.zeros(self._shape[0])
        at = self._starts[part]
        self._bias[at : at + len(bias)].copy_(bias)

    def finish(self) -> None:
        assert self._wide is not None
        low, high = torch.aminmax(self._wide)
        if max(-float(low), float(high)) <= torch.finfo(torch.float16).max:
            self._packed = torch.ops.quantized.linear_prepack_fp16(self._wide, self._bias)
            self._wide = None

    def rows(self, x: Tensor) -> Tensor:
        if self._wide is not None:
            return F.linear(x, self._wide, self._bias)
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)

    def add_to(self, x: Tensor, total: Tensor) -> None:
        total.add_(self.rows(x))

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = self.rows(x).chunk(2, dim=-1)
        out = self._workspace.get(f"{self._name} swiglu", *gate.shape)
        return torch.mul(F.silu(gate, inplace=True), up, out=out)


@cache
def half_works() -> bool:
    """Return whether this torch and CPU support the kernel."""
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.ones(8, 8), None)
        return bool((torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 8), packed) == 8).all())
    except (RuntimeError, AttributeError):
        return False
