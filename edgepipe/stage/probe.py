"""Measure a layer's time on this device: random weights through the real backend."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import BlockRun, RowState, StateWrite, Step, StepRow
from edgepipe.clock import Clock
from edgepipe.ids import SequenceId, StepId
from edgepipe.planner.layer_profile import LayerProfile, Point
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.stage.made_up import MadeUpWeights, spread
from edgepipe.weights.resident import WIDE, dtype_of, resident_sizes
from edgepipe.weights.weight_table import FLOATS, WeightTable

_ROWS = (1, 2, 4, 8, 16, 32)
_EXPERT_ROWS = (1, 4, 16, 64)  # experts are read as rows use them, so more rows read more
_INPUT = 0.03  # deviation of a row's common and of its own part
_PROMPTS = (32, 128, 512)
_HEAD_ROWS = (1, 8, 32)
_CONTEXT, _LONG_CONTEXT, _LONG_ROWS = 64, 1024, 4
_WEIGHTS_BYTES = 256 << 20  # larger than any cache, as a stage streams its weights from memory
_MOST_LAYERS = 16
_POINT_S = 0.05  # time for one point after its first run
_TOO_SLOW_S = 0.4  # longest time of one run: larger sizes follow from the slope, or for prompts from fewer layers
_LONGEST_RUN_S = 4.0  # expected for a prompt on fewer layers
_LEAST_RUNS, _MOST_RUNS = 7, 30
_ENOUGH_S, _SLOW_RUNS = 0.2, 3  # long runs are less disturbed: stop after this many that took this long together
_LONGEST_REST_S = 0.01  # rest between decode steps: a stage idles while others compute, and caches drop its weights
_LOAD_S = 0.5  # limit for loading the largest probe


def probe_layer(
    backend: Backend,
    config: ModelConfig,
    clock: Clock,
    *,
    value_bytes: int,
    weights: WeightTable = FLOATS,
    packing: str = WIDE,
) -> LayerProfile:
    """Measure a layer on the compute thread. Nothing may be loaded before or is after. Some seconds on a CPU.

    The probe's layers have the model's formats, in the model's shares. ``packing``: as in the device's profile. Raises
    the errors of loading, mainly DeviceOutOfMemory.
    """
    sizes = resident_sizes(config, weights, kind=packing, dtype=dtype_of(value_bytes)).layers
    layer_bytes = sum(sizes) / len(sizes)
    many = min(_MOST_LAYERS, max(2, math.ceil(_WEIGHTS_BYTES / layer_bytes)))
    most = max(config.num_layers, _MOST_LAYERS + 2)
    context = max(config.context_length, 2 * _LONG_CONTEXT)
    layers, table = spread(config, weights, most)
    source = MadeUpWeights(replace(config, layers=layers, context_length=context), table)
    probe = _Probe(backend, source, clock)
    try:
        quick = probe.load_s(1) * _MOST_LAYERS < _LOAD_S
        probe.warm_up()
        if quick:
            many = _MOST_LAYERS  # more layers reduce the weight of overheads and clock noise
        few = many // 2
        probe.load(few, head=False)
        few_s = probe.decode_s(1, _CONTEXT)
        probe.load(few, head=True)
        headed = probe.sweep(_HEAD_ROWS, lambda rows: probe.decode_s(rows, _CONTEXT))
        probe.load(many, head=False)
        decode = probe.sweep(probe.rows, lambda rows: probe.decode_s(rows, _CONTEXT))
        prefill = probe.sweep(_PROMPTS, probe.prefill_s)
        short_s, long_s = (probe.decode_s(_LONG_ROWS, context) for context in (_CONTEXT, _LONG_CONTEXT))
        longer = probe.longer_prompts(prefill[-1], layers=few)
    finally:
        backend.close()
    slope_s = max(0.0, decode[0].seconds - few_s) / (many - few)
    base_s = max(0.0, decode[0].seconds - many * slope_s)
    layers = tuple(_per_layer(decode, many, base_s))
    head = [Point(point.size, max(0.0, point.seconds - base_s - few * _at(layers, point.size))) for point in headed]
    return LayerProfile(
        base_s=base_s,
        decode=layers,
        prefill=tuple(_rising([*_per_layer(prefill, many, base_s), *_per_layer(longer, few, base_s)])),
        head=tuple(_rising(head)),
        kv_token_s=max(0.0, long_s - short_s) / (many * _LONG_ROWS * (_LONG_CONTEXT - _CONTEXT)),
        decode_context=_CONTEXT,
    )


def _per_layer(points: Sequence[Point], count: int, base_s: float) -> list[Point]:
    """Return the times of one of ``count`` layers."""
    return [replace(point, seconds=max(0.0, point.seconds - base_s) / count) for point in points]


def _rising(points: Sequence[Point]) -> list[Point]:
    """Make the times non-decreasing: a point above a later one was disturbed."""
    lowest = np.minimum.accumulate([point.seconds for point in reversed(points)])[::-1]
    return [
        Point(point.size, float(seconds), point.expert_share) for point, seconds in zip(points, lowest, strict=True)
    ]


def _at(points: Sequence[Point], size: float) -> float:
    return float(np.interp(size, [point.size for point in points], [point.seconds for point in points]))


def probe_rows(hidden_size: int) -> npt.NDArray[np.uint16]:
    """Return random rows [_PROMPTS[-1], H] of bf16 bits.

    Half of their power is common to all, so routers prefer some experts, as those of trained models do.
    """
    generator = np.random.default_rng(0)
    common = generator.normal(0, _INPUT, hidden_size)
    rows = (common + generator.normal(0, _INPUT, (_PROMPTS[-1], hidden_size))).astype(np.float32)
    return (rows.view(np.uint32) >> 16).astype(np.uint16)


class _Probe:
    """A few layers with random weights, and steps over them."""

    def __init__(self, backend: Backend, source: MadeUpWeights, clock: Clock) -> None:
        self._backend = backend
        self._block = backend.block_sizes[0]
        self._source = source
        self._clock = clock
        self._steps = 0
        self._expert_share = 0.0  # share of experts that a step of the newest measurement read; 0: not counted
        self._inputs = probe_rows(source.config.hidden_size)
        self._part = Slice(index=1, layers=LayerRange(0, 1), embedding=False, head=False)

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of rows of a decode step to measure."""
        return _EXPERT_ROWS if any(spec.experts is not None for spec in self._source.config.layers) else _ROWS

    def load_s(self, num_layers: int) -> float:
        """Load ``num_layers`` layers and return the seconds that it took."""
        started_s = self._clock.monotonic_s()
        self.load(num_layers, head=False)
        return self._clock.monotonic_s() - started_s

    def load(self, num_layers: int, *, head: bool) -> None:
        """Replace the loaded layers."""
        self._part = Slice(index=1, layers=LayerRange(0, num_layers), embedding=False, head=head)
        self._backend.load([self._part], self._source, lambda _: None)
        short, long = _EXPERT_ROWS[-1] * (_CONTEXT + self._block), _LONG_ROWS * (_LONG_CONTEXT + self._block)
        tokens = max(short, long, _PROMPTS[-1])
        self._backend.allocate_kv(
            num_blocks=tokens // self._block + _EXPERT_ROWS[-1] + 1,
            block_size=self._block,
            state_slots=max(self.rows) if self._source.config.state_bytes() else 0,
        )

    def warm_up(self) -> None:
        """Run a first step, which also starts libraries: seconds on a GPU."""
        self._run_s([(_CONTEXT - 1, 1)])

    def sweep(self, sizes: Sequence[int], measure: Callable[[int], float]) -> list[Point]:
        """Measure sizes up to the first that takes too long; at least one point."""
        points: list[Point] = []
        for size in sizes:
            seconds = measure(size)
            points.append(Point(size, seconds, self._expert_share))
            if points[-1].seconds > _TOO_SLOW_S:
                break
        return _rising(points)

    def decode_s(self, rows: int, context: int) -> float:
        """Time a step with one token for each of ``rows`` sequences, attending to ``context`` tokens."""
        return self._time_s([(context - 1, 1)] * rows, rests=True)

    def prefill_s(self, tokens: int) -> float:
        """Time a step with one prompt."""
        return self._time_s([(0, tokens)], rests=False)

    def longer_prompts(self, last: Point, *, layers: int) -> list[Point]:
        """Measure prompts longer than ``last``, which took long on the loaded layers, on ``layers`` layers.

        A token of a long prompt takes longer than one of a short prompt: it attends to more, and less fits into caches.
        """
        token_s = last.seconds / last.size * layers / len(self._part.layers)
        sizes = [size for size in _PROMPTS if size > last.size and size * token_s <= _LONGEST_RUN_S]
        if sizes:
            self.load(layers, head=False)
        return [Point(size, self.prefill_s(size)) for size in sizes]

    def _time_s(self, rows: Sequence[tuple[int, int]], *, rests: bool) -> float:
        """Return the median time. ``rests``: idle before each run for as long as the first run took."""
        self._expert_share = 0.0
        runs = [self._run_s(rows)]
        if runs[0] > _TOO_SLOW_S:
            return runs[0]
        rest_s = min(runs.pop(), _LONGEST_REST_S) if rests else 0.0  # the first run was the warm-up
        while len(runs) < _LEAST_RUNS or (sum(runs) < _POINT_S and len(runs) < _MOST_RUNS):
            time.sleep(rest_s)  # the compute thread is otherwise idle
            runs.append(self._run_s(rows))
            if len(runs) >= _SLOW_RUNS and sum(runs) >= _ENOUGH_S:
                break
        return statistics.median(runs)

    def _run_s(self, rows: Sequence[tuple[int, int]]) -> float:
        step_rows: list[StepRow] = []
        block = 0
        for index, (position, count) in enumerate(rows):
            blocks = -(-(position + count) // self._block)
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
            logit_rows=np.arange(len(rows) if self._part.head else 0, dtype=np.int32),
        )
        inputs = np.resize(self._inputs, (tokens, self._source.config.hidden_size))
        prepared = self._backend.prepare(step)
        started_s = self._clock.monotonic_s()
        output = self._backend.collect(self._backend.submit(prepared, inputs))
        seconds = self._clock.monotonic_s() - started_s
        self._expert_share = output.expert_share or self._expert_share
        return seconds

    def _state(self, index: int, position: int, count: int) -> RowState | None:
        """Give a row a slot of its own, as a sequence has."""
        if not self._source.config.state_bytes():
            return None
        return RowState(read=index if position else None, writes=(StateWrite(after=count, slot=index),))
