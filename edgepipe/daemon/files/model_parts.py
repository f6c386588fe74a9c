"""Parts of models on disks; parts are numbered as in ``planner.copies``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain

from edgepipe.ids import NodeId
from edgepipe.planner.copies import ModelParts
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layout import EMBEDDING, FINAL_NORM, HEAD, layer_tensors, stored_names
from edgepipe.store.store import StoredModel
from edgepipe.weights.manifest import Manifest
from edgepipe.wire.nodes import NodeState


@lru_cache(maxsize=8)  # 0.7 s for 37,000 tensors, as Qwen3-235B in 16 bits has them, and asked for at every change
def part_tensors(config: ModelConfig) -> Sequence[Sequence[str]]:
    """Return the names of each part's stored tensors; a tied head has the norm alone."""
    count, config = config.num_layers, config.with_mtp()
    layers = [list(layer_tensors(config, layer)) for layer in range(config.num_layers)]
    last = [FINAL_NORM, *(() if config.tied_embeddings else (HEAD,)), *chain.from_iterable(layers[count:])]
    return tuple(stored_names(config, names) for names in [[EMBEDDING], *layers[:count], last])


def model_parts(config: ModelConfig, manifest: Manifest) -> ModelParts:
    """Return the size of each part on a disk; tensors that an emulated model only imagines take nothing."""
    sizes = {entry.info.name: entry.info.num_bytes for entry in manifest.tensors}
    return ModelParts(
        sizes=tuple(sum(sizes.get(name, 0) for name in names) for names in part_tensors(config)),
        tied=config.tied_embeddings,
    )


def held_parts(stored: StoredModel) -> frozenset[int]:
    """Return the parts whose tensors are all here. Raises ModelInvalid."""
    names = part_tensors(stored.config)
    if stored.whole or stored.card.emulated:
        return frozenset(range(len(names)))
    held = set(stored.held_tensors())
    return frozenset(number for number, part in enumerate(names) if held.issuperset(part))


def runs_of(parts: Iterable[int]) -> tuple[LayerRange, ...]:
    """Group parts into runs."""
    runs: list[LayerRange] = []
    for part in sorted(parts):
        if runs and runs[-1].end == part:
            runs[-1] = LayerRange(runs[-1].start, part + 1)
        else:
            runs.append(LayerRange(part, part + 1))
    return tuple(runs)


def parts_of(runs: Iterable[LayerRange], *, num_parts: int) -> frozenset[int]:
    """Return the parts in ``runs`` that the model has; ignore other numbers that a node reports."""
    return frozenset(part for run in runs for part in range(run.start, min(run.end, num_parts)))


def fetch_bytes(nodes: Iterable[NodeState], stored: StoredModel) -> Callable[[NodeId, Sequence[Slice]], int]:
    """Return a function that counts the bytes a node must fetch to load slices of a model. Raises ModelInvalid."""
    parts = model_parts(stored.config, stored.manifest)
    held = {node.node_id: parts_on(node, stored.id, stored.manifest_hash, num_parts=len(parts.sizes)) for node in nodes}
    return lambda node_id, slices: parts.fetch_bytes(held.get(node_id, frozenset()), slices)


def parts_on(node: NodeState, model: str, manifest_hash: str, *, num_parts: int) -> frozenset[int]:
    """Return the parts of a model on a node's disk, over all the model's folders."""
    copies = [copy for copy in node.models if copy.model == model and copy.manifest_hash == manifest_hash]
    return frozenset(part for copy in copies for part in parts_of(copy.parts, num_parts=num_parts))
