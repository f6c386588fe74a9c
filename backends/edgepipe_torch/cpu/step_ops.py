"""Small operations of a step between its products, by kernels compiled for this CPU.

T rows, H hidden, Hq and Hkv heads, D head dim, V numbers of a head's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.spec.facts import ModelConfig
from edgepipe_torch.cpu.calls import HeadKernels
from edgepipe_torch.cpu.ir_text import float_bits
from edgepipe_torch.cpu.kernels import CpuKernels, Kernels, KernelsUnavailable
from edgepipe_torch.cpu.kv_code import row_fields
from edgepipe_torch.cpu.recurrent import CompiledStep
from edgepipe_torch.cpu.recurrent_code import step_form
from edgepipe_torch.cpu.step_code import ATTEND_JOB
from edgepipe_torch.layers.attention import SingleQuery
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv import KVPool
from edgepipe_torch.layers.linear import Workspace
from edgepipe_torch.layers.packed_attention import StepRests
from edgepipe_torch.layers.packed_kv import PackedKVStorage
from edgepipe_torch.layers.recurrent import Mixer
from edgepipe_torch.layers.step_ops import NO_NORMS, HeadNorms, TorchOps, norm_parts


class CompiledOps:
    """Computes float32 on a CPU with compiled kernels, and layers that the kernels lack with torch's operations.

    H and D are multiples of 8.
    """

    def __init__(self, kernels: CpuKernels, config: ModelConfig, workspace: Workspace, *, kv: str = "") -> None:
        """``kv``: form of the pools' KV; empty: they are ``KVStorage``, not ``PackedKVStorage``.

        Raises KernelsUnavailable if kernels compute no layer's attention.
        """
        self.kernels = kernels
        self.packed_kv = bool(kv)
        self._others = TorchOps(config)
        self._heads = _head_kernels(kernels, config, kv)
        self._epsilon = config.norm.eps
        self._workspace = workspace

    def attends(self, heads: LayerHeads) -> bool:
        """Return whether kernels compute the attention of a layer's single queries."""
        return not heads.softcap and (heads.head_dim, heads.value_width) in self._heads

    def places(self, heads: LayerHeads) -> bool:
        """Return whether kernels rotate a layer's queries and keys and write its keys and values."""
        return heads.rotates_whole and not heads.value_width and (heads.head_dim, 0) in self._heads

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = self._workspace.get("normed", *x.shape)
        self.kernels.normalise(x, weight, out, self._epsilon)
        return out

    def norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        if weight.shape[0] != heads.shape[-1]:
            heads = heads.view(heads.shape[0], -1)
        self.kernels.normalise(heads, weight, heads, self._epsilon)

    def place(
        self,
        qkv: Tensor,
        rotations: Tensor | None,
        slots: Tensor,
        pool: KVPool,
        heads: LayerHeads,
        norms: HeadNorms = NO_NORMS,
        rests: StepRests | None = None,
    ) -> None:
        norm_parts(self, qkv, heads, norms)
        if rotations is None or not self.places(heads):

            def place() -> Tensor:
                self._others.place(qkv, rotations, slots, pool, heads)
                return qkv

            self.kernels.compute(place)
        else:
            self._place(qkv, rotations, slots, pool, heads)
        if rests is not None:
            self.keep(heads, rests)

    def _place(self, qkv: Tensor, rotations: Tensor, slots: Tensor, pool: KVPool, heads: LayerHeads) -> None:
        arrays: list[Tensor] = [*pool.arrays(heads.layer)]
        kernels = self._heads[heads.head_dim, 0]
        if isinstance(pool, PackedKVStorage):
            arrays.append(pool.rests(heads, qkv.shape[0]) if kernels.keep is not None else arrays[0][:0])
        places = (qkv.data_ptr(), rotations.data_ptr(), slots.data_ptr(), *(each.data_ptr() for each in arrays))
        counts = (qkv.shape[0], heads.num_heads, heads.num_kv_heads)
        self.kernels.run(kernels.rotate, (*places, *counts), (qkv, rotations, slots, *arrays))

    def keep(self, heads: LayerHeads, rests: StepRests) -> None:
        """Write the lower bits of the tokens that were written last to a layer."""
        kernels = self._heads.get((heads.head_dim, heads.value_width))
        if kernels is None or kernels.keep is None:

            def keep() -> Tensor:
                rests.keep(heads)
                return rests.slots

            self.kernels.compute(keep)
            return
        assert rests.tokens is not None
        codes, made = rests.pool.arrays(heads.layer).codes, rests.pool.rests(heads, len(rests.slots))
        arrays = codes, made, rests.tokens, rests.slots
        places = tuple(each.data_ptr() for each in arrays)
        self.kernels.run(kernels.keep, (*places, len(rests.slots), codes.stride(0)), arrays)

    def compute(self, work: Callable[[], Tensor]) -> Tensor:
        return self.kernels.compute(work)

    def compile_mixers(self, mixers: Iterable[Mixer]) -> None:
        """Let kernels compute the rows with one token of recurrent layers, where they compute such layers."""
        for mixer in mixers:
            form = step_form(mixer.spec)
            with suppress(KernelsUnavailable):
                if form is not None:
                    function = self.kernels.recurrent(form)
                    mixer.kernel = CompiledStep(
                        self.kernels, function, mixer.spec, mixer.weights, self._workspace, eps=mixer.eps
                    )

    def single_queries(self, heads: LayerHeads, num_rows: int, longest: int, pool: KVPool) -> SingleQueries:
        """Return attention for rows with one query and at most ``longest`` keys each, in layers of one kind.

        ``heads``: of any of them, which ``attends`` accepts.
        """
        kernels = self._heads[heads.head_dim, heads.value_width]
        return SingleQueries(self, kernels, heads, num_rows, longest, pool, self._workspace)


