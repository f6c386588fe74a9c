"""NVRTC for tests that compile kernels without a GPU."""

from __future__ import annotations

import pytest
from edgepipe_torch.cuda.kernels.nvrtc import Nvrtc, find_nvrtc
from edgepipe_torch.layers.compiled_code import KernelsUnavailable


def nvrtc_for(architecture: int) -> Nvrtc:
    """Return NVRTC. Skip the test if none is installed, or if it does not know the architecture."""
    try:
        nvrtc = find_nvrtc(None)
    except KernelsUnavailable as exc:
        pytest.skip(str(exc))
    if architecture not in nvrtc.architectures:
        pytest.skip(f"NVRTC {nvrtc.version} does not know sm_{architecture}")
    return nvrtc
