"""Experts in two places: the same tokens as with all weights in one place; a CPU stands in for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu.device import CpuDevice  # noqa: E402
from edgepipe_torch.cuda.device import CudaSteps  # noqa: E402
from edgepipe_torch.layers.decoder import SliceWeights  # noqa: E402
from edgepipe_torch.layers.expert_ram import ExpertsInRam, Sent  # noqa: E402
from edgepipe_torch.layers.loading import load_slices  # noqa: E402
from edgepipe_torch.layers.mixture import Mixture  # noqa: E402
from edgepipe_torch.layers.rope import Rotations  # noqa: E402

from edgepipe.backend.types import ActivationType, BackendOptions  # noqa: E402
from edgepipe.errors import ConfigInvalid, DeviceOutOfMemory  # noqa: E402
from edgepipe.spec.expert_places import SETTING, num_in_ram, numbers_in_ram, with_ram_percent  # noqa: E402
from edgepipe.spec.facts import LayerRange, make_slices  # noqa: E402
from edgepipe.spec.layer_spec import Experts, Router  # noqa: E402
from edgepipe.spec.tensors import WeightSource  # noqa: E402
from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from edgepipe.weights.resident import WIDE, resident_sizes  # noqa: E402
from edgepipe.weights.weight_table import table_from_json, table_of  # noqa: E402
from edgepipe.weights.weights import open_weights  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row  # noqa: E402
from tests.support.backends.torch_paging import CudaOnHost, cpu_paging  # noqa: E402
from tests.support.models.experts import (  # noqa: E402
    expert_config,
    stored_tensors,
    whole_weights,
    write_expert_folder,
    write_expert_gguf,
)
from tests.support.models.family_files import write_family_folder, write_family_gguf  # noqa: E402
from tests.support.models.packed import PackedTinyModel  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from edgepipe.spec.facts import Slice

EXPERT_TENSORS = ("ffn_gate_exps.weight", "ffn_up_exps.weight")


def opened(kind: str, folder: Path) -> WeightSource:
    """A tiny mixture of a family, in floats or with packed experts."""
    family, _, form = kind.partition(" ")
    if family != "qwen3_moe":
        packed = EXPERT_TENSORS if form == "packed" else ()
        return open_weights(
            write_family_gguf(folder / "m.gguf", family, packed=packed)
            if packed
            else write_family_folder(folder, family)
        )
    if form == "floats":
        return open_weights(write_expert_folder(folder / "folder"))
    weights = whole_weights(expert_config(), stored_tensors(expert_config()))
    return open_weights(write_expert_gguf(folder / "m.gguf", weights, scheme="Q8_0"))


@pytest.fixture(params=["qwen3_moe floats", "qwen3_moe packed"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> WeightSource:
    return opened(request.param, tmp_path)


def whole(source: WeightSource) -> Slice:
    count = source.config.num_layers
    return make_slices([LayerRange(0, count)], count)[0]


def decoded(source: WeightSource, *, dtype: str, share: str) -> tuple[list[list[int]], np.ndarray]:
    """Greedy tokens of three sequences after prompts, and the last logits."""
    backend = TorchBackend(BackendOptions(device="cpu", dtype=dtype, settings={SETTING: share}))
    backend.load([whole(source)], source, lambda _progress: None)
    backend.allocate_kv(num_blocks=6, block_size=16)
    prompts = np.random.default_rng(1).integers(0, source.config.vocab_size, (3, 7)).astype(np.int32)
    rows = [step_row(0, 7, (2 * index, 2), sequence=index + 1) for index in range(3)]
    logits = run_step(backend, make_step(rows), prompts.reshape(-1))[6::7]
    tokens = [logits.argmax(-1).tolist()]
    for position in range(7, 15):
        rows = [step_row(position, 1, (2 * index, 2), sequence=index + 1) for index in range(3)]
        logits = run_step(backend, make_step(rows), np.array(tokens[-1], np.int32))
        tokens.append(logits.argmax(-1).tolist())
    backend.close()
    return tokens, logits


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("qwen3_moe floats", ["50%"]),
        ("qwen3_moe packed", ["25%", "all"]),
        ("glm4_moe packed", ["50%"]),  # with a shared expert, groups, and a dense layer
        ("gpt_oss floats", ["50%"]),  # with biases
    ],
)
def test_ids_are_those_of_one_place(kind: str, shares: list[str], tmp_path: Path) -> None:
    source = opened(kind, tmp_path)
    tokens, logits = decoded(source, dtype="float32", share="none")
    for share in shares:
        split_tokens, split = decoded(source, dtype="float32", share=share)
        assert split_tokens == tokens
        np.testing.assert_allclose(split, logits, rtol=1e-4, atol=1e-4 * float(np.abs(logits).max()))


def ring_tokens(source: WeightSource, shares: tuple[str, str]) -> list[int]:
    """Greedy tokens of one sequence over two stages, each with its share of experts in RAM."""
    stages: list[tuple[TorchBackend, int]] = []
    for part, share in zip(make_slices([LayerRange(0, 1), LayerRange(1, 2)], 2), shares, strict=True):
        options = BackendOptions(device="cpu", activation_type=ActivationType.FLOAT32, settings={SETTING: share})
        backend = TorchBackend(options)
        backend.load([part], source, lambda _progress: None)
        backend.allocate_kv(num_blocks=3, block_size=16)
        stages.append((backend, part.index))
    tokens = [1, 5, 9, 2, 7]
    position = 0
    for _ in range(12):
        values = np.array(tokens[position:], np.int32)
        for backend, index in stages:
            row = step_row(position, len(tokens) - position, (0, 2))
            last = [len(tokens) - position - 1] if index else []
            values = run_step(backend, make_step([row], logit_rows=last, slice_index=index), values)
        position = len(tokens)
        tokens.append(int(values[0].argmax()))
    for backend, _ in stages:
        backend.close()
    return tokens


@pytest.mark.parametrize("shares", [("all", "none"), ("none", "50%"), ("50%", "all")])
def test_ids_of_two_stages_are_those_without_a_share(source: WeightSource, shares: tuple[str, str]) -> None:
    with counted_ram_steps() as steps:
        without = ring_tokens(source, ("none", "none"))
        assert not steps
        assert ring_tokens(source, shares) == without
        assert len(steps) == 12 * (2 - shares.count("none"))


@contextmanager
def counted_ram_steps() -> Iterator[list[int]]:
    """Collect the rows of each call of experts in RAM within the context."""
    rows: list[int] = []
    original = ExpertsInRam.add

    def counting(self: ExpertsInRam, sent: Sent, total: Tensor) -> None:
        rows.append(len(sent.x))
        original(self, sent, total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertsInRam, "add", counting)
        yield rows


def test_activations_cross_to_a_device_of_another_type(tmp_path: Path) -> None:
    source = open_weights(write_expert_folder(tmp_path))
    _, logits = decoded(source, dtype="bfloat16", share="none")
    _, split = decoded(source, dtype="bfloat16", share="all")
    assert float(np.abs(split - logits).max()) < 0.1 * float(np.abs(logits).max())


def loaded(source: WeightSource, *, dtype: dtype, ram_percent: int) -> SliceWeights:
    (found,) = load_slices(
        [whole(source)],
        source,
        lambda _progress: None,
        device=CpuDevice(dtype),
        host=CpuDevice(torch.float32),
        rotations=Rotations(source.config).kinds,
        ram_percent=ram_percent,
    )
    return found


def held(source: WeightSource, percent: int) -> list[tuple[int, int]]:
    """Bytes of each layer's experts on the device and in RAM."""
    found: list[tuple[int, int]] = []
    for layer in loaded(source, dtype=torch.float32, ram_percent=percent).layers:
        mixture = layer.feed_forward
        assert isinstance(mixture, Mixture)
        places = (mixture._experts, mixture._in_ram)
        own, beside = (sum(each.num_bytes for each in place.linears) if place else 0 for place in places)
        assert sum(each.num_bytes for each in mixture.linears) == own + beside
        found.append((own, beside))
    return found


