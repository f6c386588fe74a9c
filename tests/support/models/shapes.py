"""The flat description of decoders whose layers are alike, for tests that compare single numbers."""

from __future__ import annotations

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.uniform import UniformShape, uniform_shape


def flat(config: ModelConfig) -> UniformShape:
    """Return the flat description of a config, which must have one."""
    shape = uniform_shape(config)
    assert shape is not None, "the layers differ"
    return shape
