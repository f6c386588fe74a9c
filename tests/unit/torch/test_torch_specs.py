"""Attention of layer specs on torch, on every path: against a decoder in numpy, compiled kernels against torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu.device import CpuDevice  # noqa: E402
from edgepipe_torch.cpu.kernels import CpuKernels, cpu_kernels  # noqa: E402
from edgepipe_torch.cpu.replay import DecodeReplays  # noqa: E402
from edgepipe_torch.cuda.graphs import DecodeGraphs  # noqa: E402
from edgepipe_torch.cuda.paging import PagedDecode  # noqa: E402
from edgepipe_torch.layers.attention import SHORT_ROWS  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.head_shape import LayerHeads  # noqa: E402

from edgepipe.backend.types import ActivationType, BackendOptions  # noqa: E402
from edgepipe.errors import ArchitectureUnsupported  # noqa: E402
from edgepipe.spec.facts import ModelConfig  # noqa: E402
from edgepipe.spec.layer_spec import LayerSpec  # noqa: E402
from edgepipe.spec.layout import model_tensors  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402
from tests.support.backends.torch_paging import CudaOnHost, cpu_paging  # noqa: E402
from tests.support.models.packed import PackedTinyModel, exact_float32  # noqa: E402
from tests.support.numerics.decode_reference import reference_decode  # noqa: E402
from tests.support.numerics.harness import Logits, Pipeline  # noqa: E402
from tests.support.numerics.spec_reference import reference_logits  # noqa: E402

PLAIN = tiny_config(num_layers=3, hidden_size=64, vocab_size=96)
TOKENS: list[int] = np.random.default_rng(1).integers(0, 96, 90).tolist()
CHUNKS = (70, 1, 1, 4, 9, 1, 1)  # more than a tile of rows, single tokens, a few at once
needs_kernels = pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")


def with_attention(*each: dict[str, Any]) -> ModelConfig:
    """Changes of all layers, or of each."""
    layers = zip(PLAIN.layers, each * 3 if len(each) == 1 else each, strict=True)
    return replace(PLAIN, layers=tuple(changed(spec, **own) for spec, own in layers))


def changed(spec: LayerSpec, **own: Any) -> LayerSpec:
    return spec.with_attention(**own)


WIDE = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 32}
SMALL = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "window": 7}
CASES = {
    "sinks": with_attention({"sinks": True}, {"sinks": True, "window": 7}, {"sinks": True, "window": 75}),
    "capped logits": with_attention({"softcap": 2.0}, {"softcap": 2.0, "window": 7}, {}),
    "sinks and capped logits": with_attention({"softcap": 2.0, "sinks": True}),
    "a scale": with_attention({"scale": 0.7, "sinks": True}, {"scale": 0.2}, {"scale": 0.7}),
    "unequal heads": with_attention(WIDE, SMALL, WIDE | {"window": 20}),
    "unequal heads, sinks in some": with_attention(WIDE | {"sinks": True}, SMALL, WIDE | {"sinks": True}),
    "no positions in some": with_attention({}, {"rope": None, "sinks": True}, {"rotary_dim": 4}),
}


class Packed(PackedTinyModel):
    """Q8_0 matrices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, {"": "Q8_0"})

    def values(self, name: str) -> npt.NDArray[np.float32]:
        return exact_float32(self.load(name))


def options(kv: str = "") -> BackendOptions:
    return BackendOptions(device="cpu", dtype="float32", kv=kv, activation_type=ActivationType.FLOAT32, threads=1)


def run(backends: Sequence[TorchBackend], source: TinyWeights | PackedTinyModel, *, scattered: bool = False) -> Logits:
    pipeline = Pipeline.build(backends, source, num_blocks=24, scattered=scattered)
    return pipeline.forced(TOKENS[:1], [*TOKENS[1:], 0], chunks=CHUNKS)


def expected(source: TinyWeights | Packed) -> npt.NDArray[np.float64]:
    weights = {name: source.values(name) for name in model_tensors(source.config)}
    return reference_logits(source.config, weights, TOKENS)


def assert_close(found: Logits, wanted: npt.NDArray[Any], *, within: float = 1e-4) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=within * float(np.abs(wanted).max()))


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_attention_of_sequences(config: ModelConfig) -> None:
    source = TinyWeights(config)
    assert_close(run([TorchBackend(options()), TorchBackend(options())], source), expected(source))
    assert_close(run([TorchBackend(options())], source, scattered=True), expected(source))


@pytest.mark.parametrize("own_kernels", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_attention_over_pages(name: str, own_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of up to eight tokens are graphs, unless a layer has no kernel over pages: it attends beside them."""
    used: list[int] = []
    run_graph = DecodeGraphs.run
    monkeypatch.setattr(DecodeGraphs, "run", lambda *given: (used.append(1), run_graph(*given))[1])
    source = TinyWeights(CASES[name])
    paging = cpu_paging(page_tokens=16, decode=reference_decode if own_kernels else refuse)
    assert_close(run([TorchBackend(options(), device=CudaOnHost(paging=paging))], source), expected(source))
    short = sum(size <= SHORT_ROWS for size in CHUNKS) + 1  # and the three tokens behind them
    assert len(used) == (0 if "capped" in name and not own_kernels else short)


def refuse(_heads: LayerHeads) -> PagedDecode:
    raise KernelsUnavailable("for a test")


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_attention_by_compiled_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps repeat recorded calls where kernels compute every layer."""
    used: list[int] = []
    replay = DecodeReplays.run
    monkeypatch.setattr(DecodeReplays, "run", lambda *given: (used.append(1), replay(*given))[1])
    source = Packed(CASES[name])
    assert_close(run([TorchBackend(options())], source, scattered=True), expected(source))
    assert len(used) == (0 if "capped" in name else len(CHUNKS) - 1)


@needs_kernels
@pytest.mark.parametrize(("kv", "sizes"), [("", (72, 56)), ("8bit", (72, 56)), ("4bit", (80, 64)), ("4bit", (112, 64))])
def test_kernels_for_values_within_keys_are_right(kv: str, sizes: tuple[int, int]) -> None:
    """They compare themselves with results in float64 when they are compiled."""
    kernels = cpu_kernels()
    assert isinstance(kernels, CpuKernels)
    kernels.heads(*sizes, kv=kv)


@needs_kernels
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("kv", "near", "rounding"), [("8bit", 0.05, 3e-3), ("4bit", 0.5, 5e-2)])
def test_attention_to_codes(config: ModelConfig, kv: str, near: float, rounding: float) -> None:
    assert config.keeps_kv_as(kv)
    source = Packed(config)
    without = CpuDevice(torch.float32, kv=kv, kernels=KernelsUnavailable("for a test"))
    by_torch = run([TorchBackend(options(kv=kv), device=without)], source)
    assert_close(by_torch, expected(source), within=near)
    # A code may differ by one, where rotations round differently.
    assert_close(run([TorchBackend(options(kv=kv))], source), by_torch, within=rounding)


def test_a_kind_of_norm_that_torch_does_not_compute_is_refused_before_anything_is_read() -> None:
    kind: Any = "of another kind"
    source = TinyWeights(replace(PLAIN, norm=replace(PLAIN.norm, kind=kind)))
    with pytest.raises(ArchitectureUnsupported, match="'of another kind'"):
        run([TorchBackend(options())], source)
    assert source.bytes_read == 0
