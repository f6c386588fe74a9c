"""4-bit KV against a reference in float64 that reads the stored bytes on its own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch.cpu.kernels import CpuKernels, cpu_kernels  # noqa: E402
from edgepipe_torch.cpu.step_ops import CompiledOps  # noqa: E402
from edgepipe_torch.layers.attention import CausalMasks  # noqa: E402
from edgepipe_torch.layers.head_shape import LayerHeads, layer_heads  # noqa: E402
from edgepipe_torch.layers.host_copies import HostCopies, HostMover  # noqa: E402
from edgepipe_torch.layers.kv_codes import Codes, FourBits  # noqa: E402
from edgepipe_torch.layers.linear import Workspace  # noqa: E402
from edgepipe_torch.layers.packed_attention import PackedSequenceAttention  # noqa: E402
from edgepipe_torch.layers.packed_kv import PackedKVStorage  # noqa: E402
from edgepipe_torch.layers.prepared import prepare_step  # noqa: E402
from edgepipe_torch.layers.rope import Rotations  # noqa: E402
from torch import Tensor  # noqa: E402

from edgepipe.backend.types import TierMove  # noqa: E402
from edgepipe.spec.facts import ModelConfig  # noqa: E402
from edgepipe.spec.kv_forms import REST_TOKENS, span_tokens  # noqa: E402
from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from tests.support.backends.steps import make_step, step_row  # noqa: E402
from tests.support.numerics.four_bits import (  # noqa: E402
    Bytes,
    group_and_block,
    scales_of,
    turned,
    values_of,
    whole_values_of,
)

CPU = torch.device("cpu")
SIZES = ((8, 0), (16, 0), (64, 0), (80, 0), (96, 0), (128, 0), (256, 0), (72, 56), (36, 32), (576, 512))


def numbers(made: Codes) -> tuple[Bytes, Bytes]:
    return made.codes.numpy(), made.scales.numpy()


@st.composite
def vectors(draw: st.DrawFn) -> tuple[int, int, npt.NDArray[np.float32]]:
    """A size, and vectors with channels that are much larger than others."""
    head_dim, value_width = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    spread = 2.0 ** draw(st.integers(-12, 8)) * np.exp2(rng.integers(0, draw(st.integers(1, 6)), head_dim))
    found = rng.standard_normal((3, 2, head_dim)) * spread + draw(st.sampled_from([0.0, 1.0, -30.0]))
    return head_dim, value_width, found.astype(np.float32)


@given(vectors())
def test_a_value_is_rounded_by_at_most_half_a_scale(case: tuple[int, int, npt.NDArray[np.float32]]) -> None:
    head_dim, value_width, given_values = case
    group, block = group_and_block(head_dim, value_width)
    codes, scales = numbers(FourBits(head_dim, value_width).encode(torch.from_numpy(given_values)))
    wanted = turned(given_values, block)
    largest = np.abs(wanted).max(-1, keepdims=True)
    allowed = np.repeat(scales_of(scales), group, -1) / 2 + 1e-6 * largest
    assert (np.abs(values_of(codes, scales, group) - wanted) <= allowed).all()
    highest = np.abs(wanted).reshape(*wanted.shape[:-1], -1, group).max(-1)
    assert (scales_of(scales) <= np.maximum(highest / 7.5 * 1.0626, 2.0**-20) + 1e-6 * largest).all()


@given(vectors())
def test_what_is_read_is_what_the_bytes_say(case: tuple[int, int, npt.NDArray[np.float32]]) -> None:
    head_dim, value_width, given_values = case
    form = FourBits(head_dim, value_width)
    made = form.encode(torch.from_numpy(given_values))
    expected = values_of(*numbers(made), group_and_block(head_dim, value_width)[0])
    np.testing.assert_array_equal(form.widen(made, torch.float32).double().numpy(), expected)
    narrow = form.widen(made, torch.bfloat16)
    assert torch.equal(narrow, form.widen(made, torch.float32).bfloat16()), "rounded once"


@given(vectors())
def test_lower_bits_leave_a_sixteenth_of_the_error(case: tuple[int, int, npt.NDArray[np.float32]]) -> None:
    head_dim, value_width, given_values = case
    group, block = group_and_block(head_dim, value_width)
    form = FourBits(head_dim, value_width)
    made = form.encode_whole(torch.from_numpy(given_values))
    for found, alone in zip(made.codes, form.encode(torch.from_numpy(given_values)), strict=True):
        assert torch.equal(found, alone), "the upper bits are the codes of 4 bits"
    codes, scales = numbers(made.codes)
    values = whole_values_of(codes, scales, made.rests.numpy(), group)
    wanted = turned(given_values, block)
    allowed = np.repeat(scales_of(scales), group, -1) / 32 + 1e-6 * np.abs(wanted).max(-1, keepdims=True)
    assert (np.abs(values - wanted) <= allowed).all()
    np.testing.assert_array_equal(form.widen_whole(made, torch.float32).double().numpy(), values)
    narrow = form.widen_whole(made, torch.bfloat16)
    assert torch.equal(narrow, form.widen_whole(made, torch.float32).bfloat16()), "rounded once"


@given(vectors())
def test_products_and_sums_are_unchanged_by_the_rotation(case: tuple[int, int, npt.NDArray[np.float32]]) -> None:
    head_dim, value_width, given_values = case
    form, wide = FourBits(head_dim, value_width), torch.from_numpy(given_values).double()
    rotated, size = form.turned(torch.from_numpy(given_values)).double(), float(wide.norm(dim=-1).max())
    products = wide.flatten(0, 1) @ wide.flatten(0, 1).T
    torch.testing.assert_close(rotated.flatten(0, 1) @ rotated.flatten(0, 1).T, products, rtol=0, atol=1e-5 * size**2)
    width = value_width or head_dim
    back = form.turned(rotated[..., :width].sum(0).float()).double()
    torch.testing.assert_close(back, wide[..., :width].sum(0), rtol=0, atol=1e-5 * size)


def test_a_channel_of_large_values_costs_the_others_less_with_the_rotation() -> None:
    rng = np.random.default_rng(3)
    found = rng.standard_normal((50, 1, 128)).astype(np.float32)
    found[..., 5] = 60 + found[..., 5]

    def others_lost(block: int) -> float:
        form = FourBits(128)
        form.block = block
        read = turned(values_of(*numbers(form.encode(torch.from_numpy(found))), 32), block)
        return float(((read - found)[..., :32] ** 2).mean())

    assert others_lost(128) < 0.15 * others_lost(1)


def test_zeros_stay_near_zero() -> None:
    form = FourBits(64)
    assert form.widen(form.encode(torch.zeros(2, 3, 64)), torch.float32).abs().max() <= 2.0**-21
    assert form.widen(form.empty((2, 3), CPU), torch.float32).abs().max() <= 7.5 * 2.0**-20, "slots never written"


def kinds(config: ModelConfig) -> LayerHeads:
    attention = config.layers[0].attention
    assert attention is not None
    return layer_heads([attention])[0]


def compiled(config: ModelConfig) -> CompiledOps | None:
    kernels = cpu_kernels()
    if not isinstance(kernels, CpuKernels):
        return None
    return CompiledOps(kernels, config, Workspace(torch.float32, CPU), kv="4bit")


class Reading:
    """One sequence in a pool, read in chunks; other blocks of the pool hold what must not be seen."""

    def __init__(self, config: ModelConfig, length: int, *, block: int, scattered: bool, by_kernels: bool) -> None:
        self.config, self.shape, self.block = config, kinds(config), block
        count = -(-(length + REST_TOKENS) // block)
        order = (
            np.random.default_rng(count).permutation(2 * count)[:count].tolist() if scattered else range(3, 3 + count)
        )
        self.runs = [(each, 1) for each in order] if scattered else [(3, count)]
        self.slots = torch.tensor([each * block + place for each in order for place in range(block)])
        self.num_blocks = 2 * count + 3
        self.pool = PackedKVStorage(
            [self.shape], classes=[0], num_blocks=[self.num_blocks], block_size=block, device=CPU, form="4bit"
        )
        for array in self.pool.arrays(0):
            array.random_(0, 200)
        self.ops = compiled(config) if by_kernels else None
        self.masks = CausalMasks(torch.float32, CPU)

    def read(self, position: int, kv: Tensor, queries: Tensor) -> Tensor:
        """Write kv [n, entries, D] of the tokens from a position on; attend with queries [n, Hq, D]."""
        prepared = prepare_step(
            make_step([step_row(position, len(kv), *self.runs)]),
            rotations=Rotations(self.config),
            block_size=self.block,
            num_blocks=self.num_blocks,
            span=span_tokens("4bit", self.block),
        )
        attention = PackedSequenceAttention(prepared, self.pool, self.masks, torch.float32, self.ops)
        assert attention.rests is not None
        attention.open(self.shape)
        self.pool.write(0, self.slots[position : position + len(kv)], kv)
        if self.ops is None:
            attention.rests.keep(self.shape)
        else:
            self.ops.keep(self.shape, attention.rests)
        found = torch.zeros(len(kv), self.shape.num_heads, self.shape.out_dim)
        attention.run(self.shape, queries.clone(), found)
        return found


@settings(max_examples=60)
@given(
    head_dim=st.sampled_from([16, 64, 80, 128]),
    groups=st.integers(1, 3),
    chunks=st.lists(st.sampled_from([1, 1, 4, 7, 20, 50]), min_size=1, max_size=4),
    block=st.sampled_from([4, 24, 32]),
    window=st.sampled_from([None, 5, 40]),
    scattered=st.booleans(),
    by_kernels=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_token_reads_its_span_with_eight_bits_and_the_tokens_before_with_four(
    head_dim: int,
    groups: int,
    chunks: list[int],
    block: int,
    window: int | None,
    scattered: bool,
    by_kernels: bool,
    seed: int,
) -> None:
    """In float64, over what the bytes say: queries as they came, keys and values rotated back. In any chunks."""
    config = tiny_config(num_heads=2 * groups, num_kv_heads=2, head_dim=head_dim, windows=(window,))
    length, rng = sum(chunks), np.random.default_rng(seed)
    reading = Reading(config, length, block=block, scattered=scattered, by_kernels=by_kernels)
    kv = torch.from_numpy(rng.standard_normal((length, 4, head_dim)).astype(np.float32))
    queries = torch.from_numpy(rng.standard_normal((length, 2 * groups, head_dim)).astype(np.float32))
    parts, position = list[Tensor](), 0
    for count in chunks:
        parts.append(reading.read(position, kv[position : position + count], queries[position : position + count]))
        position += count
    found = torch.cat(parts).double().numpy()
    group, size = group_and_block(head_dim, 0)
    made = FourBits(head_dim).encode_whole(kv)
    rough = turned(values_of(*numbers(made.codes), group), size)  # the matrix is its own inverse
    whole = turned(whole_values_of(*numbers(made.codes), made.rests.numpy(), group), size)
    expected, asked = np.empty_like(found), queries.double().numpy()
    for row in range(length):
        span = row // np.gcd(block, 32) * np.gcd(block, 32)
        first = 0 if window is None else max(0, row - window + 1)
        seen = np.concatenate([rough[first:span], whole[max(first, span) : row + 1]])
        keys, values = (np.repeat(seen[:, part], groups, axis=1) for part in (slice(2), slice(2, 4)))
        logits = np.einsum("lhd,hd->hl", keys, asked[row]) * reading.shape.scale
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        expected[row] = np.einsum("hl,lhd->hd", shares / shares.sum(-1, keepdims=True), values)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@settings(max_examples=8)
@given(start=st.integers(0, 48), drafts=st.integers(1, 7), accepted=st.integers(0, 7), by_kernels=st.booleans())
def test_rejected_drafts_leave_no_trace(start: int, drafts: int, accepted: int, by_kernels: bool) -> None:
    config, accepted = tiny_config(num_heads=2, num_kv_heads=2, head_dim=64), min(accepted, drafts)
    kv = torch.randn(80, 4, 64, generator=torch.Generator().manual_seed(1))
    queries = torch.randn(80, 2, 64, generator=torch.Generator().manual_seed(2))
    plain, drafting = (Reading(config, 80, block=32, scattered=False, by_kernels=by_kernels) for _ in range(2))
    for each in (plain, drafting):
        if start:
            each.read(0, kv[:start], queries[:start])
    wrong = torch.cat([kv[start : start + 1 + accepted], 9 * kv[60 : 60 + drafts - accepted]])
    drafting.read(start, wrong, queries[start : start + 1 + drafts])
    after = start + 1 + accepted
    for position in range(start, after):
        plain.read(position, kv[position : position + 1], queries[position : position + 1])
    for position in range(after, after + 20):
        own, asked = kv[position : position + 1], queries[position : position + 1]
        assert torch.equal(plain.read(position, own, asked), drafting.read(position, own, asked))


def test_blocks_in_host_memory_come_back_byte_by_byte() -> None:
    config = tiny_config(num_layers=2, num_kv_heads=2, head_dim=64)
    heads = layer_heads([spec.attention for spec in config.layers if spec.attention])
    pool = PackedKVStorage(heads, classes=[0], num_blocks=[4], block_size=4, device=CPU, form="4bit")
    for layer in range(2):
        pool.write(layer, torch.arange(4, 8), torch.randn(4, 4, 64))
    expected = [Codes(*(array.clone() for array in pool.run(layer, 4, 8))) for layer in range(2)]
    host = HostCopies(pool.stored, [3], HostMover())
    host.move([TierMove(number=0, place=1, kept=2, out=True)], ())
    for layer in range(2):
        pool.write(layer, torch.arange(4, 8), torch.zeros(4, 4, 64))
    host.move([TierMove(number=0, place=3, kept=2, out=False)], ())
    for layer in range(2):
        for found, wanted in zip(pool.run(layer, 12, 16), expected[layer], strict=True):
            assert torch.equal(found, wanted)
