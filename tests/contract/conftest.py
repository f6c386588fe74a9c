"""Every contract test of a backend runs against each of the three; one whose library is missing skips by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_maker import CONFIGS, Maker

from edgepipe.model.facts import ModelConfig


@pytest.fixture(params=["emulated", "torch", "mlx"])
def maker(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """One of the backends; whatever it made is closed at the end."""
    maker = Maker(name=request.param, made=[])
    yield maker
    for backend in maker.made:
        backend.close()


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """The shape of a tiny model, one of each family."""
    return CONFIGS[request.param]()
