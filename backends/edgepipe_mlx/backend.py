"""The Backend protocol on MLX."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from edgepipe.backend.draft_passes import draft_passes, guesses_of
from edgepipe.backend.drafting import DraftModel
from edgepipe.backend.kv_setting import checked_kv
from edgepipe.backend.machine_memory import machine_memory
from edgepipe.backend.step_layout import StepLayout, lay_out_step
from edgepipe.backend.types import (
    UNKNOWN_ID,
    Activations,
    BackendOptions,
    DeviceProfile,
    DraftStep,
    KernelError,
    LoadProgress,
    LogitEdits,
    PackedProducts,
    SlowPath,
    Step,
    StepOutput,
    TokenIds,
    TokenScores,
)
from edgepipe.errors import DeviceOutOfMemory, ShardMismatch
from edgepipe.plain_words import plain
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.kv_forms import KV_FORMS, span_tokens
from edgepipe.spec.memory_classes import stage_classes
from edgepipe.spec.tensors import WeightSource
from edgepipe.units import format_bytes
from edgepipe.weights.resident import WIDE
from edgepipe_mlx.attention import LayerPages, LayerStep, StepArrays
from edgepipe_mlx.device import (
    BLOCK_SIZES,
    check_device,
    choose_attention,
    choose_device,
    choose_dtype,
    choose_packing,
    choose_sampling,
    configure,
    free_bytes,
    is_cpu,
    measure,
    score_bytes,
    stores_scores,
    unwired_memory,
)
from edgepipe_mlx.expert_reads import ExpertReads
from edgepipe_mlx.kernel_errors import packed_errors
from edgepipe_mlx.kv import KVPool
from edgepipe_mlx.layers import DecoderLayer
from edgepipe_mlx.loading import LoadedSlice, Shard, WeightTypes, load_shard
from edgepipe_mlx.own_kernels import OwnKernels
from edgepipe_mlx.picks.candidates import Picked
from edgepipe_mlx.picks.checking import pick_errors
from edgepipe_mlx.picks.picking import Picking
from edgepipe_mlx.slice_ends import SliceEnds
from edgepipe_mlx.stage_memory import PoolSizes, StageMemory
from edgepipe_mlx.states import LayerStates, StateStep, StepStates


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTicket:
    """A submitted step with an array that MLX computes. Belongs to the compute thread."""

    array: mx.array  # activations [T, H] in the link's type, bf16 as bits; logits [R, V] float32; or candidates
    is_logits: bool
    picked: Picked | None = None  # candidates of the logits, if the device picks them
    scores: tuple[mx.array, ...] = ()  # the fields of TokenScores, if requested
    expert_share: mx.array | None = None  # [] float32; None: not counted
    kept: mx.array | None = None  # see ``StepOutput``; stays on the compute thread

    @property
    def output(self) -> tuple[mx.array, ...]:
        """Arrays that ``collect`` copies or lends."""
        return (self.array,) if self.picked is None else self.picked.arrays


def _copied_scores(scores: tuple[mx.array, ...]) -> TokenScores:
    log_totals, logits, top_ids, top_logits = (np.array(each) for each in scores)
    return TokenScores(log_totals=log_totals, logits=logits, top_ids=top_ids.astype(np.int32), top_logits=top_logits)


class MlxBackend:
    """Runs decoder layers over packed rows.

    MLX objects belong to the thread that made them, so all methods except ``prepare`` must be called on one thread.
    ``prepare`` only makes numpy arrays. ``collect`` returns copies, and the memory of logits without their object.
    """

    block_sizes: tuple[int, ...] = BLOCK_SIZES
    max_submitted: int = 2  # the second one only has its graph built: see ``submit``
    draft_model: DraftModel | None = None

    def __init__(self, options: BackendOptions) -> None:
        """Raises BackendUnavailable if the device is missing, ConfigInvalid for unknown options.

        ``options.settings["weights"]``: "auto" keeps packed weights packed, "mlx" in forms of MLX's own kernels only,
        "wide" widens them to the compute dtype.
        ``options.settings["attention"]``: "auto" reads KV of all sequences by own kernels, "mlx" by MLX's alone.
        ``options.settings["sampling"]``: "device" picks candidates there, "host" returns whole rows of logits, "auto"
        picks them on GPUs.
        ``options.threads`` has no effect, because MLX chooses its threads.
        """
        self._options = options
        self._device = choose_device(options.device)
        self._dtype_name, self._dtype = choose_dtype(options.dtype, self._device)
        self._packed, own_products = choose_packing(options.settings.get("weights", "auto"))
        self._own_picks = choose_sampling(options.settings.get("sampling", "auto"), self._device)
        self._picking = Picking()
        self._kv = checked_kv(options.kv)
        self._own = OwnKernels(
            self._device,
            self._dtype,
            products=own_products,
            attention=choose_attention(options.settings.get("attention", "auto")),
            kv=self._kv,
        )
        self._shard: Shard | None = None
        self._products: tuple[PackedProducts, ...] = ()
        self._slow_paths: tuple[SlowPath, ...] = ()
        self._pages: dict[int, LayerPages] = {}  # keys are indices of layers in the model
        # Keys are indices of slices.
        self._ends: dict[int, SliceEnds] = {}
        self._reads: dict[int, ExpertReads] = {}
        self._started: StepTicket | None = None  # ticket that is not collected
        self._waiting: tuple[StepTicket, list[mx.array]] | None = None  # submitted, not started; see ``_start``
        self._sizes = PoolSizes()
        self._memory: StageMemory | None = None

    def profile(self) -> DeviceProfile:
        """Measure the device with two products. The memory size comes from MLX on Metal, else from the system.

        On Metal, checks the own kernels, on which the size of K types depends.
        """
        configure(self._device)
        found = measure(self._device, self._dtype_name, self._dtype)
        kind = "mlx" if self._own.blocks() is None else "mlx-blocks"
        return replace(found, packing=kind if self._packed else WIDE, kv_forms=KV_FORMS, keeps_states=True)

    def kernel_errors(self) -> Iterator[KernelError]:
        """Compare products of packed weights with float64. See ``CheckingBackend``."""
        configure(self._device)
        yield from packed_errors(self._weight_types())
        yield from self._own.errors()
        if self._own_picks and not is_cpu(self._device):
            yield from pick_errors()

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
        self._ends = {part.part.index: self._make_ends(self._shard.config, part) for part in self._shard.slices}
        if self._packed:
            infos = [info for part in slices for info in weights.weights(part)]
            self._products = self._own.products(infos)
            self._slow_paths = self._own.slow_products(infos)
        if self._own_picks and any(part.head for part in slices):
            lacking = self._picking.begin(self._shard.config.vocab_size, on_cpu=is_cpu(self._device))
            self._slow_paths = self._slow_paths if lacking is None else (*self._slow_paths, lacking)

    @property
    def picks_candidates(self) -> bool:
        """Whether the loaded slices' candidates are picked on the device. See ``Backend``."""
        return self._picking.is_on

    def packed_products(self) -> Sequence[PackedProducts]:
        """Return what multiplies with the loaded packed weights, each once, the fallback last."""
        return self._products

    def slow_paths(self, block_size: int) -> Sequence[SlowPath]:
        """Return what the loaded weights lack. See ``ExplainingBackend``."""
        shard = self._loaded()
        unwired = unwired_memory(on_gpu=not is_cpu(self._device), macos=platform.mac_ver()[0])
        found = self._slow_paths if unwired is None else (unwired, *self._slow_paths)
        return (*found, *self._own.slow_attention(shard.config, _layers(shard), block_size))

    def kv_block_bytes(self, config: ModelConfig, slices: Sequence[Slice], block_size: int) -> int:
        """Return the bytes of one block in all layers of the slices."""
        layers = [layer for part in slices for layer in part.layers]
        return block_size * config.kv_bytes_per_token(layers, form=self._kv or self._dtype_name)

    def allocate_kv(
        self,
        *,
        num_blocks: int,
        block_size: int,
        window_blocks: Sequence[int] = (),
        state_slots: int = 0,
        host_places: Sequence[int] = (),
    ) -> None:
        """Allocate every layer's pool, replacing existing ones. Raises DeviceOutOfMemory."""
        shard = self._loaded()
        self._forget_memory()
        mx.clear_cache()
        parts = [part.part for part in shard.slices]
        classes = stage_classes(shard.config, parts, num_blocks=num_blocks, window_blocks=window_blocks)
        num_bytes = sum(self.kv_block_bytes(shard.config, own, block_size) * count for count, own in classes)
        state_bytes = shard.config.state_bytes(layer for part in parts for layer in part.layers)
        self._check_room(num_bytes + state_bytes * (state_slots + 1))  # one holds zeros
        self._sizes = PoolSizes(
            num_blocks=num_blocks, block_size=block_size, window_blocks=tuple(window_blocks), state_slots=state_slots
        )
        with self._memory_errors("the KV cache"):
            self._memory = StageMemory(shard.config, parts, self._sizes, dtype=self._dtype, kv=self._kv)
        self._pages = self._own.pages(shard.config, _layers(shard), block_size)
        if host_places:
            with self._memory_errors("the KV cache in RAM"):
                self._memory.add_host(host_places)

    def prepare(self, step: Step) -> StepLayout:
        """Lay the step out in numpy arrays. Raises StepFailed if its block tables cannot be right."""
        return lay_out_step(
            step,
            block_size=self._sizes.block_size,
            num_blocks=self._sizes.num_blocks,
            window_blocks=self._sizes.window_blocks,
            state_slots=self._sizes.state_slots,
            span=span_tokens(self._kv, self._sizes.block_size),
            dtype=np.int32,
        )

    def submit(
        self, prepared: StepLayout, inputs: TokenIds | Activations, edits: LogitEdits | None = None
    ) -> StepTicket:
        """Apply the step's copies, build its graph, and start it once the step before has ended.

        If both ran, the first one's reads would make the second one copy the KV pools instead of updating them. So only
        the work of this thread overlaps the step before. Raises ShardMismatch.
        """
        part, ends, memory = self._slice(prepared.slice_index), self._ends[prepared.slice_index], self._allocated()
        hidden = ends.hidden(prepared.num_tokens, inputs)
        if self._started is not None and (prepared.moves or prepared.copies or prepared.scores is not None):
            mx.eval(self._started.array)  # building the graph evaluates a part of this step
        memory.move(prepared.moves)
        memory.copy(prepared.copies)
        pools = memory.pools(prepared.slice_index)
        arrays = [self._arrays(each) for each in (prepared, *prepared.windows)]
        states = StepStates(prepared, zeros=self._sizes.state_slots)
        wanted = mx.array(prepared.logit_rows) if part.part.head and len(prepared.logit_rows) else None
        drafts = part.mtp is not None and prepared.next_ids is not None
        hidden = self._run_layers(part, memory, arrays, states, hidden, None if drafts else wanted)
        kept: mx.array | None = None
        if part.norm is not None:
            hidden = part.norm.rows(hidden)
        if drafts:
            kept = self._follow(part, prepared, arrays, hidden)
            hidden = hidden if wanted is None else hidden[wanted]
        sampled, scored = hidden[: prepared.num_sampled], hidden[prepared.num_sampled :]
        array = ends.logits(sampled) if part.part.head else ends.leaving(hidden)
        picked = self._picking.pick(array, edits) if part.part.head else None
        scores = ends.scores(scored, prepared.scores) if part.part.head and prepared.scores is not None else ()
        share = self._reads[prepared.slice_index].share(prepared.num_tokens)
        ticket = StepTicket(
            array=array if picked is None else picked.packed,
            is_logits=part.part.head,
            picked=picked,
            scores=scores,
            expert_share=share,
            kept=kept,
        )
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
        mx.async_eval(ticket.output, ticket.scores, updated, ticket.expert_share, ticket.kept)
        self._started = ticket

    def collect(self, ticket: StepTicket) -> StepOutput:
        """Wait for the step and copy its output to numpy, so that no MLX object leaves the thread.

        Starts the next step, if it waits.
        """
        waiting, self._waiting = self._waiting, None
        self._started = None
        mx.eval(ticket.output, ticket.scores, ticket.expert_share)
        if waiting is not None:
            self._start(*waiting)
        share = float(np.array(ticket.expert_share)) if ticket.expert_share is not None else 0.0
        if not ticket.is_logits:
            return StepOutput(activations=np.array(ticket.array), expert_share=share)
        found = StepOutput(
            scores=_copied_scores(ticket.scores) if ticket.scores else None, kept=ticket.kept, expert_share=share
        )
        if ticket.picked is None:
            return replace(found, logits=np.array(ticket.array))
        return replace(found, candidates=self._picking.copied(ticket.picked))

    def draft(self, step: DraftStep) -> Sequence[TokenIds]:
        """Guess tokens by the layer that predicts one token more. See ``DraftingBackend``."""
        part = self._slice(step.slice_index)
        if part.mtp is None:
            raise ShardMismatch(f"slice {step.slice_index} has no layer that predicts one token more")
        if self._started is not None:
            mx.eval(self._started.array)
        found: list[mx.array] = []
        finals = mx.concatenate([part for row in step.rows for part in row.kept])
        ids = mx.array(np.concatenate([row.next_ids for row in step.rows]))
        for number, each in enumerate(draft_passes(step)):
            if number and len(each.kept) < len(ids):
                going = mx.array(each.kept)
                finals, ids = finals[going], ids[going]
            layout = lay_out_step(
                each.step,
                block_size=self._sizes.block_size,
                num_blocks=self._sizes.num_blocks,
                span=span_tokens(self._kv, self._sizes.block_size),
                dtype=np.int32,
            )
            finals = self._predict(part, self._arrays(layout), ids, finals, mx.array(layout.logit_rows))
            ids = mx.argmax(self._ends[step.slice_index].logits(finals), axis=-1).astype(mx.int32)
            mx.eval(ids, self._allocated().last_pool(step.slice_index).arrays)
            found.append(ids)
        return guesses_of(step, [np.array(each, dtype=np.int64) for each in found])

    def _follow(
        self, part: LoadedSlice, layout: StepLayout, arrays: Sequence[StepArrays], finals: mx.array
    ) -> mx.array:
        """Compute a step's keys and values where the next token is known; return the other rows of finals [U, H]."""
        assert layout.next_ids is not None
        if (layout.next_ids >= 0).any():
            ids = mx.array(np.maximum(layout.next_ids, 0).astype(np.int32))
            self._predict(part, arrays[0], ids, finals, mx.array(np.zeros(1, np.int32)))
        unknown = np.flatnonzero(layout.next_ids == UNKNOWN_ID)
        return finals[mx.array(unknown)] if len(unknown) else finals[:0]

    def _predict(
        self, part: LoadedSlice, step: StepArrays, ids: mx.array, finals: mx.array, wanted: mx.array
    ) -> mx.array:
        """Run the layer that predicts one token more for tokens behind the step's; returns [R, H] of rows wanted."""
        assert part.mtp is not None
        pool = self._allocated().last_pool(part.part.index)
        own = self._layer_step(part.part.layers.end - 1, part.layers[-1], pool, step)
        return part.mtp.run(self._ends[part.part.index].embedded(ids), finals, own, wanted)

    def check(self) -> None:
        """Multiply two small matrices and check the result. Raises StageError."""
        check_device(self._device, self._dtype)

    def close(self) -> None:
        """Release weights, pools and MLX's cached buffers."""
        self._shard = None
        self._products, self._slow_paths = (), ()
        self._forget_memory()
        self._ends, self._reads = {}, {}
        self._started = self._waiting = None
        self._picking.end()
        mx.clear_cache()

    def _forget_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory, self._sizes, self._pages = None, PoolSizes(), {}

    def _weight_types(self) -> WeightTypes:
        """Choose by the device. Packed scales are as wide as the compute dtype."""
        on_cpu = is_cpu(self._device)
        return WeightTypes(
            dtype=self._dtype,
            packed=self._packed,
            in_float32=on_cpu,
            inputs_first=on_cpu and self._dtype == mx.float32,
            blocks=self._own.blocks(),
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
        memory: StageMemory,
        steps: Sequence[StepArrays],
        states: StepStates,
        hidden: mx.array,
        wanted: mx.array | None,
    ) -> mx.array:
        """Run the layers on hidden [T, H]; returns the rows ``wanted`` [R], all if None. ``steps``: by memory class.

        The last layer computes its feed-forward part for these rows only.
        """
        own_layers = part.layers[: part.num_own]
        for index, layer, pool in zip(part.part.layers, own_layers, memory.pools(part.part.index), strict=False):
            own: LayerStep | StateStep | None = None
            if isinstance(pool, LayerStates):
                own = StateStep(states, pool)
            elif pool is not None:
                own = self._layer_step(index, layer, pool, steps[memory.class_of(index)])
            hidden = layer.run(hidden, own, wanted if layer is own_layers[-1] else None)
        return hidden if own_layers or wanted is None else hidden[wanted]

    def _layer_step(self, index: int, layer: DecoderLayer, pool: KVPool, step: StepArrays) -> LayerStep:
        """Return the attention of a layer, which has an index in the model."""
        assert layer.spec.attention is not None
        pages = self._pages.get(index)
        return LayerStep(step, pool, layer.spec.attention, block_size=self._sizes.block_size, pages=pages)

    def _make_ends(self, config: ModelConfig, part: LoadedSlice) -> SliceEnds:
        return SliceEnds(config, part, dtype=self._dtype, activation_type=self._options.activation_type)

    def host_place(self, number: int, kept: int) -> Sequence[memoryview]:
        """See ``DiskBackend``."""
        if (host := self._allocated().host) is None:
            raise RuntimeError("there is no host memory")
        return host.place(number, kept)

    def disk_seconds(self, number: int, count: int, took_s: float) -> float:
        """See ``DiskBackend``."""
        return took_s

    def host_place_bytes(self) -> Sequence[int]:
        """See ``HostMemoryBackend``."""
        host = self._memory and self._memory.host
        return host.place_bytes() if host is not None else ()

    def give_back(self, number: int, places: Sequence[int]) -> None:
        """See ``HostMemoryBackend``."""
        if (host := self._memory and self._memory.host) is not None:
            host.give_back(number, places)

    def machine_memory(self) -> tuple[int, int] | None:
        """See ``HostMemoryBackend``."""
        return machine_memory()

    def _loaded(self) -> Shard:
        if self._shard is None:
            raise RuntimeError("nothing is loaded")
        return self._shard

    def _allocated(self) -> StageMemory:
        if self._memory is None:
            raise RuntimeError("no KV is allocated")
        return self._memory

    def _slice(self, index: int) -> LoadedSlice:
        for part in self._loaded().slices:
            if part.part.index == index:
                return part
        raise ShardMismatch(
            f"slice {index} is not loaded here",
            fact=f"loaded: {', '.join(str(part.part.index) for part in self._loaded().slices)}",
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
        """Translate MLX's bare RuntimeError for lack of memory, and Python's MemoryError."""
        try:
            yield
        except (RuntimeError, MemoryError) as exc:
            if isinstance(exc, RuntimeError) and "alloc" not in str(exc):
                raise
            raise DeviceOutOfMemory(
                f"{what} did not fit into memory", fact=plain(exc), next_step="give this node fewer layers"
            ) from exc


def _layers(shard: Shard) -> list[int]:
    """Return the indices in the model of a shard's layers."""
    return [layer for part in shard.slices for layer in part.part.layers]
