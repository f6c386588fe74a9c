"""CUDA graphs of decode steps, windows of drafts included: one launch instead of a few hundred.

Decoding takes about fifteen kernels per layer, and launching them from Python takes longer than running them unless the
layer is large. A graph is recorded for a number of rows and a width of block table, both rounded up: common sizes when
the slice's pools are allocated, others at the second step of that size. Each token of a window is a row of its own,
with its sequence's table. Surplus rows write to a spare block and a spare slot of states, which no sequence has. In
slices with experts they compute what the first row computes, and so choose its experts: others would have to be read.
One memory pool serves all graphs, and a step's inputs arrive as one copy in buffers with fixed addresses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.backend.step_layout import RowLayout, StepLayout
from edgepipe.spec.kv_forms import REST_TOKENS
from edgepipe_torch.cuda.paged import PagedAttention, PagedSequences, PageKernels, SingleRows, table_of
from edgepipe_torch.cuda.paging import Graph, GraphRecorder, Paging
from edgepipe_torch.layers.attention import SHORT_ROWS
from edgepipe_torch.layers.decoder import Decoder
from edgepipe_torch.layers.mixers import ClassTensors, StepTensors
from edgepipe_torch.layers.packed_attention import StepRests
from edgepipe_torch.layers.packed_kv import PackedKVStorage, Storage
from edgepipe_torch.layers.prepared import PreparedStep, Replayed
from edgepipe_torch.layers.states import StatePool, StepStates, single_slots
from edgepipe_torch.layers.transfer import GraphTransfer

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Rows of graphs. With more rows, computing takes longer than launching."""
_WIDTHS = (4, 16, 64, 256, 1024)  # pages per sequence
_RUNS_TO_RECORD = 2

Finish = Callable[[Tensor], Tensor]
"""Converts the slice's last hidden state [B, H] to its output: logits [B, V], or activations in the link's type."""


def can_replay(layout: StepLayout, *, head: bool) -> bool:
    """Return whether graphs can hold a step: a few tokens of each sequence, and with the head each sampled from.

    With recurrent layers each sequence has one token: further tokens depend on the state behind those before them.
    """
    if layout.scores is not None or not 0 < layout.num_tokens <= ROWS[-1]:
        return False
    if any(row.num_tokens > (SHORT_ROWS if row.state is None else 1) for row in layout.rows):
        return False
    if max(len(table_of(row)) for row in layout.rows) > _WIDTHS[-1]:
        return False
    return not head or np.array_equal(layout.logit_rows, np.arange(layout.num_tokens))


def _singles(rows: Sequence[RowLayout]) -> Iterator[tuple[int, RowLayout]]:
    """Yield every token as a query of its own: the tokens that it sees, and its sequence's row."""
    return ((row.length - row.num_tokens + 1 + at, row) for row in rows for at in range(row.num_tokens))


