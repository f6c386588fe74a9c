"""Products with packed weights on CUDA.

Weights stay packed. A product of up to 64 rows unpacks them in registers; with more rows, blocks of out features are
widened to bf16 and multiplied by cuBLAS. What computes is chosen per weight, the first that works here:

``own kernel``   CUDA C++ of this package (``kernels``).
``int4pack``     torch's ``_weight_int4pack_mm``: 4 bits without codebook, scales rounded to bf16.
``unpacked``     torch operations widen blocks of out features for every product: slow, small.

T rows, I in features, O out features.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.backend.types import PackedProducts
from edgepipe.spec.layer_spec import Activation
from edgepipe.spec.packed import Packed
from edgepipe.spec.packed_form import PackedForm
from edgepipe_torch.cuda.kernels.forms import TILE_ROWS, kernel_form, supports, zeros_fit
from edgepipe_torch.cuda.kernels.library import KernelLibrary, own_library
from edgepipe_torch.cuda.kernels.products import MOST_ROWS, Products
from edgepipe_torch.cuda.packed_fallbacks import Int4Weights, UnpackedWeights, WideWeights, multiply_wide, rows_at_once
from edgepipe_torch.cuda.packed_tiles import TiledWeight
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.feed_forward import ACTIVATIONS
from edgepipe_torch.layers.linear import ReadWeight

logger = logging.getLogger(__name__)


class PackedCudaLinear:
    """Merged parts, each packed or of floats. Adjacent parts of one form are one product."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        forms: Sequence[PackedForm | None],
        *,
        dtype: torch.dtype,
        device: torch.device,
        library: KernelLibrary | None = None,
    ) -> None:
        """``forms``: of each part, None for floats. ``library`` replaces the device's kernels."""
        self._in_features = in_features
        self._sizes = list(parts)
        self._starts = [sum(parts[:index]) for index in range(len(parts))]
        self._out_features = sum(parts)
        self._dtype = dtype
        self._device = device
        self._library = library
        self._runs = list(_runs(parts, forms))
        self._weights: dict[
            int, KernelWeights | Int4Weights | UnpackedWeights | WideWeights
        ] = {}  # keys are the runs' first parts
        self._bias: Tensor | None = None
        self.products: set[PackedProducts] = set()  # kernels that multiply with the packed parts

    @property
    def num_bytes(self) -> int:
        weights = sum(weights.num_bytes for weights in self._weights.values())
        return weights + (0 if self._bias is None else self._bias.nbytes)

    def fill(self, part: int, weight: ReadWeight) -> None:
        """Copy one part's weight from host memory. Raises RuntimeError if it differs in kind from its neighbours."""
        if isinstance(weight, Tensor):
            wide = WideWeights(*weight.shape, dtype=self._dtype, device=self._device)
            wide.weight.copy_(weight)
            self._weights[part] = wide
            return
        assert isinstance(weight, Packed)
        run = next(run for run in self._runs if part in run)
        found = self._weights.get(run.start)
        if found is None:
            found = self._weights[run.start] = self._new_weights(weight, sum(self._sizes[index] for index in run))
        assert not isinstance(found, WideWeights)
        found.fill(self._starts[part] - self._starts[run.start], weight)

    def fill_bias(self, part: int, bias: Tensor) -> None:
        if self._bias is None:
            self._bias = torch.zeros(self._out_features, dtype=self._dtype, device=self._device)
        at = self._starts[part]
        self._bias[at : at + len(bias)].copy_(bias)

    def rows(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], self._out_features, dtype=self._dtype, device=self._device)
        self._multiply(x, out, add=False)
        return out

    def add_to(self, x: Tensor, total: Tensor) -> None:
        self._multiply(x, total, add=True)

    def swiglu(self, x: Tensor) -> Tensor:
        return self.activated(x, "silu")

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """See ``GatedProduct``: in the kernel where both parts are one product of whole tiles."""
        weights = self._weights[0]
        if len(self._runs) == 1 and isinstance(weights, KernelWeights) and 0 < x.shape[0] <= MOST_ROWS:
            out = torch.empty(x.shape[0], self._sizes[0], dtype=self._dtype, device=self._device)
            weights.multiply(x, out, bias=self._bias, add=False, activation=activation)
            return out
        gate, up = self.rows(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up) if activation == "silu" else ACTIVATIONS[activation](gate, up)

    def finish(self) -> None:
        """Do nothing; the weights are complete."""

    def take(self, ids: Tensor) -> Tensor:
        """Return rows ids [T] int64 of a weight of one part as [T, I]."""
        (weights,) = self._weights.values()
        assert not isinstance(weights, Int4Weights)  # Int4Weights accept no tables
        return weights.take(ids)

    def _multiply(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        if not x.shape[0]:
            return
        for run in self._runs:
            columns = slice(self._starts[run.start], self._starts[run.stop - 1] + self._sizes[run.stop - 1])
            bias = None if self._bias is None else self._bias[columns]
            self._weights[run.start].multiply(x, out[:, columns], bias=bias, add=add)

    def _new_weights(self, weight: Packed, out_features: int) -> KernelWeights | Int4Weights | UnpackedWeights:
        try:
            products = self._products(weight)
        except KernelsUnavailable as exc:
            return self._without_kernels(weight, out_features, exc)
        self.products.add(PackedProducts(by="own kernels (CUDA)"))
        tiles = TiledWeight(kernel_form(weight), out_features, self._in_features, self._device)
        return KernelWeights(products, tiles, weight.order)

    def _without_kernels(
        self, weight: Packed, out_features: int, reason: KernelsUnavailable
    ) -> Int4Weights | UnpackedWeights:
        packs = Int4Weights.accepts(weight, out_features, self._device, self._dtype)
        by = "torch's int4pack" if packs else "torch (blocks widened)"
        self.products.add(reason.instead(by))
        _log_once(by, weight.form, str(reason))
        if packs:
            return Int4Weights(out_features, self._in_features, weight.form.group, self._device)
        return UnpackedWeights(weight, out_features, dtype=self._dtype, device=self._device)

    def _products(self, weight: Packed) -> Products:
        if self._dtype != torch.bfloat16:
            raise KernelsUnavailable(f"own kernels compute in bf16, not {self._dtype}")
        if not supports(weight.form, self._in_features) or not zeros_fit(weight):
            raise KernelsUnavailable(f"own kernels have no form with groups of {weight.form.group}")
        library = self._library or own_library(self._device)
        return library.products(kernel_form(weight))


def _runs(parts: Sequence[int], forms: Sequence[PackedForm | None]) -> Iterator[range]:
    """Split parts into runs of one form. A part begins a new one unless it can begin a new tile."""
    start = 0
    for index in range(1, len(parts) + 1):
        same = index < len(parts) and forms[index] == forms[start] and parts[index - 1] % TILE_ROWS == 0
        form = forms[start]
        if not same or form is None or form.ordered:
            yield range(start, index)
            start = index


@cache
def _log_once(by: str, form: PackedForm, reason: str) -> None:
    """Say which fallback computes and why, once per form."""
    logger.warning(
        "packed weights of %d bits, groups of %d, are multiplied by %s: %s", form.bits, form.group, by, reason
    )


class KernelWeights:
    """Tiles that own kernels read."""

    def __init__(self, products: Products, tiles: TiledWeight, order: npt.NDArray[Any] | None) -> None:
        self._products = products
        self._tiles = tiles
        self._order = None if order is None else torch.from_numpy(order).to(tiles.device)

    @property
    def num_bytes(self) -> int:
        return self._tiles.num_bytes + (0 if self._order is None else self._order.nbytes)

    def fill(self, first: int, weight: Packed) -> None:
        """Raises RuntimeError if scales or zeros are of another kind than those of other parts."""
        self._tiles.fill(first, weight)

    def multiply(
        self, x: Tensor, out: Tensor, *, bias: Tensor | None, add: bool, activation: Activation | None = None
    ) -> None:
        """``activation``: see ``Products.affine_mm``; of up to 64 rows."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        if x.shape[0] > MOST_ROWS:
            assert activation is None
            self._multiply_many(x, out, bias=bias, add=add)
            return
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        self._products.affine_mm(self._tiles, x, out, bias=bias, add=add, activation=activation)

    def take(self, ids: Tensor) -> Tensor:
        tiles = self._tiles
        found = torch.empty(len(ids), tiles.in_features, dtype=torch.bfloat16, device=tiles.device)
        self._products.dequantise(tiles, ids, found)
        if self._order is None:
            return found
        return torch.empty_like(found).index_copy_(1, self._order.long(), found)

    def _multiply_many(self, x: Tensor, out: Tensor, *, bias: Tensor | None, add: bool) -> None:
        tiles = self._tiles
        step = rows_at_once(tiles.out_features, tiles.in_features)
        scratch = torch.empty(step, tiles.in_features, dtype=torch.bfloat16, device=tiles.device)
        for start in range(0, tiles.out_features, step):
            rows = range(start, min(start + step, tiles.out_features))
            widened = scratch[: len(rows)]
            self._products.dequantise(tiles, rows, widened)
            part = slice(start, rows.stop)
            multiply_wide(x, widened, out[:, part], bias=None if bias is None else bias[part], add=add)
