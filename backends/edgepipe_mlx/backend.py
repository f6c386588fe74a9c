"""The Backend protocol on MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

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
    ActivationType,
    BackendOptions,
    DeviceProfile,
    DraftStep,
    KernelError,
    LoadProgress,
    LogitEdits,
    PackedProducts,
    ScoreRows,
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
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.spec.memory_classes import stage_classes
from edgepipe.spec.tensors import WeightInfo, WeightSource
from edgepipe.units import format_bytes
from edgepipe.weights.resident import WIDE, keeps_blocks
from edgepipe_mlx.attention import LayerPages, LayerStep, StepArrays
from edgepipe_mlx.blocks.checking import block_errors, checked_kernels
from edgepipe_mlx.blocks.kernels import BlockKernels
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
)
from edgepipe_mlx.expert_reads import ExpertReads
from edgepipe_mlx.host_copies import HostCopies, MovedLayer
from edgepipe_mlx.kernel_errors import packed_errors
from edgepipe_mlx.kv import KVPool, KVStorage
from edgepipe_mlx.latent_kv import latent_pool
from edgepipe_mlx.layers import DecoderLayer
from edgepipe_mlx.loading import LoadedSlice, Shard, WeightTypes, load_shard
from edgepipe_mlx.packed_kv import packed_pool
from edgepipe_mlx.packing import mlx_form
from edgepipe_mlx.pages.checking import checked_pages, page_errors
from edgepipe_mlx.pages.kernels import PageKernels
from edgepipe_mlx.pages.rows import PageForm, page_form
from edgepipe_mlx.picks.candidates import Picked
from edgepipe_mlx.picks.checking import pick_errors
from edgepipe_mlx.picks.picking import Picking
from edgepipe_mlx.states import LayerStates, StateStep, StepStates

SCORED_AT_ONCE = 64  # rows of prompt log-probabilities: 40 MB of logits with a vocabulary of 152,000


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
        self._packed, self._own_sizes = choose_packing(options.settings.get("weights", "auto"))
        self._checked: BlockKernels | SlowPath | None = None  # kernels of K types; None: not checked yet
        self._own_attention = choose_attention(options.settings.get("attention", "auto"))
        self._own_picks = choose_sampling(options.settings.get("sampling", "auto"), self._device)
        self._picking = Picking()
        self._kv = checked_kv(options.kv)
        self._shard: Shard | None = None
        self._products: tuple[PackedProducts, ...] = ()
        self._slow_paths: tuple[SlowPath, ...] = ()
        # Forms of attention that were checked, and what came of it.
        self._checked_pages: tuple[frozenset[PageForm], PageKernels | SlowPath] | None = None
        self._pages: dict[int, LayerPages] = {}  # by a layer's index in the model
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
        self._host: HostCopies | None = None

    def profile(self) -> DeviceProfile:
        """Measure the device with two products. The memory size comes from MLX on Metal, else from the system.

        On Metal, checks the own kernels, on which the size of K types depends.
        """
        configure(self._device)
        found = measure(self._device, self._dtype_name, self._dtype)
        kind = "mlx" if self._blocks() is None else "mlx-blocks"
        return replace(found, packing=kind if self._packed else WIDE, kv_forms=KV_FORMS, keeps_states=True)

    def kernel_errors(self) -> Iterator[KernelError]:
        """Compare products of packed weights with float64. See ``CheckingBackend``."""
        configure(self._device)
        yield from packed_errors(self._weight_types())
        if self._blocks() is not None:
            yield from block_errors(self._dtype)
        elif isinstance(self._checked, SlowPath):
            yield KernelError(kernel="products of K types at their own size", reason=self._checked.reason)
        if self._own_attention and not is_cpu(self._device):
            yield from page_errors(self._dtype)
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
        if self._packed:
            infos = [info for part in slices for info in weights.weights(part)]
            self._products = _products(infos, own=self._blocks() is not None)
            if isinstance(self._checked, SlowPath) and any(_is_of_blocks(info) for info in infos):
                self._slow_paths = (self._checked,)
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
        _, found = self._page_kernels(block_size)
        return (*self._slow_paths, found) if isinstance(found, SlowPath) else self._slow_paths

    def _page_kernels(self, block_size: int) -> tuple[dict[int, PageForm], PageKernels | SlowPath | None]:
        """Return the forms of attention of the loaded layers, and their kernels, once they are checked."""
        if not self._own_attention or is_cpu(self._device):
            return {}, None
        shard = self._loaded()
        forms: dict[int, PageForm] = {}
        for index in (layer for part in shard.slices for layer in part.part.layers):
            spec = shard.config.layers[index].attention
            form = spec and page_form(spec, block_size=block_size, dtype=self._dtype, kv=self._kv)
            if form is not None:
                forms[index] = form
        wanted = frozenset(forms.values())
        if self._checked_pages is None or self._checked_pages[0] != wanted:
            self._checked_pages = wanted, checked_pages(wanted)
        return forms, self._checked_pages[1]

    def _find_pages(self, block_size: int) -> dict[int, LayerPages]:
        """Return how the loaded layers attend over pages; no layer does where a kernel failed its check."""
        forms, kernels = self._page_kernels(block_size)
        if kernels is None or isinstance(kernels, SlowPath):
            return {}
        found: dict[int, LayerPages] = {}
        for index, form in forms.items():
            spec = self._loaded().config.layers[index].attention
            assert spec is not None
            found[index] = LayerPages(kernels=kernels, form=form, scale=spec.logit_scale, cap=spec.softcap)
        return found

    def _blocks(self) -> BlockKernels | None:
        """Return the kernels of K types, once they are checked; None: MLX's own kernels take their place."""
        if not self._own_sizes or is_cpu(self._device):
            return None
        if self._checked is None:
            self._checked = checked_kernels(self._dtype)
        return None if isinstance(self._checked, SlowPath) else self._checked

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
        self._pools = {}
        self._forget_host()
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
        self._pages = self._find_pages(block_size)
        self._num_blocks, self._block_size, self._window_blocks = num_blocks, block_size, tuple(window_blocks)
        self._state_slots = state_slots
        if host_places:
            with self._memory_errors("the KV cache in RAM"):
                self._host = HostCopies(list(self._moved_layers()), host_places, block_size)

    def prepare(self, step: Step) -> StepLayout:
        """Lay the step out in numpy arrays. Raises StepFailed if its block tables cannot be right."""
        return lay_out_step(
            step,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            window_blocks=self._window_blocks,
            state_slots=self._state_slots,
            span=span_tokens(self._kv, self._block_size),
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
        if self._started is not None and (prepared.moves or prepared.copies or prepared.scores is not None):
            mx.eval(self._started.array)  # building the graph evaluates a part of this step
        if self._host is not None:
            self._host.move(prepared.moves)
        self._copy_blocks(prepared)
        pools = self._pools[prepared.slice_index]
        arrays = [self._arrays(each) for each in (prepared, *prepared.windows)]
        states = StepStates(prepared, zeros=self._state_slots)
        wanted = mx.array(prepared.logit_rows) if part.part.head and len(prepared.logit_rows) else None
        drafts = part.mtp is not None and prepared.next_ids is not None
        hidden = self._run_layers(part, pools, arrays, states, hidden, None if drafts else wanted)
        kept: mx.array | None = None
        if part.norm is not None:
            hidden = part.norm.rows(hidden)
        if drafts:
            kept = self._follow(part, prepared, arrays, hidden)
            hidden = hidden if wanted is None else hidden[wanted]
        sampled, scored = hidden[: prepared.num_sampled], hidden[prepared.num_sampled :]
        array = self._logits(part, sampled) if part.part.head else self._leaving(hidden)
        picked = self._picking.pick(array, edits) if part.part.head else None
        scores = self._scores(part, scored, prepared.scores) if part.part.head and prepared.scores is not None else ()
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
                block_size=self._block_size,
                num_blocks=self._num_blocks,
                span=span_tokens(self._kv, self._block_size),
                dtype=np.int32,
            )
            finals = self._predict(part, self._arrays(layout), ids, finals, mx.array(layout.logit_rows))
            ids = mx.argmax(self._logits(part, finals), axis=-1).astype(mx.int32)
            mx.eval(ids, self._mtp_pool(part).arrays)
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
        own = self._layer_step(part.part.layers.end - 1, part.layers[-1], self._mtp_pool(part), step)
        return part.mtp.run(self._embedded(part, ids), finals, own, wanted)

    def _mtp_pool(self, part: LoadedSlice) -> KVPool:
        pool = self._pools[part.part.index][-1]
        assert pool is not None
        assert not isinstance(pool, LayerStates)
        return pool

    def _embedded(self, part: LoadedSlice, ids: mx.array) -> mx.array:
        assert part.embedding is not None
        scale, embedded = self._loaded().config.embedding_scale, part.embedding.rows(ids)
        return embedded if scale == 1 else embedded * scale

    def check(self) -> None:
        """Multiply two small matrices and check the result. Raises StageError."""
        check_device(self._device, self._dtype)

    def close(self) -> None:
        """Release weights, pools and MLX's cached buffers."""
        self._shard = None
        self._products, self._slow_paths = (), ()
        self._pools, self._pages = {}, {}
        self._forget_host()
        self._reads = {}
        self._started = self._waiting = None
        self._picking.end()
        self._num_blocks = self._block_size = 0
        mx.clear_cache()

    def _forget_host(self) -> None:
        if self._host is not None:
            self._host.close()
        self._host = None

    def _weight_types(self) -> WeightTypes:
        """Choose by the device. Packed scales are as wide as the compute dtype."""
        on_cpu = is_cpu(self._device)
        return WeightTypes(
            dtype=self._dtype,
            packed=self._packed,
            in_float32=on_cpu,
            inputs_first=on_cpu and self._dtype == mx.float32,
            blocks=self._blocks(),
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
        own_layers = part.layers[: part.num_own]
        for index, layer, pool in zip(part.part.layers, own_layers, pools, strict=False):
            own: LayerStep | StateStep | None = None
            if isinstance(pool, LayerStates):
                own = StateStep(states, pool)
            elif pool is not None:
                own = self._layer_step(index, layer, pool, steps[self._class_of[index]])
            hidden = layer.run(hidden, own, wanted if layer is own_layers[-1] else None)
        return hidden if own_layers or wanted is None else hidden[wanted]

    def _layer_step(self, index: int, layer: DecoderLayer, pool: KVPool, step: StepArrays) -> LayerStep:
        """Return the attention of a layer, which has an index in the model."""
        assert layer.spec.attention is not None
        pages = self._pages.get(index)
        return LayerStep(step, pool, layer.spec.attention, block_size=self._block_size, pages=pages)

    def _hidden(self, part: LoadedSlice, plan: StepLayout, inputs: TokenIds | Activations) -> mx.array:
        """Return the first layer's input [T, H] in the compute dtype."""
        config = self._loaded().config
        if part.part.embedding:
            self._check_shape(inputs, (plan.num_tokens,), np.int32)
            if inputs.size and not 0 <= int(inputs.min()) <= int(inputs.max()) < config.vocab_size:
                raise ShardMismatch(
                    "a token id lies outside the vocabulary",
                    fact=f"ids {inputs.min()}-{inputs.max()}, vocabulary {config.vocab_size}",
                )
            return self._embedded(part, mx.array(inputs))
        kind = self._options.activation_type
        self._check_shape(inputs, (plan.num_tokens, config.hidden_size), kind.numpy)
        arrived = mx.array(inputs)
        return (arrived.view(mx.bfloat16) if kind is ActivationType.BF16 else arrived).astype(self._dtype)

    def _leaving(self, hidden: mx.array) -> mx.array:
        """Convert hidden states to the link's type; bf16 as bits, since numpy has no bf16."""
        if self._options.activation_type is ActivationType.FLOAT32:
            return hidden.astype(mx.float32)
        return hidden.astype(mx.bfloat16).view(mx.uint16)

    def _logits(self, part: LoadedSlice, finals: mx.array) -> mx.array:
        """Return the logits [R, V] float32 of finals [R, H], the output behind the final norm."""
        config = self._loaded().config
        if part.head is None or not finals.shape[0]:
            return mx.zeros((0, config.vocab_size), mx.float32)
        logits = part.head.logits(finals)
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        cap = config.logit_softcap
        return cap * mx.tanh(logits / cap) if cap else logits

    def _scores(self, part: LoadedSlice, finals: mx.array, wanted: ScoreRows) -> tuple[mx.array, ...]:
        """Compute the fields of TokenScores of finals [S, H] in pieces, because all logits at once may not fit."""
        pieces: list[list[mx.array]] = []
        for start in range(0, len(wanted.rows), SCORED_AT_ONCE):
            logits = self._logits(part, finals[start : start + SCORED_AT_ONCE])
            targets = mx.array(wanted.targets[start : start + SCORED_AT_ONCE])[:, None]
            own = mx.take_along_axis(logits, targets, axis=1)[:, 0]
            top_ids = mx.argsort(-logits, axis=1)[:, : wanted.num_top]
            pieces.append([mx.logsumexp(logits, axis=1), own, top_ids, mx.take_along_axis(logits, top_ids, axis=1)])
            mx.eval(pieces[-1])
        return tuple(mx.concatenate(list(field)) for field in zip(*pieces, strict=True))

    def _copy_blocks(self, plan: StepLayout) -> None:
        """Copy blocks in every layer of the stage, because only its first slice of a step has the copies."""
        if plan.copies:
            for layer, pool in self._layer_pools():
                if self._class_of[layer] or pool is None or isinstance(pool, LayerStates):
                    continue  # blocks of windows are shared, never copied
                pool.copy(plan.copies)

    def _moved_layers(self) -> Iterator[MovedLayer]:
        """Yield the pools of the stage's layers, with their memory classes."""
        for layer, pool in self._layer_pools():
            if pool is not None:
                is_state = isinstance(pool, LayerStates)
                yield MovedLayer(1 + len(self._window_blocks) if is_state else self._class_of[layer], pool)

    def host_place(self, number: int, kept: int) -> Sequence[memoryview]:
        """See ``DiskBackend``."""
        if self._host is None:
            raise RuntimeError("there is no host memory")
        return self._host.place(number, kept)

    def disk_seconds(self, number: int, count: int, took_s: float) -> float:
        """See ``DiskBackend``."""
        return took_s

    def host_place_bytes(self) -> Sequence[int]:
        """See ``HostMemoryBackend``."""
        return self._host.place_bytes() if self._host is not None else ()

    def give_back(self, number: int, places: Sequence[int]) -> None:
        """See ``HostMemoryBackend``."""
        if self._host is not None:
            self._host.give_back(number, places)

    def machine_memory(self) -> tuple[int, int] | None:
        """See ``HostMemoryBackend``."""
        return machine_memory()

    def _layer_pools(self) -> Iterator[tuple[int, KVPool | LayerStates | None]]:
        """Yield each loaded layer's index in the model and its pool."""
        for part in (each.part for each in self._loaded().slices):
            yield from zip(part.layers, self._pools[part.index], strict=True)

    def _make_pool(
        self, layer: LayerSpec, *, num_blocks: int, block_size: int, state_slots: int
    ) -> KVPool | LayerStates | None:
        """Make a layer's KV pool or slots; None for a layer without a mixer."""
        if layer.recurrent is not None:
            return LayerStates(layer.recurrent, state_slots)
        if (spec := layer.attention) is None:
            return None
        if spec.latent is not None:
            return latent_pool(spec, num_blocks=num_blocks, block_size=block_size, dtype=self._dtype, form=self._kv)
        make = partial(packed_pool, form=self._kv) if self._kv else KVStorage
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
        """Translate MLX's bare RuntimeError for lack of memory, and Python's MemoryError."""
        try:
            yield
        except (RuntimeError, MemoryError) as exc:
            if isinstance(exc, RuntimeError) and "alloc" not in str(exc):
                raise
            raise DeviceOutOfMemory(
                f"{what} did not fit into memory", fact=plain(exc), next_step="give this node fewer layers"
            ) from exc


def _is_of_blocks(info: WeightInfo) -> bool:
    return info.form is not None and keeps_blocks(info.form, *info.shape)


def _products(infos: Sequence[WeightInfo], *, own: bool) -> tuple[PackedProducts, ...]:
    """Return what multiplies with the weights that have a form. ``own``: own kernels multiply with K types."""
    found: list[PackedProducts] = []
    if own and any(_is_of_blocks(info) for info in infos):
        found.append(PackedProducts(by="own kernels (Metal)"))
        infos = [info for info in infos if not _is_of_blocks(info)]
    widened = {info.shape[1] for info in infos if info.form is not None and mlx_form(info.form, info.shape[1]) is None}
    kept = any(info.form is not None and info.shape[1] not in widened for info in infos)
    if kept:
        found.append(PackedProducts(by="MLX"))
    if widened:
        reason = f"MLX multiplies no packed weights of {' or '.join(map(str, sorted(widened)))} inputs"
        found.append(PackedProducts(by="MLX (weights widened as they load)", reason=reason))
    return tuple(found)
