"""Time steps over a few layers of random weights on the real backend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgepipe.backend.energy import EnergyMeter
from edgepipe.backend.protocol import Backend, Prepared, Ticket
from edgepipe.backend.types import BlockRun, RowState, StateWrite, Step, StepRow
from edgepipe.clock import Clock
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.kv_forms import REST_TOKENS
from edgepipe.stage.made_up import MadeUpWeights

TOO_SLOW_S = 0.4
"""Longest time of a run that is run again."""

CONTEXT, LONG_CONTEXT, LONG_ROWS = 64, 1024, 4
"""Tokens that rows attend to; the longest context, of so many rows."""

MOST_ROWS, MOST_TOKENS = 64, 512
"""Rows of a decode step and tokens of a prompt, at most."""

_INPUT = 0.03  # deviation of a row's common and of its own part
_POINT_S = 0.05  # time for one point after its first run
_LEAST_RUNS, _MOST_RUNS = 7, 30
_ENOUGH_S, _SLOW_RUNS = 0.2, 3  # long runs are less disturbed: stop after this many that took this long together
_LONGEST_REST_S = 0.01  # rest between decode steps: a stage idles while others compute, and caches drop its weights


def probe_rows(hidden_size: int) -> npt.NDArray[np.uint16]:
    """Return random rows [MOST_TOKENS, H] of bf16 bits.

    Half of their power is common to all, so routers prefer some experts, as those of trained models do.
    """
    generator = np.random.default_rng(0)
    common = generator.normal(0, _INPUT, hidden_size)
    rows = (common + generator.normal(0, _INPUT, (MOST_TOKENS, hidden_size))).astype(np.float32)
    return (rows.view(np.uint32) >> 16).astype(np.uint16)


class LayerSteps:
    """A few layers with random weights, and steps over them."""

    def __init__(self, backend: Backend, source: MadeUpWeights, clock: Clock) -> None:
        self._backend = backend
        self._block = backend.block_sizes[0]
        self.source = source
        self._clock = clock
        self._steps = 0
        self.expert_share = 0.0  # share of experts that a step of the newest measurement read; 0: not counted
        self._inputs = probe_rows(source.config.hidden_size)
        self.part = Slice(index=1, layers=LayerRange(0, 1), embedding=False, head=False)

    def load_s(self, num_layers: int) -> float:
        """Load ``num_layers`` layers and return the seconds that it took."""
        started_s = self._clock.monotonic_s()
        self.load(num_layers, head=False)
        return self._clock.monotonic_s() - started_s

    def load(self, num_layers: int, *, head: bool) -> None:
        """Replace the loaded layers."""
        self.part = Slice(index=1, layers=LayerRange(0, num_layers), embedding=False, head=head)
        self._backend.load([self.part], self.source, lambda _: None)
        beside = self._block + REST_TOKENS
        tokens = max(MOST_ROWS * (CONTEXT + beside), LONG_ROWS * (LONG_CONTEXT + beside), MOST_TOKENS + beside)
        self._backend.allocate_kv(
            num_blocks=tokens // self._block + MOST_ROWS + 1,
            block_size=self._block,
            state_slots=MOST_ROWS if self.source.config.state_bytes() else 0,
        )

    def warm_up(self) -> None:
        """Run a first step, which also starts libraries: seconds on a GPU."""
        self._run_s([(CONTEXT - 1, 1)])

    def decode_s(self, rows: int, context: int, *, rests: bool = True) -> float:
        """Time a step with one token for each of ``rows`` sequences, attending to ``context`` tokens.

        ``rests``: idle before each step, as a stage does while others compute.
        """
        return self._time_s([(context - 1, 1)] * rows, rests=rests)

    def prefill_s(self, tokens: int) -> float:
        """Time a step with one prompt."""
        return self._time_s([(0, tokens)], rests=False)

    def _time_s(self, rows: Sequence[tuple[int, int]], *, rests: bool) -> float:
        """Return the median time. ``rests``: idle before each run for as long as the first run took."""
        self.expert_share = 0.0
        runs = [self._run_s(rows)]
        if runs[0] > TOO_SLOW_S:
            return runs[0]
        rest_s = min(runs.pop(), _LONGEST_REST_S) if rests else 0.0  # the first run was the warm-up
        while len(runs) < _LEAST_RUNS or (sum(runs) < _POINT_S and len(runs) < _MOST_RUNS):
            time.sleep(rest_s)  # the compute thread is otherwise idle
            runs.append(self._run_s(rows))
            if len(runs) >= _SLOW_RUNS and sum(runs) >= _ENOUGH_S:
                break
        return statistics.median(runs)

    def in_flight_s(self, depth: int, count: int) -> float:
        """Return the seconds of a decode step of one row, with ``depth`` of ``count`` steps submitted at a time."""
        rows = [(CONTEXT - 1, 1)]
        self._run_s(rows)
        waiting: list[Ticket] = []
        started_s = self._clock.monotonic_s()
        for _ in range(count):
            prepared, inputs = self._prepare(rows)
            if len(waiting) == depth:
                self._backend.collect(waiting.pop(0))
            waiting.append(self._backend.submit(prepared, inputs))
        for ticket in waiting:
            self._backend.collect(ticket)
        return (self._clock.monotonic_s() - started_s) / count

    def power_w(self, meter: EnergyMeter, steps: int, seconds: float) -> float:
        """Return the power while one row decodes for ``seconds``; ``steps`` between readings of the clock."""
        rows = [(CONTEXT - 1, 1)]
        self._run_s(rows)
        begun_j, begun_s = meter.joules(), self._clock.monotonic_s()
        while (passed_s := self._clock.monotonic_s() - begun_s) < seconds:
            for _ in range(steps):
                self._run_s(rows)
        return (meter.joules() - begun_j) / passed_s

    def _run_s(self, rows: Sequence[tuple[int, int]]) -> float:
        prepared, inputs = self._prepare(rows)
        started_s = self._clock.monotonic_s()
        output = self._backend.collect(self._backend.submit(prepared, inputs))
        seconds = self._clock.monotonic_s() - started_s
        self.expert_share = output.expert_share or self.expert_share
        return seconds

    def _prepare(self, rows: Sequence[tuple[int, int]]) -> tuple[Prepared, npt.NDArray[np.uint16]]:
        """Return a step of rows (position, number of tokens), each of a sequence of its own, and its inputs."""
        step_rows: list[StepRow] = []
        block = 0
        for index, (position, count) in enumerate(rows):
            blocks = -(-(position + count + REST_TOKENS) // self._block)
            run = BlockRun(block, blocks)
            step_rows.append(
                StepRow(
                    sequence=SequenceId(index + 1),
                    position=position,
                    num_tokens=count,
                    runs=(run,),
                    state=self._state(index, position, count),
                )
            )
            block += blocks
        tokens = sum(count for _, count in rows)
        self._steps += 1
        step = Step(
            step=StepId(self._steps),
            slice_index=1,
            rows=tuple(step_rows),
            logit_rows=np.arange(len(rows) if self.part.head else 0, dtype=np.int32),
        )
        inputs = np.resize(self._inputs, (tokens, self.source.config.hidden_size))
        return self._backend.prepare(step), inputs

    def _state(self, index: int, position: int, count: int) -> RowState | None:
        """Give a row a slot of its own, as a sequence has."""
        if not self.source.config.state_bytes():
            return None
        return RowState(read=index if position else None, writes=(StateWrite(after=count, slot=index),))
