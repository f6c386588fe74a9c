"""Types between a stage and a backend.

Shape letters: T packed tokens of a step, H hidden, V vocabulary, R rows that need logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from edgepipe.ids import SequenceId, StepId

if TYPE_CHECKING:  # commands read device profiles, and load no numpy for that
    import numpy as np
    import numpy.typing as npt

DEFAULT_BLOCK_SIZE = 16  # tokens per KV block, unless a device prefers another size

Activations: TypeAlias = "npt.NDArray[np.uint16] | npt.NDArray[np.float32]"
"""``[T, H]``: bf16 bits as uint16, or float32 if the pipeline's links do not round."""

TokenIds: TypeAlias = "npt.NDArray[np.int32]"
"""``[T]``: input of the first slice, instead of activations."""


class ActivationType(Enum):
    """Format of hidden states between stages, fixed per pipeline."""

    BF16 = "bf16"
    FLOAT32 = "float32"

    @property
    def num_bytes(self) -> int:
        """Bytes of a number."""
        return 2 if self is ActivationType.BF16 else 4

    @property
    def numpy(self) -> npt.DTypeLike:
        """numpy's type that holds it; bf16 travels as its bits."""
        import numpy as np

        return np.uint16 if self is ActivationType.BF16 else np.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """Settings of a served model that every stage obeys.

    They travel as this one value from the command line to the backend of each stage.
    """

    dtype: str = "auto"  # "float32" | "bfloat16" | "auto": as the node is set
    kv: str = ""  # form of the KV, see ``ModelConfig.kv_bytes_per_token``; empty: the compute dtype
    activation_type: ActivationType = ActivationType.BF16
    context_length: int = 0  # tokens per sequence; 0: the model's
    block_size: int = DEFAULT_BLOCK_SIZE  # tokens per KV block, for as long as the model is served
    most_slots: int = 0  # bound on the slots of recurrent layers' states; 0: no bound, see ``MemoryClasses.states``
    kv_ram: str = ""  # host memory of each stage for idle KV: bytes, or "auto"; empty: none
    kv_disk: str = ""  # disk of each stage for idle KV that leaves ``kv_ram``: bytes; empty: none
    draft_model: str = ""  # name of a second model, which drafts beside the stage with the head; empty: none
    draft_hash: str = ""  # its content, as ``ServeSpec.manifest_hash``

    def dtype_on(self, own: str) -> str:
        """Return the dtype on a node or device with the dtype ``own``."""
        return own if self.dtype == "auto" else self.dtype

    def of_backend(self) -> StageSettings:
        """Return the settings without those that a backend finds in its calls: the context decides the weights' config,
        ``allocate_kv`` names the block size and the slots, and another process has the draft model."""
        bare = replace(self, context_length=0, block_size=DEFAULT_BLOCK_SIZE, most_slots=0)
        return replace(bare, kv_ram="", kv_disk="", draft_model="", draft_hash="")

    def without_draft_model(self) -> StageSettings:
        """Return the settings of a model that is served without a draft model."""
        return replace(self, draft_model="", draft_hash="")

    def of_layer(self) -> StageSettings:
        """Return the settings of a measurement of one layer, whose activations are bf16."""
        return replace(self.of_backend(), activation_type=ActivationType.BF16)