def compiled_ops(kernels: Kernels, config: ModelConfig, workspace: Workspace, *, kv: str) -> CompiledOps | None:
    """Return the operations, or None if kernels are missing or compute wrong values on this CPU."""
    if not isinstance(kernels, CpuKernels):
        return None
    try:
        return CompiledOps(kernels, config, workspace, kv=kv)
    except KernelsUnavailable:
        return None


def _head_kernels(kernels: CpuKernels, config: ModelConfig, kv: str) -> Mapping[tuple[int, int], HeadKernels]:
    """Return the kernels of each size of a head and of its value. Raises KernelsUnavailable without any."""
    attentions = [spec.attention for spec in config.layers if spec.attention is not None]
    sizes = dict.fromkeys((each.head_dim, each.latent_width) for each in attentions if each.latent_width % 8 == 0)
    found: dict[tuple[int, int], HeadKernels] = {}
    missing = KernelsUnavailable("no layer's attention has kernels")
    for size in sizes:
        try:
            found[size] = kernels.heads(*size, kv=kv)
        except KernelsUnavailable as exc:
            missing = exc
    if not found:
        raise missing
    return found


class SingleQueries:
    """Attention of rows with one query each, by one compiled call per layer."""

    def __init__(
        self,
        ops: CompiledOps,
        kernels: HeadKernels,
        heads: LayerHeads,
        num_rows: int,
        longest: int,
        pool: KVPool,
        workspace: Workspace,
    ) -> None:
        """``heads``: of any layer of the kind; ``longest``: keys of a row, at most."""
        self._kernels = ops.kernels
        self._attend = kernels.attend
        self._pool = pool
        self.longest = longest
        self._slots: list[npt.NDArray[np.int64]] = []  # owned, of scattered rows and of lower bits
        self._table = np.zeros((num_rows, row_fields(kernels.keep is not None)), np.int64)
        shared = heads.num_heads // heads.num_kv_heads
        room = (longest // 8 * 8 + 8) * (shared if ops.packed_kv else 1)
        threads = torch.get_num_threads() if self._kernels.parallel else 1
        self._scores = workspace.get("scores", threads * room)
        values = {
            "rows": self._table.ctypes.data,
            "items": num_rows * heads.num_heads,
            "heads": heads.num_heads,
            "shared": shared,
            "pitch": pool.arrays(heads.layer)[0].stride(0),
            "scores": self._scores.data_ptr(),
            "room": room,
            "calls": self._kernels.openmp,
            "threads": threads,
            "scale": float_bits(heads.scale),
        }
        self._job = np.array([values.get(name, 0) for name in ATTEND_JOB], np.int64)

    def fill(self, rows: Sequence[SingleQuery]) -> None:
        """Set the rows' keys; as many rows as at the start."""
        self._slots = [each for row in rows for each in (row.slots, row.rests) if each is not None]
        for index, row in enumerate(rows):
            table = 0 if row.slots is None else row.slots.ctypes.data
            rests = () if row.rests is None else (row.rests.ctypes.data, len(row.rests))
            self._table[index] = row.row, row.first, table, row.length, *rests

    def run(self, heads: LayerHeads, queries: Tensor, out: Tensor) -> None:
        """Attend with queries [T, Hq, D] of all rows of the step; write the bound rows of out [T, Hq, V]."""
        job = self._job.copy() if self._kernels.recording else self._job
        arrays, sinks = self._pool.arrays(heads.layer), heads.sinks
        places = (queries.data_ptr(), queries.stride(0), out.data_ptr(), arrays[0].data_ptr(), arrays[-1].data_ptr())
        job[:6] = *places, 0 if sinks is None else sinks.data_ptr()
        self._kernels.run(self._attend, (job.ctypes.data,), (job, self, queries, out, heads, *arrays))
