"""Chains backends in one process, as stages are chained by links, and drives them by hand.

::

    pipeline = Pipeline.build([TorchBackend(options), MlxBackend(options)], open_weights(path))
    ids = pipeline.greedy([prompt_a, prompt_b], num_tokens=16)     # both decode in one micro-batch
    logits = pipeline.forced(prompt_a, reference_ids)              # [len(reference_ids), V], one prefill

The activations of one slice are what the next one gets, in the type that its options name. KV blocks come from
``Blocks``: one run per sequence, or scattered over the pool.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.backend.drafting import MOST_DRAFTS, Drafter
from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import BlockCopy, BlockRun, RowState, StateWrite, Step, StepRow
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.kv_forms import REST_TOKENS
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightSource
from edgepipe.weights.dequantise import as_bf16_bits
from edgepipe.weights.stored_weight import OneTensorPerWeight

STATE_SLOTS = 16
"""Sequences at a time, of a model with recurrent layers."""

Logits = npt.NDArray[np.float32]


class Blocks:
    """Hands out the blocks of a pool: each sequence in one run, or every block somewhere else."""

    def __init__(self, num_blocks: int, block_size: int, *, scattered: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._scattered = scattered
        self._free = list(range(num_blocks))
        if scattered:
            random.Random(7).shuffle(self._free)

    def take(self, num_tokens: int) -> tuple[BlockRun, ...]:
        """The table of a sequence that may grow to ``num_tokens``, with what a form of KV needs behind them."""
        count = -(-(num_tokens + REST_TOKENS) // self.block_size)
        assert count <= len(self._free), "the test's pool is too small"
        taken, self._free = self._free[:count], self._free[count:]
        runs: list[BlockRun] = []
        for block in taken:
            if runs and runs[-1].start + runs[-1].count == block:
                runs[-1] = BlockRun(runs[-1].start, runs[-1].count + 1)
            else:
                runs.append(BlockRun(block, 1))
        return tuple(runs)

    def give_back(self, runs: Sequence[BlockRun]) -> None:
        """The blocks may be handed out again."""
        self._free += [block for run in runs for block in range(run.start, run.start + run.count)]
        if not self._scattered:
            self._free.sort()


class BF16Weights(OneTensorPerWeight):
    """A ``WeightSource`` that has turned another one's tensors to bf16 once, so that loading again is cheap.

    Only for models whose values are exact in bf16, such as all GGUF files.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._bits: dict[str, npt.NDArray[np.uint8]] = {}
        self._bytes_read = 0

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._source.config

    @property
    def bytes_read(self) -> int:
        """Bytes of bf16 handed out."""
        return self._bytes_read

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """The source's, in bf16."""
        return [self._info(info.name, info.shape) for info in self._source.tensors(part)]

    def read(self, name: str) -> StoredTensor:
        """A tensor; kept after the first time."""
        if name not in self._bits:
            raw = self._source.read(name)
            self._shapes[name] = raw.info.shape
            self._bits[name] = as_bf16_bits(raw).reshape(-1).view(np.uint8)
        self._bytes_read += self._bits[name].nbytes
        return StoredTensor(info=self._info(name, self._shapes[name]), data=self._bits[name])

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        return TensorInfo(name=name, shape=shape, scheme="BF16", num_bytes=2 * int(np.prod(shape)), rounded=True)


