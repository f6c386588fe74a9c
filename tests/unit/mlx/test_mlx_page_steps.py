"""Whole steps of the MLX backend with attention over pages, beside those that attend sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("torch", reason="torch is not installed")

import mlx.core as mx
from edgepipe_mlx import backend as mlx_backend
from edgepipe_mlx import own_kernels
from edgepipe_mlx.pages.kernels import MetalPages, PageKernels, ReferencePages

from edgepipe.backend.types import SlowPath, StepRow
from tests.support.backends.host_compiler import COMPILER
from tests.support.backends.metal_kernels import HostKernels
from tests.support.backends.mlx_models import Chain, MemorySource, cpu_options, random_weights, row, tiny_config

NOTHING = SlowPath(what="one after another", cost="time", reason="a compiler's error")
PROMPTS = np.random.default_rng(3).integers(0, 97, (3, 48)).tolist()
TABLES = [((20, 4),), ((9, 1), (2, 1), (5, 1), (0, 1)), ((12, 2), (16, 2))]


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch) -> Callable[[PageKernels | SlowPath], None]:
    """Load as on Metal, and compute on the CPU."""

    def choose(found: PageKernels | SlowPath) -> None:
        for module in (mlx_backend, own_kernels):
            monkeypatch.setattr(module, "is_cpu", lambda _device: False)
        monkeypatch.setattr(own_kernels, "checked_pages", lambda _forms: found)

    return choose


def steps() -> Iterator[list[tuple[int, int, int]]]:
    """Sequence, position and new tokens of each row: prompts, decode steps, drafts, and a prompt between others."""
    yield [(0, 0, 30), (1, 0, 33)]
    yield [(0, 30, 1), (1, 33, 1)]
    yield [(0, 31, 4), (2, 0, 20), (1, 34, 1)]
    yield [(0, 35, 1), (1, 35, 8), (2, 20, 2)]
    yield [(1, 43, 1)]
    yield [(0, 36, 1)]
    yield [(2, 22, 20)]


def logits(kv: str, windows: Sequence[int | None]) -> list[np.ndarray]:
    config = tiny_config(head_dim=16, windows=windows)
    chain = Chain(MemorySource(config, random_weights(config)), options=cpu_options(kv=kv, weights="wide"))
    found: list[np.ndarray] = []
    for parts in steps():
        rows: list[StepRow] = []
        tokens: list[int] = []
        for sequence, position, count in parts:
            rows.append(row(position, count, *TABLES[sequence], sequence=sequence))
            tokens += PROMPTS[sequence][position : position + count]
        found.append(chain.run(tokens, rows))
    chain.backend.close()
    return found


@pytest.mark.parametrize("kv", ["", "8bit", "4bit"], ids=["float KV", "8-bit KV", "4-bit KV"])
@pytest.mark.parametrize("windows", [(None,), (None, 7, 20)], ids=["full", "windowed"])
def test_steps_give_the_logits_of_steps_without(
    kv: str, windows: Sequence[int | None], on_metal: Callable[[PageKernels | SlowPath], None]
) -> None:
    on_metal(NOTHING)
    expected = logits(kv, windows)
    on_metal(ReferencePages())
    assert_close(logits(kv, windows), expected)


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize(("kv", "window"), [("", 7), ("4bit", None)], ids=["float KV, windowed", "4-bit KV"])
def test_steps_by_the_kernels_own_source(
    kv: str,
    window: int | None,
    on_metal: Callable[[PageKernels | SlowPath], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_metal(NOTHING)
    expected = logits(kv, (window,))
    host = HostKernels(tmp_path)
    monkeypatch.setattr(mx.fast, "metal_kernel", host.make)
    on_metal(MetalPages())
    assert_close(logits(kv, (window,)), expected)
    assert host.launches == 2 * 3 * (5 if kv else 4)  # MLX reads floats of a sequence in one run itself


def assert_close(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Equal but for the order of sums."""
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4 * float(np.abs(theirs).max()))


def test_users_hear_that_sequences_attend_one_after_another(on_metal: Callable[[PageKernels | SlowPath], None]) -> None:
    on_metal(NOTHING)
    config = tiny_config(head_dim=16)
    chain = Chain(MemorySource(config, random_weights(config)), options=cpu_options(weights="wide"))
    assert chain.plain.slow_paths(16) == (NOTHING,)
    on_metal(ReferencePages())
    chain.plain.load(chain.slices, MemorySource(config, random_weights(config)), lambda _: None)
    assert chain.plain.slow_paths(32) == ()
