"""The emulated backend. Shape letters: T packed tokens, H hidden, V vocabulary, R rows with logits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from edgepipe.backend.cost import CostModel, Jitter, SliceCost, work_of
from edgepipe.backend.drafting import DraftModel
from edgepipe.backend.step_layout import check_states
from edgepipe.backend.types import (
    Activations,
    BackendOptions,
    DeviceProfile,
    LoadProgress,
    LogitEdits,
    PackedProducts,
    ScoreRows,
    Step,
    StepOutput,
    TokenIds,
    TokenScores,
)
from edgepipe.errors import DeviceOutOfMemory, ShardMismatch
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.kv_forms import KV_FORMS
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.spec.memory_classes import stage_classes
from edgepipe.spec.tensors import WeightSource
from edgepipe.units import format_bytes
from edgepipe.weights.weight_table import FLOATS, WeightTable, table_of
from edgepipe_emulated import arithmetic
from edgepipe_emulated.arithmetic import Words
from edgepipe_emulated.device_queue import DeviceQueue
from edgepipe_emulated.drafting import EmulatedDraftModel
from edgepipe_emulated.faults import DeviceFaults
from edgepipe_emulated.kv import KVStorage, StateStorage
from edgepipe_emulated.prepared import LayerGroup, Past, PreparedStep, Rests, num_awaited, prepare_step
from edgepipe_emulated.settings import read_settings

_SMALLEST_HIDDEN = 4  # four 16-bit elements hold a state


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model's slices on the emulated device."""

    config: ModelConfig
    slices: dict[int, Slice]  # keys are indices in the pipeline
    costs: dict[int, SliceCost]  # keys are indices in the pipeline
    weights: Words  # one weight per position in the context
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
        self._settings = read_settings(options)
        self._faults = DeviceFaults(self._settings.faults)
        self._device = options.device if options.device != "auto" else "rtx4090"
        self._kind = options.activation_type
        self._queue = self._make_queue(0)
        self._loaded: Loaded | None = None
        self._pools: tuple[KVStorage, ...] = ()  # one pool per memory class
        self._groups: dict[int, tuple[LayerGroup, ...]] = {}  # one tuple per slice index
        self._states = StateStorage((), 0)
        self._kv_bytes = 0
        self._move_s: tuple[float, ...] = ()  # time to move a block or slot to or from host memory, by class
        self._num_submitted = 0

    @property
    def draft_model(self) -> DraftModel | None:
        """The emulated draft model, if the settings ask for one."""
        settings = self._settings
        if settings.draft_acceptance is None or self._loaded is None:
            return None
        token_s = settings.draft_s * settings.time_factor
        config = self._loaded.config
        return EmulatedDraftModel(config, settings.draft_acceptance, token_s=token_s, seed=settings.seed)

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
            kv_forms=KV_FORMS,
            keeps_states=True,
            ram_total_bytes=device.ram_bytes,
            ram_free_bytes=device.ram_bytes,
            ram_bytes_per_s=device.ram_bytes_per_s,
            reads_as=device.reads_as,
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
            costs={part.index: cost.slice_cost(part) for part in slices},
            weights=arithmetic.position_weights(0, config.context_length),
            base_logits=arithmetic.base_logits(config.vocab_size),
            bytes=num_bytes,
        )

    def packed_products(self) -> Sequence[PackedProducts]:
        """Return nothing: it multiplies no weights."""
        return ()

    def kv_block_bytes(self, config: ModelConfig, slices: Sequence[Slice], block_size: int) -> int:
        """Return the bytes of one block on the emulated device (this process uses 8 bytes per layer and slot)."""
        return self._cost(config).kv_bytes_per_token(slices) * block_size

    def allocate_kv(
        self,
        *,
        num_blocks: int,
        block_size: int,
        window_blocks: Sequence[int] = (),
        state_slots: int = 0,
        host_places: Sequence[int] = (),
    ) -> None:
        """Allocate the pools. Raises DeviceOutOfMemory if they do not fit beside the weights."""
        loaded = self._need_loaded()
        self._pools, self._groups, self._kv_bytes = (), {}, 0
        self._states = StateStorage((), 0)
        slices = list(loaded.slices.values())
        classes = stage_classes(loaded.config, slices, num_blocks=num_blocks, window_blocks=window_blocks)
        num_bytes = sum(self.kv_block_bytes(loaded.config, parts, block_size) * count for count, parts in classes)
        every = [layer for part in slices for layer in part.layers]
        num_bytes += loaded.config.state_bytes(every) * (state_slots + 1)  # other backends keep one of zeros
        self._reserve(num_bytes, f"{num_blocks} KV blocks")
        recurrent = [layer for layer in every if loaded.config.layers[layer].recurrent is not None]
        below = [*host_places, 0] if host_places else [0] * (len(classes) + 1)  # the last one counts for states
        self._states = StateStorage(recurrent, state_slots, below[len(classes)])
        layers = [[layer for part in parts for layer in part.layers] for _, parts in classes]
        self._pools = tuple(
            KVStorage(num_layers=len(own), num_blocks=count, block_size=block_size, host_blocks=places)
            for own, (count, _), places in zip(layers, classes, below, strict=False)
        )
        self._move_s = self._seconds_of_moves(classes, block_size) if host_places else ()
        self._groups = {part.index: _groups(loaded.config, part, layers) for part in slices}
        self._kv_bytes = num_bytes

    def prepare(self, step: Step) -> PreparedStep:
        """Build the step's host arrays. Raises ShardMismatch for a missing slice, StepFailed for wrong block tables."""
        loaded = self._need_loaded()
        if step.slice_index not in loaded.slices:
            raise ShardMismatch(f"slice {step.slice_index} is not loaded", fact=f"loaded: {sorted(loaded.slices)}")
        pools = self._need_pools()
        check_states(step.rows, self._states.num_slots)
        groups = self._groups[step.slice_index]
        prepared = prepare_step(step, pools=pools, weights=loaded.weights, groups=groups, kv=self._settings.kv)
        return replace(prepared, device_s=loaded.costs[step.slice_index].step_s(work_of(step)))

    def submit(
        self, prepared: PreparedStep, inputs: TokenIds | Activations, edits: LogitEdits | None = None
    ) -> EmulatedTicket:
        """Compute the step's checksums now. Its time on the device starts after the previous step's."""
        if self._num_submitted >= self.max_submitted:
            raise RuntimeError(f"{self.max_submitted} steps are submitted but not collected")
        self._faults.check_step()
        loaded, pools = self._need_loaded(), self._need_pools()
        part = loaded.slices[prepared.step.slice_index]
        done_at_s = self._queue.enqueue(self._step_s(prepared))
        state = self._enter(part, loaded.config, prepared, inputs)  # runs during the emulated time
        for move in prepared.step.moves:
            (self._states if move.number == len(pools) else pools[move.number]).move(move)
        pools[0].copy(prepared.step.copies)
        specs = loaded.config.layers[part.layers.start : part.layers.end]
        state = _run_layers(state, part, specs, self._groups[part.index], pools, self._states, prepared)
        self._num_submitted += 1
        output = self._leave(part, loaded, prepared.step, state)
        cost = loaded.costs[part.index]
        if cost.has_experts and prepared.num_tokens > 1:
            output = replace(output, expert_share=cost.distinct_share(prepared.num_tokens))
        return EmulatedTicket(output=output, done_at_s=done_at_s)

    def _step_s(self, prepared: PreparedStep) -> float:
        """Return a step's time with its moves. As on CUDA, it waits for those up to the last one that it uses.

        The others run beside it and take memory bandwidth from it.
        """
        if not prepared.step.moves:
            return prepared.device_s
        moving_s = [self._move_s[move.number] for move in prepared.step.moves]
        before = num_awaited(prepared.step)
        beside_s, device = sum(moving_s[before:]), self._settings.device
        slowed_s = beside_s * device.host_link_bytes_per_s / device.bandwidth_bytes_per_s
        return sum(moving_s[:before]) + max(beside_s, prepared.device_s + slowed_s)

    def host_place(self, number: int, kept: int) -> Sequence[memoryview]:
        """See ``DiskBackend``."""
        pools = self._need_pools()
        return (self._states if number == len(pools) else pools[number]).host_place(kept)

    def host_place_bytes(self) -> Sequence[int]:
        """See ``HostMemoryBackend``."""
        recurrent = [self._states] if self._states.num_slots else []
        return [each.host_place_bytes for each in (*self._need_pools(), *recurrent)]

    def give_back(self, number: int, places: Sequence[int]) -> None:
        """See ``HostMemoryBackend``."""
        pools = self._need_pools()
        (self._states if number == len(pools) else pools[number]).give_back(places)

    def machine_memory(self) -> tuple[int, int] | None:
        """Return the memory that a fault file names: an emulated device takes none of the machine's."""
        return self._faults.machine_memory()

    def disk_seconds(self, number: int, count: int, took_s: float) -> float:
        """Wait as long as the emulated device's disk takes, and return that."""
        device = self._settings.device
        seconds = count * self._move_s[number] * device.host_link_bytes_per_s / device.disk_bytes_per_s
        time.sleep(max(0.0, self._settings.time_factor * seconds - took_s))
        return seconds

    def wait(self, ticket: EmulatedTicket) -> None:
        """See ``WaitingBackend``."""
        self._queue.wait_until(ticket.done_at_s)

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
        self._loaded, self._pools, self._groups = None, (), {}
        self._kv_bytes = self._num_submitted = 0

    def _enter(self, part: Slice, config: ModelConfig, prepared: PreparedStep, inputs: TokenIds | Activations) -> Words:
        """Convert token ids or activations to states ``[T]``. Raises ShardMismatch."""
        tokens = prepared.num_tokens
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
            expert_skew=self._settings.expert_skew,
        )

    def _make_queue(self, first_layer: int) -> DeviceQueue:
        """Make the device's queue. Stages with the same seed differ in jitter by their first layer."""
        jitter = Jitter(variation=self._settings.device.jitter, entropy=(self._settings.seed, first_layer))
        return DeviceQueue(time_factor=self._settings.time_factor, jitter=jitter)

    def _seconds_of_moves(self, classes: Sequence[tuple[int, Sequence[Slice]]], block_size: int) -> tuple[float, ...]:
        loaded, rate = self._need_loaded(), self._settings.device.host_link_bytes_per_s
        every = [layer for part in loaded.slices.values() for layer in part.layers]
        blocks = [self.kv_block_bytes(loaded.config, parts, block_size) for _, parts in classes]
        return tuple(num_bytes / rate for num_bytes in (*blocks, loaded.config.state_bytes(every)))

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

    def _need_pools(self) -> tuple[KVStorage, ...]:
        if not self._pools:
            raise RuntimeError("allocate_kv comes first")
        return self._pools


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


