"""Every contract test of a backend runs against each of them; one whose library or device is missing skips by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgepipe.spec.facts import ModelConfig
from tests.support.backends.maker import CONFIGS, Maker

BACKENDS = [
    pytest.param({"name": "emulated", "device": "auto"}, id="emulated"),
    pytest.param({"name": "torch", "device": "cpu"}, id="torch"),
    # Pages and graphs with the types and steps that CUDA has, so that both pass the same bounds.
    pytest.param({"name": "torch", "device": "cpu", "dtype": "bfloat16", "paged_on_cpu": True}, id="torch-paged"),
    pytest.param(
        {"name": "torch", "device": "cuda", "dtype": "bfloat16", "block_size": 256},
        id="torch-cuda",
        marks=pytest.mark.gpu,
    ),
    # Cards without pages attend sequence by sequence, which float32 compares closely.
    pytest.param({"name": "torch", "device": "cuda"}, id="torch-cuda-float32", marks=pytest.mark.gpu),
    pytest.param({"name": "mlx", "device": "cpu"}, id="mlx"),
    pytest.param({"name": "emulated", "device": "auto", "kv": "8bit"}, id="emulated-kv8"),
    pytest.param({"name": "torch", "device": "cpu", "kv": "8bit"}, id="torch-kv8"),
    pytest.param({"name": "torch", "device": "cpu", "dtype": "bfloat16", "kv": "8bit"}, id="torch-bf16-kv8"),
    pytest.param({"name": "torch", "device": "cuda", "kv": "8bit"}, id="torch-cuda-kv8", marks=pytest.mark.gpu),
    pytest.param({"name": "mlx", "device": "cpu", "kv": "8bit"}, id="mlx-kv8"),
    pytest.param({"name": "emulated", "device": "auto", "kv": "4bit"}, id="emulated-kv4"),
    pytest.param({"name": "torch", "device": "cpu", "kv": "4bit"}, id="torch-kv4"),
    pytest.param({"name": "torch", "device": "cpu", "dtype": "bfloat16", "kv": "4bit"}, id="torch-bf16-kv4"),
    pytest.param({"name": "torch", "device": "cuda", "kv": "4bit"}, id="torch-cuda-kv4", marks=pytest.mark.gpu),
    pytest.param({"name": "mlx", "device": "cpu", "kv": "4bit"}, id="mlx-kv4"),
]


@pytest.fixture(params=BACKENDS)
def maker(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """One of the backends; whatever it made is closed at the end."""
    maker = Maker(**request.param, made=[])
    yield maker
    for backend in maker.made:
        backend.close()
    maker.made.clear()


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """The shape of a tiny model, one of each family."""
    return CONFIGS[request.param]()
