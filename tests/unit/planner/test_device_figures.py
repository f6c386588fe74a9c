"""Predictions of devices that nobody has measured: arithmetic about the kernels, on the cautious side."""

from __future__ import annotations

import pytest

from edgepipe.backend.devices import device_models, named_device, reported_device
from edgepipe.planner.device_figures import FIGURES, predicted_figures
from tests.unit.planner.test_usage_table import found_plan

HOST_S = 1.3e-3  # part of a step on CUDA that the arithmetic below leaves out
LLAMA, QWEN = "llama-3.1-8b:q4_k_m", "qwen3-30b-a3b:q4_k_m"


@pytest.mark.parametrize(
    ("device", "model", "tokens_per_s"),
    [("rtx4090", LLAMA, 110), ("rtx4090", QWEN, 1 / (5.2e-3 + 2.5e-3)), ("h100", LLAMA, 160), ("m4max", LLAMA, 57)],
)
def test_a_lone_chat_is_planned_on_the_cautious_side(device: str, model: str, tokens_per_s: float) -> None:
    """Seconds of the GPU and 2.5 ms of a turn, from counts of bytes, kernels and instructions."""
    assert 0.85 <= found_plan(model, device).tokens_per_s / tokens_per_s <= 1


@pytest.mark.parametrize(
    ("figure", "rows", "gpu_s"), [("decode_1", 1, 6.6e-3), ("decode_16", 16, 7.4e-3), ("decode_64", 64, 14.5e-3)]
)
def test_steps_of_an_rtx_4090_take_the_time_of_the_arithmetic(figure: str, rows: int, gpu_s: float) -> None:
    found = predicted_figures(named_device("rtx4090"), packing="torch-cuda", dtype="bfloat16")
    assert rows / found[figure] == pytest.approx(gpu_s + HOST_S, rel=0.03)
    assert 0.85 * 6700 <= found["prompt"] <= 6700


def test_every_device_has_every_prediction() -> None:
    for device in device_models().values():
        found = predicted_figures(device, packing=device.reads_as or "torch-cpu", dtype="bfloat16")
        assert found.keys() == FIGURES.keys() - {"gap", "power"}
        assert all(value > 0 for value in found.values())


@pytest.mark.parametrize(
    ("reported", "sheet"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("Apple M4 Max", "m4max"),
        ("Apple M4", "m4"),
    ],
)
def test_a_driver_names_a_device_of_the_table(reported: str, sheet: str) -> None:
    found = reported_device(reported)
    assert found is not None
    assert found == device_models()[sheet]


@pytest.mark.parametrize(
    "reported", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4070 Ti SUPER", "AMD EPYC 7763", ""]
)
def test_another_device_has_no_sheet(reported: str) -> None:
    assert reported_device(reported) is None
