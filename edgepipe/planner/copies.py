"""Plan copies of a model's parts on disks, so that the loss of a machine never loses a part. PURE.

A model's parts, in the order that a token passes them: 0 the embedding, then the layers, last the norm with the head
and, of models that have it, the layer that predicts one token more, which counts as one layer behind the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgepipe.ids import NodeId
from edgepipe.spec.facts import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """Sizes of a model's parts on disk."""

    sizes: tuple[int, ...]  # bytes, by part
    tied: bool = False  # the head is the embedding

    @property
    def all(self) -> frozenset[int]:
        """Every part."""
        return frozenset(range(len(self.sizes)))

    def of(self, slices: Iterable[Slice]) -> frozenset[int]:
        """Return the parts that slices need."""
        found: set[int] = set()
        for part in slices:
            found.update(layer + 1 for layer in part.layers)
            last = len(self.sizes) - 1
            if part.embedding or (part.head and (self.tied or part.layers.end > last - 1)):
                found.add(0)
            if part.head:
                found.add(last)
        return frozenset(found)

    def num_bytes(self, parts: Iterable[int]) -> int:
        """Return the size of these parts."""
        return sum(self.sizes[part] for part in parts)

    def fetch_bytes(self, held: frozenset[int], slices: Iterable[Slice]) -> int:
        """Return the bytes that a node with the parts ``held`` must fetch before it can load the slices."""
        return self.num_bytes(self.of(slices) - held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One node's disk, for one model."""

    node_id: NodeId
    holds: frozenset[int]
    free_bytes: int  # available for copies
    computes: bool = True  # the node has a device, so a copy on it is useful sooner
    leaves: bool = False  # the node is draining: its parts count, but it takes no more


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCopies:
    """Parts for each node to fetch."""

    fetch: Mapping[NodeId, tuple[int, ...]]  # parts in ascending order
    lacking_bytes: int = 0  # size of copies for which no disk has room
    lost: tuple[int, ...] = ()  # parts on no disk


def plan_copies(parts: ModelParts, disks: Sequence[Disk], *, copies: int) -> PartCopies:
    """Plan for every part to be on ``copies`` disks, or on all if there are fewer. Existing parts stay.

    Runs of neighbouring parts go to one disk where they fit, so that its node can take over a whole stage.
    """
    holds = {disk.node_id: set(disk.holds) for disk in disks}
    free = {disk.node_id: 0 if disk.leaves else disk.free_bytes for disk in disks}
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
            held = sum(run[0] in held for held in holds.values())
            possible = sum(run[0] in holds[disk.node_id] or not disk.leaves for disk in disks)
            lacking += (min(wanted, possible) - held) * parts.sizes[run[0]]
            skipped.add(run[0])
            continue
        chosen = run[:taken]
        holds[best.node_id].update(chosen)
        free[best.node_id] -= parts.num_bytes(chosen)
        fetch.setdefault(best.node_id, []).extend(chosen)
    return PartCopies(
        fetch={node_id: tuple(sorted(chosen)) for node_id, chosen in sorted(fetch.items())},
        lacking_bytes=lacking,
        lost=lost,
    )


def _first_run(parts: ModelParts, holds: Iterable[set[int]], skipped: set[int], wanted: int) -> list[int]:
    """Return the first run of neighbouring parts that are on the same, too few disks, or an empty list."""
    holders = list(holds)
    run: list[int] = []
    run_disks: list[bool] = []
    for part in sorted(parts.all - skipped):
        on_disks = [part in held for held in holders]
        if run and (on_disks != run_disks or part != run[-1] + 1):
            break
        if sum(on_disks) < wanted:
            run.append(part)
            run_disks = on_disks
    return run


def _fitting(parts: ModelParts, run: Sequence[int], held: set[int], free_bytes: int) -> tuple[int, int, int]:
    """Return a sort key: the number of the run's first parts that fit, then least of the model, then most room."""
    if run[0] in held:
        return 0, 0, 0
    count, left = 0, free_bytes
    while count < len(run) and parts.sizes[run[count]] <= left:
        left -= parts.sizes[run[count]]
        count += 1
    return count, -parts.num_bytes(held), free_bytes
