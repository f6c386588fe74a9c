"""Measure the figures of ``planner.device_figures`` on the real backend, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgepipe.backend.energy import EnergyMeter
from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import DeviceProfile
from edgepipe.clock import Clock
from edgepipe.planner.device_figures import (
    CONTEXT,
    DECODE_ROWS,
    LAYER_ROWS,
    PROMPT,
    dense_model,
    expert_model,
    recurrent_model,
)
from edgepipe.spec.facts import ModelConfig
from edgepipe.stage.layer_steps import LayerSteps
from edgepipe.stage.made_up import MadeUpWeights, spread
from edgepipe.weights.weight_table import WeightTable

_ON_CPU, _ON_GPU = (1, 3), (2, 12)  # layers: the difference of their steps has no share of the host
_STEPS_IN_FLIGHT = 24
_POWER_STEPS, _POWER_S = 10, 2.0  # steps between readings of the clock, and the time to measure power


class DeviceMeasuring:
    """Measurements of one device. Each loads layers and leaves none."""

    def __init__(self, backend: Backend, profile: DeviceProfile, clock: Clock, meter: EnergyMeter | None) -> None:
        self._backend = backend
        self._profile = profile
        self._clock = clock
        self._meter = meter
        self._few, self._many = _ON_CPU if profile.device == "cpu" else _ON_GPU

    def parts(self) -> dict[str, Callable[[], dict[str, float]]]:
        """Return the measurements by name."""
        return {
            "dense": self._dense,
            "experts": lambda: self._layers("experts", *expert_model()),
            "recurrent": lambda: self._layers("recurrent", *recurrent_model()),
        }

    def _dense(self) -> dict[str, float]:
        """Measure the device's rates and a dense model."""
        config, table = dense_model()
        steps = self._steps(config, table)
        found = {"memory": self._profile.bandwidth_bytes_per_s / 1e9, "products": self._profile.flops / 1e12}
        try:
            steps.load(self._many, head=False)
            many, many_prompt_s = self._decodes(steps), steps.prefill_s(PROMPT)
            if self._backend.max_submitted > 1:
                alone_s, paired_s = (steps.in_flight_s(depth, _STEPS_IN_FLIGHT) for depth in (1, 2))
                found["gap"] = 1e6 * max(0.0, alone_s - paired_s)
            if self._meter is not None:
                found["power"] = steps.power_w(self._meter, _POWER_STEPS, _POWER_S)
            steps.load(self._few, head=False)
            few, few_prompt_s = self._decodes(steps), steps.prefill_s(PROMPT)
            steps.load(self._few, head=True)
            headed, headed_prompt_s = self._decodes(steps), steps.prefill_s(PROMPT)
        finally:
            self._backend.close()
        for rows in DECODE_ROWS:
            found[f"decode_{rows}"] = rows / self._whole_s(config, many[rows], few[rows], headed[rows])
        found["prompt"] = PROMPT / self._whole_s(config, many_prompt_s, few_prompt_s, headed_prompt_s)
        layer_s = max(0.0, many[1] - few[1]) / (self._many - self._few)
        found["step"] = 1e6 * max(0.0, few[1] - self._few * layer_s)
        return found

    def _layers(self, name: str, config: ModelConfig, table: WeightTable) -> dict[str, float]:
        """Measure one layer of a kind, in microseconds."""
        steps = self._steps(config, table)
        times: list[list[float]] = []
        try:
            for count in (self._few, self._many):
                steps.load(count, head=False)
                times.append([steps.decode_s(rows, CONTEXT, rests=False) for rows in LAYER_ROWS])
        finally:
            self._backend.close()
        layers = self._many - self._few
        return {
            f"{name}_{rows}": 1e6 * max(0.0, many_s - few_s) / layers
            for rows, few_s, many_s in zip(LAYER_ROWS, *times, strict=True)
        }

    def _steps(self, config: ModelConfig, table: WeightTable) -> LayerSteps:
        layers, forms = spread(config, table, max(self._many, config.num_layers))
        return LayerSteps(self._backend, MadeUpWeights(replace(config, layers=layers), forms), self._clock)

    @staticmethod
    def _decodes(steps: LayerSteps) -> dict[int, float]:
        return {rows: steps.decode_s(rows, CONTEXT, rests=False) for rows in DECODE_ROWS}

    def _whole_s(self, config: ModelConfig, many_s: float, few_s: float, headed_s: float) -> float:
        """Return the seconds of a step of the whole model, from steps of many and few layers, and few with the head."""
        layer_s = max(0.0, many_s - few_s) / (self._many - self._few)
        return headed_s + (config.num_layers - self._few) * layer_s