def _groups(config: ModelConfig, part: Slice, layers: Sequence[Sequence[int]]) -> tuple[LayerGroup, ...]:
    """Group a slice's layers. ``layers``: of the stage, by memory class."""
    found: dict[tuple[int, int | None], list[int]] = {}
    for layer in part.layers:
        attention = config.layers[layer].attention
        if attention is not None:
            number = next(number for number, own in enumerate(layers) if layer in own)
            found.setdefault((number, attention.window), []).append(layer)
    groups: list[LayerGroup] = []
    for (number, window), own in found.items():
        stored = [layers[number].index(layer) for layer in own]
        together = stored == list(range(stored[0], stored[0] + len(stored)))
        groups.append(
            LayerGroup(
                pool=number,
                window=window,
                layers=tuple(layer - part.layers.start for layer in own),
                stored=slice(stored[0], stored[0] + len(stored)) if together else np.array(stored, np.int64),
            )
        )
    return tuple(groups)


def _run_layers(
    state: Words,
    part: Slice,
    specs: Sequence[LayerSpec],
    groups: Sequence[LayerGroup],
    pools: Sequence[KVStorage],
    states: StateStorage,
    prepared: PreparedStep,
) -> Words:
    """Return states ``[T]`` after the slice's layers, and write their KV and their recurrent states.

    KV of earlier steps is read for all layers at once; KV of this step is summed layer by layer.
    """
    # Every row has one token, so it attends to no other token of this step.
    alone = len(prepared.row_start) == len(state)
    before = np.zeros((len(part.layers), len(state)), np.uint64)
    for group, past in zip(groups, prepared.past, strict=True):
        before[list(group.layers)] = _seen_before(group, past, pools[group.pool], prepared)
        if prepared.rests:
            before[list(group.layers)] += _lost_rests(group, prepared.rests[group.pool], pools[group.pool], len(state))
    written = np.empty((len(part.layers), len(state)), np.uint64)
    for offset, key in enumerate(arithmetic.layer_keys(part.layers.start, part.layers.end)):
        if specs[offset].mtp:  # it guesses tokens, and what it computes does not enter the logits
            written[offset] = 0
            continue
        values = written[offset] = arithmetic.kv_values(state, prepared.weights, key)
        spec = specs[offset]
        if spec.recurrent is not None:
            seen = states.run(part.layers.start + offset, prepared.step.rows, values)
        elif spec.attention is None:
            seen = np.zeros_like(values)
        else:
            weighted = values * prepared.weights
            own = weighted if alone else _sums_within_rows(weighted, prepared, spec.attention.window)
            seen = before[offset] + own
        state = arithmetic.leave_layer(state, seen, key)
        experts = spec.experts
        if experts is not None:
            state = arithmetic.pass_experts(state, arithmetic.expert_keys(part.layers.start + offset, experts.count))
    for group in groups:
        pool, values = pools[group.pool], written[list(group.layers)]
        pool.write(group.stored, prepared.slots[group.pool], values)
        if prepared.rests:
            rests = prepared.rests[group.pool]
            pool.write(group.stored, rests.slots, arithmetic.rests(values[:, rests.kept]))
    return state


