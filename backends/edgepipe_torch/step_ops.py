"""Small operations of a step between its products: by torch, or by kernels compiled for this CPU.

T rows, H hidden, Hq and Hkv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.model.facts import ModelConfig
from edgepipe_torch.cpu_kernels import CpuKernels
from edgepipe_torch.cpu_step_code import ATTEND_JOB
from edgepipe_torch.kv import KVPool, KVStorage
from edgepipe_torch.linear import Workspace


class StepOps(Protocol):
    """Operations that a decoder needs."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the RMSNorm of x [T, H], valid until the next call."""
        ...

    def norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        """Normalise heads [T, n, D], a view of some of a row's heads, in place."""
        ...

    def place(self, qkv: Tensor, rotations: Tensor, slots: Tensor, pool: KVPool, layer: int) -> None:
        """Rotate queries and keys of qkv [T, Hq + 2 Hkv, D] in place; write keys and values to the pool's slots [T].

        rotations [T, 1, D / 2] complex64.
        """
        ...


class TorchOps:
    """By torch's operations, for any device and dtype."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._config.rms_norm_eps)

    def norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        heads.copy_(self.norm(heads, weight))

    def place(self, qkv: Tensor, rotations: Tensor, slots: Tensor, pool: KVPool, layer: int) -> None:
        config = self._config
        rotate(qkv[:, : config.num_heads + config.num_kv_heads], rotations)
        pool.write(layer, slots, qkv[:, config.num_heads :])


def rotate(heads: Tensor, rotations: Tensor) -> None:
    """Rotate heads [T, heads, D] in place; pairs are adjacent. rotations [T, 1, D / 2] complex64."""
    if heads.dtype == torch.float32:
        torch.view_as_complex(heads.unflatten(-1, (-1, 2))).mul_(rotations)
        return
    turned = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2))).mul_(rotations)
    heads.copy_(torch.view_as_real(turned).flatten(-2))


class CompiledOps:
    """By compiled kernels, for float32 on a CPU. H and D are multiples of 8."""

    def __init__(self, kernels: CpuKernels, config: ModelConfig, workspace: Workspace) -> None:
        self.kernels = kernels
        self._heads = kernels.heads(config.head_dim)
        self._config = config
        self._workspace = workspace

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = self._workspace.get("normed", *x.shape)
        self.kernels.normalise(x, weight, out, self._config.rms_norm_eps)
        return out

    def norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        self.kernels.normalise(heads, weight, heads, self._config.rms_norm_eps)

    def place(self, qkv: Tensor, rotations: Tensor, slots: Tensor, pool: KVPool, layer: int) -> None:
        assert isinstance(pool, KVStorage)  # 8-bit KV has no compiled kernels
        layer_pool = pool.layer(layer)
        places = (qkv.data_ptr(), rotations.data_ptr(), slots.data_ptr(), layer_pool.data_ptr())
        counts = (qkv.shape[0], self._config.num_heads, self._config.num_kv_heads)
        self.kernels.run(self._heads.rotate, (*places, *counts), (qkv, rotations, slots, layer_pool))

    def single_queries(self, num_rows: int, longest: int, pool: KVStorage) -> SingleQueries:
        """Return attention for rows with one query and at most ``longest`` keys each."""
        return SingleQueries(self.kernels, self._config, num_rows, longest, pool, self._workspace)


@dataclass(frozen=True, slots=True)
class SingleQuery:
    """Keys of one row of a step."""

    row: int  # of queries and results
    first: int  # slot of the first key, unless they are scattered
    length: int
    slots: npt.NDArray[np.int64] | None  # [length] of scattered keys


class SingleQueries:
    """Attention of rows with one query each, by one compiled call per layer."""

    def __init__(
        self,
        kernels: CpuKernels,
        config: ModelConfig,
        num_rows: int,
        longest: int,
        pool: KVStorage,
        workspace: Workspace,
    ) -> None:
        """``longest``: keys of a row, at most."""
        self._kernels = kernels
        self._attend = kernels.heads(config.head_dim).attend
        self._pool = pool
        self.longest = longest
        self._slots: list[npt.NDArray[np.int64]] = []  # owned, of scattered rows
        self._table = np.zeros((num_rows, 4), np.int64)
        pitch = longest // 8 * 8 + 8
        threads = torch.get_num_threads() if kernels.parallel else 1
        self._scores = workspace.get("scores", threads * pitch)
        values = {
            "rows": self._table.ctypes.data,
            "items": num_rows * config.num_heads,
            "heads": config.num_heads,
            "shared": config.num_heads // config.num_kv_heads,
            "pitch": 2 * config.num_kv_heads * config.head_dim,
            "scores": self._scores.data_ptr(),
            "longest": pitch,
            "calls": kernels.openmp,
            "threads": threads,
        }
        self._job = np.array([values.get(name, 0) for name in ATTEND_JOB], np.int64)

    def fill(self, rows: Sequence[SingleQuery]) -> None:
        """Set the rows' keys; as many rows as at the start."""
        self._slots = [row.slots for row in rows if row.slots is not None]
        for index, row in enumerate(rows):
            table = 0 if row.slots is None else row.slots.ctypes.data
            self._table[index] = row.row, row.first, table, row.length

    def run(self, layer: int, queries: Tensor, out: Tensor) -> None:
        """Attend with queries [T, Hq, D] of all rows of the step; write the bound rows of out [T, Hq, D]."""
        job = self._job.copy() if self._kernels.recording else self._job
        keys = self._pool.layer(layer)
        job[:4] = queries.data_ptr(), queries.stride(0), out.data_ptr(), keys.data_ptr()
        self._kernels.run(self._attend, (job.ctypes.data,), (job, self, queries, out, keys))
