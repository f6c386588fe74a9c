"""Joined projections, and compiled parts of layers, compute what the projections and parts do alone."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from edgepipe_mlx import backend as mlx_backend
from edgepipe_mlx import recurrent as mixers
from edgepipe_mlx.experts import ExpertLinear, JoinedExperts, PackedStack
from edgepipe_mlx.joined import JoinedLinear
from edgepipe_mlx.layer_graphs import MOST_ROWS, Compiled
from edgepipe_mlx.matrices import Linear, PackedMatrix, WideMatrix
from edgepipe_mlx.packing import lay_out, mlx_form

from edgepipe.backend.types import RowState, StateWrite
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.testing.tiny_model import TinyWeights
from tests.support.backends.mlx_models import cpu_options
from tests.support.backends.steps import make_step, run_step, step_row, token_ids
from tests.support.models.packed import random_packed
from tests.support.models.recurrent_layers import MODELS

INPUTS = 256
CPU = mx.Device(mx.cpu)


@pytest.fixture(autouse=True)
def on_cpu() -> None:
    mlx_backend.configure(CPU)


def matrix(scheme: str, rows: int, *, narrow: bool = False, seed: int = 0) -> PackedMatrix:
    packed = random_packed(scheme, (rows, INPUTS), np.random.default_rng([seed, rows]))
    form = mlx_form(packed.form, INPUTS)
    assert form is not None
    planes = lay_out(packed, form, narrow=narrow)
    return PackedMatrix(planes, dtype=mx.bfloat16 if narrow else mx.float32, in_float32=True)


def rows_of(count: int, *, narrow: bool = False) -> mx.array:
    values = np.random.default_rng(1).standard_normal((count, INPUTS)).astype(np.float32)
    return mx.array(values).astype(mx.bfloat16 if narrow else mx.float32)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "by float16"])
@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize(
    ("schemes", "together"),
    [
        (["Q4_K", "Q4_K", "Q4_K"], 1),
        (["Q4_K", "Q4_K", "Q6_K"], 2),
        (["Q4_0", "Q4_K", "Q4_K"], 1),
        (["Q8_0", "Q8_0", "F32", "Q8_0"], 1),
        (["MXFP4", "MXFP4"], 2),
    ],
    ids=str,
)
def test_joined_projections(schemes: list[str], together: int, activated: bool, narrow: bool) -> None:
    """Each value is the same: a kernel computes each of a matrix' rows alone."""
    sizes = (64, 32, 48, 16)
    draw = np.random.default_rng(2)
    biases = [mx.array(draw.standard_normal(size).astype(np.float32)) for size in sizes]
    dtype = mx.bfloat16 if narrow else mx.float32
    parts = [
        Linear(
            WideMatrix(mx.array(draw.standard_normal((size, INPUTS)).astype(np.float32)).astype(dtype))
            if scheme == "F32"
            else matrix(scheme, size, narrow=narrow, seed=index),
            biases[index].astype(dtype),
        )
        for index, (scheme, size) in enumerate(zip(schemes, sizes, strict=False))
    ]
    x = rows_of(3, narrow=narrow)
    alone = [part.multiply(x) for part in parts]
    joined = JoinedLinear(parts, together=together, activated=activated)
    assert joined.is_together == (together > 1)
    if joined.is_together:
        alone = [mx.concatenate(alone[:together], axis=-1), *alone[together:]]
    for found, expected in zip(joined.multiply(x), alone, strict=True):
        assert mx.array_equal(found, expected)


def test_what_does_not_join_is_never_together() -> None:
    parts = [Linear(matrix(scheme, 64), None) for scheme in ("Q4_0", "Q8_0", "Q8_0")]
    joined = JoinedLinear(parts, together=2)
    assert not joined.is_together
    assert [each.shape[-1] for each in joined.multiply(rows_of(1))] == [64, 64, 64]


@pytest.mark.parametrize("schemes", [("Q4_0", "Q4_0"), ("Q4_0", "Q8_0"), ("Q4_0",)], ids="+".join)
def test_joined_experts(schemes: tuple[str, ...]) -> None:
    count, size, draw = 4, 32, np.random.default_rng(3)
    parts: list[ExpertLinear] = []
    for scheme in schemes:
        packed = random_packed(scheme, (count * size, INPUTS), draw)
        form = mlx_form(packed.form, INPUTS)
        assert form is not None
        planes = lay_out(packed, form, narrow=False)
        stack = PackedStack(planes, count=count, dtype=mx.float32, in_float32=True)
        parts.append(ExpertLinear(stack, mx.array(draw.standard_normal((count, size)).astype(np.float32))))
    experts = mx.array([[3, 0], [1, 2], [1, 3]], mx.uint32)
    x = rows_of(3)[:, None, None]
    alone = [part.multiply_by(x, experts, is_sorted=False) for part in parts]
    found = JoinedExperts(parts).multiply_by(x, experts, is_sorted=False)
    for own, expected in zip(found, alone, strict=True):
        assert mx.array_equal(own, expected)


def test_more_rows_than_a_compiled_step_run_as_they_are() -> None:
    calls: list[int] = []

    def double(x: mx.array) -> list[mx.array]:
        calls.append(x.shape[0])
        return [x + x]

    compiled = Compiled(double)
    for count in (MOST_ROWS, MOST_ROWS, MOST_ROWS + 1):
        (found,) = compiled(mx.ones((count, 2)))
        assert found.shape == (count, 2)
    assert calls[-1] == MOST_ROWS + 1


CONFIG = replace(MODELS["short convolution"], layers=MODELS["short convolution"].layers[:2])


def decoded() -> list[np.ndarray]:
    """Logits of four tokens, one step each, of a model with a recurrent layer and one with attention."""
    backend = mlx_backend.MlxBackend(cpu_options())
    backend.load(make_slices([LayerRange(0, 2)], 2), TinyWeights(CONFIG), lambda _progress: None)
    backend.allocate_kv(num_blocks=1, block_size=16, state_slots=1)
    found: list[np.ndarray] = []
    for at, token in enumerate((5, 3, 17, 3)):
        row = replace(step_row(at, 1, (0, 1)), state=RowState(0 if at else None, (StateWrite(1, 0),)))
        found.append(run_step(backend, make_step([row]), token_ids([token])))
    backend.close()
    return found


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles for a CPU by g++")
def test_compiled_steps_give_the_logits_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU compiling is off, so this test turns it on."""
    expected = decoded()
    monkeypatch.setattr(mlx_backend, "configure", lambda _device: mx.set_default_device(CPU))
    traced: list[int] = []
    original = mixers.ShortConvMixer._step

    def step(self: object, made: tuple[mx.array, ...], state: tuple[mx.array, ...]) -> object:
        traced.append(made[0].shape[0])
        return original(self, made, state)  # type: ignore[arg-type]  # it is the mixer

    monkeypatch.setattr(mixers.ShortConvMixer, "_step", step)
    mx.enable_compile()
    gc.disable()  # weights must be free at once
    held = mx.get_active_memory()
    try:
        found = decoded()
        assert mx.get_active_memory() == held, "compiled parts keep nothing of an unloaded model"
    finally:
        gc.enable()
        mx.disable_compile()
    assert traced == [1], "MLX repeats what it traced"
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-5 * float(np.abs(other).max()))
