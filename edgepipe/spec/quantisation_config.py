"""Read ``quantization_config`` (or MLX's ``quantization``) of a ``config.json``. Refuses other formats by name.

The config names formats; the stored tensors decide which modules have them (``settle_quantisation``). So patterns of
modules (``ignore``, ``targets``, ``dynamic``) are not evaluated, but every module must have one of the named formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from edgepipe.errors import ModelInvalid
from edgepipe.files.fields import Fields
from edgepipe.spec.formats import FORMATS, NEXT_STEP, SUPPORTED, check_format, part_name
from edgepipe.spec.formats.common import joined_experts
from edgepipe.spec.quantisation import Quantisation, WeightFormat
from edgepipe.spec.stored_types import FLOAT_TYPES
from edgepipe.spec.tensors import TensorInfo

_MAX_BLOCK = 1 << 20
_MAX_ALTERNATIVES = 1000
_TABLES = ("model.embed_tokens", "lm_head")
_MLX_KEYS = ("group_size", "bits", "mode", "quant_method")
_MLX_FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits and group by mode


def check_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """Return the formats that a parsed ``config.json`` names; None without quantisation.

    Raises ModelInvalid for formats that are not read and values that cannot be right.
    """
    mlx, other = config.get("quantization"), config.get("quantization_config")
    if mlx is None and other is None:
        return None
    value = other if mlx is None else mlx
    if not isinstance(value, dict):
        raise ModelInvalid("config.json cannot be used: 'quantization_config'", fact="an object is needed")
    fields = Fields(cast("dict[str, object]", value), what="config.json's quantization_config")
    if mlx is not None or not fields.has("quant_method"):
        return _mlx(fields, cast("dict[str, object]", value))
    method = fields.text("quant_method")
    if method not in _READERS:
        raise _refused(f"'{method[:40]}'")
    found = _READERS[method](fields)
    for stored in found.formats:
        check_format(stored)
    return found


def settle_quantisation(
    found: Quantisation, shapes: Mapping[str, tuple[int, ...]], infos: Mapping[str, TensorInfo]
) -> Quantisation:
    """Decide from the stored tensors which module has which of the formats.

    ``shapes``: of all weights by name, [out, in], or [experts, in, out] of a name without ``.weight``. A module without
    a fitting format keeps the default, so that ``check_layout`` names its tensors. Raises ModelInvalid if no weight is
    quantised.
    """
    modules = {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if len(shape) == 3 or (len(shape) == 2 and name.endswith(".weight"))
    }
    formats = {module: _stored_format(found, module, shape, infos) for module, shape in modules.items()}
    layers = Counter(stored for module, stored in formats.items() if stored and module not in _TABLES)
    if not any(formats.values()):
        raise ModelInvalid(
            "the weights contradict config.json", fact="its quantization_config fits none of them", next_step=NEXT_STEP
        )
    default = layers.most_common(1)[0][0] if layers else found.default
    settled = Quantisation(default=default)
    others = [(module, stored) for module, stored in formats.items() if settled.of(module) != stored]
    return Quantisation(default=default, others=tuple(others))


def _stored_format(
    found: Quantisation, module: str, shape: tuple[int, ...], infos: Mapping[str, TensorInfo]
) -> WeightFormat | None:
    plain = infos.get(module if len(shape) == 3 else f"{module}.weight")
    if plain is not None and plain.scheme in FLOAT_TYPES and shape in (plain.shape, joined_experts(plain.shape)):
        return None
    rows, columns = shape if len(shape) == 2 else (shape[0] * shape[2], shape[1])
    named = found.of(module)
    claims = found.formats if named is None else (named, *found.formats)
    for claim in claims:
        candidate = _with_types(claim, module, infos)
        if _fits(candidate, module, (rows, columns), infos):
            return candidate
    return named


def _with_types(claim: WeightFormat, module: str, infos: Mapping[str, TensorInfo]) -> WeightFormat:
    """Complete a claim by what only the tensors tell: the type of the scales, and whether an index is stored."""
    kind = FORMATS[claim.kind]
    scales = infos.get(part_name(module, claim, kind.scale_part))
    indexed = bool(kind.index_part) and part_name(module, claim, kind.index_part) in infos
    return replace(claim, scale=scales.scheme if scales else claim.scale, indexed=indexed)


def _fits(stored: WeightFormat, module: str, shape: tuple[int, int], infos: Mapping[str, TensorInfo]) -> bool:
    kind = FORMATS[stored.kind]
    if kind.fault(stored) or kind.misfit(stored, shape):
        return False
    for suffix, part in kind.parts(stored, shape).items():
        info = infos.get(part_name(module, stored, suffix))
        if info is None or info.scheme not in part.types or not part.accepts(info.shape):
            return False
    return True


def _refused(what: str) -> ModelInvalid:
    return ModelInvalid(
        f"the weights are quantised as {what}, which is not supported", fact=SUPPORTED, next_step=NEXT_STEP
    )


def _group(fields: Fields, default: int | None = None) -> int:
    """Return the inputs that share a scale; 0: all of a row (-1 in config files)."""
    if fields.raw("group_size") == 0:
        raise fields.fail("group_size", "it is 0; a group has at least one input")
    return max(0, fields.integer("group_size", low=-1, high=_MAX_BLOCK, default=default))


def _objects(fields: Fields, key: str) -> Mapping[str, Fields]:
    """Return an object of objects; absent: empty."""
    value = fields.raw(key)
    if value is None:
        return {}
    entries = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    good = all(isinstance(item, dict) for item in entries.values()) and isinstance(value, dict)
    if not good or len(entries) > _MAX_ALTERNATIVES:
        raise fields.fail(key, "an object of objects is needed")
    what = f"config.json's {key}"
    return {name: Fields(cast("dict[str, object]", item), what=what) for name, item in entries.items()}


def _mlx(fields: Fields, values: Mapping[str, object]) -> Quantisation:
    """Read MLX's ``quantization``: one format, other formats or false by module. Embedding and head are included."""
    default = _mlx_format(fields)
    others: dict[str, WeightFormat | None] = dict.fromkeys(_TABLES, default)
    for module, value in values.items():
        if module in _MLX_KEYS or not isinstance(value, dict | bool):
            continue
        own = Fields(cast("dict[str, object]", value), what=f"'{module[:80]}'") if isinstance(value, dict) else None
        others[module[:200]] = _mlx_format(own) if own else default if value else None
    return Quantisation(default=default, others=tuple(others.items()))


