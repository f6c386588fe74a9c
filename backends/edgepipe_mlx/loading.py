"""Read slices' weights one by one into MLX arrays, and build layers of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from edgepipe.backend.types import LoadProgress
from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    embeds,
    is_exact,
    is_expert,
    is_norm,
    is_of_heads,
    is_plain_norm,
    is_router,
    layer_tensors,
    slice_weights,
    weight_shape,
)
from edgepipe.spec.tensors import WeightInfo, WeightSource
from edgepipe.weights.resident import keeps_blocks
from edgepipe.weights.stored_weight import StoredWeight, stored_weights
from edgepipe_mlx.blocks.kernels import BlockKernels
from edgepipe_mlx.blocks.layout import lay_out_blocks
from edgepipe_mlx.blocks.matrix import BlockMatrix, BlockStack
from edgepipe_mlx.experts import PackedStack, WideStack
from edgepipe_mlx.layer_weights import LayerWeights, Norm, Weight, norm_of
from edgepipe_mlx.layers import DecoderLayer, build_layer
from edgepipe_mlx.matrices import JoiningMatrix, Matrix, PackedMatrix, WideMatrix
from edgepipe_mlx.mtp import MtpLayer
from edgepipe_mlx.packing import MlxForm, lay_out, mlx_form


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSlice:
    """One slice's layers, and the tables at the model's ends."""

    part: Slice
    layers: Sequence[DecoderLayer]
    embedding: Matrix | None  # [V, H]
    norm: Norm | None  # [H]
    head: Matrix | None  # [V, H]; the embedding itself if tied
    mtp: MtpLayer | None = None  # the last of ``layers``, if it predicts one token more

    @property
    def num_own(self) -> int:
        """Number of layers without ``mtp``."""
        return len(self.layers) - (self.mtp is not None)


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
    blocks: BlockKernels | None = None  # keep K types at their own size, with these kernels


def load_shard(
    slices: Sequence[Slice], source: WeightSource, types: WeightTypes, progress: Callable[[LoadProgress], None]
) -> Shard:
    """Read all weights of the slices.

    Raises ModelInvalid, ArchitectureUnsupported, and MLX's RuntimeError for lack of memory.
    """
    config = source.config
    norm_of(config.norm)  # an unknown kind is refused before anything is read
    found = {weight.info.name: weight for part in slices for weight in stored_weights(source, part)}
    _check(config, slices, [weight.info for weight in found.values()])
    total = sum(weight.info.num_bytes for weight in found.values())
    loaded: dict[str, Weight] = {}
    done_bytes = 0
    for name in list(found):
        weight = found.pop(name)
        loaded[name] = _load(config, weight, types)
        done_bytes += weight.info.num_bytes
        progress(LoadProgress(bytes_done=done_bytes, bytes_total=total))
    num_bytes = sum(weight.num_bytes for weight in loaded.values())
    built = [_build_slice(config, part, loaded) for part in slices]
    mx.clear_cache()
    return Shard(config=config, slices=built, num_bytes=num_bytes)


def _build_slice(config: ModelConfig, part: Slice, loaded: dict[str, Weight]) -> LoadedSlice:
    """Take the layers' weights out of ``loaded``: what a layer joins must be freed before the next one's is."""

    def weights_of(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        own = {name.removeprefix(prefix): loaded.pop(name) for name in layer_tensors(config, index)}
        return LayerWeights(own, config.norm)

    layers: list[DecoderLayer] = []
    last: LayerWeights | None = None
    for index in part.layers:
        last = weights_of(index)
        layers.append(build_layer(config, index, last))
    ends = LayerWeights(loaded, config.norm)
    return LoadedSlice(
        part=part,
        layers=layers,
        embedding=ends.matrix(EMBEDDING) if embeds(config, part) else None,
        norm=Norm(ends.vector(FINAL_NORM), config.norm) if part.head else None,
        head=ends.matrix(EMBEDDING if config.tied_embeddings else HEAD) if part.head else None,
        mtp=MtpLayer(layers[-1], last) if last is not None and layers[-1].spec.mtp else None,
    )


def _load(config: ModelConfig, weight: StoredWeight, types: WeightTypes) -> Weight:
    """Read one weight as its layer computes with it."""
    info = weight.info
    count = _num_experts(config, info) if len(info.shape) == 2 else 0
    packable = types.packed and not is_exact(info.name) and not is_of_heads(info.name)
    if packable and types.blocks is not None and info.form is not None and keeps_blocks(info.form, *info.shape):
        return _in_blocks(weight, types, types.blocks, count=count)
    form = mlx_form(info.form, info.shape[1]) if packable and info.form is not None else None
    if form is not None:
        return _packed(weight, form, types, count=count)
    floats = _floats(config, weight, types, count=count)
    return WideStack(floats, in_float32=types.in_float32) if count else WideMatrix(floats)


def _in_blocks(weight: StoredWeight, types: WeightTypes, kernels: BlockKernels, *, count: int) -> JoiningMatrix:
    """Read one weight of a K type at its own size; ``count`` as for ``_packed``."""
    planes = lay_out_blocks(weight.read_packed())
    if count:
        return BlockStack(planes, count=count, dtype=types.dtype, in_float32=types.in_float32, kernels=kernels)
    return BlockMatrix(planes, dtype=types.dtype, in_float32=types.in_float32, kernels=kernels)


def _packed(weight: StoredWeight, form: MlxForm, types: WeightTypes, *, count: int) -> JoiningMatrix:
    """Read one weight in MLX's layout. The packed form is freed before MLX copies the planes.

    ``count``: experts whose matrices the weight holds; 0: it is one matrix.
    """
    planes = lay_out(weight.read_packed(), form, narrow=types.dtype == mx.bfloat16)
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


def _floats(config: ModelConfig, weight: StoredWeight, types: WeightTypes, *, count: int) -> mx.array:
    """Read one weight in its compute dtype. Evaluates it at once, so that the stored form is freed before the next.

    A matrix of ``count`` experts becomes [count, out, in]. ``types.inputs_first``: store matrices [..., out, in] with
    their transpose dense in memory. In float32, MLX's CPU device multiplies rows with it 1.4 times as fast (a single
    row: 3 times; a row with its experts: 1.8 times).
    """
    name = weight.info.name
    dtype = mx.float32 if is_exact(name) or is_plain_norm(name) else types.dtype
    if not is_of_heads(name):  # those keep their packed values, also where they become floats
        weight = weight.without_form()
    values = weight.read_floats() if dtype == mx.float32 else weight.read_bf16()
    exact = values.dtype == np.float32
    stored = mx.array(values)
    del values
    stored = stored.reshape(count, -1, stored.shape[-1]) if count else stored
    own_order = is_of_heads(name) or (is_exact(name) and not is_router(name))
    turned = types.inputs_first and stored.ndim > 1 and not own_order
    if turned:
        stored = mx.contiguous(stored.swapaxes(-1, -2))  # it is not yet widened to the compute dtype
    tensor = stored if exact else stored.view(mx.bfloat16)
    if config.norm.plus_one and is_norm(name) and not is_plain_norm(name):
        tensor = tensor.astype(mx.float32) + 1
    tensor = tensor.astype(dtype)
    mx.eval(tensor)
    return tensor.swapaxes(-1, -2) if turned else tensor


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
