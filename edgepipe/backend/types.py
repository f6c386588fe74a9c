"""What a stage and a backend tell each other.

Shape letters: T packed tokens of a step, H hidden, V vocabulary, R rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from edgepipe.ids import SequenceId, StepId

Activations = npt.NDArray[np.uint16] | npt.NDArray[np.float32]
"""``[T, H]``: bf16 bits as uint16, or float32 where the pipeline's links do not round."""

TokenIds = npt.NDArray[np.int32]
"""``[T]``: what the first slice takes instead of activations."""


class ActivationType(Enum):
    """How hidden states travel between stages; agreed when the pipeline is made."""

    BF16 = "bf16"
    FLOAT32 = "float32"

    @property
    def num_bytes(self) -> int:
        return 2 if self is ActivationType.BF16 else 4

    @property
    def numpy(self) -> npt.DTypeLike:
        return np.uint16 if self is ActivationType.BF16 else np.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """What one device is and can do, as measured (or, for the emulated backend, as told)."""

    backend: str  # "torch" | "mlx" | "emulated"
    device: str  # the backend's word: "cpu", "cuda:0", "gpu", "rtx4090"
    name: str  # for people: "NVIDIA GeForce RTX 4090"
    compute_dtype: str  # "float32" | "bfloat16"
    memory_total_bytes: int
    memory_free_bytes: int  # free for us now
    bandwidth_bytes_per_s: float  # effective memory read rate
    flops: float  # dense matrix rate in compute_dtype, FLOP/s
    block_sizes: tuple[int, ...] = (16,)  # KV block sizes that the backend supports, tokens, ascending
    contiguous_kv: bool = True  # attends over runs as views, so prefix hits become planned copies


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """How a stage process wants its backend."""

    device: str = "auto"
    dtype: str = "auto"  # "float32" | "bfloat16" | "auto": float32 on CPUs, bf16 elsewhere
    activation_type: ActivationType = ActivationType.BF16
    threads: int | None = None  # CPU threads for computing; None: all physical cores
    settings: dict[str, str] = field(default_factory=dict[str, str])  # a backend's own, e.g. {"time_factor": "0"}


@dataclass(frozen=True, slots=True)
class BlockRun:
    """``count`` physical KV blocks with consecutive ids from ``start``."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy KV block ``source`` over block ``target`` in every layer, before the step's rows are computed."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The tokens of one sequence in a step: a whole prompt, a chunk of one, or one decode token.

    Tokens ``[position, position + num_tokens)`` are computed and their KV written; each attends to ``[0, itself]``.
    A position below what was computed before truncates: later slots are garbage from now on.
    """

    sequence: SequenceId
    position: int  # absolute, of the first token
    num_tokens: int
    runs: tuple[BlockRun, ...]  # the sequence's block table from token 0, covering position + num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One micro-batch through one slice. Tokens are packed row after row into T = sum(num_tokens)."""

    step: StepId
    slice_index: int
    rows: tuple[StepRow, ...]
    logit_rows: npt.NDArray[np.int32]  # [R] packed token indices whose logits are wanted; used by the head's slice only
    copies: tuple[BlockCopy, ...] = ()  # only in the stage's first slice of the step

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step gave: exactly one of the two is there."""

    activations: Activations | None = None  # [T, H], contiguous; hidden plus residual
    logits: npt.NDArray[np.float32] | None = None  # [R, V], from the slice with the head


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Told while weights are loaded, once per tensor."""

    tensors_done: int
    tensors_total: int
    bytes_done: int
    bytes_total: int