def _mlx_format(fields: Fields) -> WeightFormat:
    mode = fields.text("mode", default="affine")
    if mode != "affine" and mode not in _MLX_FLOATS:
        raise _refused(f"MLX '{mode[:40]}'")
    bits, group = _MLX_FLOATS.get(mode, (4, 64))
    group = fields.integer("group_size", low=1, high=_MAX_BLOCK, default=group)
    bits = fields.integer("bits", low=1, high=8, default=bits)
    if mode in _MLX_FLOATS:
        return check_format(WeightFormat(kind=f"mlx_{mode}", bits=bits, group=group, scale="U8"))
    return check_format(WeightFormat(kind="mlx", bits=bits, group=group))


def _awq(fields: Fields) -> Quantisation:
    layout = fields.text("version", default=fields.text("checkpoint_format", default="gemm")).lower()
    if layout != "gemm" or fields.text("backend", default="autoawq") == "llm-awq":
        raise _refused(f"AWQ with the layout '{layout[:40]}'")
    if not fields.flag("zero_point", default=True):
        raise _refused("AWQ without zeros")
    bits = fields.integer("bits", low=1, high=8)
    return Quantisation(default=WeightFormat(kind="awq", bits=bits, group=_group(fields), zeros=True))


def _gptq(fields: Fields) -> Quantisation:
    layout = fields.text("checkpoint_format", default=fields.text("format", default="gptq"))
    if layout not in ("gptq", "gptq_v2") or fields.flag("is_marlin_format", default=False):
        raise _refused(f"GPTQ with the layout '{layout[:40]}'")
    if fields.text("pack_dtype", default="int32") != "int32":
        raise _refused("GPTQ that is not packed in int32")
    default = _gptq_format(fields, WeightFormat(kind=layout, bits=0, group=-1))
    overrides = [own for pattern, own in _objects(fields, "dynamic").items() if not pattern.startswith("-:")]
    alternatives = dict.fromkeys(_gptq_format(own, default) for own in overrides)
    head = (("lm_head", default),) if fields.flag("lm_head", default=False) else ()
    return Quantisation(default=default, others=head, alternatives=tuple(alternatives))


def _gptq_format(fields: Fields, base: WeightFormat) -> WeightFormat:
    """Read one set of values; what is absent is as in ``base``, where bits 0 means required."""
    return WeightFormat(
        kind=base.kind,
        bits=fields.integer("bits", low=1, high=8, default=base.bits or None),
        group=_group(fields, None if base.group < 0 else base.group),
        zeros=not fields.flag("sym", default=not base.zeros),
        indexed=True,
        ordered=fields.flag("desc_act", default=base.ordered),
    )


def _autoround(fields: Fields) -> Quantisation:
    """Read AutoRound's config, which exports in the layout of GPTQ or AWQ."""
    packing = fields.text("packing_format", default="auto_round:auto_gptq")
    if packing == "auto_round:auto_awq":
        return _awq(fields)
    if packing != "auto_round:auto_gptq":
        raise _refused(f"AutoRound's '{packing[:40]}'")
    return Quantisation(default=_gptq_format(fields, WeightFormat(kind="gptq", bits=0, group=-1)))


