"""Mixtures of experts on CUDA: products by (row, expert) that never wait for the device, so that graphs hold them.

Own kernels (``kernels``) sort the pairs of a row and an expert on the device, multiply each expert's weight with
all its pairs, and sum each row's results. Where they have no form for a matrix, its experts are multiplied one after
the other, which waits for the device to learn which were chosen.

T rows, K experts used by each, P = T * K pairs, E experts, H hidden, I in features, O out features of an expert.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.backend.types import PackedProducts
from edgepipe.spec.layer_spec import Activation
from edgepipe.spec.packed import Packed
from edgepipe.spec.packed_form import PackedForm
from edgepipe_torch.cuda.kernels.experts import ExpertKernels, Runs
from edgepipe_torch.cuda.kernels.forms import TILE_ROWS, WIDE_FORM, kernel_form, supports, zeros_fit
from edgepipe_torch.cuda.kernels.library import ExpertLibrary, own_library
from edgepipe_torch.cuda.kernels.products import weight_struct, wide_struct
from edgepipe_torch.cuda.packed import PackedCudaLinear
from edgepipe_torch.cuda.packed_tiles import TiledWeight
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.experts import ReadRows, Taken
from edgepipe_torch.layers.feed_forward import ACTIVATIONS

logger = logging.getLogger(__name__)

_MOST_ROWS = 2048  # limit of rows at once: their results of K experts each take memory
_ALIGNED_INPUTS = 8  # so many bf16 inputs take 16 bytes, the alignment of a row


class CudaExperts:
    """``ExpertProducts`` in bf16 on a CUDA device."""

    def __init__(
        self, gate_up: ExpertMatrix, down: ExpertMatrix, activation: Activation, library: ExpertLibrary
    ) -> None:
        """``gate_up`` has parts gate and up, ``down`` one part. Raises KernelsUnavailable."""
        self._gate_up = gate_up
        self._down = down
        self._activation: Activation = activation
        self._routing = library.routing()
        self._found = torch.zeros(2, dtype=torch.int32, device=gate_up.device)  # runs and experts of the last call

    @property
    def distinct(self) -> Tensor:
        """See ``ExpertProducts``. Its address is fixed, so graphs write it, too."""
        return self._found[1:]

    @property
    def linears(self) -> tuple[ExpertMatrix, ExpertMatrix]:
        """See ``ExpertProducts``."""
        return self._gate_up, self._down

    matrices = linears

    @property
    def waits(self) -> bool:
        """See ``ExpertProducts``."""
        return self._gate_up.waits or self._down.waits

    def add(self, x: Tensor, chosen: Tensor, weights: Tensor, total: Tensor) -> None:
        """See ``ExpertProducts``. Each row's results are summed in float32 in the order of ``chosen``.

        The sum passes over pairs of weight 0: those of experts in another place were not computed.
        """
        for start in range(0, x.shape[0], _MOST_ROWS):
            some = slice(start, start + _MOST_ROWS)
            self._add(x[some], chosen[some].contiguous(), weights[some].contiguous(), total[some])

    def _add(self, x: Tensor, chosen: Tensor, weights: Tensor, total: Tensor) -> None:
        runs = self._routing.sort(chosen, self._gate_up.count, self._found)
        inner = self._gate_up.multiply(x, chosen, runs, self._activation)
        self._routing.add_weighted(self._down.multiply(inner, chosen, runs, None), weights, total)


class ExpertMatrix:
    """One matrix of all experts, with parts (gate and up) of equal size side by side."""

    def __init__(
        self,
        count: int,
        in_features: int,
        parts: int,
        rows: int,
        forms: Sequence[PackedForm | None],
        *,
        device: torch.device,
        library: ExpertLibrary,
    ) -> None:
        """``rows``: of each expert in each part; ``forms``: of each part, None for floats."""
        self.count = count
        self._in_features = in_features
        self._parts = parts
        self._rows = rows
        self._forms = forms
        self.device = device
        self._library = library
        self._own: _PackedTiles | _WideRows | None = None
        self._each: list[PackedCudaLinear] = []
        self._bias: Tensor | None = None  # [parts * E * rows]
        self._packed_by: set[PackedProducts] = set()

    @property
    def num_bytes(self) -> int:
        """Device memory."""
        bias = 0 if self._bias is None or self._each else self._bias.nbytes
        own = 0 if self._own is None else self._own.num_bytes
        return own + bias + sum(linear.num_bytes for linear in self._each)

    @property
    def products(self) -> set[PackedProducts]:
        """What multiplies with packed parts."""
        return self._packed_by.union(*(linear.products for linear in self._each))

    @property
    def waits(self) -> bool:
        """Whether a product waits for the device. Known when all parts are filled."""
        return bool(self._each)

    def fill(self, part: int, weight: Tensor | Packed) -> None:
        """Copy a part of all experts [E * rows, I] from host memory.

        Raises RuntimeError if a packed part differs in kind from its neighbours.
        """
        if self._own is None and not self._each:
            try:
                self._own = self._new_weights(weight)
            except KernelsUnavailable as exc:
                self._each = self._one_by_one(weight, exc)
        if self._own is not None:
            self._own.fill(part * self.count * self._rows, weight)
            return
        for expert, linear in enumerate(self._each):
            own = slice(expert * self._rows, (expert + 1) * self._rows)
            linear.fill(part, weight.rows(own) if isinstance(weight, Packed) else weight[own])

    def fill_bias(self, part: int, bias: Tensor) -> None:
        """Copy the bias of a part of all experts [E * rows] from host memory."""
        size = self.count * self._rows
        if self._bias is None:
            self._bias = torch.zeros(self._parts * size, dtype=torch.bfloat16, device=self.device)
        self._bias[part * size : (part + 1) * size].copy_(bias)

    def fill_taken(self, part: int, read: ReadRows, taken: Taken) -> None:
        """See ``layers.experts.ExpertMatrix``."""
        weight = read(taken.order)
        assert isinstance(weight, Tensor | Packed)  # CUDA devices read no other kind
        self.fill(part, weight)

    def fill_taken_bias(self, part: int, bias: Tensor, taken: Taken) -> None:
        """See ``layers.experts.ExpertMatrix``."""
        self.fill_bias(part, bias if taken.order is None else bias[torch.from_numpy(taken.order)])

    def finish(self) -> None:
        """Do nothing; the weights are complete."""

    def multiply(self, x: Tensor, chosen: Tensor, runs: Runs, activation: Activation | None) -> Tensor:
        """Return each pair's product [P, O] bf16, or its activation [P, O] of gate and up.

        x  [T, I], or [P, I] with a row for each pair
        """
        if self._own is None:
            return self._multiply_each(x, chosen, activation)
        if x.stride(1) != 1 or x.stride(0) % _ALIGNED_INPUTS or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        out = torch.empty(chosen.numel(), self._rows, dtype=torch.bfloat16, device=self.device)
        own = self._own
        own.products.expert_mm(own.struct, self.count, runs, x, out, bias=self._bias, activation=activation)
        return out

    def _new_weights(self, weight: Tensor | Packed) -> _PackedTiles | _WideRows:
        """Return storage for own kernels; ``weight``: the first part. Raises KernelsUnavailable."""
        if self._rows % TILE_ROWS or self._in_features % TILE_ROWS:
            raise KernelsUnavailable(f"own kernels need experts with multiples of {TILE_ROWS} features")
        form = self._forms[0]
        if any(other != form for other in self._forms):
            raise KernelsUnavailable("own kernels need gates and ups of one type")
        rows = self._parts * self.count * self._rows
        if not isinstance(weight, Packed):
            return _WideRows(self._library.experts(WIDE_FORM), rows, self._in_features, self.device)
        if weight.form.ordered or not supports(weight.form, self._in_features) or not zeros_fit(weight):
            raise KernelsUnavailable(f"own kernels have no form with groups of {weight.form.group}")
        own = _PackedTiles(self._library.experts(kernel_form(weight)), weight, rows, self.device)
        self._packed_by.add(PackedProducts(by="own kernels (CUDA)"))
        return own

    def _one_by_one(self, weight: Tensor | Packed, reason: KernelsUnavailable) -> list[PackedCudaLinear]:
        _log_once(weight.form if isinstance(weight, Packed) else None, str(reason))
        sizes = [self._rows] * self._parts
        return [
            PackedCudaLinear(self._in_features, sizes, self._forms, dtype=torch.bfloat16, device=self.device)
            for _ in range(self.count)
        ]

    def _multiply_each(self, x: Tensor, chosen: Tensor, activation: Activation | None) -> Tensor:
        """``multiply``, waiting for the device."""
        out = torch.empty(chosen.numel(), self._rows, dtype=torch.bfloat16, device=self.device)
        order = chosen.reshape(-1).argsort(stable=True)
        used, counts = chosen.reshape(-1)[order].unique_consecutive(return_counts=True)
        bias = None if self._bias is None else self._bias.view(self._parts, self.count, self._rows)
        start = 0
        for expert, count in zip(used.tolist(), counts.tolist(), strict=True):
            pairs = order[start : start + count]
            start += count
            if expert < 0:
                continue
            found = self._each[expert].rows(x[pairs // (chosen.numel() // x.shape[0])])
            found = found if bias is None else found + bias[:, expert].reshape(-1)
            out[pairs] = found if activation is None else _activated(activation, found)
        return out


def _activated(activation: Activation, found: Tensor) -> Tensor:
    """Return the activation [P, O] of gates and ups [P, 2 O]."""
    gate, up = found.chunk(2, dim=-1)
    return F.silu(gate) * up if activation == "silu" else ACTIVATIONS[activation](gate, up)


class _PackedTiles:
    """Packed rows in tiles that own kernels read."""

    def __init__(self, products: ExpertKernels, weight: Packed, rows: int, device: torch.device) -> None:
        self.products = products
        self._tiles = TiledWeight(kernel_form(weight), rows, weight.shape[1], device)
        self.struct = weight_struct(self._tiles)

    @property
    def num_bytes(self) -> int:
        return self._tiles.num_bytes

    def fill(self, first: int, weight: Tensor | Packed) -> None:
        """Raises RuntimeError if scales or zeros are of another kind than those of other parts."""
        assert isinstance(weight, Packed)
        self._tiles.fill(first, weight)
        self.struct = weight_struct(self._tiles)  # has the integer zero now


class _WideRows:
    """bf16 rows that own kernels read."""

    def __init__(self, products: ExpertKernels, rows: int, in_features: int, device: torch.device) -> None:
        self.products = products
        self._weight = torch.empty(rows, in_features, dtype=torch.bfloat16, device=device)
        self.struct = wide_struct(self._weight)

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def fill(self, first: int, weight: Tensor | Packed) -> None:
        assert isinstance(weight, Tensor)
        self._weight[first : first + weight.shape[0]].copy_(weight)


def expert_library(device: torch.device, dtype: torch.dtype) -> ExpertLibrary | None:
    """Return the device's kernels for experts; None where it has none or the dtype is another."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    try:
        found = own_library(device)
        found.routing()
    except KernelsUnavailable as exc:
        _log_once(None, str(exc))
        return None
    return found


@cache
def _log_once(form: PackedForm | None, reason: str) -> None:
    """Say once per form that experts are multiplied one by one."""
    kind = "16 bits" if form is None else f"{form.bits} bits, groups of {form.group},"
    logger.warning("experts of %s are multiplied one after the other, without CUDA graphs: %s", kind, reason)
