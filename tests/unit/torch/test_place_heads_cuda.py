"""The kernel that places heads: its own source, run on a CPU, compiled for each architecture, and in a layer."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch.cuda.kernels.forms import PLACE_FILES, kernel_source, options  # noqa: E402
from edgepipe_torch.cuda.kernels.place_checking import CASES, PlacedCase, place_error, worst_place_error  # noqa: E402
from edgepipe_torch.cuda.kernels.place_heads import FourBitHeads, PlaceHeads  # noqa: E402
from edgepipe_torch.cuda.step_ops import CudaOps, make_ops  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.head_shape import layer_heads  # noqa: E402
from edgepipe_torch.layers.kv import KVStorage  # noqa: E402
from edgepipe_torch.layers.kv_codes import Codes, EightBits, FourBits, WholeCodes  # noqa: E402
from edgepipe_torch.layers.packed_attention import StepRests  # noqa: E402
from edgepipe_torch.layers.packed_kv import PackedKVStorage  # noqa: E402
from edgepipe_torch.layers.step_ops import HeadNorms, TorchOps  # noqa: E402

from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from tests.support.backends.host_compiler import COMPILER  # noqa: E402
from tests.support.backends.host_kernels import PLACE, SOURCES, Part, compile_for_host  # noqa: E402
from tests.support.backends.nvrtc import nvrtc_for  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

CPU = torch.device("cpu")
CONFIG = tiny_config(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> PlaceHeads:
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    (module,) = compile_for_host([PLACE], tmp_path_factory.mktemp("kernels"))
    return PlaceHeads(module)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dim}, {case.turned}, {case.normalised}")
def test_heads_round_once(case: PlacedCase, kernel: PlaceHeads) -> None:
    assert place_error(kernel, case, CPU) <= 1


@pytest.mark.parametrize("kv", ["", "8bit", "4bit"])
def test_many_rows(kv: str, kernel: PlaceHeads) -> None:
    case = PlacedCase(rows=10, heads=7, kv_heads=1, dim=128, turned=64, normalised=(True, True, False))
    assert place_error(kernel, case, CPU, kv=kv) <= 1


@pytest.mark.parametrize("kv", ["8bit", "4bit"])
def test_the_check_of_codes_at_load_passes(kv: str, kernel: PlaceHeads) -> None:
    assert worst_place_error(kernel, CPU, kv=kv) <= 1


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 3e38])
def test_a_head_beyond_the_scales_is_no_number_and_no_other(bad: float, kernel: PlaceHeads) -> None:
    parts = torch.ones(2, 3, 8, dtype=torch.bfloat16)
    parts[1, 1, 5] = bad
    codes, scales = torch.zeros(2, 2, 8, dtype=torch.int8), torch.zeros(2, 2, dtype=torch.float16)
    how = {"num_heads": 1, "num_kv_heads": 1, "norms": HeadNorms(), "eps": 0.0}
    kernel(parts, None, torch.tensor([0, 1]), codes, scales, **how)
    assert scales.isnan().tolist() == [[False, False], [True, False]]
    assert torch.equal(codes[0], codes[1, 1].expand(2, 8))


@settings(deadline=None)
@given(values=st.lists(st.floats(-6e4, 6e4, width=16), min_size=8, max_size=8))
def test_codes_are_those_of_torchs_operations(values: list[float], kernel: PlaceHeads) -> None:
    """Zeros and the smallest float16 among them."""
    parts = torch.tensor(values).bfloat16().expand(1, 3, 8).contiguous()
    codes, scales = torch.zeros(1, 2, 8, dtype=torch.int8), torch.zeros(1, 2, dtype=torch.float16)
    how = {"num_heads": 1, "num_kv_heads": 1, "norms": HeadNorms(), "eps": 0.0}
    kernel(parts, None, torch.tensor([0]), codes, scales, **how)
    expected = EightBits(8).encode(parts[:, 1:])
    assert torch.equal(scales, expected.scales)
    assert torch.equal(codes, expected.codes)


def placed_four_bits(kernel: PlaceHeads, parts: Tensor) -> WholeCodes:
    """The codes of the keys and values [T, E, D] of parts [T, 1 + E, D], by the kernel."""
    rows, count, dim = parts.shape
    codes, scales = FourBits(dim).empty((2 * rows, count - 1), CPU)
    rests = torch.zeros(rows, count - 1, dim // 2, dtype=torch.uint8)
    four_bits = FourBitHeads(block=FourBits(dim).block, rests=rests, rest_slots=torch.arange(rows) + rows)
    how: dict[str, Any] = {"num_heads": 1, "num_kv_heads": count - 2, "norms": HeadNorms(), "eps": 0.0}
    kernel(parts, None, torch.arange(rows), codes, scales, **how, four_bits=four_bits)
    assert torch.equal(codes[rows:], rests)
    return WholeCodes(Codes(codes[:rows], scales[:rows]), rests)


@settings(deadline=None)
@given(
    dim=st.sampled_from([32, 64, 96, 128, 160, 256, 576]),
    exponents=st.lists(st.integers(-140, 100), min_size=3, max_size=3),
    bad=st.sampled_from([0.0, 0.0, np.nan, -np.nan, np.inf, -np.inf, 3e38]),
    seed=st.integers(0, 2**32 - 1),
)
def test_four_bits_are_those_of_torchs_operations(
    dim: int, exponents: list[int], bad: float, seed: int, kernel: PlaceHeads
) -> None:
    """Bit by bit: the smallest and the largest scales among them, and what has none."""
    parts = torch.randn(2, 4, dim, generator=torch.Generator().manual_seed(seed))
    parts[:, 1:] *= torch.tensor([2.0**each for each in exponents])[:, None]
    parts[1, 2, seed % dim] += bad
    parts = parts.bfloat16()
    expected = FourBits(dim).encode_whole(parts[:, 1:].clone())
    found = placed_four_bits(kernel, parts)
    assert torch.equal(found.codes.scales, expected.codes.scales)
    assert torch.equal(found.codes.codes, expected.codes.codes)
    assert torch.equal(found.rests, expected.rests)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_layer_writes_what_torchs_operations_write(head_dim: int, in_graph: bool, kernel: PlaceHeads) -> None:
    """Heads of 16 have smaller groups, which are torch's. A graph keeps lower bits in the pool alone."""
    config = tiny_config(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=head_dim)
    (heads,) = layer_heads([spec.attention for spec in config.layers if spec.attention is not None])
    qkv = torch.randn(3, 8, head_dim, generator=torch.Generator().manual_seed(5)).bfloat16()
    pools: list[PackedKVStorage] = []
    for ops in (CudaOps(config, kernel), TorchOps(config)):
        pool = PackedKVStorage([heads], classes=[0], num_blocks=[4], block_size=64, device=CPU, form="4bit")
        tokens = None if in_graph else torch.tensor([0, 2])
        slots = torch.tensor([48, 61, 255]) if in_graph else torch.tensor([48, 255])
        ops.place(qkv.clone(), None, torch.tensor([0, 13, 200]), pool, heads, rests=StepRests(pool, tokens, slots))
        pools.append(pool)
    for found, expected in zip(pools[0].arrays(0), pools[1].arrays(0), strict=True):
        assert torch.equal(found, expected)
        assert found.any()
    if not in_graph:
        assert torch.equal(pools[0].rests(heads, 3), pools[1].rests(heads, 3))


