"""Tensors between file and backend: raw blocks with their scheme, read one at a time.

Names are always Hugging Face's (``model.layers.3.self_attn.q_proj.weight``); GGUF readers translate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.packed import Packed
from edgepipe.spec.packed_form import PackedForm


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Description of one tensor in a file."""

    name: str  # Hugging Face name
    shape: tuple[int, ...]  # logical, row-major: [out_features, in_features]
    scheme: str  # "F32" | "F16" | "BF16" or a GGUF type such as "Q4_1", "Q6_K"
    num_bytes: int  # stored size
    rounded: bool = False  # widened values are rounded to bf16 for every compute type (GGUF's quantised types)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightInfo:
    """A weight as the model computes with it, made of one or several stored tensors."""

    name: str  # Hugging Face name of the weight: ``model.layers.3.mlp.up_proj.weight``, whatever its parts are called
    shape: tuple[int, ...]  # logical: [out_features, in_features]
    scheme: str  # how it is stored, for people and tables: a ``TensorInfo.scheme``, or a format such as "AWQ"
    form: PackedForm | None  # None: ``load`` returns floats
    num_bytes: int  # size of its stored tensors
    rounded: bool = False  # see TensorInfo

    @property
    def is_bf16(self) -> bool:
        """Whether bf16 holds all values of a weight that is, or becomes, floats."""
        return self.rounded or self.scheme == "BF16"

    @property
    def fits_16_bits(self) -> bool:
        """Whether floats of 16 bits hold the values to the precision of a float32 product, also of a widened weight."""
        return self.is_bf16 or self.scheme == "F16"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Position of a tensor's bytes in its file."""

    info: TensorInfo
    offset: int  # bytes from the file's start
    permuted_heads: int | None = None  # number of heads whose rows are in GGUF's llama order; None: no reordering


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor as stored: ``data`` [num_bytes] uint8, rows in logical order (q/k un-permuted)."""

    info: TensorInfo
    data: npt.NDArray[np.uint8]


class WeightSource(Protocol):
    """Lazy source of a model's tensors. Reading a tensor reads only that tensor's bytes."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read so far (headers not counted)."""
        ...

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """Return the stored tensors that a slice needs, in the best reading order.

        A tied head appears as ``model.embed_tokens.weight``, once, even if the slice does not embed.
        """
        ...

    def read(self, name: str) -> StoredTensor:
        """Read one stored tensor. Raises ModelInvalid if the file is too short."""
        ...

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Read a part of the bytes of ``read``. Several threads may do so at once. Raises ModelInvalid."""
        ...

    def weights(self, part: Slice) -> Sequence[WeightInfo]:
        """Return the weights that a slice computes with, in the order of ``tensors``. Raises ModelInvalid."""
        ...

    def load(self, name: str) -> StoredTensor | Packed:
        """Read one weight: packed if its info has a form. Raises ModelInvalid, also for values that are not finite."""
        ...
