"""A token has the same experts, with weights of the same bits, alone and in any batch on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch.cpu.packed import PackedCpuLinear  # noqa: E402
from edgepipe_torch.cpu.routing import choose  # noqa: E402
from edgepipe_torch.cpu.tiled_weight import tile_floats  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.linear import Workspace  # noqa: E402
from edgepipe_torch.layers.mixture import Mixture  # noqa: E402
from edgepipe_torch.layers.routing import RouterWeights, route  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from edgepipe.spec.layer_spec import Experts, Router  # noqa: E402
from edgepipe.weights.resident import weight_bytes  # noqa: E402
from edgepipe.weights.weights import open_weights  # noqa: E402
from tests.support.backends.torch_slices import compiled_kernels, loaded_slice  # noqa: E402
from tests.support.models import gpt_oss_files  # noqa: E402
from tests.support.models.experts import write_expert_folder  # noqa: E402

HIDDEN = 1032  # no multiple of 16, and enough terms that torch's order of them changes with the rows
MOST_ROWS = 64
ROUTERS = {
    "softmax": Router(),
    "softmax of all": Router(normalised=False, scale=2.5),
    "biased": Router(bias=True),
    "groups": Router(score="sigmoid", correction=True, groups=4, groups_used=2, group_score="top2"),
    "normed input": Router(input_eps=1e-6, expert_scales=True),
}


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    with compiled_kernels():
        yield


def spec_of(how: Router, count: int) -> Experts:
    return Experts(count=count, used=min(count // 2, 10), inner=8, router=how)


def made(how: Router, count: int) -> tuple[RouterWeights, RouterWeights]:
    """Random weights, for the kernels and for torch."""
    generator = torch.Generator().manual_seed(count)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight, bias = random(count, HIDDEN).mul_(HIDDEN**-0.5), random(count) if how.bias else None
    others = (
        random(count) if how.correction else None,
        None if how.input_eps is None else random(HIDDEN),
        random(count) if how.expert_scales else None,
    )
    linear = PackedCpuLinear("router", HIDDEN, (count,), Workspace(torch.float32, torch.device("cpu")))
    linear.fill(0, tile_floats(weight, torch.float32))
    if bias is not None:
        linear.fill_bias(0, bias)
    linear.finish()
    routers = RouterWeights(linear, None, *others), RouterWeights(weight, bias, *others)
    for router in routers:
        router.choose = choose
    return routers


def check_rows(spec: Experts, router: RouterWeights, x: Tensor, batches: list[slice]) -> None:
    """Logits, experts and weights of x [T, H] have the same bits in every batch."""
    logits = router.logits(x).clone()
    chosen, weights = route(spec, router, x)
    for part in batches:
        assert torch.equal(router.logits(x[part]), logits[part])
        own_chosen, own_weights = route(spec, router, x[part])
        assert torch.equal(own_chosen, chosen[part])
        assert torch.equal(own_weights, weights[part])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [8, 40, 128])
@pytest.mark.parametrize("how", ROUTERS.values(), ids=list(ROUTERS))
def test_each_row_alone_has_the_experts_that_it_has_among_64(how: Router, count: int, threads: int) -> None:
    torch.set_num_threads(threads)
    router, by_torch = made(how, count)
    x = torch.randn(MOST_ROWS, HIDDEN, generator=torch.Generator().manual_seed(7))
    check_rows(spec_of(how, count), router, x, [slice(row, row + 1) for row in range(MOST_ROWS)])
    torch.testing.assert_close(router.logits(x), by_torch.logits(x), rtol=2e-5, atol=2e-5)


@settings(max_examples=40)
@given(st.sampled_from(sorted(ROUTERS)), st.integers(0, MOST_ROWS - 2), st.integers(2, MOST_ROWS), st.integers(0, 999))
def test_any_batch_has_the_same_bits(name: str, first: int, rows: int, seed: int) -> None:
    how = ROUTERS[name]
    router, _ = made(how, 40)
    x = torch.randn(MOST_ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    check_rows(spec_of(how, 40), router, x, [slice(first, min(first + rows, MOST_ROWS))])


def mixtures_of(folder: Path, kernels: KernelsUnavailable | None = None) -> list[Mixture]:
    weights = loaded_slice(open_weights(folder), kernels=kernels)
    found = [layer.feed_forward for layer in weights.layers if isinstance(layer.feed_forward, Mixture)]
    assert found
    return found


@pytest.mark.parametrize("count", [16, 24])
def test_a_loaded_router_is_multiplied_by_kernels_and_counted_as_it_is_held(tmp_path: Path, count: int) -> None:
    folder = write_expert_folder(tmp_path, num_experts=count)
    for mixture, plain in zip(mixtures_of(folder), mixtures_of(folder, KernelsUnavailable("not here")), strict=True):
        ours, torchs = mixture._router, plain._router
        assert isinstance(ours.weight, PackedCpuLinear)
        assert isinstance(torchs.weight, Tensor)
        x = torch.randn(9, torchs.weight.shape[1])
        check_rows(mixture._spec, ours, x, [slice(2, 3), slice(1, 8)])
        torch.testing.assert_close(ours.logits(x), torchs.logits(x), rtol=2e-5, atol=2e-5)
        shape = tuple(torchs.weight.shape)
        for router, kind in ((ours, "torch-cpu"), (torchs, "wide")):
            counted = weight_bytes("mlp.router.weight", None, shape, kind=kind, dtype="float32")
            assert router.num_bytes == counted


def test_a_loaded_router_has_its_bias(tmp_path: Path) -> None:
    folder = gpt_oss_files.write_hugging_face(tmp_path, gpt_oss_files.random_tensors())
    for mixture, plain in zip(mixtures_of(folder), mixtures_of(folder, KernelsUnavailable("not here")), strict=True):
        bias = plain._router.bias
        assert bias is not None
        assert bias.any()
        assert isinstance(plain._router.weight, Tensor)
        x = torch.zeros(1, plain._router.weight.shape[1])
        torch.testing.assert_close(mixture._router.logits(x)[0], bias)