DEFAULT_SETTINGS = StageSettings()
"""Every stage as its node is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Properties and measured rates of one device (for the emulated backend: configured rates)."""

    backend: str  # "torch" | "mlx" | "emulated"
    device: str  # the backend's name: "cpu", "cuda:0", "gpu", "rtx4090"
    name: str  # name shown to people: "NVIDIA GeForce RTX 4090"
    compute_dtype: str  # "float32" | "bfloat16"
    memory_total_bytes: int
    memory_free_bytes: int  # available now
    bandwidth_bytes_per_s: float  # effective memory read rate
    flops: float  # dense matrix rate in compute_dtype, FLOP/s
    block_sizes: tuple[int, ...] = (DEFAULT_BLOCK_SIZE,)  # efficient KV block sizes, tokens, ascending
    contiguous_kv: bool = True  # attends over runs as views, so prefix hits become planned copies
    packing: str = ""  # how it keeps packed weights: a kind of ``edgepipe.weights.resident``; empty: widened
    kv_forms: tuple[str, ...] = ()  # forms of KV besides the compute dtype, which the setting "kv" selects
    keeps_states: bool = False  # it computes recurrent layers
    # Host memory beside the device, where the setting "experts_in_ram" keeps experts:
    ram_total_bytes: int = 0  # 0: the backend keeps no experts there, or its device uses that memory itself
    ram_free_bytes: int = 0  # available now
    ram_bytes_per_s: float = 0.0  # rate at which the CPU reads host memory, as measured
    reads_as: str = ""  # packing whose kernels an emulated device imitates; empty: its own


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedProducts:
    """What multiplies with the loaded packed weights, or with some of them. Texts are for people."""

    by: str  # "own kernels (AVX2)"
    reason: str = ""  # why nothing faster does; empty: it is the fastest on this device
    remedy: str = ""  # command that makes a faster way available, if one does


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPath:
    """Something that makes a stage's steps slower than they are elsewhere. Texts are for people."""

    what: str  # "decode steps run without CUDA graphs"
    cost: str  # measured cost, for people
    reason: str  # why
    remedy: str = ""  # command that makes the faster way available, if one does


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelError:
    """Largest error of one of the device's kernels against float64. Texts are for people."""

    kernel: str  # "product Q4_K"
    error: float = 0.0  # multiple of its bound: the rounding of a result and of its sum
    reason: str = ""  # why the kernel cannot run here; empty: it ran


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions(StageSettings):
    """Options of a stage process for its backend: the served model's settings, and those of the node.

    A ``dtype`` of "auto" means float32 on CPUs, bf16 elsewhere.
    """

    device: str = "auto"
    threads: int | None = None  # CPU threads for computing; None: the cores that other programs leave
    settings: dict[str, str] = field(default_factory=dict[str, str])  # backend-specific, e.g. {"time_factor": "0"}


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A run of ``count`` physical KV blocks with consecutive ids from ``start``."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of KV block ``source`` to block ``target`` in every layer, before the step's rows are computed."""

    source: int
    target: int


class TierMove(NamedTuple):
    """A copy of one block, or one slot of states, between the device and host memory, in every layer of its class."""

    number: int  # memory class; behind the last one: the slots of states
    place: int  # block or slot on the device
    kept: int  # block or slot in host memory
    out: bool  # True: to host memory; False: back to the device
    key: bytes = b""  # names what moves out, see ``scheduler.kv.Key``; backends do not read it


@dataclass(frozen=True, slots=True)
class WindowRuns:
    """A sequence's block table in one windowed memory class, as far as later tokens need it."""

    first: int  # place in the sequence of the first block: tokens before it are not kept
    runs: tuple[BlockRun, ...]


@dataclass(frozen=True, slots=True)
class StateWrite:
    """The state behind a row's first ``after`` tokens goes to a slot."""

    after: int  # 1 to the row's number of tokens
    slot: int


