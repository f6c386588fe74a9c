"""8-bit KV: what is stored, and how far results are from those of float KV."""

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
from edgepipe_torch.layers.packed_kv import PackedKVStorage, encode  # noqa: E402

from edgepipe.backend.types import BackendOptions, BlockCopy  # noqa: E402
from edgepipe.errors import ConfigInvalid  # noqa: E402
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices  # noqa: E402
from edgepipe.spec.tensors import StoredTensor  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row, token_ids  # noqa: E402
from tests.support.models.specs import first_attention  # noqa: E402

Floats = npt.NDArray[np.float32]
LLAMA = tiny_config()
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
        size = first_attention(LLAMA).head_dim
        values = torch.from_numpy(raw.data).view(torch.bfloat16).clone().view(-1, size, LLAMA.hidden_size)
        values[:, [0, size // 2]] *= factor
        return StoredTensor(info=raw.info, data=values.flatten().view(torch.uint8).numpy())


def loaded(config: ModelConfig, kv: str, weights: TinyWeights | None = None, dtype: str = "float32") -> TorchBackend:
    backend = TorchBackend(BackendOptions(device="cpu", threads=1, dtype=dtype, kv=kv))
    slices = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    backend.load(slices, weights or TinyWeights(config), lambda _progress: None)
    backend.allocate_kv(num_blocks=24, block_size=16)
    return backend


def logits(backend: TorchBackend, tokens: Sequence[int], *, position: int = 0, first_block: int = 0) -> Floats:
    row = step_row(position, len(tokens), (first_block, 14))
    return run_step(backend, make_step([row]), token_ids(tokens)).astype(np.float32)


@given(HEADS)
def test_a_value_is_rounded_by_at_most_half_a_scale(values: Floats) -> None:
    codes, scales = (made.double().numpy() for made in encode(torch.from_numpy(values)))
    assert (np.abs(codes * scales[..., None] - values) <= scales[..., None] * 0.5000001).all()
    assert (scales <= np.abs(values).max(-1) / 127 * 1.002 + 2**-23).all()


@given(HEADS)
def test_a_token_s_codes_depend_on_that_token_alone(values: Floats) -> None:
    together = encode(torch.from_numpy(values))
    for index, row in enumerate(values):
        alone = encode(torch.from_numpy(row[None]))
        assert torch.equal(alone.codes[0], together.codes[index])
        assert torch.equal(alone.scales[0], together.scales[index])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_head_beyond_the_scales_is_seen_and_no_other(bad: float) -> None:
    values = torch.ones(2, 2, 8)
    values[1, 0, 3] = bad
    codes, scales = encode(values)
    assert scales.isnan().tolist() == [[False, False], [True, False]]
    assert torch.equal(codes[0] * scales[0].unsqueeze(-1), codes[1, 1] * scales[1, 1] + torch.zeros(2, 8))


def test_copies_carry_codes_and_scales() -> None:
    config = tiny_config(num_layers=2, num_kv_heads=2, head_dim=8)
    heads = layer_heads([spec.attention for spec in config.layers if spec.attention])
    pool = PackedKVStorage(heads, classes=[0], num_blocks=[4], block_size=4, device=torch.device("cpu"))
    for layer in range(2):
        pool.write(layer, torch.arange(4, 8), torch.randn(4, 4, 8))
    expected = [pool.run(layer, 4, 8).codes * pool.run(layer, 4, 8).scales.unsqueeze(-1) for layer in range(2)]
    pool.copy([BlockCopy(1, 3), BlockCopy(3, 0)])
    pool.write(0, torch.arange(4, 8), torch.zeros(4, 4, 8))
    for layer in range(2):
        for found in (pool.run(layer, 0, 4), pool.gather(layer, torch.arange(12, 16))):
            assert torch.equal(found.codes * found.scales.unsqueeze(-1), expected[layer])


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_pool_takes_the_bytes_that_the_planner_counts(head_dim: int) -> None:
    config = tiny_config(head_dim=head_dim, num_layers=2)
    backend = loaded(config, "8bit")
    (pool,) = backend._pools.values()
    assert isinstance(pool, PackedKVStorage)
    slices = make_slices([LayerRange(0, 2)], 2)
    assert pool.num_bytes == 24 * backend.kv_block_bytes(config, slices, 16)
    assert pool.num_bytes == 24 * 16 * config.kv_bytes_per_token(form="8bit")


@pytest.mark.parametrize(("weights", "allowed"), [(TinyWeights, 0.04), (OutlierWeights, 0.25)])
def test_logits_are_near_those_of_float_kv(weights: type[TinyWeights], allowed: float) -> None:
    exact = logits(loaded(LLAMA, "", weights(LLAMA)), PROMPT)
    backend = loaded(LLAMA, "8bit", weights(LLAMA))
    found = np.concatenate([logits(backend, PROMPT[:150]), logits(backend, PROMPT[150:], position=150)])
    assert 0 < np.sqrt(((found - exact) ** 2).mean()) <= allowed * exact.std()


def test_heads_in_turns_give_what_all_heads_give(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(num_kv_heads=4, qk_norm=True, windows=(50,))
    whole = loaded(config, "8bit")
    expected = [logits(whole, PROMPT[:150]), logits(whole, PROMPT[150:151], position=150)]
    monkeypatch.setattr(packed_attention, "_WIDENED_BYTES", 1)
    turns = loaded(config, "8bit")
    for found, wanted in zip(
        [logits(turns, PROMPT[:150]), logits(turns, PROMPT[150:151], position=150)], expected, strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_other_sequences_do_not_change_a_bit() -> None:
    def decode_beside(neighbour: Sequence[int]) -> Floats:
        backend = loaded(LLAMA, "8bit")
        logits(backend, PROMPT[:20])
        logits(backend, neighbour[:20], first_block=5)
        rows = [step_row(20, 1, (0, 2)), step_row(20, 1, (5, 2), sequence=2)]
        return run_step(backend, make_step(rows), token_ids(PROMPT[20:21], neighbour[20:21])).astype(np.float32)

    first, second = decode_beside(PROMPT[50:]), decode_beside(PROMPT[100:])
    np.testing.assert_array_equal(first[0], second[0])
    assert not np.array_equal(first[1], second[1])


def test_a_nan_stays_in_its_sequence_and_block() -> None:
    backend = loaded(LLAMA, "8bit")
    logits(backend, PROMPT[:20])
    logits(backend, PROMPT[:20], first_block=5)
    (pool,) = backend._pools.values()
    pool.write(
        0,
        torch.tensor([3]),
        torch.full((1, 2 * first_attention(LLAMA).num_kv_heads, first_attention(LLAMA).head_dim), torch.nan),
    )
    rows = [step_row(20, 1, (0, 2)), step_row(20, 1, (5, 2), sequence=2)]
    found = run_step(backend, make_step(rows), token_ids(PROMPT[20:21], PROMPT[20:21]))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()
    assert np.isfinite(logits(backend, PROMPT[:5])).all()  # written again


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="kv cannot be '4bit'"):
        TorchBackend(BackendOptions(device="cpu", kv="4bit"))
