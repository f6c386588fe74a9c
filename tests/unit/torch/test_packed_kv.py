"""KV as codes: what is stored, and how far results are from those of float KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.layers import packed_attention  # noqa: E402
from edgepipe_torch.layers.head_shape import layer_heads  # noqa: E402
from edgepipe_torch.layers.kv_codes import EightBits, codes_of  # noqa: E402
from edgepipe_torch.layers.packed_kv import PackedKVStorage  # noqa: E402

from edgepipe.backend.types import BackendOptions, BlockCopy  # noqa: E402
from edgepipe.errors import ConfigInvalid  # noqa: E402
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices  # noqa: E402
from edgepipe.spec.tensors import StoredTensor  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row, token_ids  # noqa: E402
from tests.support.models.specs import first_attention  # noqa: E402

Floats = npt.NDArray[np.float32]
FORMS = ("8bit", "4bit")
EIGHT = EightBits(8)
BLOCKS = 24
LLAMA = tiny_config()
LARGE_HEADS = tiny_config(num_kv_heads=2, head_dim=64)
PROMPT: list[int] = np.random.default_rng(5).integers(0, LLAMA.vocab_size, 200).tolist()
HEADS = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 3), st.just(8)), elements=st.floats(-6e4, 6e4, width=32)
)


class OutlierWeights(TinyWeights):
    """One rotary pair of every key is 16 times as large, and of every query 16 times as small."""

    def read(self, name: str) -> StoredTensor:
        raw = super().read(name)
        factor = 16 if name.endswith("k_proj.weight") else 1 / 16 if name.endswith("q_proj.weight") else 0
        if not factor:
            return raw
        size = first_attention(self.config).head_dim
        values = torch.from_numpy(raw.data).view(torch.bfloat16).clone().view(-1, size, self.config.hidden_size)
        values[:, [0, size // 2]] *= factor
        return StoredTensor(info=raw.info, data=values.flatten().view(torch.uint8).numpy())


def loaded(config: ModelConfig, kv: str, weights: TinyWeights | None = None, dtype: str = "float32") -> TorchBackend:
    backend = TorchBackend(BackendOptions(device="cpu", threads=1, dtype=dtype, kv=kv))
    slices = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    backend.load(slices, weights or TinyWeights(config), lambda _progress: None)
    backend.allocate_kv(num_blocks=BLOCKS, block_size=16)
    return backend


def logits(backend: TorchBackend, tokens: Sequence[int], *, position: int = 0, first_block: int = 0) -> Floats:
    row = step_row(position, len(tokens), (first_block, 16))
    return run_step(backend, make_step([row]), token_ids(tokens)).astype(np.float32)


@given(HEADS)
def test_a_value_is_rounded_by_at_most_half_a_scale(values: Floats) -> None:
    codes, scales = (made.double().numpy() for made in EIGHT.encode(torch.from_numpy(values)))
    assert (np.abs(codes * scales[..., None] - values) <= scales[..., None] * 0.5000001).all()
    assert (scales <= np.abs(values).max(-1) / 127 * 1.002 + 2**-23).all()


@given(values=HEADS, form=st.sampled_from(FORMS))
def test_a_token_s_codes_depend_on_that_token_alone(values: Floats, form: str) -> None:
    made = codes_of(form, 8)
    together = made.encode(torch.from_numpy(values))
    for index, row in enumerate(values):
        alone = made.encode(torch.from_numpy(row[None]))
        assert torch.equal(alone.codes[0], together.codes[index])
        assert torch.equal(alone.scales[0], together.scales[index])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 3e38])
def test_a_head_beyond_the_scales_is_seen_and_no_other(bad: float, form: str) -> None:
    values = torch.ones(2, 2, 8)
    values[1, 0, 3] = bad
    made = codes_of(form, 8)
    found = made.widen(made.encode(values), torch.float32)
    assert found.isnan().all(-1).tolist() == found.isnan().any(-1).tolist() == [[False, False], [True, False]]
    assert torch.equal(found[0], found[1, 1].expand(2, 8))


@pytest.mark.parametrize("form", FORMS)
def test_copies_carry_codes_and_scales(form: str) -> None:
    config = tiny_config(num_layers=2, num_kv_heads=2, head_dim=8)
    heads = layer_heads([spec.attention for spec in config.layers if spec.attention])
    pool = PackedKVStorage(heads, classes=[0], num_blocks=[4], block_size=4, device=torch.device("cpu"), form=form)
    widen = pool.form(heads[0]).widen
    for layer in range(2):
        pool.write(layer, torch.arange(4, 8), torch.randn(4, 4, 8))
    expected = [widen(pool.run(layer, 4, 8), torch.float32) for layer in range(2)]
    assert all(each.abs().max() > 1 for each in expected)
    pool.copy([BlockCopy(1, 3), BlockCopy(3, 0)])
    pool.write(0, torch.arange(4, 8), torch.zeros(4, 4, 8))
    for layer in range(2):
        for found in (pool.run(layer, 0, 4), pool.gather(layer, torch.arange(12, 16))):
            assert torch.equal(widen(found, torch.float32), expected[layer])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_pool_takes_the_bytes_that_the_planner_counts(head_dim: int, form: str) -> None:
    config = tiny_config(head_dim=head_dim, num_layers=2)
    backend = loaded(config, form)
    (pool,) = backend._pools.values()
    assert isinstance(pool, PackedKVStorage)
    slices = make_slices([LayerRange(0, 2)], 2)
    assert pool.num_bytes == BLOCKS * backend.kv_block_bytes(config, slices, 16)
    assert pool.num_bytes == BLOCKS * 16 * config.kv_bytes_per_token(form=form)


@pytest.mark.parametrize(
    ("form", "config", "weights", "allowed"),
    [
        ("8bit", LLAMA, TinyWeights, 0.04),
        ("8bit", LLAMA, OutlierWeights, 0.25),
        ("4bit", LARGE_HEADS, TinyWeights, 0.6),
        ("4bit", LARGE_HEADS, OutlierWeights, 0.8),
    ],
)
def test_logits_are_near_those_of_float_kv(
    form: str, config: ModelConfig, weights: type[TinyWeights], allowed: float
) -> None:
    exact = logits(loaded(config, "", weights(config)), PROMPT)
    backend = loaded(config, form, weights(config))
    found = np.concatenate([logits(backend, PROMPT[:150]), logits(backend, PROMPT[150:], position=150)])
    assert 0 < np.sqrt(((found - exact) ** 2).mean()) <= allowed * exact.std()


@pytest.mark.parametrize(("form", "rounding"), [("8bit", 1e-4), ("4bit", 5e-2)])
def test_heads_in_turns_give_what_all_heads_give(form: str, rounding: float, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(num_kv_heads=4, qk_norm=True, windows=(50,))
    whole = loaded(config, form)
    expected = [logits(whole, PROMPT[:150]), logits(whole, PROMPT[150:151], position=150)]
    monkeypatch.setattr(packed_attention, "_WIDENED_BYTES", 1)
    turns = loaded(config, form)
    for found, wanted in zip(
        [logits(turns, PROMPT[:150]), logits(turns, PROMPT[150:151], position=150)], expected, strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=rounding * np.abs(wanted).max())


@pytest.mark.parametrize("form", FORMS)
def test_other_sequences_do_not_change_a_bit(form: str) -> None:
    def decode_beside(neighbour: Sequence[int]) -> Floats:
        backend = loaded(LLAMA, form)
        logits(backend, PROMPT[:20])
        logits(backend, neighbour[:20], first_block=5)
        rows = [step_row(20, 1, (0, 5)), step_row(20, 1, (5, 5), sequence=2)]
        return run_step(backend, make_step(rows), token_ids(PROMPT[20:21], neighbour[20:21])).astype(np.float32)

    first, second = decode_beside(PROMPT[50:]), decode_beside(PROMPT[100:])
    np.testing.assert_array_equal(first[0], second[0])
    assert not np.array_equal(first[1], second[1])


@pytest.mark.parametrize("form", FORMS)
def test_a_nan_stays_in_its_sequence_and_block(form: str) -> None:
    backend = loaded(LLAMA, form)
    logits(backend, PROMPT[:20])
    logits(backend, PROMPT[:20], first_block=5)
    (pool,) = backend._pools.values()
    pool.write(
        0,
        torch.tensor([3]),
        torch.full((1, 2 * first_attention(LLAMA).num_kv_heads, first_attention(LLAMA).head_dim), torch.nan),
    )
    rows = [step_row(20, 1, (0, 5)), step_row(20, 1, (5, 5), sequence=2)]
    found = run_step(backend, make_step(rows), token_ids(PROMPT[20:21], PROMPT[20:21]))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()
    assert np.isfinite(logits(backend, PROMPT[:5])).all()  # written again


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="kv cannot be '2bit'"):
        TorchBackend(BackendOptions(device="cpu", kv="2bit"))
