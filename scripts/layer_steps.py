"""Decode steps of a model's layers on this CPU, with made-up weights, against the bytes that they read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from edgepipe_torch import TorchBackend
from edgepipe_torch.layers import mixture
from figures import Row, at_most
from parts import counted

from edgepipe.backend.types import BackendOptions, BlockRun, RowState, StateWrite, Step, StepRow
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.expert_places import SETTING
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layout import multiplied_parameters
from edgepipe.stage.layer_steps import probe_rows
from edgepipe.stage.made_up import MadeUpWeights, spread
from edgepipe.weights.resident import resident_sizes
from edgepipe.weights.weight_table import WeightTable

LAYERS = 4  # more bytes than any cache holds
MOST_ROWS = 64
CONTEXT_BLOCKS, BLOCK_TOKENS = 4, 16
_SQUARE = 1024
_READ_BYTES = 1 << 30


def read_rate(threads: int) -> float:
    """Return bytes per second of reading memory with so many threads."""
    torch.set_num_threads(threads)
    data = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    taken: list[float] = []
    for _ in range(5):
        begun_s = time.perf_counter()
        data.sum()
        taken.append(time.perf_counter() - begun_s)
    return _READ_BYTES / min(taken)


class Stage:
    """Layers of a model on this CPU, and steps over them."""

    def __init__(
        self, config: ModelConfig, table: WeightTable, threads: int, *, layers: int = LAYERS, in_ram: str = "none"
    ) -> None:
        """``layers``: of the model's kinds, in their shares.

        ``in_ram``: share of the experts that take the path to host memory, though this device is a CPU.
        """
        specs, forms = spread(config, table, layers)
        shape = replace(config, layers=specs)
        part = Slice(index=1, layers=LayerRange(0, layers), embedding=False, head=False)
        self.num_layers = layers
        self.backend = TorchBackend(BackendOptions(device="cpu", threads=threads, settings={SETTING: in_ram}))
        self.backend.load([part], MadeUpWeights(shape, forms), lambda _progress: None)
        self._has_states = bool(shape.state_bytes())
        self.backend.allocate_kv(
            num_blocks=MOST_ROWS * CONTEXT_BLOCKS,
            block_size=BLOCK_TOKENS,
            state_slots=MOST_ROWS if self._has_states else 0,
        )
        sizes = resident_sizes(shape, forms, kind="torch-cpu", dtype="float32")
        self.expert_bytes = sum(sizes.experts)
        self.other_bytes = sum(sizes.layers) - self.expert_bytes
        self.state_bytes = shape.state_bytes()  # state of a sequence
        self.token_flops = 2 * sum(multiplied_parameters(spec, config.hidden_size) for spec in specs)
        self.experts = next((spec.experts for spec in specs if spec.experts is not None), None)
        self._inputs = probe_rows(config.hidden_size)

    def step(self, count: int) -> Callable[[], float]:
        """Return a function that decodes a token of so many sequences, and returns the seconds."""
        rows = tuple(
            StepRow(
                sequence=SequenceId(index),
                position=CONTEXT_BLOCKS * BLOCK_TOKENS - 1,
                num_tokens=1,
                runs=(BlockRun(index * CONTEXT_BLOCKS, CONTEXT_BLOCKS),),
                state=RowState(index, (StateWrite(1, index),)) if self._has_states else None,
            )
            for index in range(count)
        )
        step = Step(step=StepId(1), slice_index=1, rows=rows, logit_rows=np.zeros(0, np.int32))
        inputs = np.ascontiguousarray(self._inputs[:count])

        def run() -> float:
            prepared = self.backend.prepare(step)
            begun_s = time.perf_counter()
            self.backend.collect(self.backend.submit(prepared, inputs))
            return time.perf_counter() - begun_s

        return run


def layer_rows(
    name: str, stage: Stage, threads: int, rounds: int, *, counts: Sequence[int], target: float, shares: bool
) -> list[Row]:
    """Time a layer against the memory time of the bytes of weights that its rows need.

    Many rows take longer to multiply than to read: theirs is compared with the longer of both.

    name    of the layer
    counts  rows of a step; the target is for one row
    shares  whether to print how many experts the rows use
    """
    read_per_s, flops = read_rate(threads), multiply_rate(threads)
    rows: list[Row] = []
    for count in counts:
        step = stage.step(count)
        with counted_experts() as used:
            step()
        share = float(np.mean(used)) if used else 0.0
        step_s = min(step() for _ in range(rounds))
        memory_s = (stage.other_bytes + share * stage.expert_bytes) / read_per_s
        arithmetic_s = count * stage.token_flops / flops
        what = f"layer of {name}, {counted(count, 'row')}, {counted(threads, 'thread')}"
        taken, least, multiplying = (1e3 * each / stage.num_layers for each in (step_s, memory_s, arithmetic_s))
        if count == 1:
            rows.append(at_most(what, taken, "ms", least, "memory time", target))
        else:
            rows.append(Row(what, taken, "ms", least, "memory time", taken / least))
            if multiplying > least:
                rows.append(Row(what, taken, "ms", multiplying, "arithmetic time", taken / multiplying))
        if shares and stage.experts is not None:
            total = stage.experts.count
            even = 1 - (1 - stage.experts.used / total) ** count
            what = f"  experts that {counted(count, 'row')} use"
            rows.append(Row(what, total * share, f"of {total}", total * even, "if even", share / even))
    return rows


def multiply_rate(threads: int) -> float:
    """Return the float32 operations per second of a large product with so many threads."""
    torch.set_num_threads(threads)
    one, size = torch.ones(_SQUARE, _SQUARE), 2.0 * _SQUARE**3
    taken: list[float] = []
    for _ in range(5):
        begun_s = time.perf_counter()
        torch.mm(one, one)
        taken.append(time.perf_counter() - begun_s)
    return size / min(taken)


@contextmanager
def counted_experts() -> Iterator[list[float]]:
    """Collect the share of experts that each layer's rows use within the context."""
    shares: list[float] = []
    original = mixture.route

    def counting(spec: mixture.Experts, router: mixture.RouterWeights, x: torch.Tensor):  # type: ignore[no-untyped-def]
        chosen, weights = original(spec, router, x)
        shares.append(len(chosen.unique()) / spec.count)
        return chosen, weights

    mixture.route = counting
    try:
        yield shares
    finally:
        mixture.route = original
