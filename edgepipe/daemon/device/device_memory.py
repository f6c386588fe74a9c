"""One device's memory: the stages' reservations, and a smaller limit after the system has killed stages."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import replace

from edgepipe.backend.types import DeviceProfile
from edgepipe.daemon.device.memory import PRESSURE_CUT, MemoryLedger, MemoryPressure, Reservation, uses_host_memory
from edgepipe.daemon.processes.children import Child
from edgepipe.errors import NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import PipelineId
from edgepipe.model.facts import ModelConfig
from edgepipe.model.memory_classes import kv_bytes
from edgepipe.model.resident import WIDE, resident_sizes
from edgepipe.model.weight_table import FLOATS, WeightTable
from edgepipe.wire.children import PrepareRequest
from edgepipe.wire.nodes import DeviceState, Reserved

logger = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 30  # an imported torch takes 0.3 GB of the host, a CUDA context 0.5 GB of the device


class DeviceMemory:
    """The memory of one device; empty until the device has been measured."""

    def __init__(self, *, node_name: str, limit_bytes: int, kills: Callable[[], int | None]) -> None:
        """``kills``: how many processes the system has killed for lack of memory; None if it does not say."""
        self._node_name = node_name
        self._limit_bytes = limit_bytes
        self._kills = kills
        self._kills_known = kills()
        self._pressure = MemoryPressure()
        self._ledger: MemoryLedger | None = None
        self._compute_dtype = ""
        self._packing = WIDE
        self._kv_forms: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the device has been measured."""
        return self._ledger is not None

    @property
    def has_room_for_spare(self) -> bool:
        """Whether another process fits beside the reservations."""
        return self._ledger is not None and self._ledger.free_bytes >= _SPARE_BYTES

    def measured(self, profile: DeviceProfile) -> None:
        """Take the device's measured free memory, unless stages hold a part of it."""
        self._compute_dtype, self._packing = profile.compute_dtype, profile.packing
        self._kv_forms = profile.kv_forms
        if self._ledger is None or not self._ledger.reserved_bytes:
            self._ledger = MemoryLedger(
                node=self._node_name,
                free_bytes=profile.memory_free_bytes,
                total_bytes=profile.memory_total_bytes,
                on_host=uses_host_memory(profile),
                limit_bytes=self._limit_bytes,
            )
            self._ledger.cut(self._pressure.share)

    def reserve(self, request: PrepareRequest, config: ModelConfig, weights: WeightTable = FLOATS) -> None:
        """Set memory aside for a stage's weights and KV. Raises NoFeasiblePlacement, PlanInvalid."""
        assert self._ledger is not None
        if request.kv and request.kv not in self._kv_forms:
            raise NoFeasiblePlacement(
                f"node {self._node_name} cannot keep KV as {request.kv}", next_step="serve without --kv"
            )
        wanted = self._compute_dtype if request.dtype in ("", "auto") else request.dtype
        dtype = "float32" if wanted == "float32" else "bfloat16"
        beyond = next((part.layers for part in request.slices if part.layers.end > config.num_layers), None)
        if beyond is not None:
            raise PlanInvalid(
                f"layers {beyond} are not all in the model", fact=f"it has layers 0-{config.num_layers - 1}"
            )
        kv = kv_bytes(config, request.kv_tokens, form=request.kv or dtype)
        stage_kv = sum(kv[layer] for part in request.slices for layer in part.layers)
        sizes = resident_sizes(config, weights, kind=self._packing, dtype=dtype)
        weight_bytes = sum(sizes.of_slice(part) for part in request.slices)
        self._ledger.reserve(
            request.pipeline_id,
            weight_bytes=max(request.weight_bytes, weight_bytes),
            kv_token_bytes=-(-stage_kv // max(1, request.kv_tokens)),  # windows keep fewer: a mean
            kv_tokens=request.kv_tokens,
        )

    def loaded(self, pipeline_id: str, *, weight_bytes: int) -> Reservation:
        """Take the real size of a pipeline's weights; return its reservation."""
        assert self._ledger is not None
        return self._ledger.loaded(pipeline_id, weight_bytes=weight_bytes)

    def release(self, pipeline_id: str) -> None:
        """Release a reservation; unknown pipelines are fine."""
        if self._ledger is not None:
            self._ledger.release(pipeline_id)

    def note_death(self, child: Child) -> None:
        """Note the unexpected end of a stage. Use less memory if the system has again killed it for lack of memory."""
        before, self._kills_known = self._kills_known, self._kills()
        killed = child.process.returncode == -signal.SIGKILL and not child.hang
        by_system = killed and (before is None or before != self._kills_known)
        if by_system and self._pressure.killed(asyncio.get_running_loop().time()) and self._ledger is not None:
            self._ledger.cut(PRESSURE_CUT)
            logger.warning(
                "the system killed stages for lack of memory: %.0f %% of it are used from now on",
                100 * self._pressure.share,
            )

    def in_state(self, state: DeviceState) -> DeviceState:
        """Return a device's state with reserved and free memory."""
        if self._ledger is None:
            return state
        return replace(
            state,
            reserved_bytes=self._ledger.reserved_bytes,
            free_bytes=self._ledger.free_bytes,
            reserved=tuple(
                Reserved(pipeline_id=PipelineId(pipeline_id), num_bytes=held.num_bytes)
                for pipeline_id, held in self._ledger.held.items()
            ),
        )
