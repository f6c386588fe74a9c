"""Tensors on their way from a file to a backend: raw blocks with their scheme, read one at a time.

Names are Hugging Face's (``model.layers.3.self_attn.q_proj.weight``) whatever the file; GGUF readers translate them.
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
    """What a file says of one tensor."""

    name: str  # Hugging Face name
    shape: tuple[int, ...]  # logical, row-major: [out_features, in_features]
    scheme: str  # "F32" | "F16" | "BF16" or a GGUF type such as "Q4_1", "Q6_K"
    num_bytes: int  # as stored
    rounded: bool = False  # its values are those of bf16 whatever the compute type (GGUF), so that all stages agree


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a tensor's bytes stand in its file."""

    info: TensorInfo
    offset: int  # bytes from the file's start
    permuted_heads: int | None = None  # the rows of each of so many heads stand in GGUF's order for llama


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """One tensor as stored: ``data`` [num_bytes] uint8, rows in the order of the logical shape (q/k un-permuted)."""

    info: TensorInfo
    data: npt.NDArray[np.uint8]


class WeightSource(Protocol):
    """Lazily gives the tensors of a model. Reading one tensor reads that tensor's bytes and no others."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read so far (headers not counted)."""
        ...

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """The tensors that a slice needs, in the order in which they should be read.

        A tied head is listed as ``model.embed_tokens.weight``, once, also where the slice does not embed.
        """
        ...

    def read(self, name: str) -> RawTensor:
        """Read one tensor. Raises ModelInvalid if the file is shorter than it promised."""
        ...
