"""A CPU as a ``Device``."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from edgepipe.backend.free_cores import CoreTimes, ThreadChoice
from edgepipe.backend.machine_cores import core_times
from edgepipe.backend.machine_memory import machine_memory
from edgepipe.backend.types import DEFAULT_BLOCK_SIZE, DeviceProfile, KernelError
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Experts, Router
from edgepipe.weights.repacked import RepackedPlace
from edgepipe.weights.resident import WIDE
from edgepipe.weights.stored_weight import Rows, StoredWeight
from edgepipe_torch.cpu.dot_attention import attend
from edgepipe_torch.cpu.experts import CpuExperts
from edgepipe_torch.cpu.kernel_errors import cpu_kernel_errors
from edgepipe_torch.cpu.kernels import CpuKernels, Kernels, cpu_kernels
from edgepipe_torch.cpu.linear import HalfLinear, TiledLinear, half_works
from edgepipe_torch.cpu.packed import PackedCpuLinear, RouterLinear, multiplies_floats
from edgepipe_torch.cpu.repack import repack, repack_blocks
from edgepipe_torch.cpu.repack_code import BLOCK_CODES
from edgepipe_torch.cpu.replay import DecodeReplays, can_record, can_replay_decode
from edgepipe_torch.cpu.routing import choose
from edgepipe_torch.cpu.shard_cache import ShardCache
from edgepipe_torch.cpu.step_ops import CompiledOps, compiled_ops
from edgepipe_torch.cpu.tiled_weight import TiledWeight
from edgepipe_torch.cpu.transfer import HostTransfer
from edgepipe_torch.cpu.weight_memory import WeightMemory
from edgepipe_torch.layers.attention import CausalMasks, SequenceAttention, StepAttention
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.device import PAGE_TOKENS, AllocatedSlice, Device, SliceSteps
from edgepipe_torch.layers.experts import EXPERTS, ExpertProducts, each_expert
from edgepipe_torch.layers.head_shape import kernels_fit
from edgepipe_torch.layers.linear import Linear, PartForms, PlainLinear, ReadWeight, Workspace
from edgepipe_torch.layers.measuring import CPU_MEASURED, bandwidth, dtype_name, matrix_rate
from edgepipe_torch.layers.packed_attention import PackedSequenceAttention
from edgepipe_torch.layers.packed_kv import PackedKVStorage
from edgepipe_torch.layers.prepared import PreparedStep, Replayed
from edgepipe_torch.layers.recurrent import Mixer
from edgepipe_torch.layers.routing import Choose
from edgepipe_torch.layers.step_ops import StepOps, TorchOps
from edgepipe_torch.layers.transfer import Transfer

logger = logging.getLogger(__name__)


class CpuDevice(Device):
    """Float32 by kernels, or bf16 by torch's operations."""

    own_memory = False
    picks_candidates = False
    block_sizes: tuple[int, ...] = (DEFAULT_BLOCK_SIZE, PAGE_TOKENS)

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        packed: bool = True,
        kv: str = "",
        digits: int = 0,
        kernels: Kernels | None = None,
        threads: ThreadChoice | None = None,
        read_times: Callable[[], CoreTimes] = core_times,
    ) -> None:
        """``packed``: weights with a form stay so where this type allows. ``kv``: form of the KV; empty: ``dtype``.

        digits      of inputs of packed weights (``CpuKernels.product``)
        kernels     None for this process's
        threads     chooses the number of threads, where results do not depend on it; None: torch's stays
        read_times  reads the use of the processors for it
        """
        self.place = torch.device("cpu")
        self.dtype = dtype
        self.packed = packed and dtype == torch.float32
        self.packing = "torch-cpu" if packed else WIDE
        self.transfer: Transfer = HostTransfer()
        self.cache: ShardCache | None = None  # file of repacked weights, which may still be written
        self._kv = kv
        self._digits = digits
        self._given = kernels
        self._threads = threads
        self._read_times = read_times
        self._reset()

    def profile(self) -> DeviceProfile:
        total = machine_memory().total_bytes
        return DeviceProfile(
            backend="torch",
            device=str(self.place),
            name=_cpu_name(),
            compute_dtype=dtype_name(self.dtype),
            memory_total_bytes=total,
            memory_free_bytes=min(self.free_bytes(), total),
            bandwidth_bytes_per_s=bandwidth(self.place, self.dtype, CPU_MEASURED),
            flops=matrix_rate(self.place, self.dtype, CPU_MEASURED),
            block_sizes=self.block_sizes,
            contiguous_kv=True,
        )

    def kernel_errors(self) -> Iterator[KernelError]:
        return cpu_kernel_errors(self._kernels)

    def free_bytes(self) -> int:
        return machine_memory().available_bytes

    def start_load(self, kept: RepackedPlace | None) -> None:
        self.cache = ShardCache(kept, self._memory) if kept is not None and self.packed else None
        kernels = self._kernels if self._digits else None
        if isinstance(kernels, CpuKernels) and not kernels.byte_products:
            logger.warning("inputs stay float32: this CPU adds no products of bytes (AVX-512 VNNI, AVX-VNNI or AVX2)")

    def begin_step(self) -> None:
        """See ``Device``. Sets the number of threads, if all weights are packed: others' products depend on it."""
        choice = self._threads
        if choice is None or not self._adapts or not choice.due(time.monotonic()):
            return
        choice.note(self._read_times())
        if choice.threads != torch.get_num_threads():
            logger.debug("steps take %d threads now, beside other programs", choice.threads)
            torch.set_num_threads(choice.threads)

    def end_step(self) -> None:
        """See ``Device``."""
        if self._threads is not None:
            self._threads.ended(time.monotonic())

    def product(self, role: str, in_features: int, sizes: Sequence[int], parts: PartForms) -> Linear:
        is_expert = role == EXPERTS
        if any(parts.forms):
            return PackedCpuLinear(
                role,
                in_features,
                sizes,
                self.workspace,
                self._given,
                tiled_floats=is_expert,
                memory=self._memory,
                digits=self._digits,
            )
        if self.dtype != torch.float32:
            return PlainLinear(in_features, sizes, dtype=self.dtype, device=self.place)
        if is_expert and in_features % 8 == 0 and isinstance(kernels := self._kernels, CpuKernels):
            return PackedCpuLinear(
                role, in_features, sizes, self.workspace, kernels, tiled_floats=True, memory=self._memory
            )
        kind = HalfLinear if parts.fit_16_bits and half_works() else TiledLinear
        return kind(role, in_features, sizes, self.workspace)

    def read(self, weight: StoredWeight, rows: Rows | None = None) -> ReadWeight:
        """See ``Device``. Weights with a form are read into the kernels' tiles. The cache keeps those of no experts."""
        if weight.info.form is None:
            return super().read(weight, rows)
        if self.cache is None or isinstance(rows, slice):
            return self._tiled(weight, rows)
        found = self.cache.read(weight.info, rows)
        if found is None:
            found = self._tiled(weight, rows)
            self.cache.keep(weight.info, rows, found)
        return found

    def _tiled(self, weight: StoredWeight, rows: Rows | None) -> TiledWeight:
        """Tile a weight: block by block from its file where compiled code does that, else by way of ``Packed``."""
        kernels, blocks = self._kernels, None if weight.is_read else weight.blocks
        if isinstance(kernels, CpuKernels) and blocks is not None and blocks.scheme in BLOCK_CODES:
            with suppress(KernelsUnavailable):
                return repack_blocks(blocks, weight.read_range, kernels.repack(blocks.scheme), rows, self._memory)
        return repack(weight.packed_rows(rows), self._memory)

    def router(self, in_features: int, count: int) -> Linear | None:
        kernels = self._kernels
        if self.dtype != torch.float32 or in_features % 8 or not multiplies_floats(kernels):
            return None
        return RouterLinear("router", in_features, (count,), self.workspace, kernels)

    def choice(self, how: Router) -> Choose:
        return choose

    def experts(
        self, spec: Experts, in_features: int, count: int, gate_up: PartForms, down: PartForms
    ) -> ExpertProducts:
        each = each_expert(self.product, spec, in_features, count, gate_up, down)
        if spec.gated and all(isinstance(linear, PackedCpuLinear) for linear in each.linears):
            return CpuExperts(each, spec.activation, self.workspace, elsewhere=count < spec.count)
        return each

    def compile_steps(self, config: ModelConfig, mixers: Iterable[Mixer], *, has_packed: bool) -> StepOps:
        """See ``Device``. Kernels are for packed weights or KV as codes."""
        wanted = bool(self._kv) or (self.packed and has_packed)
        if wanted and self.dtype == torch.float32 and kernels_fit(config):
            self._ops = compiled_ops(self._kernels, config, self.workspace, kv=self._kv)
        if self._ops is None:
            return TorchOps(config)
        self._ops.compile_mixers(mixers)
        return self._ops

    def finish_load(self) -> None:
        if self.cache is not None:
            self.cache.write_in_background()

    def slice_steps(self, allocated: AllocatedSlice) -> CpuSteps:
        steps = CpuSteps(allocated, self._ops, self._masks, self.dtype)
        self._adapts = self._adapts and steps.only_kernels
        return steps

    def wait_until_kept(self, timeout_s: float) -> None:
        if self.cache is not None:
            self.cache.wait(timeout_s)

    def release(self) -> None:
        if self.cache is not None:
            self.cache.stop()
        self.cache = None
        self._reset()

    def _reset(self) -> None:
        self.workspace = Workspace(self.dtype, self.place)
        self._masks = CausalMasks(self.dtype, self.place)
        self._memory = WeightMemory()
        self._ops: CompiledOps | None = None
        self._adapts = True  # until a slice has products whose results depend on the number of threads

    @property
    def _kernels(self) -> Kernels:
        return self._given or cpu_kernels()


