"""The demo model's weights, dequantised once for all pipelines."""

from __future__ import annotations

import pytest

from edgepipe.store.store import StoredModel
from tests.support.numerics.harness import BF16Weights


@pytest.fixture(scope="session")
def demo_weights(demo_model: StoredModel) -> BF16Weights:
    """The demo model's weights, dequantised once for all pipelines."""
    return BF16Weights(demo_model.open_weights())
