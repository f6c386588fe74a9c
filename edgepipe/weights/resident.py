"""Memory of weights while a backend computes with them: pure arithmetic, without torch or mlx.

One function per kind of backend. A test holds each of them to the ``num_bytes`` of that backend's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from edgepipe.spec.expert_places import num_in_ram, split_kind
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.spec.layout import is_exact, is_expert, is_of_heads, is_router, is_shared_expert, spec_tensors
from edgepipe.spec.packed_form import MXFP4_FORM, MXFP8_FORM, NVFP4_FORM, PackedForm
from edgepipe.weights.weight_table import DraftModelNeed, WeightTable

WIDE = ""
"""The kind of a backend that widens every weight to its compute dtype."""

_BYTES_PER_FLOAT = {"float32": 4, "float16": 2, "bfloat16": 2}
_SCALE_BYTES = 2  # bytes of a scale, offset or zero that the backend keeps in 16 bits
_CPU_TILE, _CPU_UNIT = 16, 16
_CPU_GROUP = 256  # inputs at most that share a scale: a panel of edgepipe_torch.cpu.product_code
_CPU_CODEBOOK_BITS = {"iq4": 8, "nf4": 8, "e2m1": 4, "e4m3": 8}
_PLANE_GROUP = 32  # inputs per scale where a form is requantised
_CUDA_TILE_ROWS, _CUDA_TILE_INPUTS = 16, 128  # edgepipe_torch.cuda.packed_tiles
_MLX_BITS = (4, 5, 6, 8)  # kept as they are in groups of 32 and more; others are requantised to 8
_MLX_GROUPS = (128, 64, 32)  # sizes of groups that MLX's kernels know
_BLOCK, _BLOCK_BITS, _BLOCK_GROUPS, _LEAST_BLOCKS = 256, (4, 5, 6), (16, 32), 8
_MLX_NATIVE = (MXFP4_FORM, MXFP8_FORM, NVFP4_FORM)
_PROCESS_BYTES = {"torch-cpu": 300 << 20, "torch-cuda": 600 << 20, "mlx": 300 << 20, "mlx-blocks": 300 << 20}
"""Memory of a second process on the device beside weights and KV: the library, or a CUDA context with its kernels."""


def resident_bytes(form: PackedForm | None, shape: Sequence[int], *, kind: str, dtype: str) -> int:
    """Return the bytes of one weight in a backend's memory.

    form   of the stored weight; None: floats
    shape  [O, I] of a packed weight; any shape of floats
    kind   "torch-cpu" | "torch-cuda" | "mlx" | "mlx-blocks" | "emulated" | WIDE; an unknown kind counts as WIDE; a
           share of experts in host memory (``expert_places``) changes nothing here
    dtype  the compute dtype: "float32" | "float16" | "bfloat16"
    """
    packed = _KINDS.get(split_kind(kind)[0])
    if form is None or packed is None:
        return prod(shape) * float_bytes(dtype)
    rows, inputs = shape
    return packed(form, rows, inputs, float_bytes(dtype))


def weight_bytes(name: str, form: PackedForm | None, shape: Sequence[int], *, kind: str, dtype: str) -> int:
    """Return the bytes of a named weight in a backend's memory; ``name`` may be that within the layer.

    Routers and small weights of recurrent layers are float32 in every backend, however they are stored; CPUs keep
    routers in tiles of 16 rows. Weights of single heads are floats of the compute dtype. See ``resident_bytes``.
    """
    if is_of_heads(name):
        return prod(shape) * float_bytes(dtype)
    if is_router(name) and len(shape) == 2 and split_kind(kind)[0] == "torch-cpu":
        return _padded(shape[0]) * shape[1] * float_bytes("float32")
    if is_exact(name):
        return prod(shape) * float_bytes("float32")
    return resident_bytes(form, shape, kind=kind, dtype=dtype)


def float_bytes(dtype: str) -> int:
    """Return the bytes of a value in a compute dtype."""
    return _BYTES_PER_FLOAT[dtype]


def cpu_group(group: int) -> int:
    """Return the inputs that share a scale in a CPU's layout: larger groups become equal parts with the same scale."""
    unit = _CPU_UNIT if group % _CPU_UNIT == 0 else _CPU_UNIT // 2
    return next(size for size in range(min(group, _CPU_GROUP), 0, -1) if group % size == 0 and size % unit == 0)


def _torch_cpu(form: PackedForm, rows: int, inputs: int, _value_bytes: int) -> int:
    """Codes of 4, 5, 6 or 8 bits in tiles of 16 rows, with a float16 scale per group and for some forms an offset.

    Codes of 5 and 6 bits take 8 in groups that are no multiples of 16.
    """
    bits = _CPU_CODEBOOK_BITS.get(form.codebook, form.bits)
    bits = 8 if bits in (5, 6) and form.group % _CPU_UNIT else bits
    values = 2 if form.offset in ("added", "zeros") else 1
    row_bytes = inputs * bits // 8 + inputs // cpu_group(form.group) * values * _SCALE_BYTES
    return _padded(rows) * row_bytes + (4 * inputs if form.ordered else 0)


