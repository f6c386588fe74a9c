"""The engine's view of a prepared stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgepipe.backend.cost import SliceCost
from edgepipe.ids import NodeId, StepId
from edgepipe.model.facts import Slice


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
    kv_block_bytes: int
    max_blocks: int
    contiguous_kv: bool = False  # attends over runs of blocks as views
    certificate: bytes = b""  # PEM, of the stage's process; empty without encryption
    costs: Mapping[int, SliceCost] = field(default_factory=dict[int, SliceCost])  # by slice index, by the data sheet
    crashed_in: tuple[int, StepId] | None = None  # epoch counter and step that ended the previous process

    @property
    def label(self) -> str:
        """Name in errors."""
        return f"stage {self.index}"
