"""The Backend protocol on MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgepipe.backend.kv_setting import chosen_kv
from edgepipe.backend.step_layout import StepLayout, lay_out_step
from edgepipe.backend.types import (
    Activations,
    ActivationType,
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
from edgepipe.model.resident import WIDE
from edgepipe.model.tensors import WeightSource
from edgepipe.units import format_bytes
from edgepipe_mlx.attention import LayerCache, StepArrays
from edgepipe_mlx.definitions import check_architecture, models_folder
from edgepipe_mlx.device import (
    BLOCK_SIZES,
    check_device,
    choose_device,
    choose_dtype,
    choose_packing,
    configure,
    free_bytes,
    is_cpu,
    measure,
    score_bytes,
)
from edgepipe_mlx.kv import KVPool, KVStorage
from edgepipe_mlx.loading import LoadedSlice, Shard, WeightTypes, load_shard
from edgepipe_mlx.packed_kv import PackedKVStorage

SCORED_AT_ONCE = 64  # rows of prompt log-probabilities: 40 MB of logits with a vocabulary of 152,000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTicket:
    """A submitted step with an array that MLX is computing. Belongs to the compute thread."""

    array: mx.array  # activations [T, H] in the link's type, bf16 as bits; or logits [R, V] float32
    is_logits: bool
    scores: tuple[mx.array, ...] = ()  # the fields of TokenScores, if requested


def _copied_scores(scores: tuple[mx.array, ...]) -> TokenScores:
    log_totals, logits, top_ids, top_logits = (np.array(each) for each in scores)
    return TokenScores(log_totals=log_totals, logits=logits, top_ids=top_ids.astype(np.int32), top_logits=top_logits)


class MlxBackend:
    """Runs mlx-lm's layers over packed rows.

    MLX objects belong to the thread that made them, so all methods except ``prepare`` must be called on one thread.
    ``prepare`` only makes numpy arrays, and ``collect`` returns copies.
    """

    block_sizes: tuple[int, ...] = BLOCK_SIZES
    max_submitted: int = 1
    picks_candidates: bool = False  # shared memory: a row of logits is as near as its candidates

    def __init__(self, options: BackendOptions) -> None:
        """Raises BackendUnavailable if mlx-lm or the device is missing, ConfigInvalid for unknown options.

        ``options.settings["weights"]``: "auto" keeps packed weights packed, "wide" widens them to the compute dtype.
        ``options.threads`` has no effect, because MLX chooses its threads.
        """
        models_folder()
        self._options = options
        self._device = choose_device(options.device)
        self._dtype_name, self._dtype = choose_dtype(options.dtype, self._device)
        self._packed = choose_packing(options.settings.get("weights", "auto"))
        self._kv = chosen_kv(options.settings)
        self._shard: Shard | None = None
        self._pools: dict[int, list[KVPool]] = {}  # by slice index, one per layer
        self._num_blocks = 0
        self._block_size = 0

    def profile(self) -> DeviceProfile:
        """Measure the device with two products. The memory size comes from MLX on Metal, else from the system."""
        configure(self._device)
        found = measure(self._device, self._dtype_name, self._dtype)
        return replace(found, packing="mlx" if self._packed else WIDE, kv_forms=(KV_8BIT,))

    def load(self, slices: Sequence[Slice], weights: WeightSource, progress: Callable[[LoadProgress], None]) -> None:
        """Read the slices' tensors, replacing the loaded ones.

        Raises ModelInvalid, ArchitectureUnsupported, DeviceOutOfMemory.
        """
        self.close()
        configure(self._device)
        check_architecture(weights.config)
        with self._memory_errors("the layers"):
            self._shard = load_shard(slices, weights, self._weight_types(), progress)

    def kv_block_bytes(self, config: ModelConfig, slices: Sequence[Slice], block_size: int) -> int:
        """Return the bytes of one block in all layers of the slices."""
        num_layers = sum(len(part.layers) for part in slices)
        return block_size * config.kv_bytes_per_token(num_layers=num_layers, form=self._kv or self._dtype_name)

    def allocate_kv(self, *, num_blocks: int, block_size: int) -> None:
        """Allocate every layer's pool, replacing existing ones. Raises DeviceOutOfMemory."""
        shard = self._loaded()
        self._pools = {}
        mx.clear_cache()
        parts = [part.part for part in shard.slices]
        wanted = num_blocks * self.kv_block_bytes(shard.config, parts, block_size)
        self._check_room(wanted)
        with self._memory_errors("the KV cache"):
            self._pools = {
                part.index: [self._make_pool(shard.config, num_blocks, block_size) for _ in part.layers]
                for part in parts
            }
        self._num_blocks, self._block_size = num_blocks, block_size

    def prepare(self, step: Step) -> StepLayout:
        """Lay the step out in numpy arrays. Raises StepFailed if its block tables cannot be right."""
        return lay_out_step(step, block_size=self._block_size, num_blocks=self._num_blocks, dtype=np.int32)

    def submit(
        self, prepared: StepLayout, inputs: TokenIds | Activations, edits: LogitEdits | None = None
    ) -> StepTicket:
        """Apply the step's copies, build its graph and start it. Raises ShardMismatch."""
        part = self._slice(prepared.slice_index)
        hidden = self._hidden(part, prepared, inputs)
        self._copy_blocks(prepared)
        pools = self._pools[prepared.slice_index]
        hidden = self._run_layers(part, pools, self._arrays(prepared), hidden)
        array = (
            self._logits(part, hidden, prepared.logit_rows[: prepared.num_sampled])
            if part.part.head
            else self._leaving(hidden)
        )
        scores = self._scores(part, hidden, prepared.scores) if part.part.head and prepared.scores is not None else ()
        # Evaluate the pools with the output: a chunk without logits needs only the KV of the last layer.
        mx.async_eval(array, scores, [pool.arrays for pool in pools])
        return StepTicket(array=array, is_logits=part.part.head, scores=scores)

    def collect(self, ticket: StepTicket) -> StepOutput:
        """Wait for the step and copy its output to numpy, so that no MLX object leaves the thread."""
        mx.eval(ticket.array, ticket.scores)
        copied = np.array(ticket.array)
        if not ticket.is_logits:
            return StepOutput(activations=copied)
        return StepOutput(logits=copied, scores=_copied_scores(ticket.scores) if ticket.scores else None)

    def check(self) -> None:
        """Multiply two small matrices and check the result. Raises StageError."""
        check_device(self._device, self._dtype)

    def close(self) -> None:
        """Release weights, pools and MLX's cached buffers."""
        self._shard = None
        self._pools = {}
        self._num_blocks = self._block_size = 0
        mx.clear_cache()

    def _weight_types(self) -> WeightTypes:
        """Packed scales have the compute dtype: float32 on CPUs, bf16 on Metal, where others would widen products."""
        on_cpu = is_cpu(self._device)
        return WeightTypes(
            dtype=self._dtype,
            packed=self._packed,
            arithmetic=mx.float32 if on_cpu else self._dtype,
            inputs_first=on_cpu and self._dtype == mx.float32,
        )

    def _arrays(self, plan: StepLayout) -> StepArrays:
        """Make the step's arrays. Unfused attention holds the scores of all heads, at worst in float32."""
        return StepArrays(plan, max_scores=score_bytes(self._device) // (4 * self._loaded().config.num_heads))

    def _run_layers(self, part: LoadedSlice, pools: list[KVPool], step: StepArrays, hidden: mx.array) -> mx.array:
        """Run the layers on hidden [T, H]; returns [T, H]. They see T sequences of one token, without padding."""
        config = self._loaded().config
        rows = hidden[:, None]
        for layer, block, pool in zip(part.part.layers, part.blocks, pools, strict=True):
            cache = LayerCache(step, pool, window=config.window(layer), block_size=self._block_size)
            run: Any = block
            rows = run(rows, None, cache=cache)
        return rows[:, 0]

    def _hidden(self, part: LoadedSlice, plan: StepLayout, inputs: TokenIds | Activations) -> mx.array:
        """Return the first layer's input [T, H] in the compute dtype."""
        config = self._loaded().config
        if part.embedding is not None:
            self._check_shape(inputs, (plan.num_tokens,), np.int32)
            if inputs.size and not 0 <= int(inputs.min()) <= int(inputs.max()) < config.vocab_size:
                raise ShardMismatch(
                    "a token id lies outside the vocabulary",
                    fact=f"ids {inputs.min()}-{inputs.max()}, vocabulary {config.vocab_size}",
                )
            return part.embedding.rows(mx.array(inputs))
        kind = self._options.activation_type
        self._check_shape(inputs, (plan.num_tokens, config.hidden_size), kind.numpy)
        arrived = mx.array(inputs)
        return (arrived.view(mx.bfloat16) if kind is ActivationType.BF16 else arrived).astype(self._dtype)

    def _leaving(self, hidden: mx.array) -> mx.array:
        """Convert hidden states to the link's type; bf16 as bits, since numpy has no bf16."""
        if self._options.activation_type is ActivationType.FLOAT32:
            return hidden.astype(mx.float32)
        return hidden.astype(mx.bfloat16).view(mx.uint16)

    def _logits(self, part: LoadedSlice, hidden: mx.array, rows: npt.NDArray[np.int32]) -> mx.array:
        """Return the logits [R, V] float32 of the requested rows."""
        config = self._loaded().config
        if part.norm is None or part.head is None or not len(rows):
            return mx.zeros((0, config.vocab_size), mx.float32)
        wanted = hidden[mx.array(rows)]
        normed = mx.fast.rms_norm(wanted, part.norm, config.rms_norm_eps)
        return part.head.multiply(normed).astype(mx.float32)

    def _scores(self, part: LoadedSlice, hidden: mx.array, wanted: ScoreRows) -> tuple[mx.array, ...]:
        """Compute the fields of TokenScores in pieces, because all logits at once may not fit."""
        pieces: list[list[mx.array]] = []
        for start in range(0, len(wanted.rows), SCORED_AT_ONCE):
            logits = self._logits(part, hidden, wanted.rows[start : start + SCORED_AT_ONCE])
            targets = mx.array(wanted.targets[start : start + SCORED_AT_ONCE])[:, None]
            own = mx.take_along_axis(logits, targets, axis=1)[:, 0]
            top_ids = mx.argsort(-logits, axis=1)[:, : wanted.num_top]
            pieces.append([mx.logsumexp(logits, axis=1), own, top_ids, mx.take_along_axis(logits, top_ids, axis=1)])
            mx.eval(pieces[-1])
        return tuple(mx.concatenate(list(field)) for field in zip(*pieces, strict=True))

    def _copy_blocks(self, plan: StepLayout) -> None:
        """Copy blocks in every layer of the stage, because only its first slice of a step has the copies."""
        if plan.copies:
            for pools in self._pools.values():
                for pool in pools:
                    pool.copy(plan.copies)

    def _make_pool(self, config: ModelConfig, num_blocks: int, block_size: int) -> KVPool:
        make = PackedKVStorage if self._kv else KVStorage
        return make(
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self._dtype,
        )

    def _loaded(self) -> Shard:
        if self._shard is None:
            raise RuntimeError("nothing is loaded")
        return self._shard

    def _slice(self, index: int) -> LoadedSlice:
        for part in self._loaded().slices:
            if part.part.index == index:
                return part
        raise ShardMismatch(
            f"slice {index} is not loaded here",
            fact=f"loaded: {', '.join(str(part.part.index) for part in self._loaded().slices)}",
        )

    @staticmethod
    def _check_shape(inputs: TokenIds | Activations, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> None:
        if inputs.shape != shape or inputs.dtype != np.dtype(dtype):
            raise ShardMismatch(
                "the step's input does not match this slice",
                fact=f"it is {inputs.dtype} {list(inputs.shape)}, the slice needs {np.dtype(dtype)} {list(shape)}",
            )

    def _check_room(self, num_bytes: int) -> None:
        """Check the free memory first: on Linux, exceeding it kills the process instead of raising."""
        free = free_bytes(self._device)
        if num_bytes > free:
            raise DeviceOutOfMemory(
                f"the KV cache does not fit into the memory of {self._device.type.name}",
                fact=f"it takes {format_bytes(num_bytes)}, {format_bytes(free)} are free",
                next_step="ask for a shorter context or fewer layers on this node",
            )

    @contextmanager
    def _memory_errors(self, what: str) -> Iterator[None]:
        """Translate MLX's bare RuntimeError for lack of memory."""
        try:
            yield
        except RuntimeError as exc:
            if "alloc" not in str(exc):
                raise
            raise DeviceOutOfMemory(
                f"{what} did not fit into memory", fact=str(exc), next_step="give this node fewer layers"
            ) from exc
