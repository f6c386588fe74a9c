"""Read slices' weights one by one into MLX arrays, and build layers of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy.typing as npt

from edgepipe.backend.types import LoadProgress
from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    is_exact,
    is_expert,
    is_norm,
    is_of_heads,
    is_plain_norm,
    is_router,
    is_stored_tensor,
    layer_tensors,
    slice_weights,
    weight_shape,
)
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import WeightInfo, WeightSource
from edgepipe.weights.dequantise import as_bf16_bits, as_float32
from edgepipe_mlx.experts import PackedStack, WideStack
from edgepipe_mlx.layer_weights import LayerWeights, Norm, Weight, norm_of
from edgepipe_mlx.layers import DecoderLayer, build_layer
from edgepipe_mlx.matrices import Matrix, PackedMatrix, WideMatrix
from edgepipe_mlx.packing import lay_out, mlx_form, widened_bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSlice:
    """One slice's layers, and the tables at the model's ends."""

    part: Slice
    layers: Sequence[DecoderLayer]
    embedding: Matrix | None  # [V, H]
    norm: Norm | None  # [H]
    head: Matrix | None  # [V, H]; the embedding itself if tied


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """All slices that a stage has loaded."""

    config: ModelConfig
    slices: Sequence[LoadedSlice]
    num_bytes: int  # size of all weights; a table that two slices share counts once


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTypes:
    """How weights are kept."""

    dtype: mx.Dtype  # type of floats, and of a packed product's result
    packed: bool  # keep packed weights packed; else all weights are floats
    in_float32: bool  # packed products and products by experts; see PackedMatrix, WideStack
    inputs_first: bool  # memory layout of matrices of floats; see ``_floats``


def load_shard(
    slices: Sequence[Slice], weights: WeightSource, types: WeightTypes, progress: Callable[[LoadProgress], None]
) -> Shard:
    """Read all weights of the slices.

    Raises ModelInvalid, ArchitectureUnsupported, and MLX's RuntimeError for lack of memory.
    """
    config = weights.config
    norm_of(config.norm)  # an unknown kind is refused before anything is read
    infos = list({info.name: info for part in slices for info in weights.weights(part)}.values())
    _check(config, slices, infos)
    whole = _stored_whole(slices, weights)
    total = sum(info.num_bytes for info in infos)
    loaded: dict[str, Weight] = {}
    done_bytes = 0
    for done, info in enumerate(infos, start=1):
        loaded[info.name] = _load(weights, info, types, whole=info.name in whole)
        done_bytes += info.num_bytes
        progress(LoadProgress(tensors_done=done, tensors_total=len(infos), bytes_done=done_bytes, bytes_total=total))
    mx.clear_cache()
    built = [_build_slice(config, part, loaded) for part in slices]
    return Shard(config=config, slices=built, num_bytes=sum(weight.num_bytes for weight in loaded.values()))


def _build_slice(config: ModelConfig, part: Slice, loaded: Mapping[str, Weight]) -> LoadedSlice:
    def layer(index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        own = {name.removeprefix(prefix): loaded[name] for name in layer_tensors(config, index)}
        return build_layer(config, index, LayerWeights(own, config.norm))

    ends = LayerWeights(loaded, config.norm)
    return LoadedSlice(
        part=part,
        layers=[layer(index) for index in part.layers],
        embedding=ends.matrix(EMBEDDING) if part.embedding else None,
        norm=Norm(ends.vector(FINAL_NORM), config.norm) if part.head else None,
        head=ends.matrix(EMBEDDING if config.tied_embeddings else HEAD) if part.head else None,
    )


def _load(weights: WeightSource, info: WeightInfo, types: WeightTypes, *, whole: bool) -> Weight:
    """Read one weight as its layer computes with it. ``whole``: one tensor holds the weight."""
    count = _num_experts(weights.config, info) if len(info.shape) == 2 else 0
    packable = types.packed and not is_exact(info.name) and not is_of_heads(info.name)
    if packable and info.form is not None and mlx_form(info.form, info.shape[1]) is not None:
        return _packed(weights, info.name, types, count=count)
    floats = _floats(weights, info, types, count=count, whole=whole)
    return WideStack(floats, in_float32=types.in_float32) if count else WideMatrix(floats)


def _packed(weights: WeightSource, name: str, types: WeightTypes, *, count: int) -> PackedMatrix:
    """Read one weight in MLX's layout. The stored form is freed before MLX copies the planes.

    ``count``: experts whose matrices the weight holds; 0: it is one matrix.
    """
    packed = weights.load(name)
    assert isinstance(packed, Packed)  # its info has a form
    form = mlx_form(packed.form, packed.shape[1])
    assert form is not None
    planes = lay_out(packed, form, narrow=types.dtype == mx.bfloat16)
    del packed
    if count:
        return PackedStack(planes, count=count, dtype=types.dtype, in_float32=types.in_float32)
    return PackedMatrix(planes, dtype=types.dtype, in_float32=types.in_float32)


def _num_experts(config: ModelConfig, info: WeightInfo) -> int:
    """Return the number of experts whose values a weight holds; 0 for weights of no experts."""
    if not is_expert(info.name):
        return 0
    experts = config.layers[int(info.name.split(".")[2])].experts
    assert experts is not None  # the layer requires the weight
    return experts.count


def _floats(weights: WeightSource, info: WeightInfo, types: WeightTypes, *, count: int, whole: bool) -> mx.array:
    """Read one weight in its compute dtype. Evaluates it at once, so that the stored form is freed before the next.

    A matrix of ``count`` experts becomes [count, out, in]. ``types.inputs_first``: store matrices [..., out, in] with
    their transpose dense in memory. In float32, MLX's CPU device multiplies rows with it 1.4 times as fast (a single
    row: 3 times; a row with its experts: 1.8 times).
    """
    dtype = mx.float32 if is_exact(info.name) or is_plain_norm(info.name) else types.dtype
    packed = info.form is not None and is_of_heads(info.name)  # keeps its values, also where it becomes floats
    exact = dtype == mx.float32 and info.scheme != "BF16" and (packed or not info.rounded)
    stored = mx.array(_host_floats(weights, info.name, exact=exact, whole=whole and not packed))
    stored = stored.reshape(count, -1, stored.shape[-1]) if count else stored
    own_order = is_of_heads(info.name) or (is_exact(info.name) and not is_router(info.name))
    turned = types.inputs_first and stored.ndim > 1 and not own_order
    if turned:
        stored = mx.contiguous(stored.swapaxes(-1, -2))  # it is not yet widened to the compute dtype
    values = stored if exact else stored.view(mx.bfloat16)
    if weights.config.norm.plus_one and is_norm(info.name) and not is_plain_norm(info.name):
        values = values.astype(mx.float32) + 1
    tensor = values.astype(dtype)
    mx.eval(tensor)
    return tensor.swapaxes(-1, -2) if turned else tensor


def _host_floats(weights: WeightSource, name: str, *, exact: bool, whole: bool) -> npt.NDArray[Any]:
    """Return a weight's values as float32, or as bits of bf16."""
    raw = weights.read(name) if whole else weights.load(name)
    if isinstance(raw, Packed):
        return raw.float32() if exact else widened_bf16(raw)
    return as_float32(raw) if exact else as_bf16_bits(raw)


