"""The emulated backend. Shape letters: T packed tokens, H hidden, V vocabulary, R rows with logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from edgepipe.backend.cost import CostModel, Jitter, SliceCost, work_of
from edgepipe.backend.types import (
    Activations,
    BackendOptions,
    DeviceProfile,
    LoadProgress,
    LogitEdits,
    ScoreRows,
    Step,
    StepOutput,
    TokenIds,
    TokenScores,
)
from edgepipe.errors import DeviceOutOfMemory, ShardMismatch
from edgepipe.model.facts import KV_8BIT, ModelConfig, Slice
from edgepipe.model.tensors import WeightSource
from edgepipe.model.weight_table import FLOATS, WeightTable, table_of
from edgepipe.units import format_bytes
from edgepipe_emulated import arithmetic
from edgepipe_emulated.arithmetic import Words
from edgepipe_emulated.device_queue import DeviceQueue
from edgepipe_emulated.faults import DeviceFaults
from edgepipe_emulated.kv import KVStorage
from edgepipe_emulated.prepared import PreparedStep, prepare_step
from edgepipe_emulated.settings import read_settings

_SMALLEST_HIDDEN = 4  # four 16-bit elements hold a state


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model's slices on the emulated device."""

    config: ModelConfig
    slices: dict[int, Slice]  # by index in the pipeline
    first_layer: dict[int, int]  # by slice index: row of the slice's first layer in the KV pool
    costs: dict[int, SliceCost]  # by slice index
    weights: Words  # by position in the context
    base_logits: npt.NDArray[np.float32]  # [V]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedTicket:
    """A submitted step: its output, and the time at which the device would finish it."""

    output: StepOutput
    done_at_s: float


