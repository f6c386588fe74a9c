"""Replay a CPU's decode steps: one call instead of ten for each layer.

A step with packed weights consists of compiled functions, and of torch's operations for what those lack: experts,
latent attention, partial rotary, factors. Their arguments depend on the number of rows, so a step is recorded once for
each number; later steps fill the same buffers and repeat it. Called one by one from Python, the functions take about a
third as long again as they compute.

T packed rows, one or a few of each sequence; H hidden, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from edgepipe.backend.step_layout import StepLayout
from edgepipe_torch.cpu.calls import KernelCalls, Recording
from edgepipe_torch.cpu.packed import PackedCpuLinear
from edgepipe_torch.cpu.step_ops import CompiledOps, SingleQueries
from edgepipe_torch.layers.attention import SHORT_ROWS, single_queries
from edgepipe_torch.layers.decoder import Decoder, SliceWeights
from edgepipe_torch.layers.head_shape import LayerHeads, by_kind
from edgepipe_torch.layers.kv import KVPool
from edgepipe_torch.layers.mixers import ClassTensors, StepTensors
from edgepipe_torch.layers.packed_attention import StepRests, rest_places
from edgepipe_torch.layers.packed_kv import PackedKVStorage
from edgepipe_torch.layers.prepared import PreparedStep, Replayed
from edgepipe_torch.layers.states import StatePool, StepStates

_MOST_ROWS = 64  # limit of rows; with more, Python's share of a step is small
_FIRST_KEYS = 512  # room for scores, doubled when a context outgrows it


def can_record(weights: SliceWeights, heads: Sequence[LayerHeads], ops: CompiledOps) -> bool:
    """Return whether kernels compute a slice's attention and all products outside of the parts that torch computes."""
    if not all(ops.attends(each) for each in heads):
        return False
    products: list[object] = [weights.head] if weights.head is not None else []
    for layer in weights.layers:
        products += [each for part in (layer.mixer, layer.feed_forward) if part is not None for each in part.products]
    return all(isinstance(product, PackedCpuLinear) and product.only_kernels for product in products)


def can_replay_decode(layout: StepLayout, *, head: bool) -> bool:
    """Return whether a step has a few tokens of each sequence and, with the head, needs logits of all.

    With recurrent layers each sequence has one token: further tokens depend on the state behind those before them.
    """
    if layout.scores is not None or not 0 < layout.num_tokens <= _MOST_ROWS:
        return False
    if any(row.num_tokens > (SHORT_ROWS if row.state is None else 1) for row in layout.rows):
        return False
    return not head or layout.logit_rows.tolist() == list(range(layout.num_tokens))


class DecodeReplays:
    """Recorded decode steps of one slice."""

    def __init__(self, decoder: Decoder, ops: CompiledOps, pool: KVPool, states: StatePool | None = None) -> None:
        """``states``: of a slice with recurrent layers."""
        self._decoder = decoder
        self._ops = ops
        self._pool = pool
        self._states = states
        self._known: dict[int, _Step] = {}  # one per number of rows
        self._threads = 0  # threads that the known steps' calls use

    def run(self, prepared: PreparedStep, fill_hidden: Callable[[Tensor], None]) -> Replayed:
        """Compute a step. Its output is logits [T, V] before ``Decoder.shaped``, or hidden [T, H].

        ``fill_hidden`` writes the slice's input to a tensor [T, H].
        """
        if self._threads != (threads := torch.get_num_threads()):
            self._known.clear()
            self._threads = threads
        count = prepared.layout.num_tokens
        longest = max(row.length for row in prepared.layout.rows)
        step = self._known.get(count)
        if step is None or step.longest < longest:
            room = _FIRST_KEYS
            while room < longest:
                room *= 2
            step = self._known[count] = _Step(self._decoder, self._ops, self._pool, self._states, count, room)
        fill_hidden(step.hidden)
        return step.run(prepared)


class _Step:
    """Buffers and calls for one number of rows."""

    def __init__(
        self,
        decoder: Decoder,
        ops: CompiledOps,
        pool: KVPool,
        states: StatePool | None,
        rows: int,
        longest: int,
    ) -> None:
        config = decoder.config
        self.longest = longest
        self.hidden = torch.zeros(rows, config.hidden_size)
        self._decoder = decoder
        self._kernels: KernelCalls = ops.kernels
        self._pool = pool
        self._states = states
        kinds = [alike[0] for alike in by_kind(decoder.heads)]
        self._kinds = [(decoder.classes[heads.kind], heads.window) for heads in kinds]
        self._queries = [ops.single_queries(heads, rows, longest, pool) for heads in kinds]
        self._tensors = StepTensors(
            classes=[
                ClassTensors(torch.zeros(rows, dtype=torch.int64), _Queries(self._queries), _rests(pool, rows))
                for _ in range(1 + max(decoder.classes, default=-1))
            ],
            rotations=[torch.zeros(rows, 1, pairs, dtype=torch.complex64) for pairs in decoder.rotated_pairs],
            logit_rows=torch.arange(rows),
            every_row=True,
            states=None if states is None else StepStates.singles(rows, states.zeros),
        )
        self._recording: Recording | None = None
        self._result = Replayed(self.hidden, None)

    def run(self, prepared: PreparedStep) -> Replayed:
        """Compute the step whose input is in ``hidden``."""
        every = (prepared, *prepared.windows)
        for held, to in zip(every, self._tensors.classes, strict=False):
            to.slots.copy_(torch.from_numpy(held.layout.slots))
            if to.rests is not None:
                to.rests.slots.copy_(torch.from_numpy(rest_places(held.layout)[1]))
        for own, rotations in zip(self._tensors.rotations, prepared.rotations, strict=True):
            own[:, 0].copy_(torch.from_numpy(rotations))
        if self._tensors.states is not None:
            self._tensors.states.fill(prepared.layout.rows)
        rows = {kind: single_queries(every[kind[0]], kind[1]) for kind in set(self._kinds)}
        for kind, queries in zip(self._kinds, self._queries, strict=True):
            queries.fill(rows[kind])
        if self._recording is None:
            with self._kernels.record() as self._recording:
                self._result = self._compute()
        else:
            self._kernels.replay(self._recording)
        return self._result

    def _compute(self) -> Replayed:
        decoder = self._decoder
        hidden = decoder.run(self.hidden, self._tensors, self._pool, self._states)
        if not decoder.part.head:
            return Replayed(hidden, None)
        finals = decoder.finals(hidden)
        return Replayed(decoder.head_product(finals), finals if decoder.predicts_more else None)


def _rests(pool: KVPool, rows: int) -> StepRests | None:
    """Return where the lower bits of so many tokens go, of which each has its slot; None for KV without them."""
    if not isinstance(pool, PackedKVStorage) or not pool.has_rests:
        return None
    return StepRests(pool, torch.arange(rows), torch.zeros(rows, dtype=torch.int64))


class _Queries:
    """A ``StepAttention`` of rows with one query each."""

    def __init__(self, queries: Sequence[SingleQueries]) -> None:
        self._queries = queries  # one per kind of layer

    def run(self, heads: LayerHeads, queries: Tensor, out: Tensor) -> None:
        """See ``StepAttention``."""
        self._queries[heads.kind].run(heads, queries, out)