def _stored_whole(slices: Sequence[Slice], weights: WeightSource) -> set[str]:
    """Return the names of weights whose values one stored tensor holds, which floats are read from without packing."""
    shapes = {info.name: info.shape for part in slices for info in weights.tensors(part)}
    return {
        info.name
        for part in slices
        for info in weights.weights(part)
        if shapes.get(info.name) == info.shape and is_stored_tensor(weights.config, info.name)
    }


def _check(config: ModelConfig, slices: Sequence[Slice], infos: Sequence[WeightInfo]) -> None:
    """Check that the files hold exactly the config's weights and shapes. Raises ModelInvalid."""
    shapes = {name: weight_shape(config, name) for part in slices for name in slice_weights(config, part)}
    names = {info.name for info in infos}
    for name in shapes:
        if name not in names:
            raise ModelInvalid(f"the model lacks the tensor {name}", fact="its config requires it")
    for info in infos:
        shape = shapes.get(info.name)
        if shape is None:
            raise ModelInvalid(f"the model has an extra tensor {info.name}", fact="its config does not include it")
        if info.shape != shape:
            raise ModelInvalid(
                f"the tensor {info.name} contradicts the model's config",
                fact=f"its shape is {list(info.shape)}, the config requires {list(shape)}",
                next_step="fetch the model again",
            )
