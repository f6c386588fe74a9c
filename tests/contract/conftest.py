"""Every contract test of a backend runs against each of them; one whose library or device is missing skips by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgepipe.model.facts import ModelConfig
from tests.support.backend_maker import CONFIGS, Maker

BACKENDS = [
    pytest.param(("emulated", "auto"), id="emulated"),
    pytest.param(("torch", "cpu"), id="torch"),
    pytest.param(("torch", "cuda"), id="torch-cuda", marks=pytest.mark.gpu),
    pytest.param(("mlx", "cpu"), id="mlx"),
]


@pytest.fixture(params=BACKENDS)
def maker(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """One of the backends; whatever it made is closed at the end."""
    name, device = request.param
    maker = Maker(name=name, device=device, made=[])
    yield maker
    for backend in maker.made:
        backend.close()


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """The shape of a tiny model, one of each family."""
    return CONFIGS[request.param]()
