"""Products with a mixture's experts on CUDA: which kernels run, with how many blocks, on what.

T rows, K experts used by each, P = T * K pairs, E experts, I in features, O out features of an expert.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from edgepipe.spec.layer_spec import Activation, Router
from edgepipe_torch.cuda.kernels.driver import THREADS, Module
from edgepipe_torch.cuda.kernels.forms import KernelForm
from edgepipe_torch.cuda.kernels.products import (
    ACTIVATION_CODES,
    WARPS,
    WeightStruct,
    least_warps_down,
    partial_bytes,
    staged_bytes,
    staged_inputs,
)

_COLUMN_TILES = (1, 2, 8)  # sizes in tiles of 8 pairs of a run
_SKEW = 4  # an expert's pairs beyond so many times the mean go to further runs
_FULL_LOAD = 0.9  # least share of busy multiprocessors, as for other products
_MOST_BLOCKS = 1024  # limit of the weighted sum's blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Pairs sorted by expert, in runs of one expert; which experts have any is known on the device only."""

    order: Tensor  # [P] int32: pairs, of which pair t * K + k is row t's k-th; those left out are missing at the end
    runs: Tensor  # [most runs, 3] int32: expert, first place in ``order``, pairs
    count: Tensor  # [1] int32
    column_tiles: int  # 8 times so many pairs fit a run
    used: int  # K
    rows: int  # T

    @property
    def most_runs(self) -> int:
        """Upper bound of the number of runs."""
        return self.runs.shape[0]