def _padded(rows: int) -> int:
    """Return the rows of whole tiles on a CPU."""
    return -(-rows // _CPU_TILE) * _CPU_TILE


def _torch_cuda(form: PackedForm, rows: int, inputs: int, _value_bytes: int) -> int:
    """The packed planes as they are, in tiles of 16 out features and 128 inputs."""
    rows = -(-rows // _CUDA_TILE_ROWS) * _CUDA_TILE_ROWS
    padded = -(-inputs // _CUDA_TILE_INPUTS) * _CUDA_TILE_INPUTS
    groups = rows * (padded // form.group if form.group < _CUDA_TILE_INPUTS else -(-inputs // form.group))
    bases = rows * -(-inputs // form.span) if form.span else groups
    values = bases * form.base_bits // 8 + (groups if form.span else 0)
    total = rows * padded * form.bits // 8 + values
    total += values if form.offset == "added" else 0
    total += groups if form.offset == "zeros" else 0
    return total + (4 * inputs if form.ordered else 0)


def _emulated(form: PackedForm, rows: int, inputs: int, _value_bytes: int) -> int:
    """The packed planes as they are."""
    return form.num_bytes((rows, inputs))


def _mlx(form: PackedForm, rows: int, inputs: int, value_bytes: int) -> int:
    """Codes of 4, 5, 6 or 8 bits with scale and bias of the compute dtype's size per group of 32, 64 or 128.

    MXFP4, MXFP8 and NVFP4 stay as they are, with scales of a byte.
    Other forms take 8 bits in groups of 32, and floats if 32 does not divide the inputs.
    """
    if inputs % _PLANE_GROUP:
        return rows * inputs * value_bytes
    order = 4 * inputs if form.ordered else 0
    if replace(form, ordered=False) in _MLX_NATIVE:
        return rows * (inputs * form.bits // 8 + inputs // form.group) + order
    bits, group = 8, next((group for group in _MLX_GROUPS if form.group % group == 0), 0)
    if not form.codebook and form.bits in _MLX_BITS and group:
        bits = form.bits
    elif form.codebook != "iq4" or not group:  # the levels of IQ4 are 8-bit integers
        group = _PLANE_GROUP
    return rows * inputs * bits // 8 + rows * (inputs // group) * 2 * value_bytes + order


def keeps_blocks(form: PackedForm, rows: int, inputs: int) -> bool:
    """Return whether own kernels for Metal read a weight [rows, inputs] at its own size: K types.

    They are blocks of 256 inputs in groups of 16 or 32, with a base in float16 and a factor for each group. MLX gives a
    kernel arrays of less than eight values in another way, so weights of fewer blocks are left out.
    """
    plain = not form.codebook and not form.ordered and form.offset in ("zero", "added")
    sizes = form.span == _BLOCK and form.group in _BLOCK_GROUPS and form.bits in _BLOCK_BITS and form.base_bits == 16
    return plain and sizes and inputs % _BLOCK == 0 and rows * inputs // _BLOCK >= _LEAST_BLOCKS


def _mlx_blocks(form: PackedForm, rows: int, inputs: int, value_bytes: int) -> int:
    """K types as their planes are, others as MLX keeps them."""
    if keeps_blocks(form, rows, inputs):
        return form.num_bytes((rows, inputs))
    return _mlx(form, rows, inputs, value_bytes)


_KINDS: Mapping[str, Callable[[PackedForm, int, int, int], int]] = {
    "torch-cpu": _torch_cpu,
    "torch-cuda": _torch_cuda,
    "mlx": _mlx,
    "mlx-blocks": _mlx_blocks,
    "emulated": _emulated,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentSizes:
    """Bytes of a model's weights in one kind of backend. Layers may differ."""

    layers: tuple[int, ...]  # each layer's bytes on the device
    experts: tuple[int, ...]  # each layer's bytes of routed experts, which ``layers`` contains
    shared: tuple[int, ...]  # each layer's bytes of its shared expert, which ``layers`` contains
    in_ram: tuple[int, ...]  # each layer's bytes of experts in host memory, beside ``layers``
    embedding: int
    head: int  # its table, also if it is the embedding
    norm: int  # the final one
    tied: bool  # the head is the embedding
    drafts: bool  # the last layer predicts one token more, for which the slice with the head embeds, too
    draft_model: int = 0  # a draft model beside the head: its weights, its KV and its process

    def of_tables(self, part: Slice) -> int:
        """Return the bytes of a slice beside its layers. A tied head counts in the slice that uses it.

        A draft model counts in the slice with the head.
        """
        embeds = part.embedding or (part.head and self.drafts)
        total = self.embedding if embeds else 0
        if part.head:
            total += self.norm + (0 if embeds and self.tied else self.head) + self.draft_model
        return total

    @property
    def matrices(self) -> int:
        """All layers, embedding and head."""
        return sum(self.layers) + self.embedding + (0 if self.tied else self.head)

    def of_slice(self, part: Slice) -> int:
        """Return the bytes of a slice on the device."""
        return sum(self.layers[part.layers.start : part.layers.end]) + self.of_tables(part)

    def of_mtp(self, part: Slice) -> int:
        """Return the bytes that a slice has for the layer that predicts one token more, its embedding included."""
        if not self.drafts:
            return 0
        return self.of_slice(part) - replace(self, layers=self.layers[:-1], drafts=False).of_slice(part)


@lru_cache(maxsize=64)
def resident_sizes(config: ModelConfig, weights: WeightTable, *, kind: str, dtype: str) -> ResidentSizes:
    """Return the sizes of a model's weights; ``kind`` and ``dtype`` as for ``resident_bytes``."""
    known: dict[tuple[LayerSpec, int | None], tuple[int, int, int, int]] = {}
    _, percent = split_kind(kind)

    def layer_bytes(index: int) -> tuple[int, int, int, int]:
        """Return the bytes of a layer, its experts and its shared expert on the device, and of its experts in RAM."""
        spec, place = config.layers[index], weights.layers[index] if index < len(weights.layers) else None
        if (spec, place) not in known:
            forms, count = weights.layer(index), spec.experts.count if spec.experts else 0
            small = weights.experts_fit_16_bits(index)
            rest = experts = shared = host = 0
            for name, shape in spec_tensors(spec, config.hidden_size).items():
                if is_expert(name):
                    own, beside = expert_bytes(
                        name, forms.get(name), shape, count, percent, kind=kind, dtype=dtype, fit_16_bits=small
                    )
                    experts, host = experts + own, host + beside
                    continue
                size = weight_bytes(name, forms.get(name), shape, kind=kind, dtype=dtype)
                rest += size
                shared += size if is_shared_expert(name) else 0
            known[spec, place] = rest + experts, experts, shared, host
        return known[spec, place]

    by_layer = [layer_bytes(index) for index in range(config.num_layers)]
    table = (config.vocab_size, config.hidden_size)
    embedding = resident_bytes(weights.embedding, table, kind=kind, dtype=dtype)
    head = resident_bytes(weights.head, table, kind=kind, dtype=dtype)
    return ResidentSizes(
        layers=tuple(size for size, _, _, _ in by_layer),
        experts=tuple(size for _, size, _, _ in by_layer),
        shared=tuple(size for _, _, size, _ in by_layer),
        in_ram=tuple(size for _, _, _, size in by_layer),
        embedding=embedding,
        head=embedding if config.tied_embeddings else head,
        norm=config.hidden_size * float_bytes(dtype),
        tied=config.tied_embeddings,
        drafts=config.has_mtp,
        draft_model=_draft_model_bytes(weights.draft, kind=kind, dtype=dtype) if weights.draft is not None else 0,
    )


def _draft_model_bytes(need: DraftModelNeed, *, kind: str, dtype: str) -> int:
    """Return the bytes of a draft model's process on the device: all layers with the whole context, and its library."""
    own = split_kind(kind)[0]  # none of its experts go to host memory
    sizes = resident_sizes(need.config, need.weights, kind=own, dtype=dtype)
    kv = need.config.kv_bytes_per_token(form=dtype) * need.kv_tokens
    return sizes.matrices + sizes.norm + kv + _PROCESS_BYTES.get(own, 0)


def expert_bytes(
    name: str,
    form: PackedForm | None,
    shape: Sequence[int],
    count: int,
    percent: int,
    *,
    kind: str,
    dtype: str,
    fit_16_bits: bool,
) -> tuple[int, int]:
    """Return the bytes of a weight of ``count`` experts on the device, and in host memory at a share.

    A CPU computes with experts in host memory, so they are as a CPU keeps them: packed, or in floats of 16 or 32 bits.
    ``fit_16_bits`` as ``WeightTable.experts_fit_16_bits``, other parameters as ``weight_bytes``.
    """

    def placed(experts: int, kind: str, dtype: str) -> int:
        part = (shape[0] // count * experts, *shape[1:])
        return weight_bytes(name, form, part, kind=kind, dtype=dtype) if experts else 0

    beside = num_in_ram(count, percent)
    host = "torch-cpu" if split_kind(kind)[0] in _KINDS else WIDE
    small = len(shape) == 2 and fit_16_bits
    return placed(count - beside, kind, dtype), placed(beside, host, "bfloat16" if small else "float32")


def slice_bytes(config: ModelConfig, weights: WeightTable, part: Slice, *, kind: str, dtype: str) -> int:
    """Return the bytes of a slice's weights in a backend's memory."""
    return resident_sizes(config, weights, kind=kind, dtype=dtype).of_slice(part)


def dtype_of(value_bytes: int) -> str:
    """Return the compute dtype of values of this size."""
    return "float32" if value_bytes == _BYTES_PER_FLOAT["float32"] else "bfloat16"
