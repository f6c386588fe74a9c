"""KV as codes in MLX: what is stored, and how far results are from those of float KV."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

mx: Any = pytest.importorskip("mlx.core")

from edgepipe_mlx.attention import LayerStep, StepArrays  # noqa: E402
from edgepipe_mlx.device import configure  # noqa: E402
from edgepipe_mlx.kv import RestArrays  # noqa: E402
from edgepipe_mlx.kv_codes import EightBits, FourBits, codes_of  # noqa: E402
from edgepipe_mlx.latent_kv import latent_pool  # noqa: E402
from edgepipe_mlx.packed_kv import packed_pool  # noqa: E402

from edgepipe.backend.step_layout import lay_out_step  # noqa: E402
from edgepipe.spec.kv_forms import REST_TOKENS, span_tokens  # noqa: E402
from edgepipe.spec.layer_spec import Latent  # noqa: E402
from tests.support.backends.mlx_models import Chain, MemorySource, cpu_options, random_weights, row, tiny_config  # noqa: E402
from tests.support.backends.steps import make_step, step_row  # noqa: E402
from tests.support.models.specs import first_attention  # noqa: E402

FORMS = ("8bit", "4bit")
HEADS = arrays.arrays(np.float32, (2, 3, 8), elements=st.floats(-6e4, 6e4, width=32))


@given(HEADS)
def test_a_value_is_rounded_by_at_most_half_a_scale(values: np.ndarray) -> None:
    codes, scales = (np.array(made).astype(np.float64) for made in EightBits(8).encode(mx.array(values)))
    assert (np.abs(codes * scales - values) <= scales * 0.5000001).all()
    assert np.abs(codes).max() <= 127


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_values_read_are_rounded_once(dtype: Any, form: str) -> None:
    configure(mx.Device(mx.cpu))
    pool = packed_pool(num_kv_heads=2, head_dim=8, num_blocks=5, block_size=16, dtype=dtype, form=form)
    made = codes_of(form, 8)
    keys, values = mx.random.normal((2, 20, 2, 1, 8), key=mx.random.key(0))
    pool.write(mx.arange(16, 36), keys, values, RestArrays(mx.arange(20), mx.arange(48, 68)))
    layout = lay_out_step(make_step([step_row(16, 4, (1, 2))]), block_size=16, num_blocks=4, dtype=np.int32)
    for written, found in zip((keys, values), pool.read(layout.rows[0], 3, None), strict=True):
        expected = made.decoded(*made.encode(written[3:20].squeeze(2).swapaxes(0, 1)), mx.float32).astype(dtype)
        assert found.dtype == dtype
        assert mx.array_equal(found[0], expected)


@pytest.mark.parametrize("size", [(8, 0), (64, 0), (80, 0), (576, 512)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_4_bits_are_those_of_torch(size: tuple[int, int], scale: float) -> None:
    torch = pytest.importorskip("torch")
    from edgepipe_torch.layers.kv_codes import FourBits as TorchFourBits

    values = (scale * np.random.default_rng(1).standard_normal((3, 2, size[0]))).astype(np.float32)
    own, other = codes_of("4bit", *size), TorchFourBits(*size)
    assert isinstance(own, FourBits)
    codes, scales, rests = own.encode_whole(mx.array(values))
    made = codes, scales
    whole = other.encode_whole(torch.from_numpy(values))
    expected = whole.codes
    pair = np.array(own.whole(codes, scales, rests, mx.float32)), other.widen_whole(whole, torch.float32).numpy()
    np.testing.assert_allclose(*pair, rtol=0, atol=scale / 16)
    assert np.sqrt(((pair[0] - pair[1]) ** 2).mean()) < 0.002 * pair[1].std()
    same = [(np.array(a) == b.numpy()).mean() for a, b in zip(made, expected, strict=True)]
    assert min(same) > 0.99, "sums that differ in their last bit may give a neighbouring code"
    read, wanted = np.array(own.decoded(*made, mx.float32)), other.widen(expected, torch.float32).numpy()
    assert np.sqrt(((read - wanted) ** 2).mean()) < 0.02 * wanted.std()
    queries = values[..., : size[1] or size[0]]
    np.testing.assert_allclose(
        np.array(own.turned(mx.array(queries))), other.turned(torch.from_numpy(queries)).numpy(), atol=1e-5 * scale
    )


@settings(max_examples=25)
@given(
    chunks=st.lists(st.sampled_from([1, 1, 4, 7, 20, 50]), min_size=1, max_size=4),
    block=st.sampled_from([4, 32]),
    window=st.sampled_from([None, 5, 40]),
    scattered=st.booleans(),
    latent=st.booleans(),
    max_scores=st.sampled_from([None, 900]),
)
def test_a_token_reads_its_span_with_eight_bits_and_the_tokens_before_with_four(
    chunks: list[int], block: int, window: int | None, scattered: bool, latent: bool, max_scores: int | None
) -> None:
    """In any chunks, in float64 over the stored values. Half of a latent's numbers are its value."""
    configure(mx.Device(mx.cpu))
    length, span, heads = sum(chunks), min(block, 32), 1 if latent else 2
    spec = replace(
        first_attention(tiny_config(num_heads=4, num_kv_heads=heads, head_dim=64)),
        window=window,
        latent=Latent(query_rank=0, kv_rank=32, nope_dim=32, rope_dim=32, value_dim=32) if latent else None,
    )
    count = -(-(length + REST_TOKENS) // block)
    sizes = {"num_blocks": 2 * count, "block_size": block, "dtype": mx.float32, "form": "4bit"}
    pool = latent_pool(spec, **sizes) if latent else packed_pool(num_kv_heads=heads, head_dim=64, **sizes)
    order = np.random.default_rng(count).permutation(2 * count)[:count].tolist()
    runs = [(each, 1) for each in order] if scattered else [(1, count)]
    rng = np.random.default_rng(length)
    asked = rng.standard_normal((length, 4, 64)).astype(np.float32)
    keys = rng.standard_normal((length, heads, 64)).astype(np.float32)
    values = keys[..., :32] if latent else rng.standard_normal((length, heads, 64)).astype(np.float32)
    parts, position = list[np.ndarray](), 0
    for number in chunks:
        layout = lay_out_step(
            make_step([step_row(position, number, *runs)]),
            block_size=block,
            num_blocks=2 * count,
            span=span_tokens("4bit", block),
            dtype=np.int32,
        )
        step = LayerStep(StepArrays(layout, max_scores=max_scores), pool, spec, block_size=block)
        own = [mx.array(each[position : position + number])[:, :, None] for each in (asked, keys, values)]
        parts.append(np.array(step.attend(own[0], own[1], own[2], None))[:, :, 0])
        position += number
    form = codes_of("4bit", 64, spec.latent_width)
    assert isinstance(form, FourBits)
    rough, whole = list[np.ndarray](), list[np.ndarray]()
    for vectors in (keys,) if latent else (keys, values):
        codes, scales, rests = form.encode_whole(mx.array(vectors))
        rough.append(np.array(form.turned(form.decoded(codes, scales, mx.float32))).astype(np.float64))
        whole.append(np.array(form.turned(form.whole(codes, scales, rests, mx.float32))).astype(np.float64))
    found = np.concatenate(parts)
    for place in range(length):
        first, start = 0 if window is None else max(0, place - window + 1), place // span * span
        seen = [
            np.repeat(np.concatenate([far[first:start], near[max(first, start) : place + 1]]), 4 // heads, axis=1)
            for far, near in zip(rough, whole, strict=True)
        ]
        logits = np.einsum("lhd,hd->hl", seen[0], asked[place].astype(np.float64)) * spec.logit_scale
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        expected = np.einsum("hl,lhd->hd", shares, seen[-1][..., : values.shape[-1]])
        np.testing.assert_allclose(found[place], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, 3e38])
def test_a_head_beyond_the_scales_is_seen_and_no_other(bad: float, form: str) -> None:
    values = np.ones((2, 2, 8), np.float32)
    values[1, 0, 3] = bad
    made = codes_of(form, 8)
    found = np.isnan(np.array(made.decoded(*made.encode(mx.array(values)), mx.float32)))
    assert found.any(-1).tolist() == found.all(-1).tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("form", FORMS)
def test_a_pool_takes_the_bytes_that_the_planner_counts(form: str) -> None:
    config = tiny_config()
    chain = Chain(MemorySource(config, random_weights(config)), options=cpu_options(kv=form), num_blocks=1)
    chain.plain.allocate_kv(num_blocks=1, block_size=16)
    before = mx.get_active_memory()
    chain.plain.allocate_kv(num_blocks=1001, block_size=16)
    grown = mx.get_active_memory() - before
    assert grown == pytest.approx(1000 * chain.backend.kv_block_bytes(config, chain.slices, 16), rel=0.02)


@pytest.mark.parametrize(("form", "allowed"), [("8bit", 0.04), ("4bit", 0.5)])
@pytest.mark.parametrize("windows", [(None,), (None, 7, 20)], ids=["full", "windowed"])
def test_logits_are_near_those_of_float_kv(windows: tuple[int | None, ...], form: str, allowed: float) -> None:
    """A step of two sequences, one of them scattered, after a step that filled their first blocks."""
    config = tiny_config(windows=windows, head_dim=32)
    prompts = np.random.default_rng(5).integers(0, config.vocab_size, (2, 45)).tolist()
    results: list[np.ndarray] = []
    for kv in ("", form):
        chain = Chain(MemorySource(config, random_weights(config)), options=cpu_options(kv=kv))
        tables = [((10, 5),), ((9, 1), (2, 1), (5, 1), (0, 2))]
        for start, end in ((0, 40), (40, 45)):
            rows = [row(start, end - start, *table, sequence=n) for n, table in enumerate(tables)]
            found = chain.run([token for prompt in prompts for token in prompt[start:end]], rows)
        results.append(found)
        chain.backend.close()
    exact, found = results
    assert 0 < np.sqrt(((found - exact) ** 2).mean()) <= allowed * exact.std()
