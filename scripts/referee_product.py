"""What edgepipe computes: all logits on one backend, in a ring of two, and through a served cluster's HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.weights.weights import open_weights
from tests.support.numerics.harness import Logits, Pipeline

SIDES: dict[str, tuple[Callable[[BackendOptions], Backend], ...]] = {
    "torch": (TorchBackend,),
    "MLX": (MlxBackend,),
    "torch, MLX": (TorchBackend, MlxBackend),
}
"""Backends of the stages, which divide the layers in the middle."""

_OPTIONS = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)


def logits_of(model: Path, side: str, tokens: Sequence[int]) -> Logits:
    """Return the logits [T, V] of a folder or a file, computed in float32 on a CPU."""
    pipeline = Pipeline.build([kind(_OPTIONS) for kind in SIDES[side]], open_weights(model), num_blocks=8)
    try:
        return pipeline.forced(tokens[:1], [*tokens[1:], 0])
    finally:
        pipeline.close()


def greedy_ids(model: Path, side: str, tokens: Sequence[int], count: int) -> list[int]:
    """Return the most likely tokens behind a prompt."""
    pipeline = Pipeline.build([kind(_OPTIONS) for kind in SIDES[side]], open_weights(model), num_blocks=8)
    try:
        return pipeline.greedy([tokens], count)[0]
    finally:
        pipeline.close()
