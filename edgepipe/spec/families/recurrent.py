"""What families with recurrent layers share when they read ``config.json`` or GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import cast

from edgepipe.files.fields import Fields
from edgepipe.spec.families.reading import GgufShape, HfShape, is_list, unsupported
from edgepipe.spec.layer_spec import Attention, DeltaNet, Dense, Experts, LayerSpec, Mamba2, Rope
from edgepipe.spec.shape_limits import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_TAPS,
    MAX_TIME_STEP,
    MAX_WIDTH,
    checked_delta_net,
    checked_mamba2,
    read_kv_heads,
)

_FORMER = {"mamba": "linear_attention", "attention": "full_attention"}  # names of transformers before 5
GGUF_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
"""Names of Mamba-2's weights within a layer of a GGUF file."""


def layer_kinds(shape: HfShape, key: str, kinds: Sequence[str]) -> list[str]:
    """Return the kind of each layer as a list under ``key`` says; empty without it. Raises ModelInvalid."""
    found = [_FORMER.get(kind, kind) for kind in shape.fields.items(key) if isinstance(kind, str)]
    count = len(shape.fields.items(key))
    if count and (len(found) != shape.num_layers or count != len(found) or not set(kinds).issuperset(found)):
        raise shape.fields.fail(key, f"{shape.num_layers} times {' or '.join(kinds)} is needed, it has {count}")
    return found


def every_nth(shape: HfShape) -> list[str]:
    """Return the kinds of layers, of which by default every fourth has attention. Raises ModelInvalid."""
    every = shape.fields.integer("full_attention_interval", low=1, high=MAX_LAYERS, default=4)
    return layer_kinds(shape, "layer_types", ("linear_attention", "full_attention")) or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(shape.num_layers)
    ]


def hf_delta_net(shape: HfShape) -> DeltaNet:
    """Return the gated delta rule. Raises ModelInvalid."""
    fields = shape.fields
    delta = DeltaNet(
        key_heads=fields.integer("linear_num_key_heads", low=1, high=MAX_HEADS, default=16),
        value_heads=fields.integer("linear_num_value_heads", low=1, high=MAX_HEADS, default=32),
        key_dim=fields.integer("linear_key_head_dim", low=1, high=MAX_HEAD_DIM, default=128),
        value_dim=fields.integer("linear_value_head_dim", low=1, high=MAX_HEAD_DIM, default=128),
        taps=fields.integer("linear_conv_kernel_dim", low=2, high=MAX_TAPS, default=4),
    )
    return checked_delta_net(fields, delta, "linear_num_value_heads")


def gguf_delta_net(shape: GgufShape, *, tiled: bool) -> DeltaNet:
    """Return the gated delta rule; ``tiled``: the architecture's converter moves value heads. Raises ModelInvalid."""
    value_heads, key_heads = shape.integer("ssm.time_step_rank", high=MAX_HEADS), _groups(shape)
    delta = DeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=shape.integer("ssm.state_size", high=MAX_HEAD_DIM),
        value_dim=_inner(shape, value_heads),
        taps=_taps(shape),
        tiled=tiled and key_heads not in (1, value_heads),
    )
    return checked_delta_net(shape.fields, delta, f"{shape.arch}.ssm.time_step_rank")


def gguf_mamba2(shape: GgufShape) -> Mamba2:
    """Return the state space. Raises ModelInvalid."""
    heads = shape.integer("ssm.time_step_rank", high=MAX_HEADS)
    mamba = Mamba2(
        heads=heads,
        head_dim=_inner(shape, heads),
        groups=_groups(shape),
        state_dim=shape.integer("ssm.state_size", high=MAX_HEAD_DIM),
        taps=_taps(shape),
        conv_bias=any(name.endswith(".ssm_conv1d.bias") for name in shape.tensors),
        bias=any(name.endswith(".ssm_in.bias") for name in shape.tensors),
    )
    return checked_mamba2(shape.fields, mamba, f"{shape.arch}.ssm.group_count")


