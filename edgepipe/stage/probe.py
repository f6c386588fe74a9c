"""Measure a layer's time on this device: random weights through the real backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from edgepipe.backend.protocol import Backend
from edgepipe.clock import Clock
from edgepipe.planner.layer_profile import LayerProfile, Point
from edgepipe.spec.facts import ModelConfig
from edgepipe.stage.layer_steps import CONTEXT, LONG_CONTEXT, LONG_ROWS, TOO_SLOW_S, LayerSteps
from edgepipe.stage.made_up import MadeUpWeights, spread
from edgepipe.weights.resident import WIDE, dtype_of, resident_sizes
from edgepipe.weights.weight_table import FLOATS, WeightTable

_ROWS = (1, 2, 4, 8, 16, 32)
_EXPERT_ROWS = (1, 4, 16, 64)  # experts are read as rows use them, so more rows read more
_PROMPTS = (32, 128, 512)
_HEAD_ROWS = (1, 8, 32)
_WEIGHTS_BYTES = 256 << 20  # larger than any cache, as a stage streams its weights from memory
_MOST_LAYERS = 16
_LONGEST_RUN_S = 4.0  # expected for a prompt on fewer layers
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
    context = max(config.context_length, 2 * LONG_CONTEXT)
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
        few_s = probe.decode_s(1, CONTEXT)
        probe.load(few, head=True)
        headed = probe.sweep(_HEAD_ROWS, lambda rows: probe.decode_s(rows, CONTEXT))
        probe.load(many, head=False)
        decode = probe.sweep(probe.rows, lambda rows: probe.decode_s(rows, CONTEXT))
        prefill = probe.sweep(_PROMPTS, probe.prefill_s)
        short_s, long_s = (probe.decode_s(LONG_ROWS, context) for context in (CONTEXT, LONG_CONTEXT))
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
        kv_token_s=max(0.0, long_s - short_s) / (many * LONG_ROWS * (LONG_CONTEXT - CONTEXT)),
        decode_context=CONTEXT,
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


class _Probe(LayerSteps):
    """Steps at the sizes that a plan needs."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of rows of a decode step to measure."""
        return _EXPERT_ROWS if any(spec.experts is not None for spec in self.source.config.layers) else _ROWS

    def sweep(self, sizes: Sequence[int], measure: Callable[[int], float]) -> list[Point]:
        """Measure sizes up to the first that takes too long; at least one point."""
        points: list[Point] = []
        for size in sizes:
            seconds = measure(size)
            points.append(Point(size, seconds, self.expert_share))
            if points[-1].seconds > TOO_SLOW_S:
                break
        return _rising(points)

    def longer_prompts(self, last: Point, *, layers: int) -> list[Point]:
        """Measure prompts longer than ``last``, which took long on the loaded layers, on ``layers`` layers.

        A token of a long prompt takes longer than one of a short prompt: it attends to more, and less fits into caches.
        """
        token_s = last.seconds / last.size * layers / len(self.part.layers)
        sizes = [size for size in _PROMPTS if size > last.size and size * token_s <= _LONGEST_RUN_S]
        if sizes:
            self.load(layers, head=False)
        return [Point(size, self.prefill_s(size)) for size in sizes]