class EmulatedBackend:
    """One emulated device. The package's docstring describes its computation, ``settings`` its options."""

    block_sizes: tuple[int, ...] = (16, 32, 64, 128, 256)
    max_submitted = 2
    picks_candidates = False

    def __init__(self, options: BackendOptions) -> None:
        self._settings = read_settings(options.device, options.settings)
        self._faults = DeviceFaults(self._settings.faults)
        self._device = options.device if options.device != "auto" else "rtx4090"
        self._kind = options.activation_type
        self._queue = self._make_queue(0)
        self._loaded: Loaded | None = None
        self._pool: KVStorage | None = None
        self._kv_bytes = 0
        self._num_submitted = 0

    def profile(self) -> DeviceProfile:
        """Return the configured device's profile, without a measurement."""
        device = self._settings.device
        used = (self._loaded.bytes if self._loaded else 0) + self._kv_bytes
        return DeviceProfile(
            backend="emulated",
            device=self._device,
            name=f"{device.name} (emulated)",
            compute_dtype="bfloat16",
            memory_total_bytes=device.memory_bytes,
            memory_free_bytes=max(0, (device.usable_bytes if device.shared_memory else device.memory_bytes) - used),
            bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
            flops=device.flops,
            block_sizes=self.block_sizes,
            contiguous_kv=self._settings.contiguous_kv,
            packing=self._settings.packing,
            kv_forms=(KV_8BIT,),
        )

    def load(self, slices: Sequence[Slice], weights: WeightSource, progress: Callable[[LoadProgress], None]) -> None:
        """Load the slices' shapes without reading tensors. Reports progress per layer, in bytes of a real model.

        Raises ShardMismatch, DeviceOutOfMemory.
        """
        self.close()
        self._faults.check_memory()
        config = weights.config
        if config.hidden_size < _SMALLEST_HIDDEN:
            raise ShardMismatch(f"the emulated backend needs a hidden size of {_SMALLEST_HIDDEN} or more")
        cost = self._cost(config, table_of(weight for part in slices for weight in weights.weights(part)))
        num_bytes = cost.weight_bytes(slices)
        self._reserve(num_bytes, "the weights of these layers")
        layers = [len(part.layers) for part in slices]
        _tell(progress, num_layers=sum(layers), num_bytes=num_bytes)
        self._queue = self._make_queue(slices[0].layers.start)
        self._loaded = Loaded(
            config=config,
            slices={part.index: part for part in slices},
            first_layer={part.index: sum(layers[:i]) for i, part in enumerate(slices)},
            costs={part.index: cost.slice_cost(part) for part in slices},
            weights=arithmetic.position_weights(0, config.context_length),
            base_logits=arithmetic.base_logits(config.vocab_size),
            bytes=num_bytes,
        )

    def kv_block_bytes(self, config: ModelConfig, slices: Sequence[Slice], block_size: int) -> int:
        """Return the bytes of one block on the emulated device (this process uses 8 bytes per layer and slot)."""
        return self._cost(config).kv_bytes_per_token(slices) * block_size

    def allocate_kv(self, *, num_blocks: int, block_size: int) -> None:
        """Allocate the pool. Raises DeviceOutOfMemory if it does not fit beside the weights."""
        loaded = self._need_loaded()
        self._pool, self._kv_bytes = None, 0
        slices = list(loaded.slices.values())
        num_bytes = self.kv_block_bytes(loaded.config, slices, block_size) * num_blocks
        self._reserve(num_bytes, f"{num_blocks} KV blocks")
        num_layers = sum(len(part.layers) for part in slices)
        self._pool = KVStorage(num_layers=num_layers, num_blocks=num_blocks, block_size=block_size)
        self._kv_bytes = num_bytes

    def prepare(self, step: Step) -> PreparedStep:
        """Build the step's host arrays. Raises ShardMismatch for a missing slice, StepFailed for wrong block tables."""
        loaded = self._need_loaded()
        if step.slice_index not in loaded.slices:
            raise ShardMismatch(f"slice {step.slice_index} is not loaded", fact=f"loaded: {sorted(loaded.slices)}")
        return prepare_step(step, pool=self._need_pool(), weights=loaded.weights)

    def submit(
        self, prepared: PreparedStep, inputs: TokenIds | Activations, edits: LogitEdits | None = None
    ) -> EmulatedTicket:
        """Compute the step's checksums now. Its time on the device starts after the previous step's."""
        if self._num_submitted >= self.max_submitted:
            raise RuntimeError(f"{self.max_submitted} steps are submitted but not collected")
        self._faults.check_step()
        loaded, pool = self._need_loaded(), self._need_pool()
        part = loaded.slices[prepared.step.slice_index]
        done_at_s = self._queue.enqueue(loaded.costs[part.index].step_s(work_of(prepared.step)))
        state = self._enter(part, loaded.config, prepared, inputs)  # runs during the emulated time
        pool.copy(prepared.step.copies)
        state = _run_layers(state, part, loaded.first_layer[part.index], pool, prepared)
        self._num_submitted += 1
        return EmulatedTicket(output=self._leave(part, loaded, prepared.step, state), done_at_s=done_at_s)

    def collect(self, ticket: EmulatedTicket) -> StepOutput:
        """Wait until the device would have finished the step."""
        self._queue.wait_until(ticket.done_at_s)
        self._num_submitted -= 1
        return ticket.output

    def check(self) -> None:
        """Check the device. Raises StepFailed while it is broken."""
        self._faults.check_computes()

    def close(self) -> None:
        """Release the model and the KV pool."""
        self._loaded, self._pool = None, None
        self._kv_bytes = self._num_submitted = 0

    def _enter(self, part: Slice, config: ModelConfig, prepared: PreparedStep, inputs: TokenIds | Activations) -> Words:
        """Convert token ids or activations to states ``[T]``. Raises ShardMismatch."""
        tokens = len(prepared.slots)
        shape = (tokens,) if part.embedding else (tokens, config.hidden_size)
        kind = np.dtype(np.int32 if part.embedding else self._kind.numpy)
        if inputs.shape != shape or inputs.dtype != kind:
            raise ShardMismatch(
                f"slice {part.index} got {inputs.dtype} {list(inputs.shape)}", fact=f"it needs {kind} {list(shape)}"
            )
        if not part.embedding:
            return arithmetic.decode(cast("Activations", inputs), self._kind)
        if inputs.min() < 0 or inputs.max() >= config.vocab_size:
            raise ShardMismatch("a token id is not in the vocabulary", fact=f"it has {config.vocab_size} ids")
        return arithmetic.embed(cast("TokenIds", inputs))

    def _leave(self, part: Slice, loaded: Loaded, step: Step, state: Words) -> StepOutput:
        if part.head:
            scores = _score(state, step.scores, loaded.base_logits) if step.scores is not None else None
            return StepOutput(logits=arithmetic.make_logits(state[step.logit_rows], loaded.base_logits), scores=scores)
        return StepOutput(activations=arithmetic.encode(state, loaded.config.hidden_size, self._kind))

    def _cost(self, config: ModelConfig, weights: WeightTable = FLOATS) -> CostModel:
        """``weights`` do not matter for the KV."""
        if self._settings.as_model is not None:
            config, weights = self._settings.as_model
        return CostModel(
            config,
            self._settings.device,
            weights=weights,
            kind=self._settings.packing,
            kv=self._settings.kv,
            as_model_bytes=self._settings.as_model_bytes,
            as_kv_bytes_per_token=self._settings.as_kv_bytes_per_token,
        )

    def _make_queue(self, first_layer: int) -> DeviceQueue:
        """Make the device's queue. Stages with the same seed differ in jitter by their first layer."""
        jitter = Jitter(variation=self._settings.device.jitter, entropy=(self._settings.seed, first_layer))
        return DeviceQueue(time_factor=self._settings.time_factor, jitter=jitter)

    def _reserve(self, num_bytes: int, what: str) -> None:
        free = self.profile().memory_free_bytes
        if num_bytes > free:
            raise DeviceOutOfMemory(
                f"{what} do not fit into {self._settings.device.name} (emulated)",
                fact=f"they need {format_bytes(num_bytes)}, {format_bytes(free)} are free",
            )

    def _need_loaded(self) -> Loaded:
        if self._loaded is None:
            raise RuntimeError("load comes first")
        return self._loaded

    def _need_pool(self) -> KVStorage:
        if self._pool is None:
            raise RuntimeError("allocate_kv comes first")
        return self._pool


