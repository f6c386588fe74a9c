"""What the MLX backend keeps in its blocks: runs, gathers, copies, truncation, and updates in place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx

from edgepipe.backend.types import ActivationType, BlockCopy
from edgepipe.spec.facts import ModelConfig
from tests.support.backends.mlx_models import (
    Chain,
    Float32s,
    MemorySource,
    cpu_options,
    random_weights,
    row,
    tiny_config,
)

WINDOWED = tiny_config(windows=(None, 7, 20))
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 97, 45)]
OTHER = [int(token) for token in np.random.default_rng(4).integers(0, 97, 30)]


@pytest.fixture(params=["", "8bit", "4bit"], ids=["float KV", "8-bit KV", "4-bit KV"])
def kv(request: pytest.FixtureRequest) -> str:
    form: str = request.param
    return form


@pytest.fixture(params=[tiny_config(), WINDOWED], ids=["full", "windowed"])
def chain(request: pytest.FixtureRequest, kv: str) -> Iterator[Chain]:
    config: ModelConfig = request.param
    source = MemorySource(config, random_weights(config))
    made = Chain(source, ranges=[(0, 1), (1, 3)], options=cpu_options(kv=kv))
    yield made
    made.backend.close()


def assert_same(got: Float32s, expected: Float32s) -> None:
    """Equal but for the order of sums."""
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


def whole(chain: Chain, tokens: list[int]) -> Float32s:
    """The tokens in one go, in one run of blocks that no other part of a test uses."""
    return chain.run(tokens, [row(0, len(tokens), (28, 4))])


def test_scattered_blocks_give_what_one_run_gives(chain: Chain) -> None:
    scattered = chain.run(PROMPT, [row(0, 45, (9, 1), (2, 1), (5, 1))])
    assert_same(scattered, whole(chain, PROMPT))


def test_sequences_of_different_lengths_share_a_step_without_touching_each_other(chain: Chain) -> None:
    expected = [whole(chain, PROMPT), whole(chain, OTHER)]
    chain.run(PROMPT[:44] + OTHER[:20], [row(0, 44, (0, 3)), row(0, 20, (9, 1), (6, 1), sequence=2)])
    mixed = chain.run(PROMPT[44:] + OTHER[20:], [row(44, 1, (0, 3)), row(20, 10, (9, 1), (6, 1), sequence=2)])
    assert_same(mixed, np.concatenate([expected[0][44:], expected[1][20:]]))


def test_a_chunk_without_logits_still_leaves_its_keys(chain: Chain) -> None:
    first = chain.run(PROMPT[:40], [row(0, 40, (0, 3))], logit_rows=[])
    assert first.shape == (0, 97)
    rest = chain.run(PROMPT[40:], [row(40, 5, (0, 3))], logit_rows=[4])
    assert_same(rest, whole(chain, PROMPT)[-1:])


def test_copied_blocks_serve_a_second_sequence(chain: Chain) -> None:
    chain.run(PROMPT[:32], [row(0, 32, (0, 2))], logit_rows=[])
    copies = (BlockCopy(0, 10), BlockCopy(1, 11))
    continued = chain.run(PROMPT[32:], [row(32, 13, (10, 3), sequence=2)], copies=copies)
    assert_same(continued, whole(chain, PROMPT)[32:])


def test_copies_apply_one_after_the_other(chain: Chain) -> None:
    chain.run(PROMPT[:16], [row(0, 16, (0, 1))], logit_rows=[])
    chain.run(OTHER[:16], [row(0, 16, (1, 1))], logit_rows=[])
    copies = (BlockCopy(0, 10), BlockCopy(1, 0), BlockCopy(10, 1))  # swaps blocks 0 and 1
    swapped = chain.run(
        PROMPT[16:20] + OTHER[16:20], [row(16, 4, (1, 2)), row(16, 4, (0, 1), (4, 1), sequence=2)], copies=copies
    )
    expected = np.concatenate([whole(chain, PROMPT[:20])[16:], whole(chain, OTHER[:20])[16:]])
    assert_same(swapped, expected)


def test_a_lower_position_truncates(chain: Chain) -> None:
    chain.run(PROMPT, [row(0, 45, (0, 3))], logit_rows=[])
    again = chain.run(OTHER[:5], [row(20, 5, (0, 3))])
    assert_same(again, whole(chain, PROMPT[:20] + OTHER[:5])[20:])


@pytest.mark.parametrize("table", [((0, 3),), ((9, 1), (2, 1), (5, 1))], ids=["one run", "scattered"])
def test_long_chunks_attended_in_parts_give_what_the_whole_gives(
    chain: Chain, table: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(chain, PROMPT)
    monkeypatch.setattr("edgepipe_mlx.backend.score_bytes", lambda _: 4 * 4 * 250)  # 250 scores for each of 4 heads
    assert_same(chain.run(PROMPT, [row(0, 45, *table)]), expected)


def test_a_reused_block_forgets_its_former_sequence(chain: Chain) -> None:
    expected = whole(chain, OTHER)
    chain.run(PROMPT, [row(0, 45, (0, 3))], logit_rows=[])
    assert_same(chain.run(OTHER, [row(0, 30, (0, 2))]), expected)


def test_steps_write_into_the_pool_and_do_not_copy_it(kv: str) -> None:
    config = tiny_config()
    chain = Chain(MemorySource(config, random_weights(config)), options=cpu_options(kv=kv), num_blocks=4096)
    pool_bytes = 4096 * chain.backend.kv_block_bytes(config, chain.slices, 16) // config.num_layers
    chain.run(PROMPT[:8], [row(0, 8, (100, 3))], logit_rows=[])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    chain.run(PROMPT[8:10], [row(8, 1, (100, 3)), row(0, 1, (7, 1), (3, 1), sequence=2)], copies=(BlockCopy(9, 8),))
    assert mx.get_peak_memory() - before < pool_bytes / 4


def test_kv_block_bytes_is_what_the_pools_take() -> None:
    config = tiny_config()
    for dtype in ("float32", "bfloat16"):
        chain = Chain(MemorySource(config, random_weights(config)), options=cpu_options(dtype=dtype), num_blocks=1)
        before = mx.get_active_memory()
        chain.backend.allocate_kv(num_blocks=1001, block_size=16)
        grown = mx.get_active_memory() - before
        assert grown == pytest.approx(1000 * chain.backend.kv_block_bytes(config, chain.slices, 16), rel=0.02)
        chain.backend.close()


@pytest.mark.parametrize("kind", list(ActivationType))
def test_cutting_the_model_only_rounds_what_travels(kind: ActivationType) -> None:
    config = tiny_config()
    source = MemorySource(config, random_weights(config))
    options = cpu_options(activation_type=kind)
    whole = Chain(source, options=options).run(PROMPT, [row(0, 45, (0, 3))])
    cut = Chain(source, ranges=[(0, 1), (1, 2), (2, 3)], options=options).run(PROMPT, [row(0, 45, (0, 3))])
    tolerance = 1e-5 if kind is ActivationType.FLOAT32 else 3e-2
    assert float(np.abs(whole - cut).max()) < tolerance * float(np.abs(whole).max())
