"""A prepared stage, as its engine knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgepipe.backend.cost import SliceCost
from edgepipe.ids import NodeId, StepId
from edgepipe.model.facts import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSite:
    """Where a prepared stage is and what it holds."""

    index: int
    node_id: NodeId
    node_name: str  # for people; the id where the name is not known
    address: str
    slices: tuple[Slice, ...]
    backend: str
    device: str
    weight_bytes: int
    kv_block_bytes: int
    max_blocks: int
    contiguous_kv: bool = False  # attends over runs of blocks as views
    certificate: bytes = b""  # PEM, of the stage's process; empty where nothing is encrypted
    costs: Mapping[int, SliceCost] = field(default_factory=dict[int, SliceCost])  # by the device's data sheet, by slice
    crashed_in: tuple[int, StepId] | None = None  # the stage before it crashed in that step: epoch's counter, step

    @property
    def label(self) -> str:
        """How errors name it."""
        return f"stage {self.index}"
