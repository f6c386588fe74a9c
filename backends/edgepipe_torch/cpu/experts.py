"""Experts of a step on a CPU with packed weights: one compiled call for all of them, not some calls for each.

T rows, H hidden, I inner features, E experts, K of them used by each row, P = T * K pairs of a row and an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.spec.layer_spec import Activation
from edgepipe_torch.cpu.calls import KernelCalls
from edgepipe_torch.cpu.packed import Chain, PackedCpuLinear
from edgepipe_torch.layers.experts import EachExpert, ExpertLinears
from edgepipe_torch.layers.feed_forward import ACTIVATIONS
from edgepipe_torch.layers.linear import Linear, Workspace


class CpuExperts:
    """``ExpertProducts`` whose kernels multiply all experts of a step at once; without kernels, one by one."""

    def __init__(
        self, each: EachExpert, activation: Activation, workspace: Workspace, *, elsewhere: bool = False
    ) -> None:
        """``each``: experts whose products are ``PackedCpuLinear``, filled later.

        ``elsewhere``: the layer has experts in another place, too.
        """
        self._each = each
        self._activation = activation
        self._workspace = workspace
        self._elsewhere = elsewhere
        self._products: tuple[_Grouped, _Grouped] | None = None
        self._finished = False
        self.distinct = 0  # see ``ExpertProducts``

    @property
    def linears(self) -> Sequence[Linear]:
        """See ``ExpertProducts``."""
        return self._each.linears

    @property
    def matrices(self) -> tuple[ExpertLinears, ExpertLinears]:
        """See ``ExpertProducts``."""
        return self._each.matrices

    @property
    def waits(self) -> bool:
        """See ``ExpertProducts``."""
        return True

    def add(self, x: Tensor, chosen: Tensor, weights: Tensor, total: Tensor) -> None:
        """See ``ExpertProducts``. Each row's experts are added in their order in ``chosen``."""
        if not self._finished:
            self._products = self._grouped()
            self._finished = True
        if self._products is None:
            self._each.add(x, chosen, weights, total)
            self.distinct = self._each.distinct
            return
        gate_up, down = self._products
        sorted_by = _Sorted(chosen, gate_up.num_experts, elsewhere=self._elsewhere)
        self.distinct = len(sorted_by.used)
        if not self.distinct:
            return
        rows = self._workspace.get("expert inputs", len(sorted_by.rows), x.shape[1])
        torch.index_select(x, 0, sorted_by.rows, out=rows)
        found = gate_up.rows(rows, sorted_by, self._workspace)
        inner = self._inner(gate_up.kernels, found)
        out = down.rows(inner, sorted_by, self._workspace, spare=int(self._elsewhere))
        gate_up.kernels.join(out, sorted_by.places, weights.contiguous(), total)

    def _inner(self, kernels: KernelCalls, found: Tensor) -> Tensor:
        """Return the activation of gates and ups [P, 2 I] as [P, I]."""
        if self._activation == "silu":
            out = self._workspace.get("experts swiglu", found.shape[0], found.shape[1] // 2)
            kernels.swiglu(found, out)
            return out
        gate, up = found.chunk(2, dim=-1)
        return ACTIVATIONS[self._activation](gate, up).contiguous()

    def _grouped(self) -> tuple[_Grouped, _Grouped] | None:
        """Return both products; None if kernels do not multiply all experts."""
        own = [[linear for linear in linears if isinstance(linear, PackedCpuLinear)] for linears in self._each.by_role]
        gate_up, down = ([chain for linear in linears if (chain := linear.chain)] for linears in own)
        count = self._each.num_experts
        if len(gate_up) != count or len(down) != count or own[1][0].out_features % 8:
            return None
        return _Grouped("gate_up", gate_up, own[0][0].out_features), _Grouped("down", down, own[1][0].out_features)


@dataclass(slots=True)
class _Sorted:
    """Pairs of a row and an expert, sorted by expert."""

    rows: Tensor  # [P] int64: the row of each pair
    places: Tensor  # [T, K] int64: where a row's pairs are; behind the last those of experts elsewhere
    used: npt.NDArray[np.int64]  # [n]: experts with rows
    counts: npt.NDArray[np.int64]  # [n]: their rows

    def __init__(self, chosen: Tensor, num_experts: int, *, elsewhere: bool) -> None:
        """chosen [T, K] int64; a row's are distinct. ``elsewhere``: or -1."""
        flat = chosen.numpy().reshape(-1)
        if len(chosen) == 1 and not elsewhere:
            self.rows, self.places, self.counts = _of_one_row(len(flat))
            self.used = flat
            return
        order = flat.argsort(kind="stable")
        if elsewhere:
            order = order[np.count_nonzero(flat < 0) :]
        counts = np.bincount(flat[order] if elsewhere else flat, minlength=num_experts)
        places = np.full_like(flat, len(order))
        places[order] = np.arange(len(order))
        self.rows = torch.from_numpy(order // chosen.shape[1])
        self.places = torch.from_numpy(places).view(chosen.shape)
        self.used = counts.nonzero()[0]
        self.counts = counts[self.used]


@cache
def _of_one_row(used: int) -> tuple[Tensor, Tensor, npt.NDArray[np.int64]]:
    """Return rows, places and counts of a step of one row, which need no sorting."""
    return torch.zeros(used, dtype=torch.int64), torch.arange(used).unsqueeze(0), np.ones(used, np.int64)


class _Grouped:
    """One product of all experts."""

    def __init__(self, role: str, chains: Sequence[Chain], out_features: int) -> None:
        self.kernels = chains[0].kernels
        self.num_experts = len(chains)
        self._role = role
        self._out_features = out_features
        self._firsts = np.array([chain.first for chain in chains])
        self._slot = chains[0].slot  # all experts have the same shape and form
        self._pitch = max(chain.pitch for chain in chains)

    def rows(self, x: Tensor, by: _Sorted, workspace: Workspace, *, spare: int = 0) -> Tensor:
        """Multiply the sorted rows x [P, I]; the result [P + spare, O], spare rows 0, is valid until the next call."""
        groups = np.empty((len(by.used), 3), np.int64)
        groups[:, 0] = self._firsts[by.used]
        groups[:, 1] = by.counts.cumsum() - by.counts
        groups[:, 2] = by.counts
        out = workspace.get(f"experts {self._role}", x.shape[0] + spare, self._out_features)
        if spare:
            out[-spare:].zero_()
        scratch = workspace.get("packed inputs", x.shape[0] * self._pitch)
        threads = torch.get_num_threads()
        self.kernels.multiply_groups(groups, x, out, scratch, pitch=self._pitch, slot=self._slot, threads=threads)
        return out
