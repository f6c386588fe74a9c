"""GGUF files in F16, with biases in F32: a CPU keeps the weights and the embedding in two bytes each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch.cpu.device import CpuDevice  # noqa: E402
from edgepipe_torch.cpu.linear import HalfLinear, half_works  # noqa: E402
from edgepipe_torch.layers.loading import load_slices  # noqa: E402
from edgepipe_torch.layers.rope import Rotations  # noqa: E402

from edgepipe.spec.facts import LayerRange, Slice  # noqa: E402
from edgepipe.weights.weights import open_weights  # noqa: E402
from tests.support.models.changed_gguf import Arrays, write_changed  # noqa: E402
from tests.support.models.family_files import write_family_gguf  # noqa: E402


def narrow(tensors: Arrays) -> Arrays:
    return {name: each.astype(np.float16) if each.ndim > 1 else each for name, each in tensors.items()}


@pytest.mark.skipif(not half_works(), reason="this CPU multiplies no fp16 weights")
def test_float32_biases_leave_weights_in_two_bytes(tmp_path: Path) -> None:
    plain = write_family_gguf(tmp_path / "plain.gguf", "qwen2")
    source = open_weights(write_changed(tmp_path / "narrow.gguf", plain, narrow))
    [loaded] = load_slices(
        [Slice(index=0, layers=LayerRange(0, 2), embedding=True, head=False)],
        source,
        lambda _progress: None,
        device=CpuDevice(torch.float32),
        host=CpuDevice(torch.float32),
        rotations=Rotations(source.config).kinds,
    )
    assert "model.layers.0.self_attn.q_proj.bias" in {info.name for info in source.weights(loaded.part)}
    assert all(isinstance(layer.linears[0], HalfLinear) for layer in loaded.layers)
    assert cast("Any", loaded.embedding).dtype == torch.float16
