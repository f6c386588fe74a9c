"""A CUDA device as a ``Device``."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch

from edgepipe.backend.machine_memory import machine_memory
from edgepipe.backend.types import DEFAULT_BLOCK_SIZE, DeviceProfile, KernelError, SlowPath
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Experts, Router
from edgepipe.weights.repacked import RepackedPlace
from edgepipe.weights.resident import WIDE
from edgepipe_torch.cuda.experts import CudaExperts, ExpertMatrix, expert_library
from edgepipe_torch.cuda.graphs import ROWS, DecodeGraphs, can_replay
from edgepipe_torch.cuda.kernel_errors import cuda_kernel_errors
from edgepipe_torch.cuda.kernels.library import ExpertLibrary, KernelLibrary, PlaceLibrary, own_library
from edgepipe_torch.cuda.mixer_steps import StepKernels, own_step_kernels, use_kernels
from edgepipe_torch.cuda.moving import SideStream
from edgepipe_torch.cuda.packed import PackedCudaLinear
from edgepipe_torch.cuda.paged import PageKernels, step_attention
from edgepipe_torch.cuda.paging import Paging, find_paging, with_codes
from edgepipe_torch.cuda.slow_paths import no_paging, slow_paths
from edgepipe_torch.cuda.step_ops import make_ops
from edgepipe_torch.cuda.transfer import CudaTransfer
from edgepipe_torch.layers.attention import CausalMasks, StepAttention
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.decoder import SliceWeights
from edgepipe_torch.layers.device import PAGE_TOKENS, AllocatedSlice, Device, SliceSteps
from edgepipe_torch.layers.experts import ExpertProducts
from edgepipe_torch.layers.host_copies import Mover
from edgepipe_torch.layers.linear import Linear, PartForms, PlainLinear, Workspace
from edgepipe_torch.layers.measuring import CPU_MEASURED, Measured, bandwidth, dtype_name, matrix_rate
from edgepipe_torch.layers.packed_attention import by_sequence
from edgepipe_torch.layers.prepared import PreparedStep, Replayed
from edgepipe_torch.layers.recurrent import Mixer
from edgepipe_torch.layers.routing import AddGated, Choose, add_gated, choose
from edgepipe_torch.layers.step_ops import StepOps
from edgepipe_torch.layers.transfer import Transfer

logger = logging.getLogger(__name__)

_MEASURED = Measured(weights=32, shape=(8192, 4096), square=8192)  # 2.2 GB in bf16


class OwnKernels(KernelLibrary, ExpertLibrary, PlaceLibrary, Protocol):
    """Kernels for products, experts and heads."""


class CudaDevice(Device):
    """A GPU, in bf16 by default."""

    own_memory = True
    norms_stay = True
    picks_candidates = True

    def __init__(
        self,
        place: torch.device,
        dtype: torch.dtype,
        *,
        packed: bool = True,
        kv: str = "",
        paging: Paging | None = None,
        step_kernels: StepKernels | None = None,
        kernels: OwnKernels | None = None,
        transfer: Transfer | None = None,
        mover: Mover | None = None,
    ) -> None:
        """
        packed        weights with a form stay so
        kv            form of the pools' KV; empty: they are ``KVStorage``, not ``PackedKVStorage``
        paging        of attention over pages and graphs, by default the device's; brings a transfer
        step_kernels  for one token of recurrent layers, by default the device's
        kernels       for products, experts and heads, by default the device's
        mover         between the device and host memory, by default on a stream of its own
        """
        self._kernels = kernels
        self.place = place
        self.dtype = dtype
        self.packed = packed
        self.packing = "torch-cuda" if packed else WIDE
        self._paging: Paging | None = None
        self._no_paging: KernelsUnavailable | None = None
        self._kv = kv
        try:
            found = paging or find_paging(place, dtype, kv)
            self._paging = with_codes(found) if kv else found
        except KernelsUnavailable as exc:
            self._no_paging = exc
        self._step_kernels = step_kernels or own_step_kernels(place)
        self.transfer: Transfer = self._paging.transfer if self._paging else transfer or CudaTransfer(place)
        self.mover: Mover = mover or SideStream(place)
        self.block_sizes: tuple[int, ...] = (
            (self._paging.page_tokens,) if self._paging else (DEFAULT_BLOCK_SIZE, PAGE_TOKENS)
        )
        self._reset()

    def profile(self) -> DeviceProfile:
        """See ``Device``: with the host's memory, and the rate at which its CPU reads experts there."""
        total, host = torch.cuda.mem_get_info(self.place)[1], machine_memory()
        found = DeviceProfile(
            backend="torch",
            device=str(self.place),
            name=torch.cuda.get_device_name(self.place),
            compute_dtype=dtype_name(self.dtype),
            memory_total_bytes=total,
            memory_free_bytes=min(self.free_bytes(), total),
            bandwidth_bytes_per_s=bandwidth(self.place, self.dtype, _MEASURED, self._synchronise),
            flops=matrix_rate(self.place, self.dtype, _MEASURED, self._synchronise),
            block_sizes=self.block_sizes,
            contiguous_kv=False,
            ram_total_bytes=host.total_bytes,
            ram_free_bytes=host.available_bytes,
            ram_bytes_per_s=bandwidth(torch.device("cpu"), torch.float32, CPU_MEASURED),
        )
        torch.cuda.empty_cache()  # the measured matrices, whose memory other processes may need
        return found

    def kernel_errors(self) -> Iterator[KernelError]:
        try:
            library = own_library(self.place)
        except KernelsUnavailable as exc:
            yield KernelError(kernel="all", reason=str(exc))
            return
        yield from cuda_kernel_errors(library, self.place, self.dtype)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()  # CUDA counts it as used
        return torch.cuda.mem_get_info(self.place)[0]

    def start_load(self, kept: RepackedPlace | None) -> None:
        torch.cuda.set_device(self.place)  # events and graphs use the thread's current device

    def product(self, role: str, in_features: int, sizes: Sequence[int], parts: PartForms) -> Linear:
        if any(parts.forms):
            return PackedCudaLinear(
                in_features, sizes, parts.forms, dtype=self.dtype, device=self.place, library=self._kernels
            )
        return PlainLinear(in_features, sizes, dtype=self.dtype, device=self.place)

    def choice(self, how: Router) -> Choose:
        library = self._expert_library() if how.groups == 1 else None
        return choose if library is None else library.routing().choose

    def gated_sum(self) -> AddGated:
        library = self._expert_library()
        return add_gated if library is None else library.routing().add_gated

    def experts(
        self, spec: Experts, in_features: int, count: int, gate_up: PartForms, down: PartForms
    ) -> ExpertProducts:
        library = self._expert_library() if spec.gated else None
        if library is None:
            return super().experts(spec, in_features, count, gate_up, down)
        first = ExpertMatrix(
            count, in_features, len(gate_up.forms), spec.inner, gate_up.forms, device=self.place, library=library
        )
        last = ExpertMatrix(count, spec.inner, 1, in_features, down.forms, device=self.place, library=library)
        return CudaExperts(first, last, spec.activation, library)

    def compile_steps(self, config: ModelConfig, mixers: Iterable[Mixer], *, has_packed: bool) -> StepOps:
        use_kernels(mixers, self._step_kernels, self.dtype)
        return make_ops(config, self._kernels, self.place, self.dtype, self._kv)

    def slow_paths(self, weights: Sequence[SliceWeights], block_size: int) -> Iterator[SlowPath]:
        if self._paging is None:
            assert self._no_paging is not None
            return iter((no_paging(self._no_paging),))
        return slow_paths(self._paging, weights, block_size)

    def pads_steps(self, block_size: int) -> bool:
        return self._pages(block_size) is not None

    def slice_steps(self, allocated: AllocatedSlice) -> CudaSteps:
        return CudaSteps(allocated, self._pages(allocated.block_size), self._masks, self.transfer, self.dtype)

    def release(self) -> None:
        self._reset()
        gc.collect()  # the error of a failed load may hold tensors
        torch.cuda.empty_cache()

    def _expert_library(self) -> ExpertLibrary | None:
        return self._kernels or expert_library(self.place, self.dtype)

    def _reset(self) -> None:
        self.workspace = Workspace(self.dtype, self.place)
        self._masks = CausalMasks(self.dtype, self.place, copied=True)

    def _pages(self, block_size: int) -> Paging | None:
        """Return the paging if blocks are whole pages."""
        return self._paging if self._paging and block_size % self._paging.page_tokens == 0 else None

    def _synchronise(self) -> None:
        torch.cuda.synchronize(self.place)


