"""Some layers of a model with made-up weights on an NVIDIA GPU, as a slice has them: decode steps and prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from edgepipe_torch import TorchBackend
from layer_steps import counted_experts

from edgepipe.backend.types import BackendOptions, BlockRun, RowState, StateWrite, Step, StepRow
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.stage.layer_steps import probe_rows
from edgepipe.stage.made_up import MadeUpWeights, spread
from edgepipe.weights.mixes import named_model
from edgepipe.weights.resident import resident_sizes
from edgepipe.weights.weight_table import only_layers

MOST_ROWS = 64
_PAGE = 256  # tokens
_STEPS, _WARM_UP, _ROUNDS = 40, 4, 5  # a size's second step records its graph


class Layers:
    """Layers of a model on the GPU. Each row of a step has a sequence of its own."""

    def __init__(self, name: str, count: int, *, among: Callable[[LayerSpec], bool] = lambda _spec: True) -> None:
        """``among``: the layers of the model to choose from, in their shares."""
        config, table = named_model(name)
        config, table = only_layers(config, table, among)
        layers, forms = spread(config, table, count)
        shape = replace(config, layers=layers)
        part = Slice(index=1, layers=LayerRange(0, count), embedding=False, head=False)
        self._backend = TorchBackend(BackendOptions(device="cuda", threads=1))
        self.bandwidth = self._backend.profile().bandwidth_bytes_per_s
        self._backend.load([part], MadeUpWeights(shape, forms), lambda _progress: None)
        if slow := [each for each in self._backend.packed_products() if each.reason]:
            raise RuntimeError(f"{name} is multiplied by {slow[0].by}: {slow[0].reason}")
        self._state_bytes = shape.state_bytes()
        slots = MOST_ROWS if self._state_bytes else 0
        self._backend.allocate_kv(num_blocks=MOST_ROWS, block_size=_PAGE, state_slots=slots)
        sizes = resident_sizes(shape, forms, kind="torch-cuda", dtype="bfloat16")
        self._expert_bytes = sum(sizes.experts)
        self._other_bytes = sum(sizes.layers) - self._expert_bytes
        self._inputs = probe_rows(config.hidden_size)

    def first_step(self, count: int) -> float:
        """Run the first step of so many rows, which no graph has, and return the bytes that it reads and writes.

        These are all weights but the experts that no row chose, and each row's states twice.
        """
        with counted_experts() as shares:
            self._decode(count)
        weights = self._other_bytes + (statistics.fmean(shares) if shares else 0.0) * self._expert_bytes
        return weights + 2 * count * self._state_bytes

    def step_s(self, count: int) -> float:
        """Seconds of a decode step, the least of some rounds' means."""
        self._each_s(lambda: self._decode(count), _WARM_UP)
        return min(self._each_s(lambda: self._decode(count), _STEPS) for _ in range(_ROUNDS))

    def prompt_s(self, num_tokens: int) -> float:
        """Seconds of one sequence's first tokens, the least of some rounds."""
        rows = [self._row(0, 0, num_tokens, num_blocks=-(-num_tokens // _PAGE))]
        self._submit(rows)
        return min(self._each_s(lambda: self._submit(rows), 1) for _ in range(_ROUNDS))

    @staticmethod
    def _each_s(run: Callable[[], None], times: int) -> float:
        begun_s = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begun_s) / times

    def _decode(self, count: int) -> None:
        self._submit([self._row(index, _PAGE // 2, 1) for index in range(count)])

    def _row(self, number: int, position: int, num_tokens: int, *, num_blocks: int = 1) -> StepRow:
        state = RowState(number if position else None, (StateWrite(num_tokens, number),))
        return StepRow(
            sequence=SequenceId(number),
            position=position,
            num_tokens=num_tokens,
            runs=(BlockRun(number, num_blocks),),
            state=state if self._state_bytes else None,
        )

    def _submit(self, rows: list[StepRow]) -> None:
        count = sum(row.num_tokens for row in rows)
        step = Step(step=StepId(1), slice_index=1, rows=tuple(rows), logit_rows=np.zeros(0, np.int32))
        inputs = np.resize(self._inputs, (count, self._inputs.shape[1]))
        self._backend.collect(self._backend.submit(self._backend.prepare(step), inputs))

    def close(self) -> None:
        """Release the device's memory."""
        self._backend.close()
