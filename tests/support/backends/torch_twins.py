"""One model twice on a CPU: over pages and as graphs, and sequence by sequence. Every step runs on both.

Blocks and slots of states that no sequence holds are full of NaN, and so are the spare ones until surplus rows write
there.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from edgepipe_torch import TorchBackend
from edgepipe_torch.cuda.mixer_steps import StepKernels
from edgepipe_torch.cuda.paging import PagedDecode
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv import KVStorage
from edgepipe_torch.layers.kv_codes import NO_SCALE, scale_values

from edgepipe.backend.types import ActivationType, BackendOptions, RowState, StateWrite, Step, StepRow
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices
from edgepipe.spec.kv_forms import rest_tokens
from edgepipe.testing.tiny_model import TinyWeights, tiny_config
from tests.support.backends.graph_recorder import CpuGraph, CpuRecorder
from tests.support.backends.steps import make_step, result_of, run_step, step_row
from tests.support.backends.torch_paging import CudaOnHost, cpu_paging
from tests.support.numerics.decode_reference import reference_decode

TINY = tiny_config(num_layers=2, hidden_size=16, vocab_size=31)
WINDOW = tiny_config(num_layers=2, hidden_size=16, vocab_size=31, windows=(6,))
UNGROUPED = tiny_config(num_layers=2, hidden_size=16, vocab_size=31, num_kv_heads=4)


class Twins:
    """Both backends with the same slices, pools and steps."""

    def __init__(
        self,
        config: ModelConfig = TINY,
        *,
        cuts: Sequence[int] = (),
        kind: ActivationType = ActivationType.FLOAT32,
        page_tokens: int = 4,
        num_blocks: int = 96,
        decode: Callable[[LayerHeads], PagedDecode] = reference_decode,
        step_kernels: StepKernels | None = None,
        has_varlen: bool = True,
        kv: str = "",
        recorded_ahead: Sequence[tuple[int, int]] = (),
    ) -> None:
        """``cuts``: layers before which a slice ends; ``kind``: type of activations between slices.

        decode        gives the kernel of layers that torch's kernel over pages excludes
        step_kernels  of recurrent layers, where graphs are
        has_varlen    torch has a kernel over pages
        kv            form of the KV; empty: float32
        recorded_ahead  see ``Paging``
        """
        self.config = config
        self.state_slots = 24 if config.state_bytes() else 0
        self.num_blocks = num_blocks
        self.page_tokens = page_tokens
        self._cuts = cuts
        # A last bit of bf16 may differ at each cut, and a code of KV in any layer.
        of_kv = {"": 1e-4, "8bit": 0.03, "4bit": 0.15}[kv]
        self._rounding = 0.1 if kind is not ActivationType.FLOAT32 else of_kv
        self.more_tokens = rest_tokens(kv)  # slots that a sequence needs behind its last token's
        self._recorders: list[CpuRecorder] = []
        self._waiting: list[tuple[Any, np.ndarray]] = []
        options = BackendOptions(device="cpu", dtype="float32", activation_type=kind, threads=1, kv=kv)
        paging = cpu_paging(page_tokens=page_tokens, new_recorder=self._new_recorder, decode=decode)
        paging = replace(paging, recorded_ahead=recorded_ahead)
        paging = paging if has_varlen else replace(paging, attend=None)
        self.paged = TorchBackend(options, device=CudaOnHost(paging=paging, step_kernels=step_kernels, kv=kv))
        self.plain = TorchBackend(options)
        self.load()
        self.allocate()

    @property
    def graphs(self) -> list[CpuGraph]:
        """Every graph recorded so far for the pools in use, slice by slice."""
        return [graph for recorder in self._recorders for graph in recorder.graphs]

    def load(self, *, seed: int = 0) -> None:
        """Load the slices on both."""
        for backend in (self.paged, self.plain):
            backend.load(self._slices(), TinyWeights(self.config, seed=seed), lambda _progress: None)

    def allocate(self) -> None:
        """Allocate both pools, full of NaN but for the slot of zeros."""
        self._recorders.clear()
        for backend in (self.paged, self.plain):
            backend.allocate_kv(num_blocks=self.num_blocks, block_size=self.page_tokens, state_slots=self.state_slots)
            for pool in pools_of(backend):
                pool.fill_(_unknown(pool))
            for states in states_of(backend):
                states[: self.state_slots] = torch.nan
                states[self.state_slots + 1 :] = torch.nan

    def spoil(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN."""
        for backend in (self.paged, self.plain):
            for pool in pools_of(backend):
                pool.unflatten(1, (-1, self.page_tokens))[:, list(blocks)] = _unknown(pool)

    def spoil_states(self, slots: Sequence[int]) -> None:
        """Fill slots with NaN."""
        for backend in (self.paged, self.plain):
            for states in states_of(backend):
                states[list(slots)] = torch.nan

    def step(
        self,
        rows: Sequence[StepRow],
        ids: Any,
        *,
        logit_rows: Sequence[int] | None = None,
        copies: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Run a step on both. The twins compare its results when a later step needs the place, or in ``finish``."""
        ids = np.asarray(ids, np.int32)
        last = len(self._slices()) - 1
        ours, theirs = ids, ids
        for index in range(last + 1):
            step = make_step(rows, slice_index=index, logit_rows=logit_rows, copies=copies if index == 0 else ())
            theirs = run_step(self.plain, step, theirs)
            if index < last:
                ours = run_step(self.paged, step, ours)
        self._submit(
            make_step(rows, slice_index=last, logit_rows=logit_rows, copies=() if last else copies), ours, theirs
        )
        self._compare_kv()

    def finish(self) -> None:
        """Compare the results of the steps that are still submitted."""
        while self._waiting:
            self._collect()

    def _submit(self, step: Step, inputs: Any, expected: np.ndarray) -> None:
        before = [graph.num_replays for graph in self.graphs]
        self._waiting.append((self.paged.submit(self.paged.prepare(step), inputs), expected))
        for graph, count in zip(self.graphs, [*before, *[0] * len(self.graphs)], strict=False):
            if graph.num_replays > count and graph.result.dtype == torch.float32:
                assert graph.result.isfinite().all(), "a row read a block that no sequence holds"
        if len(self._waiting) == self.paged.max_submitted:
            self._collect()

    def _collect(self) -> None:
        ticket, expected = self._waiting.pop(0)
        self._assert_close(np.asarray(result_of(self.paged.collect(ticket))), expected)

    def _compare_kv(self) -> None:
        """Whatever belongs to a sequence is the same in both pools, and nothing else was written."""
        end = self.num_blocks * self.page_tokens
        for paged, plain in zip(pools_of(self.paged), pools_of(self.plain), strict=True):
            self._assert_close(_numbers(paged[:, :end]), _numbers(plain[:, :end]))
        end = self.state_slots + 1  # with the slot of zeros
        for paged, plain in zip(states_of(self.paged), states_of(self.plain), strict=True):
            self._assert_close(paged[:end].numpy(), plain[:end].numpy())

    def _assert_close(self, found: np.ndarray, expected: np.ndarray) -> None:
        known = np.abs(expected[np.isfinite(expected)])
        largest = float(known.max()) if known.size else 1.0
        np.testing.assert_allclose(found, expected, rtol=0, atol=self._rounding * largest)

    def _slices(self) -> Any:
        bounds = [0, *self._cuts, self.config.num_layers]
        ranges = [LayerRange(start, end) for start, end in itertools.pairwise(bounds)]
        return make_slices(ranges, self.config.num_layers)

    def _new_recorder(self) -> CpuRecorder:
        self._recorders.append(CpuRecorder())
        return self._recorders[-1]


class Crowd:
    """Sequences that come, grow, fork and go, in blocks drawn at random."""

    def __init__(self, twins: Twins, seed: int) -> None:
        self._twins = twins
        self._random = random.Random(seed)
        self._free = list(range(twins.num_blocks))
        self._uses: Counter[int] = Counter()  # sequences that use each block
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._free_slots = list(range(twins.state_slots))
        self._slots: dict[int, int] = {}  # slot of each sequence's state
        self._next = 1

    def arrive(self, prompts: Sequence[int]) -> None:
        """Start a sequence for each prompt length and compute all prompts in one step, as far as blocks suffice."""
        new: dict[int, int] = {}
        for tokens in prompts:
            if self._missing(0, tokens) <= len(self._free) - sum(self._missing(0, count) for count in new.values()):
                self._tables[self._next], self._lengths[self._next] = [], 0
                new[self._next] = tokens
                self._next += 1
        self._advance(new)

    def decode(self, count: int) -> None:
        """Compute one token of each of at most ``count`` sequences, in random order."""
        chosen = self._random.sample(sorted(self._tables), min(count, len(self._tables)))
        self._advance(dict.fromkeys(chosen, 1))

    def chunk(self, tokens: int, count: int) -> None:
        """Compute several tokens of one sequence beside one token of each of ``count`` others."""
        chosen = self._random.sample(sorted(self._tables), min(count + 1, len(self._tables)))
        self._advance({sequence: tokens if index == 0 else 1 for index, sequence in enumerate(chosen)})

    def fork(self) -> None:
        """Start a sequence that shares another's full blocks and has a copy of its last one, and compute a token.

        Without that copy if KV has spans: it has the lower bits of none.
        """
        size = self._twins.page_tokens
        if not self._tables or len(self._free) < 2:
            return
        parent = self._random.choice(sorted(self._tables))
        length, table = self._lengths[parent], self._tables[parent]
        if self._twins.more_tokens:
            length -= length % size
        shared = table[: length // size]
        self._uses.update(shared)
        self._tables[self._next], self._lengths[self._next] = list(shared), length
        if parent in self._slots:
            self._slots[self._next] = self._slots[parent]
        copies: list[tuple[int, int]] = []
        if length % size:
            own = self._take()
            self._tables[self._next].append(own)
            copies.append((table[length // size], own))
        self._advance({self._next: 1}, copies)
        self._next += 1

    def leave(self, count: int) -> None:
        """End sequences. Blocks without another user become NaN."""
        for sequence in self._random.sample(sorted(self._tables), min(count, len(self._tables))):
            table = self._tables.pop(sequence)
            del self._lengths[sequence]
            self._release(self._slots.pop(sequence, None))
            self._uses.subtract(table)
            unused = [block for block in table if not self._uses[block]]
            self._twins.spoil(unused)
            self._free += unused

    def _advance(self, counts: dict[int, int], copies: Sequence[tuple[int, int]] = ()) -> None:
        """Compute so many tokens of each of these sequences, except of those for which no blocks are left."""
        rows: list[StepRow] = []
        before = dict(self._slots)
        for sequence, tokens in counts.items():
            position = self._lengths[sequence]
            missing = self._missing(sequence, position + tokens)
            if missing > len(self._free) or (self._twins.state_slots and len(self._free_slots) < 2):
                continue
            self._tables[sequence] += [self._take() for _ in range(missing)]
            self._lengths[sequence] += tokens
            runs = [(block, 1) for block in self._tables[sequence]]
            row = step_row(position, tokens, *runs, sequence=sequence)
            rows.append(replace(row, state=self._state(sequence, tokens)) if self._twins.state_slots else row)
        if rows:
            ids = [self._random.randrange(self._twins.config.vocab_size) for row in rows for _ in range(row.num_tokens)]
            self._twins.step(rows, ids, copies=copies)
        for slot in {before[sequence] for sequence in before if before[sequence] != self._slots[sequence]}:
            self._release(slot)

    def _state(self, sequence: int, tokens: int) -> RowState:
        """Keep a sequence's state in its slot, or in another."""
        read = self._slots.get(sequence)
        shared = sum(slot == read for slot in self._slots.values()) > 1
        if read is None or shared or self._random.random() < 0.5:
            self._slots[sequence] = self._free_slots.pop(self._random.randrange(len(self._free_slots)))
        return RowState(read, (StateWrite(tokens, self._slots[sequence]),))

    def _release(self, slot: int | None) -> None:
        """Give a slot back unless another sequence has it."""
        if slot is not None and slot not in self._slots.values():
            self._twins.spoil_states([slot])
            self._free_slots.append(slot)

    def _missing(self, sequence: int, length: int) -> int:
        return -(-(length + self._twins.more_tokens) // self._twins.page_tokens) - len(self._tables.get(sequence, ()))

    def _take(self) -> int:
        block = self._free.pop(self._random.randrange(len(self._free)))
        self._uses[block] += 1
        return block


def pools_of(backend: TorchBackend) -> list[torch.Tensor]:
    """The pool [layers, slots, 2 * kv heads, D] of each slice; of codes their scales [layers, slots, 2 * kv heads]."""
    found: list[torch.Tensor] = []
    for storage in backend._pools.values():
        found += storage.pools if isinstance(storage, KVStorage) else [pool.scales for pool in storage.pools]
    return found


def _unknown(pool: torch.Tensor) -> float:
    """Return what is read as NaN: of 4 bits a byte."""
    return torch.nan if pool.is_floating_point() else NO_SCALE


def _numbers(pool: torch.Tensor) -> np.ndarray:
    """Return the numbers of a pool, or its scales."""
    return (pool.float() if pool.is_floating_point() else scale_values(pool)).numpy()


def states_of(backend: TorchBackend) -> list[torch.Tensor]:
    """The tensors [slots, ...] of the recurrent layers of all slices."""
    pools = backend._states.items()
    layers = [pool.layer(at) for index, pool in pools for at in range(len(backend._weights[index].mixers))]
    return [tensor for layer in layers for tensor in layer]
