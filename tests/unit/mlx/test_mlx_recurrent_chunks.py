"""Recurrences of long rows on MLX: chunks computed at once, against numpy's one token after another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from edgepipe_mlx.device import configure
from edgepipe_mlx.recurrent_chunks import delta_tokens, scan_tokens, unit_inverse

Floats = npt.NDArray[np.float64]
HEADS = 3
LENGTHS = [1, 2, 37, 64, 65, 200]


def drawn(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape)


def given(*values: Floats) -> list[mx.array]:
    configure(mx.Device(mx.cpu))
    return [mx.array(each.astype(np.float32)) for each in values]


def close(found: mx.array, expected: Floats) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("size", [1, 2, 3, 37, 64])
@pytest.mark.parametrize("likeness", [0.0, 0.9, 1.0])
def test_the_inverse_is_exact_for_any_size_and_for_keys_that_are_alike(size: int, likeness: float) -> None:
    """Keys that are alike make the largest systems: every token writes where all others wrote."""
    keys = (1 - likeness) * drawn(1, 2, HEADS, size, 16) + likeness * drawn(2, 16)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    strict = np.tril(keys @ keys.swapaxes(-1, -2), -1)
    close(unit_inverse(*given(strict)), np.linalg.inv(strict + np.eye(size)))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_gated_delta_rule_in_chunks_is_that_token_by_token(length: int) -> None:
    queries, keys, values = drawn(1, HEADS, length, 8), drawn(2, HEADS, length, 8), drawn(3, HEADS, length, 6)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    log_decay, beta = -np.exp(drawn(4, HEADS, length) - 2), 1 / (1 + np.exp(-drawn(5, HEADS, length)))
    before = drawn(6, HEADS, 8, 6)
    memory, expected = before, np.empty((HEADS, length, 6))
    for at in range(length):
        key = keys[:, at, :, None]
        memory = memory * np.exp(log_decay[:, at])[:, None, None]
        error = values[:, at, None] - key.swapaxes(1, 2) @ memory
        memory = memory + beta[:, at, None, None] * key @ error
        expected[:, at] = (queries[:, at, None] @ memory)[:, 0]
    out, after = delta_tokens(*given(queries, keys, values, log_decay, beta, before))
    close(out, expected)
    close(after, memory)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_selective_scan_in_chunks_is_that_token_by_token(length: int) -> None:
    x, into, out_of = drawn(1, HEADS, length, 6), drawn(2, HEADS, length, 8), drawn(3, HEADS, length, 8)
    log_decay, before = -np.exp(drawn(4, HEADS, length) - 2), drawn(5, HEADS, 6, 8)
    memory, expected = before, np.empty((HEADS, length, 6))
    for at in range(length):
        memory = memory * np.exp(log_decay[:, at])[:, None, None] + x[:, at, :, None] * into[:, at, None]
        expected[:, at] = (memory @ out_of[:, at, :, None])[..., 0]
    out, after = scan_tokens(*given(x, into, out_of, log_decay, before))
    close(out, expected)
    close(after, memory)