@dataclass(frozen=True, slots=True)
class RowState:
    """Where a row's recurrent layers find their state, and where they leave it.

    A slot that is read may also be written. No other row of the step writes to a slot that a row reads or writes.
    """

    read: int | None  # slot with the state behind all tokens before the row; None: the sequence begins
    writes: tuple[StateWrite, ...]  # ascending in ``after``; the last is behind the row's last token


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The tokens of one sequence in a step: a whole prompt, a chunk of a prompt, or one decode token.

    The step computes tokens ``[position, position + num_tokens)`` and writes their KV; each attends to ``[0, itself]``.
    A position below the computed tokens truncates the sequence: the content of later slots is then undefined.
    """

    sequence: SequenceId
    position: int  # absolute, of the first token
    num_tokens: int
    runs: tuple[BlockRun, ...]  # the sequence's block table from token 0, covering position + num_tokens
    windows: tuple[WindowRuns, ...] = ()  # its tables of windowed classes, if the pool has such classes
    state: RowState | None = None  # set if the model has recurrent layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRows:
    """Known tokens to score, too many to move their logits off the device."""

    rows: npt.NDArray[np.int32]  # [S] packed token indices
    targets: npt.NDArray[np.int32]  # [S] the token that follows each
    num_top: int  # N most likely tokens to return besides


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Results for ``ScoreRows``. Raw logits: subtract the total to get log-probabilities."""

    log_totals: npt.NDArray[np.float32]  # [S] log of the sum of exp(logit)
    logits: npt.NDArray[np.float32]  # [S] of the targets
    top_ids: npt.NDArray[np.int32]  # [S, N] most likely first
    top_logits: npt.NDArray[np.float32]  # [S, N]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Changes to a step's logits on the device before it picks candidates. E sparse entries, W words of masks."""

    rows: npt.NDArray[np.int32]  # [E] index of the row among R
    ids: npt.NDArray[np.int32]  # [E] token; each pair of row and token at most once
    repetition: npt.NDArray[np.float32]  # [E] divides positive logits, multiplies negative ones; 1: no change
    add: npt.NDArray[np.float32]  # [E] added afterwards
    masks: npt.NDArray[np.int32] | None  # [R, W] a bit per allowed token; None: all rows allow all tokens
    temperatures: npt.NDArray[np.float32]  # [R] above 0
    num_top: int  # N most likely tokens to return, of the unchanged logits


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedCandidates:
    """Result of a device with ``picks_candidates``. K candidates per row."""

    ids: npt.NDArray[np.int32]  # [R, K] tokens of the highest changed logits, descending
    logits: npt.NDArray[np.float32]  # [R, K] changed
    raw_logits: npt.NDArray[np.float32]  # [R, K] of the same tokens, unchanged
    totals: npt.NDArray[np.float32]  # [R] sum of exp((changed - highest changed) / temperature) over V
    raw_log_totals: npt.NDArray[np.float32]  # [R] of the unchanged logits at temperature 1
    top_ids: npt.NDArray[np.int32]  # [R, N] tokens of the highest unchanged logits, descending
    top_logits: npt.NDArray[np.float32]  # [R, N]
    # Fetches a row's changed logits [V] for a draw beyond K; on any thread, once.
    fetch: Callable[[int], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One micro-batch through one slice. Tokens are packed row after row into T = sum(num_tokens)."""

    step: StepId
    slice_index: int
    rows: tuple[StepRow, ...]
    logit_rows: npt.NDArray[np.int32]  # [R] packed indices of tokens that need logits; only for the head's slice
    copies: tuple[BlockCopy, ...] = ()  # set in the stage's first slice of the step only
    moves: tuple[TierMove, ...] = ()  # the same; in order, before the copies
    scores: ScoreRows | None = None  # set for the head's slice only
    # [T] the token behind each packed one, or ``UNKNOWN_ID``, or ``NO_DRAFT``. Only for the head's slice of a model
    # whose last layer predicts one token more: that computes the keys and values of tokens whose next one is known.
    next_ids: TokenIds | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(row.num_tokens for row in self.rows)


UNKNOWN_ID = -1
"""A value of ``Step.next_ids``: the next token is not known yet, and the output is kept for ``DraftRow``."""

NO_DRAFT = -2
"""A value of ``Step.next_ids``: nothing drafts for the sequence by that layer."""

Kept: TypeAlias = Any
"""The backend's own ``[U, H]``: the model's output behind its final norm. Can be sliced; used on the compute thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """Tokens of one sequence that are known, and how many to guess behind them."""

    sequence: SequenceId
    position: int  # position of the first of the n tokens that ``kept`` belongs to
    kept: tuple[Kept, ...]  # together [n, H], of one step's output or of several steps'
    next_ids: TokenIds  # [n] the token behind each of them
    depth: int  # tokens to guess, at least 1
    runs: tuple[BlockRun, ...]  # the sequence's block table from token 0, covering position + n + depth - 1

    @property
    def end(self) -> int:
        """Position behind the n tokens."""
        return self.position + len(self.next_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """Guesses by a layer that predicts one token more, in the head's slice. It writes KV in that layer only."""

    slice_index: int
    rows: tuple[DraftRow, ...]  # each of another sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Output of a step: activations, or from the head's slice logits or candidates."""

    activations: Activations | None = None  # [T, H], contiguous; hidden plus residual
    logits: npt.NDArray[np.float32] | None = None  # [R, V], owned by the receiver, which overwrites it
    candidates: PickedCandidates | None = None  # candidates of R rows, if the backend picks them
    scores: TokenScores | None = None  # scores of given tokens, if requested
    kept: Kept = None  # states of the U tokens with ``UNKNOWN_ID`` in ``Step.next_ids``, in order; None: no such token
    expert_share: float = 0.0  # share of a layer's experts that the step read, mean of its layers; 0: not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Progress of loading weights, reported once per tensor."""

    bytes_done: int
    bytes_total: int