MUTANTS = (
    ("if (pair < turned)", "if (pair + 1 < turned)"),
    ("is_value ? 0 : given.turned", "given.turned"),
    ("before * imaginary + second", "first * imaginary + second"),
    ("is_value ? given.value_norm : given.key_norm", "given.key_norm"),
    ("/ given.dim + given.eps", "/ given.dim"),
    ("given.slots[row])", "row)"),
    ("apart = 16; apart;", "apart = 8; apart;"),
    ("if (is_query && !norm && !turned) return;", "if (is_query && !turned) return;"),
)
CODE_MUTANTS = (
    ("* given.scale_factor + given.least_scale", "+ given.least_scale"),
    ("apart < 32; apart *= 2", "apart < 16; apart *= 2"),
    ("float_as_bits(pair.second) & 0x7FFFFFFFu", "float_as_bits(pair.first) & 0x7FFFFFFFu"),
    ("static_cast<int>(rintf(found.second / scale))", "static_cast<int>(found.second / scale)"),
    ("(first & 0xFF) |", "first |"),
    ("(given.scales)[vector] = bits;", "(given.scales)[row] = bits;"),
    ("static_cast<u16 *>(given.pool) + vector * pairs", "static_cast<u16 *>(given.pool) + row * pairs"),
)


FOUR_BIT_MUTANTS = (
    ("is_second ? other - own : own + other", "own + other"),
    ("found.first - found.second};", "found.second - found.first};"),
    ("apart < 32 && 2 * apart < block", "apart < 32"),
    ("64 * apart < block", "128 * apart < block"),
    ("].second *= block_scale;", "].second *= 1.0f;"),
    ("for (int apart = 1; apart < 16; apart *= 2) highest", "for (int apart = 1; apart < 32; apart *= 2) highest"),
    ("+ (1u << 19)) >> 20)", ") >> 20)"),
    ("value / scale + 8.0f", "value / scale + 7.5f"),
    ("whole_code(found.second, scale, has_scale) << 8", "whole_code(found.first, scale, has_scale) << 8"),
    ("other_lane_bits(mine, 8)", "other_lane_bits(mine, 4)"),
    ("2 * round + lane / 16,", "2 * round,"),
    ("(theirs & 0xF0F0)", "(theirs << 4 & 0xF0F0)"),
    ("(theirs & 0x0F0F) |", "(theirs >> 4 & 0x0F0F) |"),
    ("rests += (row * given.entries + entry) * bytes", "rests += row * given.entries * bytes"),
    ("given.rest_slots[row]) * given.entries", "row) * given.entries"),
    ("(given.scales) + vector * (given.dim / 32)", "(given.scales) + row * (given.dim / 32)"),
)


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("kv", "mutants"),
    [("", MUTANTS), ("8bit", CODE_MUTANTS), ("4bit", FOUR_BIT_MUTANTS)],
    ids=["bf16", "8bit", "4bit"],
)
def test_the_check_at_load_refuses_broken_kernels(
    kv: str, mutants: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    *shared, own = PLACE_FILES
    source = (SOURCES / own).read_text(encoding="utf-8")
    for each in shared:
        shutil.copy(SOURCES / each, folder)
    parts: list[Part] = []
    for index, (whole, broken) in enumerate(mutants):
        assert source.count(whole) == 1, whole
        (folder / f"mutant_{index}.cu").write_text(source.replace(whole, broken), encoding="utf-8")
        parts.append(Part(files=(*shared, f"mutant_{index}.cu"), macros={}, functions=PLACE.functions))
    modules = compile_for_host(parts, tmp_path, folder)
    errors = {
        whole: worst_place_error(PlaceHeads(each), CPU, kv=kv)
        for (whole, _), each in zip(mutants, modules, strict=True)
    }
    assert [whole for whole, error in errors.items() if error <= 1] == []


@pytest.mark.parametrize("architecture", [80, 89, 90, 120])
def test_compile_without_a_gpu(architecture: int) -> None:
    cubin = nvrtc_for(architecture).compile(kernel_source(PLACE_FILES), architecture=architecture, options=options({}))
    assert b"place_heads" in cubin


def placed(ops: Any, norms: HeadNorms, *, turned: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries and pool after a step of three rows."""
    (heads,) = layer_heads([spec.attention for spec in CONFIG.layers if spec.attention is not None])
    pool = KVStorage([heads], classes=[0], num_blocks=[4], block_size=2, dtype=torch.bfloat16, device=CPU)
    draw = torch.Generator().manual_seed(3)
    qkv = torch.randn(3, 8, 16, generator=draw).bfloat16()
    angles = torch.randn(3, 1, turned, generator=draw)
    turns = torch.polar(torch.ones_like(angles), angles)
    ops.place(qkv, turns, torch.tensor([5, 0, 3]), pool, heads, norms)
    return qkv[:, :4].float().numpy(), pool.pools[0].float().numpy()


@pytest.mark.parametrize("normalised", [(), (16, 16), (64, 32), (16, 16, 16)], ids=str)
@pytest.mark.parametrize("turned", [4, 8])
def test_agrees_with_torchs_operations(normalised: tuple[int, ...], turned: int, kernel: PlaceHeads) -> None:
    """Norms over all heads of a row are torch's there, too."""
    norms = HeadNorms(*(1 + torch.arange(size) / 64 for size in normalised))
    norms = HeadNorms(*(None if each is None else each.bfloat16() for each in norms))
    found = placed(CudaOps(CONFIG, kernel), norms, turned=turned)
    for own, expected in zip(found, placed(TorchOps(CONFIG), norms, turned=turned), strict=True):
        np.testing.assert_allclose(own, expected, rtol=0.02, atol=0.02)  # torch rounds between its operations


def test_other_kinds_of_norm_are_torchs(kernel: PlaceHeads) -> None:
    """The kernel would not subtract the mean."""
    config = replace(CONFIG, norm=replace(CONFIG.norm, kind="layer"))
    norms = HeadNorms(*(torch.ones(16).bfloat16() for _ in range(2)))
    found = placed(CudaOps(config, kernel), norms, turned=8)
    for own, expected in zip(found, placed(TorchOps(config), norms, turned=8), strict=True):
        np.testing.assert_array_equal(own, expected)


def test_without_the_kernel_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Without:
        def place_heads(self, kv: str = "") -> PlaceHeads:
            raise KernelsUnavailable("NVRTC was not found")

    assert type(make_ops(CONFIG, Without(), CPU, torch.bfloat16)) is TorchOps
    assert "in more launches: NVRTC was not found" in caplog.text
