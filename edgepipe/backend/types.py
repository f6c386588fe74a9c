"""What a stage and a backend tell each other.

Shape letters: T packed tokens of a step, H hidden, V vocabulary, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from edgepipe.ids import SequenceId, StepId

DEFAULT_BLOCK_SIZE = 16  # tokens per KV block, where no device serves another size better

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
    block_sizes: tuple[int, ...] = (DEFAULT_BLOCK_SIZE,)  # KV block sizes that it serves well, tokens, ascending
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
class ScoreRows:
    """Known tokens whose log-probabilities are wanted: too many for their logits to leave the device."""

    rows: npt.NDArray[np.int32]  # [S] packed token indices
    targets: npt.NDArray[np.int32]  # [S] the token that follows each
    num_top: int  # N most likely tokens wanted beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What ``ScoreRows`` asked for. Raw logits: subtract the total to get log-probabilities."""

    log_totals: npt.NDArray[np.float32]  # [S] log of the sum of exp(logit)
    logits: npt.NDArray[np.float32]  # [S] of the targets
    top_ids: npt.NDArray[np.int32]  # [S, N] most likely first
    top_logits: npt.NDArray[np.float32]  # [S, N]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """How a step's logits are changed on the device before it picks candidates. E sparse entries, W words of masks."""

    rows: npt.NDArray[np.int32]  # [E] which of the R rows
    ids: npt.NDArray[np.int32]  # [E] which token; a row and token come once
    repetition: npt.NDArray[np.float32]  # [E] positive logits are divided by it, negative ones multiplied; 1: neither
    add: npt.NDArray[np.float32]  # [E] added then
    masks: npt.NDArray[np.int32] | None  # [R, W] a bit per token that may come; None: all rows may have any
    temperatures: npt.NDArray[np.float32]  # [R] above 0
    num_top: int  # N most likely tokens wanted of the logits before all changes


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedCandidates:
    """What a device with ``picks_candidates`` returns of its logits. K candidates per row."""

    ids: npt.NDArray[np.int32]  # [R, K] of the highest changed logits, descending
    logits: npt.NDArray[np.float32]  # [R, K] changed
    raw_logits: npt.NDArray[np.float32]  # [R, K] of the same tokens, unchanged
    totals: npt.NDArray[np.float32]  # [R] sum of exp((changed - highest changed) / temperature) over V
    raw_log_totals: npt.NDArray[np.float32]  # [R] of the unchanged logits at temperature 1
    top_ids: npt.NDArray[np.int32]  # [R, N] of the highest unchanged logits, descending
    top_logits: npt.NDArray[np.float32]  # [R, N]
    fetch: Callable[[int], npt.NDArray[np.float32]]  # a row's changed logits [V], for draws beyond K; any thread, once


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One micro-batch through one slice. Tokens are packed row after row into T = sum(num_tokens)."""

    step: StepId
    slice_index: int
    rows: tuple[StepRow, ...]
    logit_rows: npt.NDArray[np.int32]  # [R] packed token indices whose logits are wanted; used by the head's slice only
    copies: tuple[BlockCopy, ...] = ()  # only in the stage's first slice of the step
    scores: ScoreRows | None = None  # used by the head's slice only

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step gave: activations, or from the slice with the head logits or candidates."""

    activations: Activations | None = None  # [T, H], contiguous; hidden plus residual
    logits: npt.NDArray[np.float32] | None = None  # [R, V], the receiver's own: it writes there
    candidates: PickedCandidates | None = None  # of R rows, if the backend picks them
    scores: TokenScores | None = None  # beside either, if asked


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Told while weights are loaded, once per tensor."""

    tensors_done: int
    tensors_total: int
    bytes_done: int
    bytes_total: int
