"""Recorded decode steps of packed weights, where windowed layers have pools of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu.kernels import KernelsUnavailable, cpu_kernels  # noqa: E402
from edgepipe_torch.cpu.replay import DecodeReplays  # noqa: E402

from edgepipe.backend.types import ActivationType, BackendOptions, BlockRun, WindowRuns  # noqa: E402
from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from tests.support.backends.maker import cut  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row, token_ids  # noqa: E402
from tests.support.models.packed import PackedTinyModel  # noqa: E402

WINDOW, BLOCK = 9, 4
CONFIG = tiny_config(
    num_layers=3,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=304,
    windows=(WINDOW, None, WINDOW),
)


@pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")
def test_a_recorded_step_reads_each_class_s_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[int] = []
    run = DecodeReplays.run
    monkeypatch.setattr(DecodeReplays, "run", lambda *given: (replayed.append(1), run(*given))[1])
    whole, few = backend(()), backend((6,))
    tokens = np.random.default_rng(3).integers(0, 290, 60).tolist()
    position = 0
    for count in (13, *(1,) * 30, 3, 1, 1):
        row = step_row(position, count, (0, 16))
        first = max(0, position - WINDOW + 1) // BLOCK
        places = range(first, (position + count - 1) // BLOCK + 1)
        held = replace(row, windows=(WindowRuns(first, tuple(BlockRun(place * 5 % 6, 1) for place in places)),))
        ids = token_ids(tokens[position : position + count])
        found, expected = run_step(few, make_step([held]), ids), run_step(whole, make_step([row]), ids)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
        position += count
    assert len(replayed) == 2 * 33


def backend(window_blocks: tuple[int, ...]) -> TorchBackend:
    made = TorchBackend(BackendOptions(device="cpu", activation_type=ActivationType.FLOAT32, threads=1))
    made.load(cut(CONFIG, ()), PackedTinyModel(CONFIG, {"": "Q8_0"}), lambda _progress: None)
    made.allocate_kv(num_blocks=16, block_size=BLOCK, window_blocks=window_blocks)
    return made