def _groups(shape: GgufShape) -> int:
    return shape.integer("ssm.group_count", high=MAX_HEADS)


def _taps(shape: GgufShape) -> int:
    return shape.integer("ssm.conv_kernel", low=2, high=MAX_TAPS)


def _inner(shape: GgufShape, heads: int) -> int:
    """Return the numbers of each head, of which the file says only the product. Raises ModelInvalid."""
    inner = shape.integer("ssm.inner_size", high=MAX_WIDTH)
    if inner % heads or inner // heads > MAX_HEAD_DIM:
        raise shape.fields.fail(f"{shape.arch}.ssm.inner_size", f"{inner} numbers cannot be in {heads} heads")
    return inner // heads


def layers_with(shape: GgufShape, part: str, count: int) -> list[bool]:
    """Return which of ``count`` layers a GGUF file has a part of; the parts say what a layer is."""
    return [f"blk.{layer}.{part}.weight" in shape.tensors for layer in range(count)]


def gguf_kinds(shape: GgufShape, part: str, count: int, recurrent: str = "linear_attention") -> list[str]:
    """Return the kinds of ``count`` layers: ``recurrent`` where a GGUF file has a part, else full attention."""
    return [recurrent if each else "full_attention" for each in layers_with(shape, part, count)]


def leading_dense(dense: Dense, experts: Experts, leading: int, num_layers: int) -> list[LayerSpec]:
    """Return the feed-forward parts alone: dense ones in the ``leading`` layers, experts in the others."""
    return [LayerSpec(dense=dense) if layer < leading else LayerSpec(experts=experts) for layer in range(num_layers)]


def gguf_attention(shape: GgufShape, rope: Callable[[int], Rope | None]) -> Attention:
    """Return attention whose number of key-value heads is 0 in layers without it; ``rope``: of a head's size.

    Raises ModelInvalid, ArchitectureUnsupported.
    """
    size, name = shape.head_dim(), f"{shape.arch}.attention.head_count_kv"
    heads = shape.fields.raw(name)
    if is_list(heads):
        present = [item for item in shape.fields.items(name) if item != 0]
        if any(item != present[0] for item in present):
            raise unsupported(f"{name} that differs between layers", ["one number for all layers with attention"])
        heads = next(iter(present), None)
    found = read_kv_heads(Fields({name: heads}, what=shape.fields.what), name, shape.num_heads, None)
    return Attention(num_heads=shape.num_heads, num_kv_heads=found, head_dim=size, rope=rope(size))


def time_limits(fields: Fields, key: str) -> tuple[float, float]:
    """Return the bounds of Mamba-2's time steps; none by default. Raises ModelInvalid."""
    items = fields.items(key)
    if not items:
        return 0.0, inf
    if len(items) != 2:
        raise fields.fail(key, f"two numbers are needed, it has {len(items)}")
    low = Fields({key: items[0]}, what=fields.what).number(key, low=0.0, high=MAX_TIME_STEP)
    if _endless(items[1]):
        return low, inf
    return low, Fields({key: items[1]}, what=fields.what).number(key, low=low, high=MAX_TIME_STEP)


def _endless(value: object) -> bool:
    """Return whether a value is infinite, as JSON or as transformers 5 writes it."""
    if isinstance(value, dict):
        return cast("Mapping[str, object]", value).get("__float__") == "Infinity"
    return value == inf


def with_mixers(
    kinds: Sequence[str], mixers: Mapping[str, LayerSpec], feeds: Sequence[LayerSpec]
) -> tuple[LayerSpec, ...]:
    """Return layers of these mixers by kind, each with the feed-forward part of another spec."""
    return tuple(
        replace(mixers[kind], dense=feed.dense, experts=feed.experts) for kind, feed in zip(kinds, feeds, strict=True)
    )
