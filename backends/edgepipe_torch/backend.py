"""The Backend protocol on torch."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.backend.kv_setting import chosen_kv
from edgepipe.backend.step_layout import StepLayout
from edgepipe.backend.types import (
    DEFAULT_BLOCK_SIZE,
    Activations,
    ActivationType,
    BackendOptions,
    DeviceProfile,
    LoadProgress,
    LogitEdits,
    PackedProducts,
    Step,
    StepOutput,
    TokenIds,
)
from edgepipe.errors import ConfigInvalid, DeviceOutOfMemory, ShardMismatch
from edgepipe.model.expert_places import SETTING, chosen_share, with_ram_percent
from edgepipe.model.facts import KV_8BIT, ModelConfig, Slice
from edgepipe.model.layout import is_expert
from edgepipe.model.memory_classes import memory_classes, stage_classes
from edgepipe.model.repacked import KeepsRepacked
from edgepipe.model.resident import WIDE, expert_bytes, weight_bytes
from edgepipe.model.tensors import WeightInfo, WeightSource
from edgepipe.model.weight_table import WeightTable, table_of
from edgepipe.units import format_bytes
from edgepipe_torch.cpu.kernels import CpuKernels, cpu_kernels
from edgepipe_torch.cpu.replay import DecodeReplays, can_record, can_replay_decode
from edgepipe_torch.cpu.shard_cache import ShardCache
from edgepipe_torch.cuda.graphs import ROWS, DecodeGraphs, can_replay
from edgepipe_torch.cuda.paged import PageKernels, step_attention
from edgepipe_torch.cuda.paging import PAGE_TOKENS, Paging, find_paging, find_step_kernels
from edgepipe_torch.layers.attention import CausalMasks, SequenceAttention, StepAttention
from edgepipe_torch.layers.candidates import Picked, Scored, pick, score
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.decoder import ClassTensors, Decoder, SliceWeights, StepTensors
from edgepipe_torch.layers.expert_ram import CPU
from edgepipe_torch.layers.expert_reads import ExpertReads, ReadShare, covers
from edgepipe_torch.layers.expert_uses import ExpertUses
from edgepipe_torch.layers.head_shape import by_kind, kernels_fit
from edgepipe_torch.layers.kv import KVStorage
from edgepipe_torch.layers.linear import Workspace
from edgepipe_torch.layers.loading import load_slices
from edgepipe_torch.layers.measuring import (
    check_device,
    choose_device,
    choose_dtype,
    dtype_name,
    free_bytes,
    lacks_memory,
    measure,
    set_threads,
    with_ram,
)
from edgepipe_torch.layers.mixer_steps import StepKernels, use_kernels
from edgepipe_torch.layers.packed_attention import PackedSequenceAttention
from edgepipe_torch.layers.packed_kv import PackedKVStorage
from edgepipe_torch.layers.prepared import PreparedStep, prepare_step
from edgepipe_torch.layers.rope import Rotations
from edgepipe_torch.layers.states import StatePool, StepStates, added_slots
from edgepipe_torch.layers.step_ops import CompiledOps
from edgepipe_torch.layers.transfer import Download, Transfer, make_transfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTicket:
    """A submitted step."""

    download: Download | Picked  # activations [T, H] in the link's type (bf16 as int16), logits [R, V] or candidates
    is_logits: bool
    scored: Scored | None = None
    experts: ReadShare | None = None


class TorchBackend:
    """Runs slices of a Llama-like decoder on a CPU (float32) or a CUDA device (bf16)."""

    def __init__(
        self,
        options: BackendOptions,
        *,
        paging: Paging | None = None,
        kernels: CpuKernels | KernelsUnavailable | None = None,
        step_kernels: StepKernels | None = None,
    ) -> None:
        """``paging`` replaces what the device offers for attention over pages and for graphs, ``kernels`` the CPU's.

        step_kernels  for one token of recurrent layers, by default the device's

        Raises BackendUnavailable if the device is missing, ConfigInvalid for an unknown device or dtype.
        """
        self._device = choose_device(options.device)
        self._dtype = choose_dtype(options.dtype, self._device)
        self._activation_type = options.activation_type
        set_threads(options.threads)
        self._packed = _keeps_packed(options)
        self._ram_percent = chosen_share(options.settings)  # of each layer's experts, which stay in host memory
        self._kernels = kernels
        self._kv = chosen_kv(options.settings)
        self._step_kernels = step_kernels or find_step_kernels(self._device)
        self._paging = paging or find_paging(self._device, self._dtype)
        if self._kv and self._paging is not None:
            logger.info("8-bit KV saves memory and costs speed: attention runs without pages and graphs")
            self._paging = None
        self._transfer: Transfer = self._paging.transfer if self._paging else make_transfer(self._device)
        self.block_sizes: tuple[int, ...] = (
            (self._paging.page_tokens,) if self._paging else (DEFAULT_BLOCK_SIZE, PAGE_TOKENS)
        )
        self.max_submitted = self._transfer.max_submitted
        self.picks_candidates = _picks_candidates(options, self._device)
        self._forget()

    def profile(self) -> DeviceProfile:
        """Return memory as reported by the system or CUDA, and measured bandwidth and matrix rate."""
        found = measure(self._device, self._dtype, block_sizes=self.block_sizes)
        if self._device.type == "cuda":
            found = with_ram(found)
        return replace(found, packing=self._packing, kv_forms=(KV_8BIT,), keeps_states=True)

    def load(self, slices: Sequence[Slice], weights: WeightSource, progress: Callable[[LoadProgress], None]) -> None:
        """Read the slices' tensors, replacing the loaded ones.

        Raises ModelInvalid, ArchitectureUnsupported, DeviceOutOfMemory.
        """
        self.close()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # for this thread: events and graphs use the current device
        infos = [info for part in slices for info in weights.weights(part)]
        self._uses = ExpertUses(weights.repacked if isinstance(weights, KeepsRepacked) else None)
        table = table_of(infos)
        placed = [self._placed_bytes(info, weights.config, table) for info in infos]
        needed = sum(own for own, _ in placed)
        self._check_ram(sum(beside for _, beside in placed))
        rotations = Rotations(weights.config)
        cache = self._cache_of(weights)
        with self._memory_errors("the layers", needed):
            loaded = load_slices(
                slices,
                weights,
                progress,
                dtype=self._dtype,
                device=self._device,
                workspace=self._workspace,
                rotations=rotations.kinds,
                packed=self._packed,
                kernels=self._kernels,
                cache=cache,
                ram_percent=self._ram_percent,
                uses=self._uses,
            )
            if self._step_kernels is not None:
                mixers = [layer.mixer for part in loaded for layer in part.layers if layer.mixer is not None]
                use_kernels(mixers, self._step_kernels, self._dtype)
        self._config = weights.config
        self._rotations = rotations
        self._weights = {part.part.index: part for part in loaded}
        self._ops = self._compiled_ops(weights.config) if self._kv or _has_packed(slices, weights) else None
        if self._ops is not None:
            self._ops.compile_mixers([layer.mixer for part in loaded for layer in part.layers if layer.mixer])
        self._decoders = {part.part.index: Decoder(weights.config, part, self._workspace, self._ops) for part in loaded}
        if cache is not None:
            self._cache = cache
            cache.write_in_background()

    def _cache_of(self, weights: WeightSource) -> ShardCache | None:
        """Return the cache of repacked weights beside a model of the store, where a CPU computes with them."""
        place = weights.repacked if isinstance(weights, KeepsRepacked) else None
        return ShardCache(place) if place and self._packed and self._device.type == "cpu" else None

    def wait_until_kept(self, timeout_s: float) -> None:
        """Wait until the repacked weights of the loaded slices are on disk. Raises TimeoutError."""
        if self._cache is not None:
            self._cache.wait(timeout_s)

    def packed_products(self) -> Sequence[PackedProducts]:
        """Return what multiplies with the loaded packed weights, each once, the fallbacks last."""
        found = {each for part in self._weights.values() for linear in part.packed for each in linear.products}
        return sorted(found, key=lambda each: (each.reason, each.by))

    def kv_block_bytes(self, config: ModelConfig, slices: Sequence[Slice], block_size: int) -> int:
        """Return the bytes of one block in all layers of the slices."""
        layers = [layer for part in slices for layer in part.layers]
        return block_size * config.kv_bytes_per_token(layers, form=self._kv or dtype_name(self._dtype))

    def allocate_kv(
        self, *, num_blocks: int, block_size: int, window_blocks: Sequence[int] = (), state_slots: int = 0
    ) -> None:
        """Allocate every layer's pool, replacing existing ones. Raises DeviceOutOfMemory."""
        config = self._loaded_config()
        self._pools, self._graphs, self._replays, self._page_kernels, self._states = {}, {}, {}, {}, {}
        self._pages = self._paging if self._paging and block_size % self._paging.page_tokens == 0 else None
        parts = [decoder.part for decoder in self._decoders.values()]
        classes = stage_classes(config, parts, num_blocks=num_blocks, window_blocks=window_blocks)
        num_bytes = sum(self.kv_block_bytes(config, own, block_size) * count for count, own in classes)
        state_bytes = config.state_bytes(layer for part in parts for layer in part.layers)
        num_bytes += state_bytes * (state_slots + added_slots(spare=self._pages is not None))
        class_of = memory_classes(config).of_layer if window_blocks else (0,) * config.num_layers
        for decoder in self._decoders.values():
            kinds = by_kind(decoder.heads)
            first = decoder.part.layers.start
            decoder.classes = [class_of[first + decoder.attending[alike[0].layer]] for alike in kinds]
        with self._memory_errors("the KV pool", num_bytes):
            self._pools = {
                index: self._new_pool(decoder, (num_blocks, *window_blocks), block_size)
                for index, decoder in self._decoders.items()
            }
            self._states = {
                index: StatePool(own.mixers, state_slots, self._device, spare=self._pages is not None)
                for index, own in self._weights.items()
                if own.mixers
            }
        self._state_slots = state_slots
        self._num_blocks, self._block_size, self._window_blocks = num_blocks, block_size, tuple(window_blocks)
        if self._pages is not None:
            with self._memory_errors("the checks of kernels", 0):
                self._page_kernels = {
                    index: PageKernels(self._pages, decoder.heads) for index, decoder in self._decoders.items()
                }
            self._graphs = {
                index: self._new_graphs(index, self._pages, kernels)
                for index, kernels in self._page_kernels.items()
                if not self._weights[index].waits and kernels.whole
            }
        self._reads = {
            index: ExpertReads(own.mixtures, sizes=ROWS if index in self._graphs else None)
            for index, own in self._weights.items()
            if own.mixtures
        }
        if self._ops is not None:
            self._replays = {
                index: DecodeReplays(decoder, self._ops, self._pools[index], self._states.get(index))
                for index, decoder in self._decoders.items()
                if can_record(self._weights[index], decoder.heads, self._ops)
            }

    def prepare(self, step: Step) -> PreparedStep:
        """Lay out the step. Raises StepFailed if its blocks do not cover its tokens."""
        self._loaded_config()
        assert self._rotations is not None
        return prepare_step(
            step,
            rotations=self._rotations,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            window_blocks=self._window_blocks,
            state_slots=self._state_slots,
        )

    def submit(
        self, prepared: PreparedStep, inputs: TokenIds | Activations, edits: LogitEdits | None = None
    ) -> StepTicket:
        """Apply the copies and compute: at once on a CPU, by queueing kernels on CUDA.

        Raises ShardMismatch if the inputs do not match the step or the slice is not loaded.
        """
        ticket = self._submit(prepared, inputs, edits)
        layout = prepared.layout
        if (reads := self._reads.get(layout.slice_index)) is None:
            return ticket
        all_rows = not self._decoders[layout.slice_index].part.head or covers(layout)
        share = reads.start(layout.num_tokens, self._transfer, all_rows=all_rows)
        return ticket if share is None else replace(ticket, experts=share)

    def _submit(self, prepared: PreparedStep, inputs: TokenIds | Activations, edits: LogitEdits | None) -> StepTicket:
        layout = prepared.layout
        decoder, pool = self._slice(layout.slice_index)
        self._check_inputs(decoder.part, layout.num_tokens, inputs)
        with torch.inference_mode():
            self._transfer.begin()
            for other in self._pools.values():
                other.copy(layout.copies)
            graphs = self._graphs.get(layout.slice_index)
            if graphs is not None and can_replay(layout, head=decoder.part.head):
                found = graphs.run(prepared, inputs)
                if decoder.part.head:
                    return self._sampled(found, edits)
                return StepTicket(download=self._transfer.download(found), is_logits=False)
            replays = self._replays.get(layout.slice_index)
            if replays is not None and can_replay_decode(layout, head=decoder.part.head):
                found = replays.run(prepared, lambda hidden: self._fill_hidden(decoder, inputs, hidden))
                if decoder.part.head:
                    return self._sampled(decoder.shaped(found.clone()), edits)
                return StepTicket(download=self._transfer.download(self._encode(found)), is_logits=False)
            hidden = self._workspace.get("hidden", layout.num_tokens, self._loaded_config().hidden_size)
            self._fill_hidden(decoder, inputs, hidden)
            tensors = self._step_tensors(decoder, prepared, pool)
            hidden = decoder.run(hidden, tensors, pool, self._states.get(layout.slice_index))
            if not decoder.part.head:
                return StepTicket(download=self._transfer.download(self._encode(hidden)), is_logits=False)
            return self._leave(decoder, hidden, layout, edits)

    def collect(self, ticket: StepTicket) -> StepOutput:
        """Wait for that step only."""
        scores = ticket.scored.wait() if ticket.scored is not None else None
        if isinstance(ticket.download, Picked):
            output = StepOutput(candidates=ticket.download.wait(), scores=scores)
        elif ticket.is_logits:
            output = StepOutput(logits=ticket.download.wait(), scores=scores)
        else:
            output = StepOutput(activations=ticket.download.wait().view(self._activation_type.numpy))
        return output if ticket.experts is None else replace(output, expert_share=ticket.experts.wait())

    def check(self) -> None:
        """Multiply two small matrices and check the result. Raises StageError."""
        check_device(self._device, self._dtype)

    def close(self) -> None:
        """Release all memory, and keep what was learnt of experts. May be called twice."""
        self._uses.save()
        if self._cache is not None:
            self._cache.stop()
        self._forget()
        if self._device.type == "cuda":
            gc.collect()  # the error of a failed load may hold tensors
            torch.cuda.empty_cache()

    def _forget(self) -> None:
        self._config: ModelConfig | None = None
        self._rotations: Rotations | None = None
        self._ops: CompiledOps | None = None  # for packed weights or 8-bit KV on a CPU
        self._decoders: dict[int, Decoder] = {}  # by slice index
        self._weights: dict[int, SliceWeights] = {}  # by slice index
        self._pools: dict[int, KVStorage | PackedKVStorage] = {}  # by slice index
        self._graphs: dict[int, DecodeGraphs] = {}  # by slice index, if the device supports graphs
        self._replays: dict[int, DecodeReplays] = {}  # by slice index, if kernels compute the whole slice
        self._uses = ExpertUses(None)
        self._cache: ShardCache | None = None  # of a CPU's repacked weights, which may still be written
        self._reads: dict[int, ExpertReads] = {}  # by slice index, if it has experts
        self._pages: Paging | None = None  # if the pool's blocks are whole pages
        self._page_kernels: dict[int, PageKernels] = {}  # by slice index, if so
        self._num_blocks = 0
        self._block_size = 0
        self._window_blocks: tuple[int, ...] = ()
        self._state_slots = 0
        self._states: dict[int, StatePool] = {}  # by slice index, if it has recurrent layers
        self._workspace = Workspace(self._dtype, self._device)
        self._masks = CausalMasks(self._dtype, self._device)

    @property
    def _packing(self) -> str:
        kind = f"torch-{self._device.type}" if self._packed else WIDE
        return kind if self._device.type == "cpu" else with_ram_percent(kind, self._ram_percent)

    def _placed_bytes(self, info: WeightInfo, config: ModelConfig, table: WeightTable) -> tuple[int, int]:
        """Return the bytes of a weight on the device, and beside its memory."""
        kind, dtype = self._packing, dtype_name(self._dtype)
        layer = int(info.name.split(".")[2]) if is_expert(info.name) else None
        experts = None if layer is None else config.layers[layer].experts
        if layer is None or experts is None:
            return weight_bytes(info.name, info.form, info.shape, kind=kind, dtype=dtype), 0
        return expert_bytes(
            info.name,
            info.form,
            info.shape,
            experts.count,
            0 if self._device.type == "cpu" else self._ram_percent,
            kind=kind,
            dtype=dtype,
            fit_16_bits=table.experts_fit_16_bits(layer),
        )

    def _check_ram(self, needed_bytes: int) -> None:
        """Raises DeviceOutOfMemory if experts of that size do not fit host memory."""
        free = free_bytes(CPU)
        if needed_bytes > free:
            fact = f"{format_bytes(needed_bytes)} are needed, {format_bytes(free)} are free in RAM"
            raise DeviceOutOfMemory(
                "the experts do not fit RAM", fact=fact, next_step=f"keep fewer there: lower {SETTING}"
            )

    def _compiled_ops(self, config: ModelConfig) -> CompiledOps | None:
        """Return kernels for the operations between products, if this CPU and the model's shape allow them."""
        wanted = (self._packed or self._kv) and self._device.type == "cpu" and self._dtype == torch.float32
        if not wanted or not kernels_fit(config):
            return None
        kernels = self._kernels or cpu_kernels()
        try:
            if isinstance(kernels, KernelsUnavailable):
                return None
            return CompiledOps(kernels, config, self._workspace, packed_kv=bool(self._kv))
        except KernelsUnavailable:  # they compute wrong values on this CPU
            return None

    def _loaded_config(self) -> ModelConfig:
        if self._config is None:
            raise ShardMismatch("nothing is loaded", next_step="load slices first")
        return self._config

    def _slice(self, index: int) -> tuple[Decoder, KVStorage | PackedKVStorage]:
        if index not in self._decoders or index not in self._pools:
            raise ShardMismatch(f"slice {index} is not loaded here", fact=f"loaded: {sorted(self._decoders)}")
        return self._decoders[index], self._pools[index]

    def _new_pool(self, decoder: Decoder, num_blocks: tuple[int, ...], block_size: int) -> KVStorage | PackedKVStorage:
        if self._kv:
            return PackedKVStorage(
                decoder.heads,
                classes=decoder.classes,
                num_blocks=num_blocks,
                block_size=block_size,
                device=self._device,
            )
        return KVStorage(
            decoder.heads,
            classes=decoder.classes,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self._dtype,
            device=self._device,
            spare_blocks=0 if self._pages is None else 1,  # for graphs
        )

    def _new_graphs(self, index: int, paging: Paging, kernels: PageKernels) -> DecodeGraphs:
        pool = self._pools[index]
        assert self._config is not None
        assert isinstance(pool, KVStorage)
        decoder = Decoder(self._config, self._weights[index], Workspace(self._dtype, self._device))
        decoder.classes = self._decoders[index].classes
        return DecodeGraphs(
            decoder,
            pool,
            paging,
            kernels,
            states=self._states.get(index),
            finish=decoder.logits if decoder.part.head else self._encode,
            travels=torch.bfloat16 if self._activation_type is ActivationType.BF16 else torch.float32,
        )

    def _check_inputs(self, part: Slice, num_tokens: int, inputs: npt.NDArray[Any]) -> None:
        config = self._loaded_config()
        shape = (num_tokens,) if part.embedding else (num_tokens, config.hidden_size)
        dtype = np.dtype(np.int32 if part.embedding else self._activation_type.numpy)
        if inputs.shape != shape or inputs.dtype != dtype:
            raise ShardMismatch(
                "the step's inputs do not match its rows",
                fact=f"{list(inputs.shape)} {inputs.dtype} arrived, {list(shape)} {dtype} are needed",
            )
        if part.embedding and num_tokens and not 0 <= int(inputs.min()) <= int(inputs.max()) < config.vocab_size:
            raise ShardMismatch(
                "a token id is outside the vocabulary",
                fact=f"ids {inputs.min()}-{inputs.max()}, vocabulary {config.vocab_size}",
            )

    def _fill_hidden(self, decoder: Decoder, inputs: npt.NDArray[Any], hidden: Tensor) -> None:
        """Write the input to hidden [T, H] in the compute dtype, which the layers overwrite."""
        if decoder.part.embedding:
            decoder.embed(self._transfer.upload(inputs.astype(np.int64)), hidden)
        elif self._activation_type is ActivationType.BF16:
            # A copy, since the caller's array may be read-only.
            bits = self._transfer.upload(np.array(inputs.view(np.int16)))
            hidden.copy_(bits.view(torch.bfloat16))
        else:
            hidden.copy_(self._transfer.upload(np.array(inputs)))

    def _encode(self, hidden: Tensor) -> Tensor:
        """Copy the activations to a new tensor in the link's type."""
        if self._activation_type is ActivationType.BF16:
            return hidden.to(torch.bfloat16, copy=True).view(torch.int16)
        return hidden.to(torch.float32, copy=True)

    def _leave(self, decoder: Decoder, hidden: Tensor, layout: StepLayout, edits: LogitEdits | None) -> StepTicket:
        """hidden [R + S, H]: rows that are sampled from, then rows that are scored."""
        num_sampled = hidden.shape[0] - (len(layout.scores.rows) if layout.scores is not None else 0)
        scored = None
        if layout.scores is not None:
            scored = score(hidden[num_sampled:], layout.scores, decoder.logits, self._transfer)
        return self._sampled(decoder.logits(hidden[:num_sampled]), edits, scored)

    def _sampled(self, logits: Tensor, edits: LogitEdits | None, scored: Scored | None = None) -> StepTicket:
        """Start the transfer of logits [R, V], or of their candidates, to the host."""
        if edits is not None and logits.shape[0]:
            return StepTicket(download=pick(logits, edits, self._transfer), is_logits=True, scored=scored)
        return StepTicket(download=self._transfer.download(logits), is_logits=True, scored=scored)

    def _step_tensors(self, decoder: Decoder, prepared: PreparedStep, pool: KVStorage | PackedKVStorage) -> StepTensors:
        states = self._states.get(decoder.part.index)
        return StepTensors(
            classes=[
                ClassTensors(self._transfer.upload(held.layout.slots), self._attention(decoder, held, pool))
                for held in (prepared, *prepared.windows)
            ],
            rotations=[self._transfer.upload(each).unsqueeze(1) for each in prepared.rotations],
            logit_rows=self._transfer.upload(prepared.layout.logit_rows),
            states=None if states is None else StepStates.of(prepared.layout, states.zeros, self._transfer),
        )

    def _attention(self, decoder: Decoder, prepared: PreparedStep, pool: KVStorage | PackedKVStorage) -> StepAttention:
        if isinstance(pool, PackedKVStorage):
            return PackedSequenceAttention(prepared, pool, self._masks, self._dtype, self._ops)
        kernels = self._page_kernels.get(decoder.part.index)
        if kernels is not None:
            return step_attention(prepared, pool, kernels, masks=self._masks, transfer=self._transfer)
        return SequenceAttention(prepared, pool, self._masks, self._ops)

    @contextmanager
    def _memory_errors(self, what: str, needed_bytes: int) -> Iterator[None]:
        """Check the free memory first, because a system that overcommits would later kill the process."""
        free = free_bytes(self._device)
        fact = f"{format_bytes(needed_bytes)} are needed, {format_bytes(free)} are free on {self._device}"
        if needed_bytes > free:
            raise DeviceOutOfMemory(f"{what} do not fit", fact=fact)
        try:
            yield
        except (RuntimeError, MemoryError) as exc:
            if not lacks_memory(exc):
                raise
            self.close()
            raise DeviceOutOfMemory(f"{what} do not fit", fact=fact) from exc


def _picks_candidates(options: BackendOptions, device: torch.device) -> bool:
    """Return whether to pick candidates: on CUDA, or by the setting ``sampling``. Raises ConfigInvalid."""
    wanted = options.settings.get("sampling", "auto")
    if wanted not in ("auto", "device", "host"):
        raise ConfigInvalid(f"sampling '{wanted}' is not known", next_step="choose auto, device or host")
    return wanted == "device" or (wanted == "auto" and device.type == "cuda")


def _keeps_packed(options: BackendOptions) -> bool:
    """Return whether packed weights stay packed, by the setting ``weights``. Raises ConfigInvalid."""
    wanted = options.settings.get("weights", "auto")
    if wanted not in ("auto", "wide"):
        raise ConfigInvalid(f"weights '{wanted}' are not known", next_step="choose auto or wide")
    return wanted == "auto"


def _has_packed(slices: Sequence[Slice], weights: WeightSource) -> bool:
    return any(info.form is not None for part in slices for info in weights.weights(part))
