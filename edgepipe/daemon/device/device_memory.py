"""One device's memory: the stages' reservations, and a smaller limit after the system has killed stages."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import replace

from edgepipe.backend.types import DeviceProfile
from edgepipe.daemon.device.memory import (
    PRESSURE_CUT,
    DiskLedger,
    MemoryLedger,
    MemoryPressure,
    Reservation,
    uses_host_memory,
)
from edgepipe.daemon.processes.children import Child
from edgepipe.errors import EdgepipeError, NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import PipelineId
from edgepipe.planner.placement import lacks_ram
from edgepipe.spec.expert_places import AUTO, split_kind, with_ram_percent
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.kv_forms import rest_tokens, slots_of_chat
from edgepipe.spec.memory_classes import AUTO_TIER_PARTS, kv_bytes
from edgepipe.units import format_bytes
from edgepipe.weights.resident import WIDE, resident_sizes
from edgepipe.weights.weight_table import FLOATS, WeightTable
from edgepipe.wire.children import PrepareRequest
from edgepipe.wire.nodes import DeviceState, Reserved

logger = logging.getLogger(__name__)

_BEFORE = " before"  # no pipeline id has a space
_SPARE_BYTES = 1 << 30  # an imported torch takes 0.3 GB of the host, a CUDA context 0.5 GB of the device


class DeviceMemory:
    """The memory of one device; empty until the device has been measured."""

    def __init__(
        self,
        *,
        node_name: str,
        limit_bytes: int,
        kills: Callable[[], int | None],
        disk: DiskLedger,
    ) -> None:
        """
        kills  how many processes the system has killed for lack of memory; None if it does not say
        disk   promises of the disk for KV that leaves host memory, by pipeline
        """
        self._disk = disk
        self._node_name = node_name
        self._limit_bytes = limit_bytes
        self._kills = kills
        self._kills_known = kills()
        self._pressure = MemoryPressure()
        self._ledger: MemoryLedger | None = None
        self._compute_dtype = ""
        self._packing = WIDE
        self._kv_forms: tuple[str, ...] = ()
        self._ram: MemoryLedger | None = None  # host memory for experts beside the device; None: it keeps none there

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
            self._ram = _ram_ledger(self._node_name, profile)

    def reserve(self, request: PrepareRequest, config: ModelConfig, weights: WeightTable = FLOATS) -> bool:
        """Set memory aside for a stage's weights and KV. Return whether all wanted KV fits.

        Raises NoFeasiblePlacement, PlanInvalid.
        """
        assert self._ledger is not None
        settings, slices = request.settings, request.placement.slices
        if settings.kv and settings.kv not in self._kv_forms:
            raise NoFeasiblePlacement(
                f"node {self._node_name} cannot keep KV as {settings.kv}", next_step="serve without --kv"
            )
        dtype = "float32" if settings.dtype_on(self._compute_dtype) == "float32" else "bfloat16"
        beyond = next((part.layers for part in slices if part.layers.end > config.num_layers), None)
        if beyond is not None:
            raise PlanInvalid(
                f"layers {beyond} are not all in the model", fact=f"it has layers 0-{config.num_layers - 1}"
            )

        def stage_bytes(num_tokens: int) -> int:
            """Return the KV of a chat of so many tokens, in whole blocks."""
            tokens = slots_of_chat(num_tokens, settings.kv, settings.block_size) - rest_tokens(settings.kv)
            kv = kv_bytes(config, max(0, tokens), form=settings.kv or dtype, most_slots=settings.most_slots)
            return sum(kv[layer] for part in slices for layer in part.layers)

        stage_kv = stage_bytes(request.kv_tokens)
        promised = min(request.promised_tokens, request.kv_tokens)
        sizes = resident_sizes(config, weights, kind=self._packing_of(request), dtype=dtype)
        weight_bytes = sum(sizes.of_slice(part) for part in slices)
        in_ram = sum(sum(sizes.in_ram[part.layers.start : part.layers.end]) for part in slices)
        self._check_ram(request.pipeline_id, in_ram)
        beside, on_host = self._tier(request, in_ram)
        self._check_disk(request, beside + on_host)
        kv_token_bytes = -(-stage_kv // max(1, request.kv_tokens))  # windows keep fewer: a mean
        held = self._ledger.reserve(
            request.pipeline_id,
            weight_bytes=weight_bytes,
            kv_token_bytes=kv_token_bytes,
            kv_tokens=request.kv_tokens,
            tier_bytes=on_host,
            promised_kv_bytes=(stage_bytes(promised) + promised) if promised else 0,  # rounded up for each token
        )
        if self._ram is not None:
            self._ram.reserve(
                request.pipeline_id, weight_bytes=in_ram, kv_token_bytes=0, kv_tokens=0, tier_bytes=beside
            )
        self._disk.hold(request.pipeline_id, int(settings.kv_disk or 0))
        return held.kv_bytes >= kv_token_bytes * request.kv_tokens

    def _tier(self, request: PrepareRequest, in_ram: int) -> tuple[int, int]:
        """Return the bytes of host memory for idle KV: beside the device's memory, and in it where that is the host's.

        Raises NoFeasiblePlacement if the wanted bytes are not free.
        """
        wanted = request.settings.kv_ram
        if not wanted or (wanted == AUTO and self._ram is None):
            return 0, 0
        if wanted != AUTO and not wanted.isdecimal():
            raise PlanInvalid(f"'{wanted}' is no size of host memory", fact="it is auto or a number of bytes")
        if self._ram is None:
            return 0, int(wanted)
        held = self._ram.held.get(request.pipeline_id)
        free = self._ram.free_bytes + (held.num_bytes if held is not None else 0) - in_ram
        if wanted == AUTO:
            return max(0, free) // AUTO_TIER_PARTS, 0
        if int(wanted) > free:
            raise NoFeasiblePlacement(
                f"node {self._node_name} lacks host memory for idle conversations",
                fact=f"--kv-ram asks for {format_bytes(int(wanted))}, {format_bytes(max(0, free))} are free",
                next_step=f"give --kv-ram {max(0, free) // 10**6}MB or less, or auto",
                node=self._node_name,
            )
        return int(wanted), 0

    def _check_disk(self, request: PrepareRequest, tier_bytes: int) -> None:
        """Raise NoFeasiblePlacement if the disk has no room for idle KV, or if no host memory is above it."""
        wanted = request.settings.kv_disk
        if wanted and not wanted.isdecimal():
            raise PlanInvalid(f"'{wanted}' is no size on disk", fact="it is a number of bytes")
        if not wanted:
            return
        if not tier_bytes:
            raise NoFeasiblePlacement(
                f"node {self._node_name} has no RAM for conversations on their way to disk",
                fact="--kv-ram auto takes none where the device's memory is the machine's",
                next_step="give --kv-ram a size, such as 4GB",
                node=self._node_name,
            )
        free, others = (ask(request.pipeline_id) for ask in (self._disk.free_bytes, self._disk.promised_beside))
        if int(wanted) > free:
            beside = f" beside the {format_bytes(others)} that other models may still fill" if others else ""
            raise NoFeasiblePlacement(
                f"node {self._node_name} lacks disk for idle conversations",
                fact=f"--kv-disk asks for {format_bytes(int(wanted))}, {format_bytes(free)} are free{beside}",
                next_step=f"give --kv-disk {free // 10**6}MB or less",
                node=self._node_name,
            )

    def tier_bytes(self, pipeline_id: str) -> int:
        """Return the host memory reserved for a pipeline's idle KV."""
        ledgers = [ledger for ledger in (self._ledger, self._ram) if ledger is not None]
        return sum(ledger.held[pipeline_id].tier_bytes for ledger in ledgers if pipeline_id in ledger.held)

    def reserve_beside(self, request: PrepareRequest, config: ModelConfig, weights: WeightTable = FLOATS) -> bool:
        """Set memory aside beside the reservation of the pipeline's running stage. Return whether both fit in full.

        The running stage's reservation then lasts until ``release_before``. Otherwise nothing changes.
        """
        pipeline_id, ledger = request.pipeline_id, self._ledger
        held = self._ram.held.get(pipeline_id) if self._ram is not None else None
        in_ram = request.placement.ram_percent or (held is not None and held.weight_bytes)
        if ledger is None or in_ram or pipeline_id not in ledger.held or _before(pipeline_id) in ledger.held:
            return False
        self._rename(pipeline_id, _before(pipeline_id))
        try:
            fits = self.reserve(request, config, weights)
        except EdgepipeError:
            fits = False
        if not fits:
            self.keep_before(pipeline_id)
        return fits

    def keep_before(self, pipeline_id: str) -> None:
        """Drop the reservation made beside the running stage, which stays."""
        if self._ledger is not None and _before(pipeline_id) in self._ledger.held:
            self.release(pipeline_id)
            self._rename(_before(pipeline_id), pipeline_id)

    def release_before(self, pipeline_id: str) -> None:
        """Release the reservation of the stage that another one has replaced."""
        self.release(_before(pipeline_id))

    def _rename(self, holder: str, other: str) -> None:
        for ledger in (self._ledger, self._ram):
            if ledger is not None and holder in ledger.held:
                ledger.rename(holder, other)
        self._disk.rename(holder, other)

    def _packing_of(self, request: PrepareRequest) -> str:
        """Return the packing of a stage's weights. Raises NoFeasiblePlacement if the node keeps no experts in RAM."""
        percent = request.placement.ram_percent
        if not percent:
            return self._packing
        if self._ram is None:
            raise NoFeasiblePlacement(
                f"node {self._node_name} keeps no experts in RAM",
                fact="its backend or device does not compute with weights beside the device",
                next_step="serve without --experts-in-ram",
            )
        return with_ram_percent(split_kind(self._packing)[0], percent)

    def _check_ram(self, pipeline_id: str, wanted: int) -> None:
        """Check that host memory holds a stage's experts beside those of other stages. Raises NoFeasiblePlacement."""
        if self._ram is None or not wanted:
            return
        held = self._ram.held.get(pipeline_id)
        free = self._ram.free_bytes + (held.num_bytes if held is not None else 0)
        if wanted > free:
            raise lacks_ram(self._node_name, wanted, free)

    def loaded(self, pipeline_id: str, *, weight_bytes: int) -> Reservation:
        """Take the real size of a pipeline's weights; return its reservation."""
        assert self._ledger is not None
        return self._ledger.loaded(pipeline_id, weight_bytes=weight_bytes)

    def release(self, pipeline_id: str) -> None:
        """Release a reservation; unknown pipelines are fine."""
        if self._ledger is not None:
            self._ledger.release(pipeline_id)
        if self._ram is not None:
            self._ram.release(pipeline_id)
        self._disk.release(pipeline_id)

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

    def _bytes_by_pipeline(self) -> dict[str, int]:
        """Return the reserved bytes; for a pipeline whose stage is being replaced, those of both stages."""
        found: dict[str, int] = {}
        for holder, held in self._ledger.held.items() if self._ledger is not None else ():
            pipeline_id = holder.removesuffix(_BEFORE)
            found[pipeline_id] = found.get(pipeline_id, 0) + held.num_bytes
        return found

    def in_state(self, state: DeviceState) -> DeviceState:
        """Return a device's state with reserved and free memory."""
        if self._ledger is None:
            return state
        beside = {name: held.num_bytes for name, held in self._ram.held.items()} if self._ram is not None else {}
        return replace(
            state,
            ram_free_bytes=self._ram.free_bytes if self._ram is not None else 0,
            reserved_bytes=self._ledger.reserved_bytes,
            free_bytes=self._ledger.free_bytes,
            reserved=tuple(
                Reserved(pipeline_id=PipelineId(pipeline_id), num_bytes=num_bytes, ram_bytes=beside.get(pipeline_id, 0))
                for pipeline_id, num_bytes in self._bytes_by_pipeline().items()
            ),
        )


def _before(pipeline_id: str) -> str:
    """Return the holder of the reservation of a stage that is being replaced."""
    return pipeline_id + _BEFORE


def as_loaded(profile: DeviceProfile, ram_percent: int) -> DeviceProfile:
    """Return the device's profile with the packing of a stage's share of experts in host memory; 0: as it is."""
    if not ram_percent:
        return profile
    return replace(profile, packing=with_ram_percent(split_kind(profile.packing)[0], ram_percent))


def _ram_ledger(node: str, profile: DeviceProfile) -> MemoryLedger | None:
    if not profile.ram_total_bytes:
        return None
    return MemoryLedger(node=node, free_bytes=profile.ram_free_bytes, total_bytes=profile.ram_total_bytes, on_host=True)