class CudaSteps(SliceSteps):
    """Steps of a slice on a GPU."""

    def __init__(
        self,
        allocated: AllocatedSlice,
        paging: Paging | None,
        masks: CausalMasks,
        transfer: Transfer,
        dtype: torch.dtype,
    ) -> None:
        """``paging``: None: each sequence attends by itself, and no step is recorded."""
        self._head = allocated.decoder.part.head
        self._pool = allocated.pool
        self._masks = masks
        self._transfer = transfer
        self._dtype = dtype
        self._kernels = None if paging is None else PageKernels(paging, allocated.decoder.heads)
        self.graphs: DecodeGraphs | None = None
        if paging is not None and self._kernels is not None and self._kernels.whole and not allocated.weights.waits:
            self.graphs = _new_graphs(allocated, paging, self._kernels, dtype)
            self.graphs.record_common(paging.recorded_ahead)
        self.counted_rows = None if self.graphs is None else ROWS

    def attention(self, prepared: PreparedStep) -> StepAttention:
        if self._kernels is None:
            return by_sequence(prepared, self._pool, self._masks, self._dtype)
        return step_attention(
            prepared, self._pool, self._kernels, masks=self._masks, transfer=self._transfer, dtype=self._dtype
        )

    def replay(self, prepared: PreparedStep, inputs: npt.NDArray[Any]) -> Replayed | None:
        if self.graphs is None or not can_replay(prepared.layout, head=self._head):
            return None
        return self.graphs.run(prepared, inputs)


def _new_graphs(allocated: AllocatedSlice, paging: Paging, kernels: PageKernels, dtype: torch.dtype) -> DecodeGraphs:
    pool, plain, ends = allocated.pool, allocated.decoder, allocated.ends
    decoder = plain.with_workspace(Workspace(dtype, pool.device))
    return DecodeGraphs(
        decoder,
        pool,
        paging,
        kernels,
        states=allocated.states,
        finish=decoder.logits if decoder.part.head else ends.encode,
        dtype=dtype,
        travels=ends.travels,
    )