def _lost_rests(group: LayerGroup, rests: Rests, pool: KVStorage, num_tokens: int) -> Words:
    """Return for each layer and token ``[layers, T]`` zero, or what spoils it if lower bits that it sees are wrong."""
    lost: Words | None = None
    for span in rests.begun:
        found = pool.read(group.stored, span.rests) ^ arithmetic.rests(pool.read(group.stored, span.slots))
        if found.any():
            lost = np.zeros((len(found), num_tokens), np.uint64) if lost is None else lost
            lost[:, span.seen_by] = found.sum(axis=1, keepdims=True)
    return np.zeros((len(group.layers), num_tokens), np.uint64) if lost is None else lost


def _seen_before(group: LayerGroup, past: Past, pool: KVStorage, prepared: PreparedStep) -> Words:
    """Return for each layer and token ``[layers, T]`` the weighted sum of what it sees of earlier steps."""
    seen = [pool.read(group.stored, slots) for slots in past.slots(pool.block_size)]
    if group.window is None or len(prepared.row_start) == prepared.num_tokens:
        totals = [values @ weights for values, weights in zip(seen, past.weights, strict=True)]
        return np.stack(totals, axis=1)[:, prepared.row_of]
    parts: list[Words] = []
    for row, values, weights, start in zip(prepared.step.rows, seen, past.weights, past.starts, strict=True):
        sums = np.zeros((len(values), len(weights) + 1), np.uint64)  # sums over the first 0, 1, ... tokens
        np.cumsum(values * weights, axis=1, out=sums[:, 1:])
        positions = np.arange(row.position, row.position + row.num_tokens)
        unseen = np.clip(positions - group.window + 1 - start, 0, len(weights))  # tokens before each token's window
        parts.append(sums[:, -1:] - sums[:, unseen])
    return np.concatenate(parts, axis=1)


def _sums_within_rows(weighted: Words, prepared: PreparedStep, window: int | None) -> Words:
    sums = np.cumsum(weighted)
    first = prepared.row_start[prepared.row_of]
    if window is not None:
        first = np.maximum(first, np.arange(len(weighted)) - window + 1)
    return sums - (sums - weighted)[first]


def _tell(progress: Callable[[LoadProgress], None], *, num_layers: int, num_bytes: int) -> None:
    for done in range(1, num_layers + 1):
        progress(LoadProgress(bytes_done=num_bytes * done // num_layers, bytes_total=num_bytes))