@pytest.mark.parametrize("percent", [0, 25, 50, 100])
def test_every_layer_has_the_share_of_its_experts_in_ram(source: WeightSource, percent: int) -> None:
    (everything, none), *_ = held(source, 0)
    assert none == 0
    moved = everything // 4 * num_in_ram(4, percent)
    assert held(source, percent) == [(everything - moved, moved)] * 2


def test_a_stage_with_experts_in_ram_waits(source: WeightSource) -> None:
    assert all(loaded(source, dtype=torch.float32, ram_percent=percent).waits for percent in (25, 100))


@pytest.mark.parametrize("percent", [50, 100])
def test_ram_holds_what_is_counted(tmp_path: Path, percent: int) -> None:
    source = opened("qwen3_moe packed", tmp_path)
    table = table_of(source.weights(whole(source)))
    sizes = resident_sizes(source.config, table, kind=f"torch-cuda/{percent}", dtype="bfloat16")
    assert tuple(beside for _, beside in held(source, percent)) == sizes.in_ram


def test_experts_of_both_places_count(source: WeightSource) -> None:
    """Experts that a step of many rows reads: all, in both places."""
    backend = TorchBackend(BackendOptions(device="cpu", settings={SETTING: "50%"}))
    backend.load([whole(source)], source, lambda _progress: None)
    backend.allocate_kv(num_blocks=8, block_size=16)
    step = make_step([step_row(0, 64, (0, 4))], logit_rows=list(range(64)))
    output = backend.collect(backend.submit(backend.prepare(step), np.arange(64, dtype=np.int32)))
    assert output.expert_share == 1.0


