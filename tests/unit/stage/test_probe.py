"""A probe layer's times are taken apart rightly, and nothing stays loaded."""

from __future__ import annotations

import pytest
from edgepipe_torch import TorchBackend

from edgepipe.backend.cost import StepWork
from edgepipe.backend.loader import create_backend
from edgepipe.backend.types import BackendOptions, DeviceProfile
from edgepipe.planner.profiles import measured_speed
from edgepipe.stage.probe import probe_layer
from edgepipe.testing.clock import FakeClock
from edgepipe.testing.tiny_model import tiny_config
from tests.support.backends.timed import TimedBackend
from tests.support.models.experts import expert_config
from tests.support.models.recurrent_layers import MODELS

DEVICE = DeviceProfile(
    backend="torch",
    device="cpu",
    name="CPU",
    compute_dtype="float32",
    memory_total_bytes=64 << 30,
    memory_free_bytes=64 << 30,
    bandwidth_bytes_per_s=40e9,
    flops=1e12,
)


def test_base_layer_head_and_context_are_told_apart() -> None:
    clock = FakeClock()
    backend = TimedBackend(clock)
    profile = probe_layer(backend, tiny_config(num_layers=4), clock, value_bytes=4)
    assert backend.closed
    assert profile.base_s == pytest.approx(1e-3)
    assert [point.size for point in profile.decode] == [1, 2, 4, 8, 16, 32]
    assert profile.decode[3].seconds == pytest.approx(2e-3 + 8e-4 + 8 * 64e-6)
    assert profile.kv_token_s == pytest.approx(1e-6)
    assert [point.seconds for point in profile.head] == pytest.approx([5e-3] * 3)
    speed = measured_speed(profile, DEVICE, tiny_config(num_layers=4))
    parts = speed.parts(StepWork.of_rows([999] * 8, [1] * 8, logit_rows=8))
    assert list(parts.layer_s) == pytest.approx([2e-3 + 8e-4 + 8e-3] * 4)
    assert parts.head_s == pytest.approx(5e-3)
    alone = speed.parts(StepWork.of_rows([0], [128], logit_rows=0))
    assert list(alone.layer_s) == pytest.approx([2e-3 + 128e-4] * 4, rel=0.02)


def test_prompts_that_take_long_are_measured_on_fewer_layers() -> None:
    """Time grows with the square of the tokens, so no slope of short prompts tells it."""
    clock = FakeClock()
    backend = TimedBackend(clock, prompts_s=lambda tokens: 4e-6 * tokens**2)
    profile = probe_layer(backend, tiny_config(num_layers=4), clock, value_bytes=4)
    assert [point.size for point in profile.prefill] == [32, 128, 512]
    for point in profile.prefill:
        assert point.seconds == pytest.approx(2e-3 + 1e-4 * point.size + 4e-6 * point.size**2, rel=0.01)


def test_prompts_that_take_too_long_are_not_measured() -> None:
    clock = FakeClock()
    backend = TimedBackend(clock, prompts_s=lambda tokens: 0.01 * tokens)
    profile = probe_layer(backend, tiny_config(num_layers=4), clock, value_bytes=4)
    assert [point.size for point in profile.prefill] == [32]


def test_a_real_backend_runs_made_up_layers() -> None:
    backend = TorchBackend(BackendOptions(device="cpu", threads=1))
    clock = SteppingClock()
    profile = probe_layer(backend, tiny_config(num_layers=2, qkv_bias=True, tied_embeddings=True), clock, value_bytes=4)
    assert len(profile.decode) == 6
    assert len(profile.prefill) == 3


def test_points_keep_the_share_of_experts_that_they_read() -> None:
    clock = FakeClock()
    profile = probe_layer(TimedBackend(clock, counts=True), expert_config(), clock, value_bytes=4)
    assert [(point.size, point.expert_share) for point in profile.decode] == [
        (1, 0.0),
        (4, 0.04),
        (16, 0.16),
        (64, 0.64),
    ]
    assert {point.expert_share for point in profile.prefill} == {0.0}


def test_a_real_backend_counts_the_experts_of_made_up_layers() -> None:
    backend = TorchBackend(BackendOptions(device="cpu", threads=1))
    profile = probe_layer(backend, expert_config(num_experts=16), SteppingClock(), value_bytes=4)
    shares = [point.expert_share for point in profile.decode]
    assert shares[0] == 0.0
    assert 2 / 16 <= shares[1] < shares[2] <= shares[3] <= 1
    assert shares[2] < 1 - (14 / 16) ** 16, "inputs have a common part, so routers prefer some experts"


@pytest.mark.parametrize(
    ("backend", "device"), [("torch", "cpu"), pytest.param("mlx", "cpu", marks=pytest.mark.long), ("emulated", "auto")]
)
def test_recurrent_layers_are_measured(backend: str, device: str) -> None:
    made = create_backend(backend, BackendOptions(device=device, threads=1))
    profile = probe_layer(made, MODELS["all of them"], SteppingClock(), value_bytes=4)
    assert [point.size for point in profile.decode] == [1, 2, 4, 8, 16, 32]
    assert [point.size for point in profile.prefill] == [32, 128, 512]


class SteppingClock(FakeClock):
    """Time passes between two looks, so that every point has the fewest runs."""

    def monotonic_s(self) -> float:
        self.advance(0.01)
        return super().monotonic_s()
