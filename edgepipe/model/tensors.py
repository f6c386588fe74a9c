"""Tensors between file and backend: raw blocks with their scheme, read one at a time.

Names are always Hugging Face's (``model.layers.3.self_attn.q_proj.weight``); GGUF readers translate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgepipe.model.facts import ModelConfig, Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Description of one tensor in a file."""

    name: str  # Hugging Face name
    shape: tuple[int, ...]  # logical, row-major: [out_features, in_features]
    scheme: str  # "F32" | "F16" | "BF16" or a GGUF type such as "Q4_1", "Q6_K"
    num_bytes: int  # as stored
    rounded: bool = False  # values are rounded to bf16 for every compute type (GGUF), so that all stages agree


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Position of a tensor's bytes in its file."""

    info: TensorInfo
    offset: int  # bytes from the file's start
    permuted_heads: int | None = None  # number of heads whose rows are in GGUF's llama order; None: no reordering


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
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
        """Return the tensors that a slice needs, in the best reading order.

        A tied head appears as ``model.embed_tokens.weight``, once, even if the slice does not embed.
        """
        ...

    def read(self, name: str) -> RawTensor:
        """Read one tensor. Raises ModelInvalid if the file is too short."""
        ...