def column_tiles(rows: int, used: int, experts: int) -> int:
    """Return how many tiles of 8 pairs a run takes. A row uses an expert once, so an expert has up to ``rows``."""
    expected = min(rows, _SKEW * -(-rows * used // experts))
    return next((size for size in _COLUMN_TILES if 8 * size >= expected), _COLUMN_TILES[-1])


def most_runs(rows: int, used: int, experts: int, most: int) -> int:
    """Return an upper bound of runs of up to ``most`` pairs, whatever experts the rows chose."""
    pairs = rows * used
    return min(pairs, experts * -(-rows // most), min(pairs, experts) + pairs // most)


class RoutingKernels:
    """Choose experts, sort pairs by expert, and sum a row's results, those of a gated part, too."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def choose(self, how: Router, logits: Tensor, correction: Tensor | None, used: int) -> tuple[Tensor, Tensor]:
        """See ``feed_forward.choose``; of equals, the expert of the lower number is chosen. One group.

        logits [T, E] and correction [E] float32
        """
        rows, experts = logits.shape
        logits = logits.contiguous()
        chosen = torch.empty(rows, used, dtype=torch.int64, device=logits.device)
        weights = torch.empty(rows, used, dtype=torch.float32, device=logits.device)
        if not rows:
            return chosen, weights
        self._module.launch(
            "choose",
            blocks=rows,
            shared_bytes=5 * experts + 8 * THREADS,
            arguments=(
                _pointer(logits),
                ctypes.c_void_p(None) if correction is None else _pointer(correction),
                ctypes.c_int(experts),
                ctypes.c_int(used),
                ctypes.c_int(how.score == "sigmoid"),
                ctypes.c_int(how.normalised),
                _pointer(chosen),
                _pointer(weights),
            ),
        )
        return chosen, weights

    def sort(self, chosen: Tensor, experts: int, found: Tensor) -> Runs:
        """Sort the pairs of chosen [T, K] int64, whose rows adjoin; a row's experts differ, or are -1: left out.

        found [2] int32: gets the number of runs and of distinct experts
        """
        rows, used = chosen.shape
        tiles = column_tiles(rows, used, experts)
        runs = Runs(
            order=torch.empty(rows * used, dtype=torch.int32, device=chosen.device),
            runs=torch.empty(most_runs(rows, used, experts, 8 * tiles), 3, dtype=torch.int32, device=chosen.device),
            count=found[:1],
            column_tiles=tiles,
            used=used,
            rows=rows,
        )
        self._module.launch(
            "sort_pairs",
            blocks=1,
            shared_bytes=4 * (experts + experts % 2) + 2 * 8 * experts + 4,
            arguments=(
                _pointer(chosen),
                ctypes.c_int(rows * used),
                ctypes.c_int(experts),
                ctypes.c_int(8 * tiles),
                _pointer(runs.order),
                _pointer(runs.runs),
                _pointer(found),
            ),
        )
        return runs

    def add_weighted(self, results: Tensor, weights: Tensor, total: Tensor) -> None:
        """Add the sum of each row's results [P, O] bf16, times weights [T, K] float32, to total [T, O] bf16. O is even.

        Results of weight 0 may be undefined. Results and weights are whole; rows of total begin at multiples of 4
        bytes.
        """
        rows, used = weights.shape
        features = results.shape[1]
        blocks = -(-rows * features // 2 // THREADS)
        self._module.launch(
            "add_weighted",
            blocks=min(blocks, _MOST_BLOCKS),
            shared_bytes=0,
            arguments=(
                _pointer(results),
                _pointer(weights),
                ctypes.c_int(used),
                ctypes.c_int(features),
                ctypes.c_int(rows),
                _pointer(total),
                ctypes.c_int(total.stride(0)),
            ),
        )

    def add_gated(self, x: Tensor, gate: Tensor, added: Tensor, total: Tensor) -> None:
        """See ``layers.routing.add_gated``; bf16, columns adjoin."""
        assert gate.is_contiguous()
        assert x.stride(1) == added.stride(1) == total.stride(1) == 1
        if not x.shape[0]:
            return
        self._module.launch(
            "add_gated",
            blocks=x.shape[0],
            shared_bytes=4 * THREADS,
            arguments=(
                _pointer(x),
                ctypes.c_int(x.stride(0)),
                _pointer(gate),
                ctypes.c_int(x.shape[1]),
                _pointer(added),
                ctypes.c_int(added.stride(0)),
                ctypes.c_int(total.shape[1]),
                _pointer(total),
                ctypes.c_int(total.stride(0)),
            ),
        )


class ExpertKernels:
    """Kernels of one form on one device."""

    def __init__(self, module: Module, form: KernelForm, *, multiprocessors: int) -> None:
        self._module = module
        self._form = form
        self._multiprocessors = multiprocessors

    def expert_mm(
        self,
        weight: WeightStruct,
        experts: int,
        runs: Runs,
        x: Tensor,
        out: Tensor,
        *,
        bias: Tensor | None,
        activation: Activation | None = None,
    ) -> None:
        """Multiply x by each pair's expert into out [P, O] bf16. The weight holds E * O rows; O is a multiple of 16.

        x           [T, I], or [P, I] with a row for each pair; bf16, columns adjoin, rows begin at 16 bytes
        bias        [E * O] bf16
        activation  the weight and the bias hold the gates of all experts, then their ups; out is [P, O / 2]
        """
        gated = activation is not None
        tiles = weight.row_tiles // experts // (2 if gated else 1)
        down = expert_warps_down(self._form, tiles, runs, gated=gated, multiprocessors=self._multiprocessors)
        pairs = min(8 * runs.column_tiles, runs.rows)
        chunk = staged_inputs(self._form, weight.input_tiles, pairs, down, column_tiles=runs.column_tiles)
        blocks = -(-tiles // (down // 2 if gated else down))
        staged = staged_bytes(self._form, pairs, chunk, column_tiles=runs.column_tiles)
        self._module.launch(
            f"expert_mm_{runs.column_tiles}",
            blocks=runs.most_runs * blocks,
            shared_bytes=max(staged, partial_bytes(runs.column_tiles)),
            arguments=(
                weight,
                _Runs(runs.order.data_ptr(), runs.runs.data_ptr(), runs.count.data_ptr()),
                ctypes.c_int(experts),
                _pointer(x),
                ctypes.c_int(x.stride(0)),
                ctypes.c_int(runs.order.shape[0] // x.shape[0]),
                _pointer(out),
                ctypes.c_int(out.stride(0)),
                ctypes.c_void_p(None) if bias is None else _pointer(bias),
                ctypes.c_int(-1 if activation is None else ACTIVATION_CODES[activation]),
                ctypes.c_int(blocks),
                ctypes.c_int(chunk),
                ctypes.c_int(down),
            ),
        )


class _Runs(ctypes.Structure):
    """``Runs`` of experts.cu."""

    _fields_ = (("order", ctypes.c_void_p), ("runs", ctypes.c_void_p), ("count", ctypes.c_void_p))


def expert_warps_down(form: KernelForm, tiles: int, runs: Runs, *, gated: bool, multiprocessors: int) -> int:
    """Return how many row tiles a block takes, of an expert's ``tiles`` (gated: of so many gates and as many ups).

    More of them read the inputs in fewer blocks, but every multiprocessor needs a block.
    """
    pairs = min(8 * runs.column_tiles, runs.rows)
    down = least_warps_down(form, pairs, column_tiles=runs.column_tiles, gated=gated)
    all_tiles = runs.most_runs * tiles * (2 if gated else 1)
    while down < WARPS and all_tiles / (2 * down) >= _FULL_LOAD * multiprocessors:
        down *= 2
    return down


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
