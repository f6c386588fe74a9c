"""The Backend protocol on torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.backend.drafting import DraftModel
from edgepipe.backend.kv_setting import checked_kv
from edgepipe.backend.machine_memory import machine_memory
from edgepipe.backend.step_layout import StepLayout
from edgepipe.backend.types import (
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
)
from edgepipe.errors import ConfigInvalid, DeviceOutOfMemory, ShardMismatch
from edgepipe.spec.expert_places import SETTING, chosen_share, with_ram_percent
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.kv_forms import KV_FORMS, span_tokens
from edgepipe.spec.layout import is_expert
from edgepipe.spec.memory_classes import memory_classes, stage_classes
from edgepipe.spec.tensors import WeightInfo, WeightSource
from edgepipe.units import format_bytes
from edgepipe.weights.repacked import KeepsRepacked
from edgepipe.weights.resident import expert_bytes, weight_bytes
from edgepipe.weights.weight_table import WeightTable, table_of
from edgepipe_torch.devices import host_device, make_device
from edgepipe_torch.layers.candidates import Picked, Scored, pick, score
from edgepipe_torch.layers.decoder import Decoder, SliceWeights
from edgepipe_torch.layers.device import AllocatedSlice, Device, SliceSteps
from edgepipe_torch.layers.drafting import Drafting, knows_any
from edgepipe_torch.layers.expert_reads import ExpertReads, ReadShare, covers
from edgepipe_torch.layers.expert_uses import ExpertUses
from edgepipe_torch.layers.head_shape import by_kind
from edgepipe_torch.layers.host_copies import HostCopies, Mark
from edgepipe_torch.layers.kv import KVStorage
from edgepipe_torch.layers.loading import load_slices
from edgepipe_torch.layers.measuring import check_device, dtype_name, lacks_memory, set_threads
from edgepipe_torch.layers.mixers import ClassTensors, StepTensors
from edgepipe_torch.layers.packed_attention import SpanAttention
from edgepipe_torch.layers.packed_kv import PackedKVStorage, Storage
from edgepipe_torch.layers.prepared import PreparedStep, prepare_step
from edgepipe_torch.layers.rope import Rotations
from edgepipe_torch.layers.slice_ends import SliceEnds
from edgepipe_torch.layers.states import StatePool, StepStates, added_slots
from edgepipe_torch.layers.transfer import Download


@dataclass(frozen=True, slots=True)
class StepTicket:
    """A submitted step."""

    download: Download | Picked  # activations [T, H] in the link's type (bf16 as int16), logits [R, V] or candidates
    is_logits: bool
    scored: Scored | None = None
    experts: ReadShare | None = None
    kept: Tensor | None = None  # see ``StepOutput``
    moved: Mark | None = None  # the end of its moves, if they may run longer than it computes


class TorchBackend:
    """Runs slices of a Llama-like decoder on a CPU (float32) or a CUDA device (bf16)."""

    def __init__(self, options: BackendOptions, *, device: Device | None = None) -> None:
        """``device`` replaces the one that options name.

        Raises BackendUnavailable if the device is missing, ConfigInvalid for an unknown device, dtype or setting.
        """
        self._device = device or make_device(options)
        self._host = host_device()
        self._activation_type = options.activation_type
        set_threads(options.threads)
        self._ram_percent = chosen_share(options.settings)  # share of each layer's experts that stays in host memory
        self._kv = checked_kv(options.kv)
        self.block_sizes = self._device.block_sizes
        self.max_submitted = self._device.transfer.max_submitted
        self.picks_candidates = _picks_candidates(options, self._device)
        self.draft_model: DraftModel | None = None
        self._host_copies: HostCopies | None = None
        # Submitted steps that may still compute when the next one is submitted; only with host memory.
        self._running: deque[StepLayout] = deque(maxlen=self.max_submitted - 1)
        self._forget()

    def profile(self) -> DeviceProfile:
        """Return memory as reported by the system or CUDA, and measured bandwidth and matrix rate."""
        found = self._device.profile()
        return replace(found, packing=self._packing, kv_forms=KV_FORMS, keeps_states=True)

    def kernel_errors(self) -> Iterator[KernelError]:
        """Compare the device's own kernels with float64. See ``CheckingBackend``."""
        return self._device.kernel_errors()

    def load(self, slices: Sequence[Slice], weights: WeightSource, progress: Callable[[LoadProgress], None]) -> None:
        """Read the slices' tensors, replacing the loaded ones.

        Raises ModelInvalid, ArchitectureUnsupported, DeviceOutOfMemory.
        """
        self.close()
        device, kept = self._device, weights.repacked if isinstance(weights, KeepsRepacked) else None
        device.start_load(kept)
        infos = [info for part in slices for info in weights.weights(part)]
        self._uses = ExpertUses(kept)
        table = table_of(infos)
        placed = [self._placed_bytes(info, weights.config, table) for info in infos]
        needed = sum(own for own, _ in placed)
        self._check_ram(sum(beside for _, beside in placed))
        rotations = Rotations(weights.config)
        with self._memory_errors("the layers", needed):
            loaded = load_slices(
                slices,
                weights,
                progress,
                device=device,
                host=self._host,
                rotations=rotations.kinds,
                ram_percent=self._ram_percent,
                uses=self._uses,
            )
            mixers = [mixer for part in loaded for mixer in part.mixers]
            has_packed = any(info.form is not None for info in infos)
            ops = device.compile_steps(weights.config, mixers, has_packed=has_packed)
        self._config = weights.config
        self._rotations = rotations
        self._weights = {part.part.index: part for part in loaded}
        self._decoders = {part.part.index: Decoder(weights.config, part, device.workspace, ops) for part in loaded}
        device.finish_load()

    def wait_until_kept(self, timeout_s: float) -> None:
        """Wait until the repacked weights of the loaded slices are on disk. Raises TimeoutError."""
        self._device.wait_until_kept(timeout_s)

    def slow_paths(self, block_size: int) -> Sequence[SlowPath]:
        """Return what makes steps of the loaded layers slow. See ``ExplainingBackend``."""
        return tuple(self._device.slow_paths(list(self._weights.values()), block_size))

    def packed_products(self) -> Sequence[PackedProducts]:
        """Return what multiplies with the loaded packed weights, each once, the fallbacks last."""
        found = {each for part in self._weights.values() for linear in part.packed for each in linear.products}
        return sorted(found, key=lambda each: (each.reason, each.by))

    def kv_block_bytes(self, config: ModelConfig, slices: Sequence[Slice], block_size: int) -> int:
        """Return the bytes of one block in all layers of the slices."""
        layers = [layer for part in slices for layer in part.layers]
        return block_size * config.kv_bytes_per_token(layers, form=self._kv or dtype_name(self._device.dtype))

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
        config = self._loaded_config()
        self._forget_host_copies()
        self._pools, self._steps, self._states = {}, {}, {}
        spare = self._device.pads_steps(block_size)
        parts = [decoder.part for decoder in self._decoders.values()]
        classes = stage_classes(config, parts, num_blocks=num_blocks, window_blocks=window_blocks)
        num_bytes = sum(self.kv_block_bytes(config, own, block_size) * count for count, own in classes)
        state_bytes = config.state_bytes(layer for part in parts for layer in part.layers)
        num_bytes += state_bytes * (state_slots + added_slots(spare=spare))
        class_of = memory_classes(config).of_layer if window_blocks else (0,) * config.num_layers
        for decoder in self._decoders.values():
            kinds = by_kind(decoder.heads)
            first = decoder.part.layers.start
            decoder.classes = [class_of[first + decoder.attending[alike[0].layer]] for alike in kinds]
        with self._memory_errors("the KV pool", num_bytes):
            self._pools = {
                index: self._new_pool(decoder, (num_blocks, *window_blocks), block_size, spare=spare)
                for index, decoder in self._decoders.items()
            }
            self._states = {
                index: StatePool([mixer.spec for mixer in own.mixers], state_slots, self._device.place, spare=spare)
                for index, own in self._weights.items()
                if own.mixers
            }
            stored = [each for pool in self._pools.values() for each in pool.stored]
            stored += [each for states in self._states.values() for each in states.stored(1 + len(window_blocks))]
            self._host_copies = HostCopies(stored, host_places, self._device.mover) if host_places else None
        self._state_slots = state_slots
        self._num_blocks, self._block_size, self._window_blocks = num_blocks, block_size, tuple(window_blocks)
        with self._memory_errors("the checks of kernels", 0):
            self._steps = {index: self._new_steps(index) for index in self._decoders}
        self._reads = {
            index: ExpertReads(own.mixtures, sizes=self._steps[index].counted_rows)
            for index, own in self._weights.items()
            if own.mixtures
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
            span=span_tokens(self._kv, self._block_size),
        )

    def submit(
        self, prepared: PreparedStep, inputs: TokenIds | Activations, edits: LogitEdits | None = None
    ) -> StepTicket:
        """Apply the copies and compute: at once on a CPU, by queueing kernels on CUDA.

        Raises ShardMismatch if the inputs do not match the step or the slice is not loaded.
        """
        layout = prepared.layout
        decoder, _ = self._slice(layout.slice_index)
        self._check_inputs(decoder.part, layout.num_tokens, inputs)
        with torch.inference_mode():
            self._device.begin_step()
            moved = self._move(layout)
            ticket = self._submit(prepared, inputs, edits)
        self._device.end_step()
        if moved is not None:
            ticket = replace(ticket, moved=moved)
        if (reads := self._reads.get(layout.slice_index)) is None:
            return ticket
        all_rows = not self._decoders[layout.slice_index].part.head or covers(layout)
        share = reads.start(layout.num_tokens, self._device.transfer, all_rows=all_rows)
        return ticket if share is None else replace(ticket, experts=share)

    def _move(self, layout: StepLayout) -> Mark | None:
        """See ``HostCopies.move``."""
        if self._host_copies is None:
            return None
        moved = self._host_copies.move(layout.moves, self._running, step=layout)
        self._running.append(layout)
        return moved

    def _submit(self, prepared: PreparedStep, inputs: TokenIds | Activations, edits: LogitEdits | None) -> StepTicket:
        layout = prepared.layout
        decoder, pool = self._slice(layout.slice_index)
        transfer, steps, is_head = self._device.transfer, self._steps[layout.slice_index], decoder.part.head
        ends = self._ends[layout.slice_index]
        transfer.begin()
        for other in self._pools.values():
            other.copy(layout.copies)
        states = self._states.get(layout.slice_index)
        drafts = layout.next_ids is not None and decoder.predicts_more
        found = None if drafts and knows_any(layout) else steps.replay(prepared, inputs)
        if found is not None:
            if not is_head:
                return StepTicket(transfer.download(found.output), is_logits=False)
            kept = None
            if drafts and found.finals is not None:
                kept = self._drafting(layout.slice_index).kept_of(found.finals, layout)
            return replace(self._sampled(found.output, edits), kept=kept)
        hidden = self._device.workspace.get("hidden", layout.num_tokens, self._loaded_config().hidden_size)
        ends.fill(inputs, hidden)
        tensors = self._step_tensors(steps, prepared, states)
        if drafts:
            tensors.every_row = True
        hidden = decoder.run(hidden, tensors, pool, states)
        if not is_head:
            return StepTicket(transfer.download(ends.encode(hidden)), is_logits=False)
        if not drafts:
            return self._leave(decoder, decoder.finals(hidden), layout, edits)
        finals = decoder.finals(hidden).clone()
        kept = self._drafting(layout.slice_index).follow(finals, layout, tensors)
        return replace(self._leave(decoder, finals[tensors.logit_rows], layout, edits), kept=kept)

    def host_place(self, number: int, kept: int) -> Sequence[memoryview]:
        """See ``DiskBackend``."""
        if self._host_copies is None:
            raise RuntimeError("there is no host memory")
        return self._host_copies.place(number, kept)

    def host_place_bytes(self) -> Sequence[int]:
        """See ``HostMemoryBackend``."""
        return self._host_copies.place_bytes() if self._host_copies is not None else ()

    def give_back(self, number: int, places: Sequence[int]) -> None:
        """See ``HostMemoryBackend``."""
        if self._host_copies is not None:
            self._host_copies.give_back(number, places)

    def machine_memory(self) -> tuple[int, int] | None:
        """See ``HostMemoryBackend``."""
        return machine_memory()

    def disk_seconds(self, number: int, count: int, took_s: float) -> float:
        """See ``DiskBackend``."""
        return took_s

    def wait(self, ticket: StepTicket) -> None:
        """See ``WaitingBackend``. What it waits for are events of the device, which any thread may wait for."""
        if ticket.moved is not None:
            ticket.moved.synchronize()
        found = ticket.download
        (found.download if isinstance(found, Picked) else found).wait()

    def collect(self, ticket: StepTicket) -> StepOutput:
        """Wait for that step only."""
        if ticket.moved is not None:
            ticket.moved.synchronize()
        scores = ticket.scored.wait() if ticket.scored is not None else None
        if isinstance(ticket.download, Picked):
            output = StepOutput(candidates=ticket.download.wait(), scores=scores)
        elif ticket.is_logits:
            output = StepOutput(logits=ticket.download.wait(), scores=scores)
        else:
            output = StepOutput(activations=ticket.download.wait().view(self._activation_type.numpy))
        if ticket.kept is not None:
            output = replace(output, kept=ticket.kept)
        return output if ticket.experts is None else replace(output, expert_share=ticket.experts.wait())

    def draft(self, step: DraftStep) -> Sequence[TokenIds]:
        """Guess tokens by the layer that predicts one token more. See ``DraftingBackend``."""
        with torch.inference_mode():
            return self._drafting(step.slice_index).guesses(step)

    def check(self) -> None:
        """Multiply two small matrices and check the result. Raises StageError."""
        check_device(self._device.place, self._device.dtype)

    def close(self) -> None:
        """Release all memory, and keep what was learnt of experts. May be called twice."""
        self._uses.save()
        self._forget_host_copies()
        self._forget()
        for device in (self._device, self._host):
            device.release()

    def _forget(self) -> None:
        self._config: ModelConfig | None = None
        self._rotations: Rotations | None = None
        # Dictionaries have one entry per slice index.
        self._decoders: dict[int, Decoder] = {}
        self._weights: dict[int, SliceWeights] = {}
        self._pools: dict[int, Storage] = {}
        self._ends: dict[int, SliceEnds] = {}
        self._steps: dict[int, SliceSteps] = {}
        self._uses = ExpertUses(None)
        self._reads: dict[int, ExpertReads] = {}  # only slices with experts
        self._num_blocks = 0
        self._block_size = 0
        self._window_blocks: tuple[int, ...] = ()
        self._state_slots = 0
        self._states: dict[int, StatePool] = {}  # only slices with recurrent layers

    def _forget_host_copies(self) -> None:
        if self._host_copies is not None:
            self._host_copies.close()
        self._host_copies = None
        self._running.clear()

    @property
    def _packing(self) -> str:
        device = self._device
        return with_ram_percent(device.packing, self._ram_percent) if device.own_memory else device.packing

    def _placed_bytes(self, info: WeightInfo, config: ModelConfig, table: WeightTable) -> tuple[int, int]:
        """Return the bytes of a weight on the device, and beside its memory."""
        kind, dtype = self._packing, dtype_name(self._device.dtype)
        layer = int(info.name.split(".")[2]) if is_expert(info.name) else None
        experts = None if layer is None else config.layers[layer].experts
        if layer is None or experts is None:
            return weight_bytes(info.name, info.form, info.shape, kind=kind, dtype=dtype), 0
        return expert_bytes(
            info.name,
            info.form,
            info.shape,
            experts.count,
            self._ram_percent if self._device.own_memory else 0,
            kind=kind,
            dtype=dtype,
            fit_16_bits=table.experts_fit_16_bits(layer),
        )

    def _check_ram(self, needed_bytes: int) -> None:
        """Raises DeviceOutOfMemory if experts of that size do not fit host memory."""
        free = self._host.free_bytes()
        if needed_bytes > free:
            fact = f"{format_bytes(needed_bytes)} are needed, {format_bytes(free)} are free in RAM"
            raise DeviceOutOfMemory(
                "the experts do not fit RAM", fact=fact, next_step=f"keep fewer there: lower {SETTING}"
            )

    def _loaded_config(self) -> ModelConfig:
        if self._config is None:
            raise ShardMismatch("nothing is loaded", next_step="load slices first")
        return self._config

    def _slice(self, index: int) -> tuple[Decoder, Storage]:
        if index not in self._decoders or index not in self._pools:
            raise ShardMismatch(f"slice {index} is not loaded here", fact=f"loaded: {sorted(self._decoders)}")
        return self._decoders[index], self._pools[index]

    def _new_pool(self, decoder: Decoder, num_blocks: tuple[int, ...], block_size: int, *, spare: bool) -> Storage:
        if self._kv:
            return PackedKVStorage(
                decoder.heads,
                classes=decoder.classes,
                num_blocks=num_blocks,
                block_size=block_size,
                device=self._device.place,
                form=self._kv,
                spare_blocks=int(spare),
            )
        return KVStorage(
            decoder.heads,
            classes=decoder.classes,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self._device.dtype,
            device=self._device.place,
            spare_blocks=int(spare),
        )

    def _new_steps(self, index: int) -> SliceSteps:
        decoder = self._decoders[index]
        ends = self._ends[index] = SliceEnds(decoder, self._device.transfer, self._activation_type)
        return self._device.slice_steps(
            AllocatedSlice(
                weights=self._weights[index],
                decoder=decoder,
                ends=ends,
                pool=self._pools[index],
                states=self._states.get(index),
                block_size=self._block_size,
            )
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

    def _drafting(self, index: int) -> Drafting:
        decoder, pool = self._slice(index)
        if not decoder.predicts_more:
            raise ShardMismatch(f"slice {index} has no layer that predicts one token more")
        return Drafting(decoder, pool, partial(self._drafting_tensors, self._steps[index]), self._device.transfer)

    def _drafting_tensors(self, steps: SliceSteps, step: Step) -> StepTensors:
        """Lay out a pass of the layer that predicts one token more, which has no state."""
        assert self._rotations is not None
        prepared = prepare_step(
            step,
            rotations=self._rotations,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            span=span_tokens(self._kv, self._block_size),
        )
        return self._step_tensors(steps, prepared, None)

    def _leave(self, decoder: Decoder, finals: Tensor, layout: StepLayout, edits: LogitEdits | None) -> StepTicket:
        """finals [R + S, H]: rows that are sampled from, then rows that are scored, behind the final norm."""
        num_sampled = finals.shape[0] - (len(layout.scores.rows) if layout.scores is not None else 0)
        scored = None
        if layout.scores is not None:
            finals = finals.clone()  # scoring takes a while, and other norms overwrite them
            scored = score(finals[num_sampled:], layout.scores, decoder.logits_of, self._device.transfer)
        return self._sampled(decoder.logits_of(finals[:num_sampled]), edits, scored)

    def _sampled(self, logits: Tensor, edits: LogitEdits | None, scored: Scored | None = None) -> StepTicket:
        """Start the transfer of logits [R, V], or of their candidates, to the host."""
        if edits is not None and logits.shape[0]:
            return StepTicket(pick(logits, edits, self._device.transfer), is_logits=True, scored=scored)
        return StepTicket(self._device.transfer.download(logits), is_logits=True, scored=scored)

    def _step_tensors(self, steps: SliceSteps, prepared: PreparedStep, states: StatePool | None) -> StepTensors:
        layout, upload = prepared.layout, self._device.transfer.upload

        def in_class(held: PreparedStep) -> ClassTensors:
            attention = steps.attention(held)
            rests = attention.rests if isinstance(attention, SpanAttention) else None
            return ClassTensors(upload(held.layout.slots), attention, rests)

        return StepTensors(
            classes=[in_class(held) for held in (prepared, *prepared.windows)],
            rotations=[upload(each).unsqueeze(1) for each in prepared.rotations],
            logit_rows=upload(layout.logit_rows),
            states=None if states is None else StepStates.of(layout, states.zeros, self._device.transfer),
        )

    @contextmanager
    def _memory_errors(self, what: str, needed_bytes: int) -> Iterator[None]:
        """Check the free memory first, because a system that overcommits would later kill the process."""
        free = self._device.free_bytes()
        fact = f"{format_bytes(needed_bytes)} are needed, {format_bytes(free)} are free on {self._device.place}"
        if needed_bytes > free:
            raise DeviceOutOfMemory(f"{what} do not fit", fact=fact)
        try:
            yield
        except (RuntimeError, MemoryError) as exc:
            if not lacks_memory(exc):
                raise
            self.close()
            raise DeviceOutOfMemory(f"{what} do not fit", fact=fact) from exc


def _picks_candidates(options: BackendOptions, device: Device) -> bool:
    """Return whether to pick candidates: on CUDA, or by the setting ``sampling``. Raises ConfigInvalid."""
    wanted = options.settings.get("sampling", "auto")
    if wanted not in ("auto", "device", "host"):
        raise ConfigInvalid(f"sampling '{wanted}' is not known", next_step="choose auto, device or host")
    return wanted == "device" or (wanted == "auto" and device.picks_candidates)
