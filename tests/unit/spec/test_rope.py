"""Rotary frequencies and temperatures at places where the published formulas are easy to follow by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from edgepipe.spec.layer_spec import Rope, Temperature
from edgepipe.spec.rope import rotary_frequencies, temperatures


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_blends_between() -> None:
    """Of 32 pairs, the one at 10.5 turns 32 times in 4,096 tokens, and the one at 22.5 once."""
    rope = Rope(theta=10_000.0, scaling="yarn", factor=4.0, original_context=4096, beta_fast=32.0, beta_slow=1.0)
    plain = 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    scaled, amplitude = rotary_frequencies(rope, dims=64, context_length=16_384)
    assert plain[[0, 10]] / scaled[[0, 10]] == pytest.approx(1.0)
    assert plain[[23, 31]] / scaled[[23, 31]] == pytest.approx(4.0)
    assert scaled[15] / plain[15] == pytest.approx(1 - 5 / 13 + 5 / 13 / 4)
    assert amplitude == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_llama3_blends_a_pair_by_its_turns_in_the_context() -> None:
    """The only pair turns once in 2 pi tokens."""
    rope = Rope(theta=10_000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    for context, share in ((3, 0.0), (16, (16 / (2 * math.pi) - 1) / 3), (64, 1.0)):
        stretched, amplitude = rotary_frequencies(replace(rope, original_context=context), dims=2, context_length=128)
        assert stretched == pytest.approx([share + (1 - share) / 8])
        assert amplitude == 1.0


def test_temperatures_grow_by_whole_contexts() -> None:
    positions = np.array([0, 8191, 8192, 24_576])
    found = temperatures(Temperature(growth=0.1, context=8192), positions)
    assert found == pytest.approx([1.0, 1.0, 1.0 + 0.1 * math.log(2), 1.0 + 0.1 * math.log(4)])
