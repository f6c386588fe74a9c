"""Names the forms of packed weights that the kernels compute with, and the macros that compile them for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgepipe.spec.packed import GroupValues, Packed
from edgepipe.spec.packed_form import CODEBOOKS, PackedForm

TILE_ROWS, TILE_INPUTS = 16, 128
FUNCTIONS = ("affine_mm_1", "affine_mm_2", "affine_mm_4", "affine_mm_8", "add_splits", "dequantise")
EXPERT_FUNCTIONS = ("expert_mm_1", "expert_mm_2", "expert_mm_8")
ROUTING_FUNCTIONS = ("choose", "sort_pairs", "add_weighted", "add_gated")
PLACE_FUNCTIONS = ("place_heads",)
PAGED_FUNCTIONS = ("attend_parts", "merge_parts")

_OFFSETS = {"none": 0, "zero": 1, "zeros": 2, "added": 3}
_KINDS = {"float16": 0, "uint16": 1, "float32": 2}  # stored types of GroupValues.base
_FACTORS = {"uint8": 1, "int8": 2}
_TABLE_BYTES = 1024
_MAX_ZERO = 128  # largest zero: with 4 to 6 bits, bf16 holds 128 + zero up to 256 exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatKind:
    """Stored types of a ``GroupValues``."""

    base: str = "float16"  # a key of _KINDS
    factor: str = ""  # a key of _FACTORS; empty: one level

    @property
    def base_code(self) -> int:
        """The kernels' number for the base type."""
        return _KINDS[self.base]

    @property
    def factor_code(self) -> int:
        """The kernels' number for the factor type."""
        return _FACTORS[self.factor] if self.factor else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """What the kernels are compiled for."""

    bits: int  # 16: bf16, not packed
    group: int  # 0: all of a row
    span: int
    offset: Literal["none", "zero", "zeros", "added"]  # values of ``PackedForm.offset``
    codebook: str
    scale: FloatKind
    added: FloatKind  # kind of the offset, where one is added

    @property
    def macros(self) -> dict[str, str]:
        """Names and values to define."""
        macros = {
            "BITS": self.bits,
            "GROUP": self.group,
            "SPAN": self.span,
            "SCALE_KIND": self.scale.base_code,
            "SCALE_FACTOR": self.scale.factor_code,
            "OFFSET": _OFFSETS[self.offset],
            "OFFSET_KIND": self.added.base_code,
            "OFFSET_FACTOR": self.added.factor_code,
            "E4M3": int(self.codebook == "e4m3"),
        }
        texts = {name: str(value) for name, value in macros.items()}
        if self.has_table:
            levels, rest = bf16_terms(self.codebook)
            texts["LEVELS"] = ",".join(map(str, levels))
            if any(rest):
                texts["LEVELS_REST"] = ",".join(map(str, rest))
        return texts

    @property
    def has_table(self) -> bool:
        """Whether levels are looked up in shared memory."""
        return bool(self.codebook) and self.codebook != "e4m3"

    @property
    def table_bytes(self) -> int:
        """Shared memory of the table of levels, by pairs of codes."""
        return _TABLE_BYTES * (2 if "LEVELS_REST" in self.macros else 1) if self.has_table else 0

    @property
    def segment(self) -> int:
        """Inputs whose product is summed before it is scaled."""
        return 16 if self.group == 16 else 32


def kernel_form(weight: Packed) -> KernelForm:
    """Return what to compile for a weight; ``supports`` its form."""
    form = weight.form
    whole_row = form.group == weight.shape[1] and form.group not in (16, 32, 64) and form.group % TILE_INPUTS != 0
    return KernelForm(
        bits=form.bits,
        group=0 if whole_row else form.group,
        span=form.span,
        offset=form.offset,
        codebook=form.codebook,
        scale=_kind(weight.scale),
        added=FloatKind() if weight.offset is None else _kind(weight.offset),
    )


def _kind(values: GroupValues) -> FloatKind:
    return FloatKind(base=values.base.dtype.name, factor="" if values.factor is None else values.factor.dtype.name)


def supports(form: PackedForm, in_features: int) -> bool:
    """Return whether the kernels compute with weights of this form and number of inputs."""
    group_fits = form.group in (16, 32, 64) or form.group % TILE_INPUTS == 0 or form.group == in_features
    span_fits = form.span == 0 or (form.span % TILE_INPUTS == 0 and form.group <= form.span)
    levels_fit = not form.codebook or (form.offset == "none" and _width(form.codebook) == form.bits)
    return form.bits in (4, 5, 6, 8) and in_features % 16 == 0 and group_fits and span_fits and levels_fit


def zeros_fit(weight: Packed) -> bool:
    """Return whether the weight's zeros lie in the range that the kernels compute exactly."""
    zeros = weight.zero if weight.zero is not None else 0
    return weight.form.bits == 8 or int(np.max(zeros)) <= _MAX_ZERO


def _width(codebook: str) -> int:
    """Return the bits of a code."""
    return len(CODEBOOKS[codebook]).bit_length() - 1


@cache
def bf16_terms(codebook: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the bits of a codebook's levels in bf16, and of what the rounding missed. Only nf4's levels miss any."""
    exact = CODEBOOKS[codebook]
    levels = _round_to_bf16(exact)
    rest = _round_to_bf16(exact - (levels << 16).view(np.float32))
    return tuple(map(int, levels)), tuple(map(int, rest))


def _round_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)


WIDE_FORM = KernelForm(
    bits=16, group=0, span=0, offset="none", codebook="", scale=FloatKind(base="uint16"), added=FloatKind()
)
"""bf16 values; only experts' products compute with them."""


PRODUCT_FILES = ("common.cuh", "packed.cu", "products.cu")
ROUTING_FILES = ("common.cuh", "routing.cu")
PLACE_FILES = ("common.cuh", "place_heads.cu")
PAGED_FILES = ("common.cuh", "paged_decode.cu")
EXPERT_MACROS = {"EXPERTS": "1"}


def expert_files(form: KernelForm) -> tuple[str, ...]:
    """Return the sources of products with experts of a form. They need ``EXPERT_MACROS``, too."""
    return ("common.cuh", "wide.cu" if form == WIDE_FORM else "packed.cu", "products.cu", "experts.cu")


@cache
def kernel_source(files: tuple[str, ...] = PRODUCT_FILES) -> str:
    """Return CUDA source without its macros."""
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in ("primitives.cuh", *files))


def options(macros: Mapping[str, str]) -> list[str]:
    """Return the compiler's options for macros."""
    return [f"-D{name}={value}" for name, value in sorted(macros.items())]
