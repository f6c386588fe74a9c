"""Read slices' weights one by one into MLX arrays in mlx-lm's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from edgepipe.backend.types import LoadProgress
from edgepipe.errors import ModelInvalid
from edgepipe.model.dequantise import as_bf16_bits, as_float32
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.layout import EMBEDDING, FINAL_NORM, HEAD
from edgepipe.model.packed import Packed
from edgepipe.model.tensors import WeightInfo, WeightSource
from edgepipe_mlx.definitions import build_block
from edgepipe_mlx.matrices import Matrix, PackedLinear, PackedMatrix, WideMatrix
from edgepipe_mlx.packing import lay_out, mlx_form, widened_bf16

Weight = WideMatrix | PackedMatrix


@dataclass(slots=True)
class LoadedSlice:
    """One slice's layers, and the tables at the model's ends."""

    part: Slice
    blocks: list[nn.Module]
    embedding: Matrix | None = None  # [V, H]
    norm: mx.array | None = None  # [H]
    head: Matrix | None = None  # [V, H]; the embedding itself if tied


@dataclass(slots=True)
class Shard:
    """All slices that a stage has loaded."""

    config: ModelConfig
    slices: list[LoadedSlice]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights; a table that two slices share counts once."""
        tables = {
            id(table): table for part in self.slices for table in (part.embedding, part.head) if table is not None
        }
        norms = sum(part.norm.nbytes for part in self.slices if part.norm is not None)
        blocks = sum(_block_bytes(block) for part in self.slices for block in part.blocks)
        return sum(table.num_bytes for table in tables.values()) + norms + blocks


def _block_bytes(block: nn.Module) -> int:
    packed = sum(module.matrix.num_bytes for module in block.modules() if isinstance(module, PackedLinear))
    parameters: Any = tree_flatten(block.parameters())
    return packed + sum(array.nbytes for _path, array in parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTypes:
    """How weights are kept."""

    dtype: mx.Dtype  # of floats, and of a packed product's result
    packed: bool  # keep packed weights packed; else all weights are floats
    arithmetic: mx.Dtype  # of packed products; see PackedMatrix
    inputs_first: bool  # memory layout of matrices of floats; see ``_floats``


@dataclass(slots=True)
class _Place:
    """Destination of a weight: its shape and its setters (several slices may share a table)."""

    shape: tuple[int, ...]
    takers: list[Callable[[Weight], None]] = field(default_factory=list[Callable[[Weight], None]])


def load_shard(
    slices: Sequence[Slice], weights: WeightSource, types: WeightTypes, progress: Callable[[LoadProgress], None]
) -> Shard:
    """Read all weights of the slices.

    Raises ModelInvalid, ArchitectureUnsupported, and MLX's RuntimeError for lack of memory.
    """
    config = weights.config
    loaded = [LoadedSlice(part, [build_block(config) for _ in part.layers]) for part in slices]
    places = _places(config, loaded)
    infos = list({info.name: info for part in slices for info in weights.weights(part)}.values())
    _check(infos, places)
    whole = _stored_whole(slices, weights)
    total = sum(info.num_bytes for info in infos)
    done_bytes = 0
    for done, info in enumerate(infos, start=1):
        if types.packed and info.form is not None and mlx_form(info.form, info.shape[1]) is not None:
            weight = _packed(weights, info.name, types)
        else:
            weight = WideMatrix(_floats(weights, info, types, whole=info.name in whole))
        for take in places[info.name].takers:
            take(weight)
        del weight
        done_bytes += info.num_bytes
        progress(LoadProgress(tensors_done=done, tensors_total=len(infos), bytes_done=done_bytes, bytes_total=total))
    mx.clear_cache()
    return Shard(config, loaded)


def _packed(weights: WeightSource, name: str, types: WeightTypes) -> PackedMatrix:
    """Read one weight in MLX's layout. The stored form is freed before MLX copies the planes."""
    packed = weights.load(name)
    assert isinstance(packed, Packed)  # its info has a form
    form = mlx_form(packed.form, packed.shape[1])
    assert form is not None
    planes = lay_out(packed, form, bf16=types.dtype == mx.bfloat16)
    del packed
    return PackedMatrix(planes, dtype=types.dtype, arithmetic=types.arithmetic)


def _floats(weights: WeightSource, info: WeightInfo, types: WeightTypes, *, whole: bool) -> mx.array:
    """Read one weight in the compute dtype. Evaluates it at once, so that the stored form is freed before the next.

    ``whole``: one tensor holds the weight. ``types.inputs_first``: store a matrix [out, in] with its transpose dense
    in memory. In float32, MLX's CPU device multiplies rows with it 1.4 times as fast (a single row: 3 times).
    """
    exact = types.dtype == mx.float32 and info.scheme != "BF16" and not info.rounded
    stored = mx.array(_host_floats(weights, info.name, exact=exact, whole=whole))
    turned = types.inputs_first and stored.ndim == 2
    if turned:
        stored = mx.contiguous(stored.T)  # before it is widened to the compute dtype
    tensor = stored if exact else stored.view(mx.bfloat16).astype(types.dtype)
    mx.eval(tensor)
    return tensor.T if turned else tensor


def _host_floats(weights: WeightSource, name: str, *, exact: bool, whole: bool) -> npt.NDArray[Any]:
    """Return a weight's values as float32, or as bits of bf16."""
    raw = weights.read(name) if whole else weights.load(name)
    if isinstance(raw, Packed):
        return raw.float32() if exact else widened_bf16(raw)
    return as_float32(raw) if exact else as_bf16_bits(raw)


def _stored_whole(slices: Sequence[Slice], weights: WeightSource) -> set[str]:
    """Return the names of weights that one stored tensor holds, which floats are read from without packing."""
    schemes = {info.name: info.scheme for part in slices for info in weights.tensors(part)}
    return {info.name for part in slices for info in weights.weights(part) if schemes.get(info.name) == info.scheme}


def _places(config: ModelConfig, loaded: list[LoadedSlice]) -> dict[str, _Place]:
    """Return the destination of every required weight, by name."""
    places: dict[str, _Place] = {}
    table = (config.vocab_size, config.hidden_size)
    for part in loaded:
        for layer, block in zip(part.part.layers, part.blocks, strict=True):
            parameters: Any = tree_flatten(block.parameters())
            for path, placeholder in parameters:
                name = f"model.layers.{layer}.{path}"
                places[name] = _Place(tuple(placeholder.shape), [_into_block(block, path)])
        if part.part.embedding:
            places.setdefault(EMBEDDING, _Place(table)).takers.append(_into_table(part, "embedding"))
        if part.part.head:
            places[FINAL_NORM] = _Place((config.hidden_size,), [_into_norm(part)])
            name = EMBEDDING if config.tied_embeddings else HEAD
            places.setdefault(name, _Place(table)).takers.append(_into_table(part, "head"))
    return places


def _into_table(part: LoadedSlice, attribute: str) -> Callable[[Weight], None]:
    def take(weight: Weight) -> None:
        setattr(part, attribute, weight)

    return take


def _into_norm(part: LoadedSlice) -> Callable[[Weight], None]:
    def take(weight: Weight) -> None:
        assert isinstance(weight, WideMatrix)  # only matrices are packed
        part.norm = weight.array

    return take


def _into_block(block: nn.Module, path: str) -> Callable[[Weight], None]:
    def take(weight: Weight) -> None:
        if isinstance(weight, WideMatrix):
            block.update(tree_unflatten([(path, weight.array)]))
        else:
            _replace_linear(block, path.removesuffix(".weight"), weight)

    return take


def _replace_linear(block: nn.Module, path: str, weight: PackedMatrix) -> None:
    """Replace a projection of the block ("self_attn.q_proj") by a packed one with the same bias, loaded or not yet."""
    owner, name = path.split(".")
    parent: Any = block[owner]
    setattr(parent, name, PackedLinear(weight, parent[name].get("bias")))


def _check(infos: list[WeightInfo], places: dict[str, _Place]) -> None:
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
