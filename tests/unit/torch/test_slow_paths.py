"""A GPU's backend tells why steps run without pages or graphs, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cuda.paging import Paging, find_paging  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.head_shape import LayerHeads  # noqa: E402

from edgepipe.backend.protocol import ExplainingBackend  # noqa: E402
from edgepipe.backend.types import BackendOptions, SlowPath  # noqa: E402
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices  # noqa: E402
from edgepipe.spec.layer_spec import Experts, Router  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402
from tests.support.backends.torch_paging import CudaOnHost, cpu_paging  # noqa: E402

PLAIN = tiny_config(num_layers=2, hidden_size=16, vocab_size=31)
LARGE = replace(PLAIN, layers=tuple(spec.with_attention(num_heads=2, head_dim=264) for spec in PLAIN.layers))
MIXED = replace(
    PLAIN,
    layers=tuple(
        replace(spec, dense=None, experts=Experts(count=4, used=2, inner=16, router=Router())) for spec in PLAIN.layers
    ),
)


def slow_paths(config: ModelConfig, paging: Paging | None, *, block_size: int = 4, kv: str = "") -> list[SlowPath]:
    options = BackendOptions(device="cpu", dtype="float32", threads=1, kv=kv)
    backend = TorchBackend(options, device=CudaOnHost(paging=paging, kv=kv))
    assert isinstance(backend, ExplainingBackend)
    backend.load(make_slices([LayerRange(0, 2)], 2), TinyWeights(config), lambda _progress: None)
    return list(backend.slow_paths(block_size))


def refuse(_heads: LayerHeads) -> Any:
    raise KernelsUnavailable("NVRTC was not found", remedy="pip install it")


def test_pages_and_graphs_are_not_slow() -> None:
    assert slow_paths(PLAIN, cpu_paging(page_tokens=4)) == []
    assert slow_paths(LARGE, cpu_paging(page_tokens=4)) == []


def test_without_a_device_that_has_pages() -> None:
    (found,) = slow_paths(PLAIN, None)
    assert found.what == "attention runs sequence by sequence, and decode steps without CUDA graphs"
    assert found.reason == "pages need a CUDA device"
    assert "instead of" in found.cost


def test_heads_without_a_kernel_are_told_once_with_the_remedy() -> None:
    (found,) = slow_paths(LARGE, cpu_paging(page_tokens=4, decode=refuse))
    assert (found.reason, found.remedy) == ("NVRTC was not found", "pip install it")


def test_a_torch_that_reads_no_pages_and_no_own_kernels() -> None:
    assert slow_paths(PLAIN, cpu_paging(page_tokens=4, attend=None)) == []
    assert len(slow_paths(PLAIN, cpu_paging(page_tokens=4, attend=None, decode=refuse))) == 1


def test_blocks_that_are_no_whole_pages() -> None:
    (found,) = slow_paths(PLAIN, cpu_paging(page_tokens=4), block_size=6)
    assert found.reason == "a KV block of this model has 6 tokens, and pages have 4"


def test_experts_that_wait_for_the_device_take_graphs_alone() -> None:
    (found,) = slow_paths(MIXED, cpu_paging(page_tokens=4))
    assert found.what == "decode steps run without CUDA graphs"


@pytest.mark.parametrize("kv", ["8bit", "4bit"])
def test_kv_as_codes_has_both(kv: str) -> None:
    assert slow_paths(PLAIN, cpu_paging(page_tokens=4), kv=kv) == []


@pytest.mark.parametrize("kv", ["8bit", "4bit"])
def test_kv_as_codes_without_own_kernels(kv: str) -> None:
    """torch's kernel over pages would read heads of this size, but no codes."""
    (found,) = slow_paths(PLAIN, cpu_paging(page_tokens=4, decode=refuse), kv=kv)
    assert found.what == "attention runs sequence by sequence, and decode steps without CUDA graphs"
    assert (found.reason, found.remedy) == ("NVRTC was not found", "pip install it")


@pytest.mark.parametrize(
    ("dtype", "capability", "reason"),
    [
        (torch.float32, (8, 9), "attention over pages computes in bf16, not float32"),
        (torch.bfloat16, (7, 5), "attention over pages needs an Ampere or newer card, and RTX 2080 is sm_75"),
    ],
)
def test_a_card_or_a_type_without_pages(
    dtype: Any, capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "RTX 2080")
    with pytest.raises(KernelsUnavailable, match=reason):
        find_paging(torch.device("cuda", 0), dtype)
