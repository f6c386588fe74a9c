"""The engine's view of a prepared stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgepipe.backend.cost import SliceCost
from edgepipe.backend.types import PackedProducts, SlowPath
from edgepipe.engine.kv_carryover import NO_NUMBERS, HeldNumbers
from edgepipe.ids import NodeId, StepId
from edgepipe.scheduler import SchedulerLimits
from edgepipe.spec.facts import Slice
from edgepipe.spec.memory_classes import pool_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSite:
    """Address, slices and memory of a prepared stage."""

    index: int
    node_id: NodeId
    node_name: str  # the id if the name is not known
    address: str
    slices: tuple[Slice, ...]
    backend: str
    device: str
    weight_bytes: int
    kv_block_bytes: int  # size of one block in all its layers
    max_blocks: int
    max_host_blocks: int = 0  # blocks for which host memory has room
    max_disk_blocks: int = 0  # on disk below it
    held_blocks: HeldNumbers = NO_NUMBERS  # what its process has allocated for an earlier epoch
    window_block_bytes: tuple[int, ...] = ()  # size of one block of each windowed memory class, in its layers
    state_bytes: int = 0  # size of one sequence's state, in its recurrent layers
    products: tuple[PackedProducts, ...] = ()  # ways to multiply with its packed weights
    slow_paths: tuple[SlowPath, ...] = ()  # what makes its steps slow
    ram_percent: int = 0  # percent of each layer's experts that are in host memory
    contiguous_kv: bool = False  # attends over runs of blocks as views
    certificate: bytes = b""  # PEM, of the stage's process; empty without encryption
    costs: Mapping[int, SliceCost] = field(default_factory=dict[int, SliceCost])  # data-sheet costs by slice index
    crashed_in: tuple[int, StepId] | None = None  # epoch counter and step that ended the previous process

    def kv_bytes(self, limits: SchedulerLimits) -> int:
        """Return the bytes of the stage's pools."""
        window_blocks = [pool.num_blocks for pool in limits.windows]
        kv = pool_bytes(self.kv_block_bytes, self.window_block_bytes, limits.num_blocks, window_blocks)
        return kv + (self.state_bytes * limits.states.kept_slots if limits.states else 0)

    @property
    def label(self) -> str:
        """Name in errors."""
        return f"stage {self.index}"