def _score(state: Words, wanted: ScoreRows, base: npt.NDArray[np.float32]) -> TokenScores:
    """Score row by row, because all logits at once may not fit in memory."""
    scored = [
        _score_row(arithmetic.make_logits(state[row : row + 1], base)[0], int(target), wanted.num_top)
        for row, target in zip(wanted.rows.tolist(), wanted.targets.tolist(), strict=True)
    ]
    return TokenScores(
        log_totals=np.array([total for total, _, _, _ in scored], np.float32),
        logits=np.array([logit for _, logit, _, _ in scored], np.float32),
        top_ids=np.array([ids for _, _, ids, _ in scored], np.int32).reshape(len(scored), -1),
        top_logits=np.array([logits for _, _, _, logits in scored], np.float32).reshape(len(scored), -1),
    )


def _score_row(
    logits: npt.NDArray[np.float32], target: int, num_top: int
) -> tuple[float, float, npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    highest = float(logits.max())
    total = highest + math.log(float(np.exp(logits - highest).sum(dtype=np.float64)))
    top = np.argsort(-logits, kind="stable")[:num_top]
    return total, float(logits[target]), top, logits[top]


def _run_layers(state: Words, part: Slice, first: int, pool: KVStorage, prepared: PreparedStep) -> Words:
    """Return states ``[T]`` after the slice's layers, and write their KV.

    KV of earlier steps is read for all layers at once; KV of this step is summed layer by layer.
    """
    layers = slice(first, first + len(part.layers))
    # Every row has one token, so it attends to no other token of this step.
    alone = len(prepared.row_start) == len(state)
    rows = zip(prepared.past, prepared.past_weights, strict=True)
    past = [pool.attended(layers, slots, weights) for slots, weights in rows]
    before = np.stack(past, axis=1)[:, prepared.row_of]
    written = np.empty((len(part.layers), len(state)), np.uint64)
    for offset, key in enumerate(arithmetic.layer_keys(part.layers.start, part.layers.end)):
        values = written[offset] = arithmetic.kv_values(state, prepared.weights, key)
        weighted = values * prepared.weights
        own = weighted if alone else _sums_within_rows(weighted, prepared)
        state = arithmetic.leave_layer(state, before[offset] + own, key)
    pool.write(layers, prepared.slots, written)
    return state


def _sums_within_rows(weighted: Words, prepared: PreparedStep) -> Words:
    sums = np.cumsum(weighted)
    return sums - (sums - weighted)[prepared.row_start][prepared.row_of]


def _tell(progress: Callable[[LoadProgress], None], *, num_layers: int, num_bytes: int) -> None:
    for done in range(1, num_layers + 1):
        progress(
            LoadProgress(
                tensors_done=done,
                tensors_total=num_layers,
                bytes_done=num_bytes * done // num_layers,
                bytes_total=num_bytes,
            )
        )
