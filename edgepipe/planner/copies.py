"""Which disks keep which parts of a model, and which of them get another copy, so that no lost machine takes the last
one along. PURE.

A model's parts in the order of a token's way: 0 the embedding, then its layers, last the norm with the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgepipe.ids import NodeId
from edgepipe.model.facts import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """What a model's parts take on a disk."""

    sizes: tuple[int, ...]  # bytes, by part
    tied: bool = False  # the head is the embedding

    @property
    def all(self) -> frozenset[int]:
        """Every part."""
        return frozenset(range(len(self.sizes)))

    def of(self, slices: Iterable[Slice]) -> frozenset[int]:
        """The parts that slices need."""
        found: set[int] = set()
        for one in slices:
            found.update(layer + 1 for layer in one.layers)
            if one.embedding or (one.head and self.tied):
                found.add(0)
            if one.head:
                found.add(len(self.sizes) - 1)
        return frozenset(found)

    def num_bytes(self, parts: Iterable[int]) -> int:
        """What these parts take."""
        return sum(self.sizes[part] for part in parts)

    def fetch_bytes(self, held: frozenset[int], slices: Iterable[Slice]) -> int:
        """What a node that holds ``held`` would have to fetch before it can load the slices."""
        return self.num_bytes(self.of(slices) - held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One node's disk as far as a model is concerned."""

    node_id: NodeId
    holds: frozenset[int]
    free_bytes: int  # that copies may take
    computes: bool = True  # a copy beside a device is of use sooner


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """Who fetches what."""

    fetch: Mapping[NodeId, tuple[int, ...]]  # parts in ascending order
    lacking_bytes: int = 0  # of copies for which no disk has room
    lost: tuple[int, ...] = ()  # parts that nobody has


def plan_copies(parts: ModelParts, disks: Sequence[Disk], *, copies: int) -> CopyPlan:
    """Let every part be on ``copies`` disks, or on all if there are fewer; parts that are there already are kept.

    Runs of neighbouring parts go to one disk where they fit: it can then take a lost stage whole.
    """
    holds = {disk.node_id: set(disk.holds) for disk in disks}
    free = {disk.node_id: disk.free_bytes for disk in disks}
    ordered = sorted(disks, key=lambda disk: (not disk.computes, disk.node_id))
    wanted = min(copies, len(disks))
    lost = tuple(part for part in sorted(parts.all) if not any(part in held for held in holds.values()))
    skipped: set[int] = set(lost)
    fetch: dict[NodeId, list[int]] = {}
    lacking = 0
    while run := _first_run(parts, holds.values(), skipped, wanted):
        best = max(ordered, key=lambda disk: _fitting(parts, run, holds[disk.node_id], free[disk.node_id]))
        taken, _, _ = _fitting(parts, run, holds[best.node_id], free[best.node_id])
        if not taken:  # the run's first part fits nowhere
            missing = wanted - sum(run[0] in held for held in holds.values())
            lacking += missing * parts.sizes[run[0]]
            skipped.add(run[0])
            continue
        chosen = run[:taken]
        holds[best.node_id].update(chosen)
        free[best.node_id] -= parts.num_bytes(chosen)
        fetch.setdefault(best.node_id, []).extend(chosen)
    return CopyPlan(
        fetch={node_id: tuple(sorted(chosen)) for node_id, chosen in sorted(fetch.items())},
        lacking_bytes=lacking,
        lost=lost,
    )


def _first_run(parts: ModelParts, holds: Iterable[set[int]], skipped: set[int], wanted: int) -> list[int]:
    """Neighbouring parts that are on the same, too few disks; empty if there are none."""
    holders = list(holds)
    run: list[int] = []
    where: list[bool] = []
    for part in sorted(parts.all - skipped):
        here = [part in held for held in holders]
        if run and (here != where or part != run[-1] + 1):
            break
        if sum(here) < wanted:
            run.append(part)
            where = here
    return run


def _fitting(parts: ModelParts, run: Sequence[int], held: set[int], free_bytes: int) -> tuple[int, int, int]:
    """How many of the run's first parts fit; ties go to the disk with least of the model, then to the roomiest."""
    if run[0] in held:
        return 0, 0, 0
    count, left = 0, free_bytes
    while count < len(run) and parts.sizes[run[count]] <= left:
        left -= parts.sizes[run[count]]
        count += 1
    return count, -parts.num_bytes(held), free_bytes
