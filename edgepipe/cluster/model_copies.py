"""Copies of models on the cluster's disks (PURE)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # 'models list' without a node loads no messages
    from edgepipe.wire.nodes import MemberState

Key = tuple[str, str]
"""A model's name and its manifest's hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCopies:
    """Nodes that have a model's parts on disk."""

    fewest: int  # disks that hold its rarest part
    nodes: tuple[str, ...]  # names of the nodes with any part


def copies_of(members: Iterable[MemberState]) -> dict[Key, ModelCopies]:
    """Count the copies of every model on the members' disks."""
    parts: dict[Key, dict[str, set[int]]] = {}  # parts on each node's disk
    for member in members:
        for model in member.node.models:
            node_parts = parts.setdefault((model.model, model.manifest_hash), {}).setdefault(member.node.name, set())
            node_parts.update(part for run in model.parts for part in run)
    found: dict[Key, ModelCopies] = {}
    for key, nodes in parts.items():
        holding = {name: held for name, held in nodes.items() if held}
        last = max((max(held) for held in holding.values()), default=-1)
        counts = [sum(part in held for held in holding.values()) for part in range(last + 1)]
        found[key] = ModelCopies(fewest=min(counts, default=0), nodes=tuple(sorted(holding)))
    return found
