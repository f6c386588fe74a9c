"""Read slices' tensors one by one into MLX arrays in mlx-lm's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from edgepipe.backend.types import LoadProgress
from edgepipe.errors import ModelInvalid
from edgepipe.model.dequantise import as_bf16_bits, as_float32
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.tensors import TensorInfo, WeightSource
from edgepipe_mlx.definitions import build_block

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(slots=True)
class LoadedSlice:
    """One slice's layers, and the tables at the model's ends."""

    part: Slice
    blocks: list[nn.Module]
    embedding: mx.array | None = None  # [V, H]
    norm: mx.array | None = None  # [H]
    head: mx.array | None = None  # [V, H]; the embedding itself if tied


@dataclass(slots=True)
class Shard:
    """All slices that a stage has loaded."""

    config: ModelConfig
    slices: list[LoadedSlice]


@dataclass(slots=True)
class _Place:
    """Destination of a tensor: its shape and its setters (several slices may share a table)."""

    shape: tuple[int, ...]
    takers: list[Callable[[mx.array], None]] = field(default_factory=list[Callable[[mx.array], None]])


def load_shard(
    slices: Sequence[Slice],
    weights: WeightSource,
    dtype: mx.Dtype,
    progress: Callable[[LoadProgress], None],
    *,
    inputs_first: bool,
) -> Shard:
    """Read all tensors of the slices. ``inputs_first``: memory layout of matrices (see ``_read``).

    Raises ModelInvalid, ArchitectureUnsupported, and MLX's RuntimeError for lack of memory.
    """
    config = weights.config
    loaded = [LoadedSlice(part, [build_block(config) for _ in part.layers]) for part in slices]
    places = _places(config, loaded)
    infos = _tensors(slices, weights)
    _check(infos, places)
    total = sum(info.num_bytes for info in infos)
    done_bytes = 0
    for done, info in enumerate(infos, start=1):
        tensor = _read(weights, info, dtype, inputs_first=inputs_first)
        for take in places[info.name].takers:
            take(tensor)
        done_bytes += info.num_bytes
        progress(LoadProgress(tensors_done=done, tensors_total=len(infos), bytes_done=done_bytes, bytes_total=total))
    mx.clear_cache()
    return Shard(config, loaded)


def _read(weights: WeightSource, info: TensorInfo, dtype: mx.Dtype, *, inputs_first: bool) -> mx.array:
    """Read one tensor in the compute dtype. Evaluates it at once, so that the stored form is freed before the next.

    ``inputs_first``: store a matrix [out, in] with its transpose dense in memory. In float32, MLX's CPU device
    multiplies rows with it 1.4 times as fast (a single row: 3 times).
    """
    exact = dtype == mx.float32 and info.scheme != "BF16" and not info.rounded
    raw = weights.read(info.name)
    stored = mx.array(as_float32(raw) if exact else as_bf16_bits(raw))
    del raw
    turned = inputs_first and stored.ndim == 2
    if turned:
        stored = mx.contiguous(stored.T)  # before it is widened to the compute dtype
    tensor = stored if exact else stored.view(mx.bfloat16).astype(dtype)
    mx.eval(tensor)
    return tensor.T if turned else tensor


def _tensors(slices: Sequence[Slice], weights: WeightSource) -> list[TensorInfo]:
    """Return the tensors of all slices, each once."""
    return list({info.name: info for part in slices for info in weights.tensors(part)}.values())


def _places(config: ModelConfig, loaded: list[LoadedSlice]) -> dict[str, _Place]:
    """Return the destination of every required tensor, by name."""
    places: dict[str, _Place] = {}
    table = (config.vocab_size, config.hidden_size)
    for part in loaded:
        for layer, block in zip(part.part.layers, part.blocks, strict=True):
            parameters: Any = tree_flatten(block.parameters())
            for path, placeholder in parameters:
                name = f"model.layers.{layer}.{path}"
                places[name] = _Place(tuple(placeholder.shape), [_into_block(block, path)])
        if part.part.embedding:
            _place(places, EMBEDDING, table, part, "embedding")
        if part.part.head:
            _place(places, NORM, (config.hidden_size,), part, "norm")
            _place(places, EMBEDDING if config.tied_embeddings else HEAD, table, part, "head")
    return places


def _place(places: dict[str, _Place], name: str, shape: tuple[int, ...], part: LoadedSlice, attribute: str) -> None:
    def take(tensor: mx.array) -> None:
        setattr(part, attribute, tensor)

    places.setdefault(name, _Place(shape)).takers.append(take)


def _into_block(block: nn.Module, path: str) -> Callable[[mx.array], None]:
    def take(tensor: mx.array) -> None:
        block.update(tree_unflatten([(path, tensor)]))

    return take


def _check(infos: list[TensorInfo], places: dict[str, _Place]) -> None:
    """Check that the files hold exactly the config's tensors and shapes. Raises ModelInvalid."""
    names = {info.name for info in infos}
    for name in places:
        if name not in names:
            raise ModelInvalid(f"the model lacks the tensor {name}", fact="its config requires it")
    for info in infos:
        place = places.get(info.name)
        if place is None:
            raise ModelInvalid(f"the model has an extra tensor {info.name}", fact="its config does not include it")
        if info.shape != place.shape:
            raise ModelInvalid(
                f"the tensor {info.name} contradicts the model's config",
                fact=f"its shape is {list(info.shape)}, the config requires {list(place.shape)}",
                next_step="fetch the model again",
            )