def _fp8(fields: Fields) -> Quantisation:
    """Read FP8 with a scale per block, or per matrix (Ministral 3), under one of two names."""
    if fields.text("fmt", default="e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refused("FP8 that is not e4m3")
    blocks = fields.has("weight_block_size")
    rows, group = _block(fields, "weight_block_size") if blocks else (0, 0)
    plain = WeightFormat(kind="fp8", bits=8, rows=rows, group=group, scale="F32")
    inverse = replace(plain, kind="fp8_inv")
    default, other = (inverse, plain) if blocks else (plain, inverse)
    return Quantisation(default=default, alternatives=(other,))


def _fbgemm_fp8(fields: Fields) -> Quantisation:
    return Quantisation(default=WeightFormat(kind="fp8", bits=8, scale="F32"))


def _block(fields: Fields, key: str) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    block = fields.items(key)
    if len(block) != 2 or not all(type(size) is int and 0 < size <= _MAX_BLOCK for size in block):
        raise fields.fail(key, f"it is {str(block)[:60]}; two sizes are needed")
    rows, columns = cast("list[int]", block)
    return rows, columns


def _bitsandbytes(fields: Fields) -> Quantisation:
    if fields.flag("load_in_8bit", default=False) or fields.flag("_load_in_8bit", default=False):
        raise _refused("bitsandbytes int8")
    kind = fields.text("bnb_4bit_quant_type", default="fp4")
    if kind != "nf4":
        raise _refused(f"bitsandbytes '{kind[:40]}'")
    if fields.text("bnb_4bit_quant_storage", default="uint8") != "uint8":
        raise _refused("bitsandbytes that is not stored in uint8")
    nested = fields.flag("bnb_4bit_use_double_quant", default=False)
    return Quantisation(default=WeightFormat(kind="nf4", group=64, scale="U8" if nested else "F32"))


def _compressed_tensors(fields: Fields) -> Quantisation:
    sparsity = fields.raw("sparsity_config")
    if isinstance(sparsity, dict) and sparsity and cast("dict[str, object]", sparsity).get("format") != "dense":
        raise _refused("compressed-tensors with sparsity")
    if fields.raw("transform_config"):
        raise _refused("compressed-tensors with transforms")
    layout = fields.text("format", default="dense")
    groups = _objects(fields, "config_groups")
    formats = [stored for own in groups.values() if (stored := _compressed_format(own, layout)) is not None]
    if not formats:
        raise _refused("compressed-tensors without quantised weights")
    default, *alternatives = dict.fromkeys(formats)
    return Quantisation(default=default, alternatives=tuple(alternatives))


def _compressed_format(group: Fields, layout: str) -> WeightFormat | None:
    """Read one of ``config_groups``; None: its weights are not quantised."""
    if not group.has("weights"):
        return None
    layout = group.text("format", default=layout)
    value = group.raw("weights")
    weights = Fields(cast("dict[str, object]", value) if isinstance(value, dict) else {}, what="config.json's weights")
    kind, bits = weights.text("type"), weights.integer("num_bits", low=1, high=8)
    if layout == "naive-quantized":
        layout = "float-quantized" if kind == "float" else "int-quantized"
    strategy = weights.text("strategy", default="group" if weights.has("group_size") else "tensor")
    if weights.flag("dynamic", default=False) or strategy not in ("tensor", "channel", "group", "block"):
        raise _refused(f"compressed-tensors with the strategy '{strategy[:40]}'")
    base = WeightFormat(
        kind=layout,
        bits=bits,
        group=_group(weights) if strategy == "group" else 0,
        rows=0 if strategy == "tensor" else 1,
        zeros=not weights.flag("symmetric", default=True),
        ordered=weights.raw("actorder") in ("group", True),
    )
    if layout == "pack-quantized" and kind == "int":
        return replace(base, kind="packed", indexed=base.ordered)
    if layout == "int-quantized" and kind == "int":
        return replace(base, kind="int8")
    if layout == "float-quantized" and kind == "float":
        block = _block(weights, "block_structure") if strategy == "block" else (base.rows, base.group)
        return replace(base, kind="fp8", rows=block[0], group=block[1], scale="F32")
    raise _refused(f"compressed-tensors '{layout[:40]}' of {bits} bits ({kind[:20]})")


def _mxfp4(_: Fields) -> Quantisation:
    """gpt-oss's experts. Its ``modules_to_not_convert`` are stored as floats."""
    return Quantisation(default=WeightFormat(kind="mxfp4", bits=4, group=32, scale="U8"))


_READERS: Mapping[str, Callable[[Fields], Quantisation]] = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _autoround,
    "intel/auto-round": _autoround,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
}