@dataclass(slots=True)
class Track:
    """A sequence: its identity, its block table, and how many tokens have KV."""

    identity: int
    runs: tuple[BlockRun, ...]
    length: int = 0
    slot: int | None = None  # slot of its state, if the model has recurrent layers

    def row(self, num_tokens: int) -> StepRow:
        """The row of the next ``num_tokens``."""
        state: RowState | None = None
        if self.slot is not None:
            state = RowState(self.slot if self.length else None, (StateWrite(num_tokens, self.slot),))
        return StepRow(
            sequence=SequenceId(self.identity),
            position=self.length,
            num_tokens=num_tokens,
            runs=self.runs,
            state=state,
        )


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """Slices of one model, one after the other."""

    backends: Sequence[Backend]
    blocks: Blocks
    slices: Sequence[Slice]
    has_states: bool = False  # the model has recurrent layers
    rows_seen: list[int] = field(default_factory=list[int])  # rows of every step so far
    _steps: int = 0
    _sequences: int = 0

    @classmethod
    def build(
        cls,
        backends: Sequence[Backend],
        weights: WeightSource,
        *,
        num_blocks: int = 160,
        block_size: int = 16,
        scattered: bool = False,
    ) -> Pipeline:
        """Cut the model into as many parts as there are backends, the first ones larger, and load them."""
        slices = even_slices(weights.config.num_layers, len(backends))
        for backend, part in zip(backends, slices, strict=True):
            backend.load([part], weights, lambda _progress: None)
            slots = STATE_SLOTS if weights.config.state_bytes() else 0
            backend.allocate_kv(num_blocks=num_blocks, block_size=block_size, state_slots=slots)
        blocks = Blocks(num_blocks, block_size, scattered=scattered)
        return cls(backends=backends, blocks=blocks, slices=slices, has_states=bool(weights.config.state_bytes()))

    def add(self, max_tokens: int) -> Track:
        """A new, empty sequence."""
        self._sequences += 1
        slot = self._sequences % STATE_SLOTS if self.has_states else None
        return Track(self._sequences, self.blocks.take(max_tokens), slot=slot)

    def drop(self, sequence: Track) -> None:
        """Its blocks may be used again."""
        self.blocks.give_back(sequence.runs)

    def step(
        self,
        work: Sequence[tuple[Track, Sequence[int]]],
        *,
        all_logits: bool = False,
        copies: Sequence[tuple[int, int]] = (),
    ) -> Logits:
        """Compute the next tokens of some sequences in one micro-batch through all slices.

        Returns [R, V]: the logits of every sequence's last token, or of all tokens. Set ``sequence.length`` to a lower
        value before to truncate.
        """
        rows = tuple(sequence.row(len(tokens)) for sequence, tokens in work)
        ends = np.cumsum([row.num_tokens for row in rows])
        wanted = np.arange(ends[-1]) if all_logits else ends - 1
        data: npt.NDArray[Any] = np.array([token for _sequence, tokens in work for token in tokens], np.int32)
        self._steps += 1
        self.rows_seen.append(len(data))
        for backend, part in zip(self.backends, self.slices, strict=True):
            step = Step(
                step=StepId(self._steps),
                slice_index=part.index,
                rows=rows,
                logit_rows=wanted.astype(np.int32),
                copies=tuple(BlockCopy(source, target) for source, target in copies),
            )
            output = backend.collect(backend.submit(backend.prepare(step), data))
            result = output.logits if output.logits is not None else output.activations
            assert result is not None
            data = result
        for sequence, tokens in work:
            sequence.length += len(tokens)
        return data

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """The most likely tokens after each prompt; prompts one by one, then all decode in one micro-batch."""
        sequences = [self.add(len(prompt) + num_tokens) for prompt in prompts]
        found = [
            [int(self.step([(sequence, prompt)])[0].argmax())]
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]
        for _ in range(num_tokens - 1):
            work = [(sequence, ids[-1:]) for sequence, ids in zip(sequences, found, strict=True)]
            for ids, logits in zip(found, self.step(work), strict=True):
                ids.append(int(logits.argmax()))
        for sequence in sequences:
            self.drop(sequence)
        return found

    def greedy_windows(self, prompt: Sequence[int], num_tokens: int, drafter: Drafter) -> tuple[list[int], int]:
        """The most likely tokens after a prompt, several a step where the drafts are right; and the number of steps."""
        sequence = self.add(len(prompt) + num_tokens + MOST_DRAFTS)
        found = [int(self.step([(sequence, prompt)])[0].argmax())]
        new, steps = found, 0
        while len(found) < num_tokens:
            drafts = drafter.propose(new, MOST_DRAFTS).ids
            logits = self.step([(sequence, (found[-1], *drafts))], all_logits=True)
            steps += 1
            new = [int(logits[0].argmax())]
            while len(new) <= len(drafts) and new[-1] == drafts[len(new) - 1]:
                new.append(int(logits[len(new)].argmax()))
            sequence.length -= len(drafts) + 1 - len(new)
            found += new
        self.drop(sequence)
        return found[:num_tokens], steps

    def forced(self, prompt: Sequence[int], continuation: Sequence[int], *, chunks: Sequence[int] = ()) -> Logits:
        """[len(continuation), V]: what each of the tokens was chosen from.

        One prefill of everything but the last token; ``chunks`` cuts it: their sizes, the rest at the end.
        """
        tokens = [*prompt, *continuation[:-1]]
        sequence = self.add(len(tokens))
        found: list[Logits] = []
        for part in cut(tokens, chunks):
            found.append(self.step([(sequence, part)], all_logits=True))
        self.drop(sequence)
        return np.concatenate(found)[len(prompt) - 1 :]

    def close(self) -> None:
        """Give the backends' memory back."""
        for backend in self.backends:
            backend.close()


def cut(tokens: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """The tokens in parts of these sizes; what is left is one more part."""
    parts: list[Sequence[int]] = []
    at = 0
    for size in sizes:
        parts.append(tokens[at : at + size])
        at += size
    return [part for part in (*parts, tokens[at:]) if len(part)]


def even_slices(num_layers: int, num_parts: int) -> tuple[Slice, ...]:
    """Parts of nearly equal size."""
    bounds = [round(index * num_layers / num_parts) for index in range(num_parts + 1)]
    return make_slices([LayerRange(a, b) for a, b in itertools.pairwise(bounds)], num_layers)