class CpuSteps(SliceSteps):
    """Steps of a slice on a CPU."""

    counted_rows = None

    def __init__(
        self, allocated: AllocatedSlice, ops: CompiledOps | None, masks: CausalMasks, dtype: torch.dtype
    ) -> None:
        """``ops``: kernels between products; without them no step is recorded."""
        self._ends = allocated.ends
        self._decoder = decoder = allocated.decoder
        self._head = decoder.part.head
        self._pool = pool = allocated.pool
        self._ops = ops
        self._masks = masks
        self._dtype = dtype
        self._replays: DecodeReplays | None = None
        if ops is not None and can_record(allocated.weights, decoder.heads, ops):
            self._replays = DecodeReplays(decoder, ops, pool, allocated.states)

    @property
    def only_kernels(self) -> bool:
        """Whether compiled functions compute all products."""
        return self._replays is not None

    def attention(self, prepared: PreparedStep) -> StepAttention:
        pool = self._pool
        if isinstance(pool, PackedKVStorage):
            return PackedSequenceAttention(prepared, pool, self._masks, self._dtype, self._ops, dot_attention=attend)
        return SequenceAttention(prepared, pool, self._masks, self._ops, dot_attention=attend)

    def replay(self, prepared: PreparedStep, inputs: npt.NDArray[Any]) -> Replayed | None:
        if self._replays is None or not can_replay_decode(prepared.layout, head=self._head):
            return None
        found = self._replays.run(prepared, lambda hidden: self._ends.fill(inputs, hidden))
        if not self._head:
            return Replayed(self._ends.encode(found.output), None)
        return Replayed(self._decoder.shaped(found.output.clone()), found.finals)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