class DecodeGraphs:
    """Graphs of one slice."""

    def __init__(
        self,
        decoder: Decoder,
        pool: Storage,
        paging: Paging,
        kernels: PageKernels,
        *,
        states: StatePool | None,
        finish: Finish,
        dtype: torch.dtype,
        travels: torch.dtype,
    ) -> None:
        """``decoder`` needs its own workspace, ``kernels`` one for each layer; ``travels``: type of arrivals.

        states  of a slice with recurrent layers, with a spare slot
        dtype   compute dtype
        """
        self._decoder = decoder
        self._pool = pool
        self._transfer = paging.transfer
        self._kernels = kernels
        self._states = states
        self._recorder = paging.new_recorder()
        self._finish = finish
        self._dtype = dtype
        self._travels = travels
        self._known: dict[tuple[int, int], _StepGraph] = {}  # keys: rows and pages

    def run(self, prepared: PreparedStep, inputs: npt.NDArray[Any]) -> Replayed:
        """Return the slice's output for the step's rows.

        inputs  [T] int32 token ids, or [T, H] activations in the link's type
        """
        layout = prepared.layout
        rows = next(size for size in ROWS if size >= layout.num_tokens)
        pages = next(size for size in _WIDTHS if size >= max(len(table_of(row)) for row in layout.rows))
        graph = self._graph(rows, pages)
        graph.fields.fill(prepared, inputs, self._transfer)
        graph.run(self._compute, self._recorder)
        count, finals = layout.num_tokens, graph.fields.finals
        return Replayed(graph.result[:count], None if finals is None else finals[:count])

    def record_common(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Record graphs for numbers of rows and pages, so that no step waits for that, nor for kernels that load.

        Steps of surplus rows alone run for it. Lack of memory ends it; steps of these sizes try again.
        """
        with torch.inference_mode():
            for rows, pages in sizes:
                try:
                    graph = self._graph(rows, pages)
                    self._transfer.begin()
                    graph.fields.fill_with_surplus(self._transfer)
                    for _ in range(_RUNS_TO_RECORD):
                        graph.run(self._compute, self._recorder)
                    self._transfer.download(graph.result).wait()  # before the pinned inputs are filled again
                except torch.OutOfMemoryError as exc:
                    self._known.pop((rows, pages), None)
                    logger.warning("CUDA graphs are not recorded ahead from %d rows on: %s", rows, exc)
                    return

    def _graph(self, rows: int, pages: int) -> _StepGraph:
        found = self._known.get((rows, pages))
        if found is None:
            types = self._dtype, self._travels
            fields = _Fields(self._decoder, self._pool, self._kernels, self._states, rows, pages, *types)
            found = self._known[rows, pages] = _StepGraph(fields)
        return found

    def _compute(self, fields: _Fields) -> Tensor:
        if fields.ids is not None:
            self._decoder.embed(fields.ids, fields.hidden)
        else:
            fields.hidden.copy_(fields.arrived)
        hidden = self._decoder.run(fields.hidden, fields.step, self._pool, self._states)
        if fields.finals is None:
            return self._finish(hidden)
        fields.finals.copy_(self._decoder.finals(hidden))
        return self._decoder.logits_of(fields.finals)


class _StepGraph:
    """Graph for one size of step.

    It holds nothing that refers to ``DecodeGraphs``: a cycle would keep pool and weights until Python collects it.
    """

    def __init__(self, fields: _Fields) -> None:
        self.fields = fields
        self.result = fields.hidden
        self._runs = 0
        self._recorded: Graph | None = None

    def run(self, compute: Callable[[_Fields], Tensor], recorder: GraphRecorder) -> None:
        """Compute ``result``."""
        self._runs += 1
        if self._runs == _RUNS_TO_RECORD:  # the first run has loaded every kernel
            self._record(compute, recorder)
        if self._recorded is not None:
            self._recorded.replay()
        else:
            self.result = compute(self.fields)

    def _record(self, compute: Callable[[_Fields], Tensor], recorder: GraphRecorder) -> None:
        try:
            self.result, self._recorded = recorder.record(lambda: compute(self.fields))
        except RuntimeError as exc:  # such as lack of memory: run steps of this size without a graph
            logger.warning("steps of %d rows run without a CUDA graph: %s", self.fields.rows, exc)


class _Fields:
    """A step's inputs on the device, at fixed addresses: B rows, P pages each."""

    def __init__(
        self,
        decoder: Decoder,
        pool: Storage,
        kernels: PageKernels,
        states: StatePool | None,
        rows: int,
        pages: int,
        dtype: torch.dtype,
        travels: torch.dtype,
    ) -> None:
        config, device = decoder.config, pool.device
        self.rows = rows
        self.hidden = torch.zeros(rows, config.hidden_size, dtype=dtype, device=device)
        self.arrived = torch.zeros(rows, config.hidden_size, dtype=travels, device=device)
        self.finals = torch.zeros_like(self.hidden) if decoder.predicts_more else None
        # Whether surplus rows repeat the first row. A state that it writes must not be read beside it.
        self._repeats = decoder.has_experts and states is None
        self._spares = [(each, each * pool.block_size) for each in pool.num_blocks]  # block and slot of each class
        self._spare_rest = min(REST_TOKENS, pool.block_size - 1)
        num_classes, num_kinds = len(pool.num_blocks), len(decoder.rotated_pairs)
        held: list[tuple[type[Any], tuple[int, ...]]] = [  # lengths, starts of keys, tables
            (np.int32, (rows,)),
            (np.int32, (rows + 1,)),
            (np.int32, (rows, pages)),
        ]
        has_rests = isinstance(pool, PackedKVStorage) and pool.has_rests
        shapes: list[tuple[type[Any], tuple[int, ...]]] = [
            (np.int64, (rows,)),
            (np.int64, (2, rows)),  # slots of states: read and written
            *[(np.int64, (rows,))] * num_classes,
            *[(np.int64, (rows,))] * (num_classes if has_rests else 0),  # slots of lower bits
            *[(np.complex64, (rows, 1, pairs)) for pairs in decoder.rotated_pairs],
            *held * num_classes,
        ]
        sizes = [np.dtype(kind).itemsize * math.prod(shape) for kind, shape in shapes]
        self._host = np.zeros(sum(sizes), np.uint8)
        self._device = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        starts = np.cumsum([0, *sizes[:-1]])
        host = [self._host[at : at + size] for at, size in zip(starts, sizes, strict=True)]
        self._ids, self._state_slots, *parts = (
            part.view(kind).reshape(shape) for part, (kind, shape) in zip(host, shapes, strict=True)
        )
        end = 2 * num_classes if has_rests else num_classes
        ends = end, end + num_kinds
        self._slots, self._rests = parts[:num_classes], parts[num_classes:end]
        self._rotations, self._held = parts[end : ends[1]], parts[ends[1] :]
        ids, state_slots, *tensors = (
            self._device[int(at) : int(at) + size].view(_torch_type(kind)).view(shape)
            for at, size, (kind, shape) in zip(starts, sizes, shapes, strict=True)
        )
        self.ids = ids if decoder.part.embedding else None
        every = torch.arange(rows + 1, device=device)
        row_starts = every.int()
        found: list[ClassTensors] = []
        for number in range(num_classes):
            lengths, key_starts, tables = tensors[ends[1] + 3 * number : ends[1] + 3 * number + 3]
            sequences = PagedSequences(row_starts=row_starts, key_starts=key_starts, lengths=lengths, tables=tables)
            singles = SingleRows(rows=row_starts[:rows], lengths=lengths, tables=tables)
            max_k = pages * pool.block_size
            attention = PagedAttention(kernels, pool, sequences, singles, max_q=1, max_k=max_k)
            rests = None
            if isinstance(pool, PackedKVStorage) and pool.has_rests:
                rests = StepRests(pool, None, tensors[num_classes + number])
            found.append(ClassTensors(tensors[number], attention, rests))
        self._states = states
        self.step = StepTensors(
            classes=found,
            rotations=tensors[ends[0] : ends[1]],
            logit_rows=every[:rows],
            states=None if states is None else _every_row(state_slots, states),
        )

    def fill(self, prepared: PreparedStep, inputs: npt.NDArray[Any], transfer: GraphTransfer) -> None:
        """Send a step's inputs. Rows beyond its own write the spare block and slot.

        They read the spare block, too, or all that the first row reads, if they repeat it.
        """
        layout = prepared.layout
        count = layout.num_tokens
        for own, turns in zip(self._rotations, prepared.rotations, strict=True):
            own[:count, 0] = turns
            own[count:] = own[0]
        self._set_surplus(count)
        for number, held in enumerate((layout, *layout.windows)):
            slots, (lengths, key_starts, tables) = self._slots[number], self._held[3 * number : 3 * number + 3]
            slots[:count] = held.slots
            for index, (length, row) in enumerate(_singles(held.rows)):
                lengths[index], blocks = length, table_of(row)
                tables[index, : len(blocks)] = blocks
            if self._rests:
                places = [row.rests.slots[-row.num_tokens :] for row in held.rows if row.rests is not None]
                self._rests[number][:count] = np.concatenate(places)
            if self._repeats:
                lengths[count:], tables[count:] = lengths[0], tables[0]
            np.cumsum(lengths, dtype=np.int32, out=key_starts[1:])
        if (states := self._states) is not None:
            for index, row in enumerate(layout.rows):
                assert row.state is not None
                self._state_slots[:, index] = single_slots(row.state, states.zeros)
        if self.ids is not None:
            self._ids[:count] = inputs
            self._ids[count:] = inputs[0]
        else:
            surplus = len(self.arrived) - count if self._repeats else 0
            transfer.upload_to(np.concatenate([inputs, *[inputs[:1]] * surplus]) if surplus else inputs, self.arrived)
        transfer.upload_to(self._host, self._device)

    def fill_with_surplus(self, transfer: GraphTransfer) -> None:
        """Send the inputs of a step without rows of its own."""
        self._set_surplus(0)
        for key_starts in self._held[1::3]:
            key_starts[:] = np.arange(self.rows + 1)
        transfer.upload_to(self._host, self._device)

    def _set_surplus(self, first: int) -> None:
        """Let rows from ``first`` on read and write the spare block and slot."""
        for number, (block, slot) in enumerate(self._spares):
            lengths, _, tables = self._held[3 * number : 3 * number + 3]
            lengths[first:], tables[first:], self._slots[number][first:] = 1, block, slot
            if self._rests:
                self._rests[number][first:] = slot + self._spare_rest
        if (states := self._states) is not None:
            self._state_slots[:, first:] = [[states.zeros], [states.spare]]


def _every_row(slots: Tensor, states: StatePool) -> StepStates:
    """Return where rows with one token each read and write states, by slots [2, B]."""
    return StepStates(rows=None, read=slots[0], write=slots[1], only=None, long=(), zeros=states.zeros)


def _torch_type(kind: type[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, kind)).dtype