def test_rows_whose_experts_are_all_in_one_place(source: WeightSource) -> None:
    """Neither place computes for rows that chose none of its experts, and a neighbour's results do not reach them."""
    layer = loaded(source, dtype=torch.float32, ram_percent=50).layers[0]
    mixture = layer.feed_forward
    assert isinstance(mixture, Mixture)
    in_ram, on_device = mixture._in_ram, mixture._experts
    assert in_ram is not None
    assert on_device is not None
    beside = list(numbers_in_ram(4, 50))
    own = sorted({0, 1, 2, 3} - {*beside})
    x, weights = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)), torch.full((3, 2), 0.5)
    x[2] = float("nan")
    for chosen in ([own, own, own], [beside, beside, beside], [own, beside, own], [beside, own, beside]):
        numbers = torch.tensor(chosen)
        parts = torch.zeros(3, 64), torch.zeros(3, 64)
        on_device.add(x.clone(), *in_ram.on_device(numbers, weights), parts[0])
        in_ram.add(in_ram.send(x.clone(), numbers, weights), parts[1])
        for row in range(2):
            here, there = (0, 1) if chosen[row] == own else (1, 0)
            assert torch.isfinite(parts[here][row]).all()
            assert parts[here][row].any()
            assert not parts[there][row].any()


def test_a_stage_that_waits_records_no_graphs(tmp_path: Path) -> None:
    source = open_weights(write_expert_folder(tmp_path))
    options = BackendOptions(device="cpu", settings={SETTING: "all"})
    backend = TorchBackend(options, device=CudaOnHost(paging=cpu_paging(page_tokens=16)))
    backend.load([whole(source)], source, lambda _progress: None)
    backend.allocate_kv(num_blocks=4, block_size=16)
    steps = backend._steps[0]
    assert isinstance(steps, CudaSteps)
    assert steps.graphs is None


@pytest.mark.parametrize("weights", ["auto", "wide"])
@pytest.mark.parametrize("rounded", [False, True], ids=["as published", "GGUF"])
@pytest.mark.parametrize("scheme", ["Q8_0", "BF16", "F16", "F32"])
def test_plans_and_loads_count_the_bytes_that_experts_take_in_ram(
    scheme: str, rounded: bool, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_config(num_layers=1, hidden_size=64, vocab_size=96)
    experts = Experts(count=4, used=2, inner=64, router=Router())
    source = PackedTinyModel(
        replace(tiny, layers=(replace(tiny.layers[0], dense=None, experts=experts),)), {"": scheme}, rounded=rounded
    )
    backend = TorchBackend(BackendOptions(device="cpu", settings={SETTING: "50%", "weights": weights}))
    backend.load([whole(source)], source, lambda _progress: None)
    mixture = backend._weights[0].layers[0].feed_forward
    assert isinstance(mixture, Mixture)
    assert mixture._in_ram is not None
    held = sum(linear.num_bytes for linear in mixture._in_ram.linears)
    kind = with_ram_percent("torch-cuda" if weights == "auto" else WIDE, 50)
    infos = source.weights(whole(source))
    table = table_from_json(table_of(infos).to_json(), source.config)  # as nodes send it to one another
    assert resident_sizes(source.config, table, kind=kind, dtype="bfloat16").in_ram == (held,)
    monkeypatch.setattr(backend._device, "own_memory", True)
    monkeypatch.setattr(backend._device, "packing", "torch-cuda" if weights == "auto" else WIDE)
    assert sum(backend._placed_bytes(info, source.config, table)[1] for info in infos) == held


def test_bad_settings_and_too_little_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigInvalid, match="experts_in_ram"):
        TorchBackend(BackendOptions(device="cpu", settings={SETTING: "much"}))
    backend = TorchBackend(BackendOptions(device="cpu", settings={SETTING: "all"}))
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda _device: 10)
    monkeypatch.setattr(backend, "_placed_bytes", lambda *_: (0, 1))
    source = open_weights(write_expert_folder(tmp_path))
    with pytest.raises(DeviceOutOfMemory, match="the experts do not fit RAM"):
        backend.load([whole(source)], source, lambda _progress: None)
