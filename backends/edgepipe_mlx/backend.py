"""The Backend protocol on MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from edgepipe.backend.kv_setting import checked_kv
from edgepipe.backend.step_layout import StepLayout, lay_out_step
from edgepipe.backend.types import (
    Activations,
    ActivationType,
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
from edgepipe.plain_words import plain
from edgepipe.spec.facts import KV_8BIT, ModelConfig, Slice
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.spec.memory_classes import stage_classes
from edgepipe.spec.tensors import WeightInfo, WeightSource
from edgepipe.units import format_bytes
from edgepipe.weights.resident import WIDE
from edgepipe_mlx.attention import LayerStep, StepArrays
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
    stores_scores,
)
from edgepipe_mlx.expert_reads import ExpertReads
from edgepipe_mlx.kv import KVPool, KVStorage
from edgepipe_mlx.latent_kv import latent_pool
from edgepipe_mlx.loading import LoadedSlice, Shard, WeightTypes, load_shard
from edgepipe_mlx.packed_kv import PackedKVStorage
from edgepipe_mlx.packing import mlx_form
from edgepipe_mlx.states import LayerStates, StateStep, StepStates

SCORED_AT_ONCE = 64  # rows of prompt log-probabilities: 40 MB of logits with a vocabulary of 152,000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTicket:
    """A submitted step with an array that MLX computes. Belongs to the compute thread."""

    array: mx.array  # activations [T, H] in the link's type, bf16 as bits; or logits [R, V] float32
    is_logits: bool
    scores: tuple[mx.array, ...] = ()  # the fields of TokenScores, if requested
    expert_share: mx.array | None = None  # [] float32; None: not counted


def _copied_scores(scores: tuple[mx.array, ...]) -> TokenScores:
    log_totals, logits, top_ids, top_logits = (np.array(each) for each in scores)
    return TokenScores(log_totals=log_totals, logits=logits, top_ids=top_ids.astype(np.int32), top_logits=top_logits)


class MlxBackend:
    """Runs decoder layers over packed rows.

    MLX objects belong to the thread that made them, so all methods except ``prepare`` must be called on one thread.
    ``prepare`` only makes numpy arrays, and ``collect`` returns copies.
    """

    block_sizes: tuple[int, ...] = BLOCK_SIZES
    max_submitted: int = 2  # the second one only has its graph built: see ``submit``
    picks_candidates: bool = False  # shared memory: a row of logits is as near as its candidates

    def __init__(self, options: BackendOptions) -> None:
        """Raises BackendUnavailable if the device is missing, ConfigInvalid for unknown options.

        ``options.settings["weights"]``: "auto" keeps packed weights packed, "wide" widens them to the compute dtype.
        ``options.threads`` has no effect, because MLX chooses its threads.
        """
        self._options = options
        self._device = choose_device(options.device)
        self._dtype_name, self._dtype = choose_dtype(options.dtype, self._device)
        self._packed = choose_packing(options.settings.get("weights", "auto"))
        self._kv = checked_kv(options.kv)
        self._shard: Shard | None = None
        self._products: tuple[PackedProducts, ...] = ()
        # One list per slice index, with an entry for each layer with a mixer.
        self._pools: dict[int, list[KVPool | LayerStates | None]] = {}
        self._reads: dict[int, ExpertReads] = {}  # one per slice index
        self._started: StepTicket | None = None  # ticket that is not collected
        self._waiting: tuple[StepTicket, list[mx.array]] | None = None  # submitted, not started; see ``_start``
        self._class_of: dict[int, int] = {}  # memory class of each loaded layer, by its index in the model
        self._num_blocks = 0
        self._block_size = 0
        self._window_blocks: tuple[int, ...] = ()
        self._state_slots = 0

    def profile(self) -> DeviceProfile:
        """Measure the device with two products. The memory size comes from MLX on Metal, else from the system."""
        configure(self._device)
        found = measure(self._device, self._dtype_name, self._dtype)
        return replace(found, packing="mlx" if self._packed else WIDE, kv_forms=(KV_8BIT,), keeps_states=True)

    def load(self, slices: Sequence[Slice], weights: WeightSource, progress: Callable[[LoadProgress], None]) -> None:
        """Read the slices' tensors, replacing the loaded ones.

        Raises ModelInvalid, ArchitectureUnsupported, DeviceOutOfMemory.
        """
        self.close()
        configure(self._device)
        with self._memory_errors("the layers"):
            self._shard = load_shard(slices, weights, self._weight_types(), progress)
        self._reads = {
            part.part.index: ExpertReads([layer.mixture for layer in part.layers if layer.mixture is not None])
            for part in self._shard.slices
        }
        if self._packed:
            self._products = _products([info for part in slices for info in weights.weights(part)])

    def packed_products(self) -> Sequence[PackedProducts]:
        """Return what multiplies with the loaded packed weights, each once, the fallback last."""
        return self._products

    def kv_block_bytes(self, config: ModelConfig, slices: Sequence[Slice], block_size: int) -> int:
        """Return the bytes of one block in all layers of the slices."""
        layers = [layer for part in slices for layer in part.layers]
        return block_size * config.kv_bytes_per_token(layers, form=self._kv or self._dtype_name)

    def allocate_kv(
        self, *, num_blocks: int, block_size: int, window_blocks: Sequence[int] = (), state_slots: int = 0
    ) -> None:
        """Allocate every layer's pool, replacing existing ones. Raises DeviceOutOfMemory."""
        shard = self._loaded()
        self._pools = {}
        mx.clear_cache()
        parts = [part.part for part in shard.slices]
        classes = stage_classes(shard.config, parts, num_blocks=num_blocks, window_blocks=window_blocks)
        num_bytes = sum(self.kv_block_bytes(shard.config, own, block_size) * count for count, own in classes)
        state_bytes = shard.config.state_bytes(layer for part in parts for layer in part.layers)
        self._check_room(num_bytes + state_bytes * (state_slots + 1))  # one holds zeros
        self._class_of = {layer: n for n, (_, own) in enumerate(classes) for part in own for layer in part.layers}
        with self._memory_errors("the KV cache"):
            self._pools = {
                part.index: [
                    self._make_pool(
                        shard.config.layers[layer],
                        num_blocks=classes[self._class_of[layer]][0],
                        block_size=block_size,
                        state_slots=state_slots,
                    )
                    for layer in part.layers
                ]
                for part in parts
            }
        self._num_blocks, self._block_size, self._window_blocks = num_blocks, block_size, tuple(window_blocks)
        self._state_slots = state_slots

    def prepare(self, step: Step) -> StepLayout:
        """Lay the step out in numpy arrays. Raises StepFailed if its block tables cannot be right."""
        return lay_out_step(
            step,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            window_blocks=self._window_blocks,
            state_slots=self._state_slots,
            dtype=np.int32,
        )

    def submit(
        self, prepared: StepLayout, inputs: TokenIds | Activations, edits: LogitEdits | None = None
    ) -> StepTicket:
        """Apply the step's copies, build its graph, and start it once the step before has ended.

        If both ran, the first one's reads would make the second one copy the KV pools instead of updating them. So only
        the work of this thread overlaps the step before. Raises ShardMismatch.
        """
        part = self._slice(prepared.slice_index)
        hidden = self._hidden(part, prepared, inputs)
        if self._started is not None and (prepared.copies or prepared.scores is not None):
            mx.eval(self._started.array)  # building the graph evaluates a part of this step
        self._copy_blocks(prepared)
        pools = self._pools[prepared.slice_index]
        arrays = [self._arrays(each) for each in (prepared, *prepared.windows)]
        states = StepStates(prepared, zeros=self._state_slots)
        wanted = mx.array(prepared.logit_rows) if part.part.head and len(prepared.logit_rows) else None
        hidden = self._run_layers(part, pools, arrays, states, hidden, wanted)
        sampled, scored = hidden[: prepared.num_sampled], hidden[prepared.num_sampled :]
        array = self._logits(part, sampled) if part.part.head else self._leaving(hidden)
        scores = self._scores(part, scored, prepared.scores) if part.part.head and prepared.scores is not None else ()
        share = self._reads[prepared.slice_index].share(prepared.num_tokens)
        ticket = StepTicket(array=array, is_logits=part.part.head, scores=scores, expert_share=share)
        updated = [
            each for pool in pools if pool is not None and not isinstance(pool, LayerStates) for each in pool.arrays
        ]
        if self._started is None:
            self._start(ticket, updated + states.written)
        else:
            self._waiting = ticket, updated + states.written
        return ticket

    def _start(self, ticket: StepTicket, updated: list[mx.array]) -> None:
        """Start a step. ``updated``: KV and states; a chunk's output does not depend on the last layer's."""
        mx.async_eval(ticket.array, ticket.scores, updated, ticket.expert_share)
        self._started = ticket

    def collect(self, ticket: StepTicket) -> StepOutput:
        """Wait for the step and copy its output to numpy, so that no MLX object leaves the thread.

        Starts the next step, if it waits.
        """
        waiting, self._waiting = self._waiting, None
        self._started = None
        mx.eval(ticket.array, ticket.scores, ticket.expert_share)
        if waiting is not None:
            self._start(*waiting)
        copied = np.array(ticket.array)
        share = float(np.array(ticket.expert_share)) if ticket.expert_share is not None else 0.0
        if not ticket.is_logits:
            return StepOutput(activations=copied, expert_share=share)
        scores = _copied_scores(ticket.scores) if ticket.scores else None
        return StepOutput(logits=copied, scores=scores, expert_share=share)

    def check(self) -> None:
        """Multiply two small matrices and check the result. Raises StageError."""
        check_device(self._device, self._dtype)

    def close(self) -> None:
        """Release weights, pools and MLX's cached buffers."""
        self._shard = None
        self._products = ()
        self._pools = {}
        self._reads = {}
        self._started = self._waiting = None
        self._num_blocks = self._block_size = 0
        mx.clear_cache()

    def _weight_types(self) -> WeightTypes:
        """Choose by the device. Packed scales are as wide as the compute dtype."""
        on_cpu = is_cpu(self._device)
        return WeightTypes(
            dtype=self._dtype,
            packed=self._packed,
            in_float32=on_cpu,
            inputs_first=on_cpu and self._dtype == mx.float32,
        )

    def _arrays(self, plan: StepLayout) -> StepArrays:
        """Make the step's arrays.

        Where attention stores the scores of all heads, at worst in float32, it takes a part of a long row at a time.
        """
        specs = [spec.attention for spec in self._loaded().config.layers if spec.attention is not None]
        heads = max((spec.num_heads for spec in specs if stores_scores(self._device, spec)), default=0)
        return StepArrays(plan, max_scores=score_bytes(self._device) // (4 * heads) if heads else None)

    def _run_layers(
        self,
        part: LoadedSlice,
        pools: list[KVPool | LayerStates | None],
        steps: Sequence[StepArrays],
        states: StepStates,
        hidden: mx.array,
        wanted: mx.array | None,
    ) -> mx.array:
        """Run the layers on hidden [T, H]; returns the rows ``wanted`` [R], all if None. ``steps``: by memory class.

        The last layer computes its feed-forward part for these rows only.
        """
        for index, layer, pool in zip(part.part.layers, part.layers, pools, strict=True):
            own: LayerStep | StateStep | None = None
            if isinstance(pool, LayerStates):
                own = StateStep(states, pool)
            elif pool is not None and layer.spec.attention is not None:
                step = steps[self._class_of[index]]
                own = LayerStep(step, pool, layer.spec.attention, block_size=self._block_size)
            hidden = layer.run(hidden, own, wanted if layer is part.layers[-1] else None)
        return hidden

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
            embedded = part.embedding.rows(mx.array(inputs))
            return embedded if config.embedding_scale == 1 else embedded * config.embedding_scale
        kind = self._options.activation_type
        self._check_shape(inputs, (plan.num_tokens, config.hidden_size), kind.numpy)
        arrived = mx.array(inputs)
        return (arrived.view(mx.bfloat16) if kind is ActivationType.BF16 else arrived).astype(self._dtype)

    def _leaving(self, hidden: mx.array) -> mx.array:
        """Convert hidden states to the link's type; bf16 as bits, since numpy has no bf16."""
        if self._options.activation_type is ActivationType.FLOAT32:
            return hidden.astype(mx.float32)
        return hidden.astype(mx.bfloat16).view(mx.uint16)

    def _logits(self, part: LoadedSlice, hidden: mx.array) -> mx.array:
        """Return the logits [R, V] float32 of hidden [R, H]."""
        config = self._loaded().config
        if part.norm is None or part.head is None or not hidden.shape[0]:
            return mx.zeros((0, config.vocab_size), mx.float32)
        logits = part.head.logits(part.norm.rows(hidden))
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        cap = config.logit_softcap
        return cap * mx.tanh(logits / cap) if cap else logits

    def _scores(self, part: LoadedSlice, hidden: mx.array, wanted: ScoreRows) -> tuple[mx.array, ...]:
        """Compute the fields of TokenScores of hidden [S, H] in pieces, because all logits at once may not fit."""
        pieces: list[list[mx.array]] = []
        for start in range(0, len(wanted.rows), SCORED_AT_ONCE):
            logits = self._logits(part, hidden[start : start + SCORED_AT_ONCE])
            targets = mx.array(wanted.targets[start : start + SCORED_AT_ONCE])[:, None]
            own = mx.take_along_axis(logits, targets, axis=1)[:, 0]
            top_ids = mx.argsort(-logits, axis=1)[:, : wanted.num_top]
            pieces.append([mx.logsumexp(logits, axis=1), own, top_ids, mx.take_along_axis(logits, top_ids, axis=1)])
            mx.eval(pieces[-1])
        return tuple(mx.concatenate(list(field)) for field in zip(*pieces, strict=True))

    def _copy_blocks(self, plan: StepLayout) -> None:
        """Copy blocks in every layer of the stage, because only its first slice of a step has the copies."""
        if plan.copies:
            for part in (each.part for each in self._loaded().slices):
                for layer, pool in zip(part.layers, self._pools[part.index], strict=True):
                    if self._class_of[layer] or pool is None or isinstance(pool, LayerStates):
                        continue  # blocks of windows are shared, never copied
                    pool.copy(plan.copies)

    def _make_pool(
        self, layer: LayerSpec, *, num_blocks: int, block_size: int, state_slots: int
    ) -> KVPool | LayerStates | None:
        """Make a layer's KV pool or slots; None for a layer without a mixer."""
        if layer.recurrent is not None:
            return LayerStates(layer.recurrent, state_slots)
        if (spec := layer.attention) is None:
            return None
        if spec.latent is not None:
            return latent_pool(
                spec, num_blocks=num_blocks, block_size=block_size, dtype=self._dtype, packed=bool(self._kv)
            )
        make = PackedKVStorage if self._kv else KVStorage
        return make(
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
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
                f"{what} did not fit into memory", fact=plain(exc), next_step="give this node fewer layers"
            ) from exc


def _products(infos: Sequence[WeightInfo]) -> tuple[PackedProducts, ...]:
    """Return what multiplies with the weights that have a form."""
    widened = {info.shape[1] for info in infos if info.form is not None and mlx_form(info.form, info.shape[1]) is None}
    kept = any(info.form is not None and info.shape[1] not in widened for info in infos)
    found = [PackedProducts(by="MLX")] if kept else []
    if widened:
        reason = f"MLX multiplies no packed weights of {' or '.join(map(str, sorted(widened)))} inputs"
        found.append(PackedProducts(by="MLX (weights widened as they load)", reason=reason))
    return tuple(found)
