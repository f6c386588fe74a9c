"""Formats whose weights are several stored tensors: names and shapes of the parts, the packed form, and packing."""

from __future__ import annotations

from collections.abc import Mapping

from edgepipe.errors import ModelInvalid
from edgepipe.spec.formats.awq import Awq
from edgepipe.spec.formats.common import StoredArrays, StoredFormat, StoredPart, decode
from edgepipe.spec.formats.compressed import Int8, PackedIntegers
from edgepipe.spec.formats.fp8 import Fp8
from edgepipe.spec.formats.gptq import Gptq
from edgepipe.spec.formats.mlx import MlxAffine, MlxMxfp4, MlxMxfp8, MlxNvfp4
from edgepipe.spec.formats.mxfp4 import Mxfp4
from edgepipe.spec.formats.nf4 import Nf4
from edgepipe.spec.packed import Packed
from edgepipe.spec.packed_form import PackedForm
from edgepipe.spec.quantisation import WeightFormat
from edgepipe.spec.tensors import StoredTensor

FORMATS: Mapping[str, StoredFormat] = {
    "awq": Awq(),
    "gptq": Gptq(zero_shift=1),
    "gptq_v2": Gptq(zero_shift=0),
    "packed": PackedIntegers(),
    "int8": Int8(),
    "fp8": Fp8(scale_part="weight_scale"),
    "fp8_inv": Fp8(scale_part="weight_scale_inv"),
    "mlx": MlxAffine(),
    "mlx_mxfp4": MlxMxfp4(),
    "mlx_mxfp8": MlxMxfp8(),
    "mlx_nvfp4": MlxNvfp4(),
    "mxfp4": Mxfp4(),
    "nf4": Nf4(),
}
"""Keys are values of ``WeightFormat.kind``."""


def check_format(stored: WeightFormat) -> WeightFormat:
    """Return the value if its fields belong together. Raises ModelInvalid."""
    fault = FORMATS[stored.kind].fault(stored) if stored.kind in FORMATS else f"the format '{stored.kind[:40]}'"
    if fault:
        raise ModelInvalid(f"{fault} is not supported", fact=SUPPORTED, next_step=NEXT_STEP)
    return stored


SUPPORTED = (
    "edgepipe reads GGUF, MLX (2-8 bits, mxfp4, mxfp8, nvfp4), AWQ, GPTQ (2, 3, 4 and 8 bits), "
    "compressed-tensors (W4A16, W8A16, int8, FP8), FP8, gpt-oss' MXFP4 and bitsandbytes NF4"
)
NEXT_STEP = "pull another quantisation of the model, or its original"


def weight_parts(stored: WeightFormat, shape: tuple[int, ...]) -> dict[str, StoredPart]:
    """Return the stored tensors of a weight by suffix. Raises ModelInvalid if the weight cannot be stored so."""
    matrix = _matrix(shape)
    misfit = FORMATS[stored.kind].misfit(stored, matrix)
    if misfit:
        raise ModelInvalid("the weights contradict the model's config", fact=f"{weight_label(stored)}: {misfit}")
    return FORMATS[stored.kind].parts(stored, matrix)


def part_name(module: str, stored: WeightFormat, suffix: str) -> str:
    """Return the name of a weight's stored tensor."""
    return f"{module}_{suffix}" if stored.kind == "mxfp4" else f"{module}.{suffix}"


def packed_form(stored: WeightFormat, shape: tuple[int, ...]) -> PackedForm:
    """Return the packed form of a weight."""
    return FORMATS[stored.kind].form(stored, _matrix(shape))


def weight_label(stored: WeightFormat) -> str:
    """Return the format's name for people and tables."""
    return FORMATS[stored.kind].label(stored)


def pack_weight(name: str, shape: tuple[int, ...], stored: WeightFormat, tensors: Mapping[str, StoredTensor]) -> Packed:
    """Pack a weight's stored tensors, given by suffix. Raises ModelInvalid."""
    arrays = {
        suffix: decode(tensors[suffix].info.name, part, tensors[suffix].data, tensors[suffix].info.scheme)
        for suffix, part in weight_parts(stored, shape).items()
    }
    weight = StoredArrays(name=name, shape=_matrix(shape), stored=stored, arrays=arrays)
    return FORMATS[stored.kind].pack(weight)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns
