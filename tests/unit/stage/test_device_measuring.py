"""Figures of a device follow from steps whose times are known."""

from __future__ import annotations

import pytest

from edgepipe.backend.types import DeviceProfile
from edgepipe.planner.device_figures import CONTEXT, DECODE_ROWS, PROMPT
from edgepipe.spec.facts import ModelConfig
from edgepipe.stage import device_measuring
from edgepipe.stage.device_measuring import DeviceMeasuring
from edgepipe.testing.clock import FakeClock
from edgepipe.testing.tiny_model import tiny_config
from edgepipe.weights.weight_table import FLOATS, WeightTable
from tests.support.backends.timed import TimedBackend

GPU = DeviceProfile(
    backend="torch",
    device="cuda:0",
    name="GPU",
    compute_dtype="bfloat16",
    memory_total_bytes=64 << 30,
    memory_free_bytes=64 << 30,
    bandwidth_bytes_per_s=900e9,
    flops=100e12,
)
LAYERS = 14
LAYER_S = {rows: 2e-3 + 1e-4 * rows + 1e-6 * CONTEXT * rows for rows in (*DECODE_ROWS, 16)}  # of TimedBackend
BESIDE_S = 1e-3 + 5e-3  # the step and the head


class PoweredClock:
    """Counts 300 W by a clock."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def joules(self) -> float:
        return 300 * self._clock.monotonic_s()


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> tuple[ModelConfig, WeightTable]:
        return tiny_config(num_layers=LAYERS), FLOATS

    for name in ("dense_model", "expert_model", "recurrent_model"):
        monkeypatch.setattr(device_measuring, name, model)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_whole_model_is_its_layers_its_head_and_the_step(clock: FakeClock, device: str) -> None:
    backend = TimedBackend(clock)
    profile = DeviceProfile(**{**{name: getattr(GPU, name) for name in GPU.__slots__}, "device": device})
    found = DeviceMeasuring(backend, profile, clock, None).parts()["dense"]()
    assert backend.closed
    for rows in DECODE_ROWS:
        assert found[f"decode_{rows}"] == pytest.approx(rows / (BESIDE_S + LAYERS * LAYER_S[rows]))
    assert found["prompt"] == pytest.approx(PROMPT / (BESIDE_S + LAYERS * (2e-3 + 1e-4 * PROMPT)))
    assert found["step"] == pytest.approx(1e3)
    assert found["memory"] == 900
    assert "power" not in found


@pytest.mark.parametrize("name", ["experts", "recurrent"])
def test_a_layer_has_no_share_of_the_step(clock: FakeClock, name: str) -> None:
    found = DeviceMeasuring(TimedBackend(clock), GPU, clock, None).parts()[name]()
    assert found == pytest.approx({f"{name}_{rows}": 1e6 * LAYER_S[rows] for rows in (1, 16)})


def test_power_is_what_the_meter_counts_while_steps_run(clock: FakeClock) -> None:
    found = DeviceMeasuring(TimedBackend(clock), GPU, clock, PoweredClock(clock)).parts()["dense"]()
    assert found["power"] == pytest.approx(300)


def test_what_a_second_step_in_flight_saves_is_the_gap(clock: FakeClock) -> None:
    """Steps of this backend take their time when they are collected, so a second one saves nothing."""
    backend = TimedBackend(clock)
    backend.max_submitted = 2
    assert DeviceMeasuring(backend, GPU, clock, None).parts()["dense"]()["gap"] == pytest.approx(0)
