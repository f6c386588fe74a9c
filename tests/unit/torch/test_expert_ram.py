"""Experts in host memory: the same tokens as with all weights in one place; a CPU stands in for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.decoder import SliceWeights  # noqa: E402
from edgepipe_torch.expert_ram import ExpertsInRam  # noqa: E402
from edgepipe_torch.linear import Workspace  # noqa: E402
from edgepipe_torch.loading import load_slices  # noqa: E402
from edgepipe_torch.rope import Rotations  # noqa: E402

from edgepipe.backend.types import ActivationType, BackendOptions  # noqa: E402
from edgepipe.errors import ConfigInvalid, DeviceOutOfMemory  # noqa: E402
from edgepipe.model.expert_places import SETTING, in_ram  # noqa: E402
from edgepipe.model.facts import LayerRange, Slice, make_slices  # noqa: E402
from edgepipe.model.resident import resident_sizes  # noqa: E402
from edgepipe.model.tensors import WeightSource  # noqa: E402
from edgepipe.model.weight_table import table_of  # noqa: E402
from edgepipe.model.weights import open_weights  # noqa: E402
from tests.support.expert_models import (  # noqa: E402
    expert_config,
    stored_tensors,
    whole_weights,
    write_expert_folder,
    write_expert_gguf,
)
from tests.support.steps import make_step, run_step, step_row  # noqa: E402
from tests.support.torch_paging import cpu_paging  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, dtype

WHOLE = Slice(index=0, layers=LayerRange(0, 2), embedding=True, head=True)
CPU = torch.device("cpu")


@pytest.fixture(params=["floats", "packed"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> WeightSource:
    if request.param == "floats":
        return open_weights(write_expert_folder(tmp_path / "folder"))
    weights = whole_weights(expert_config(), stored_tensors(expert_config()))
    return open_weights(write_expert_gguf(tmp_path / "m.gguf", weights, scheme="Q8_0"))


def decoded(source: WeightSource, *, dtype: str, share: str) -> tuple[list[list[int]], np.ndarray]:
    """Greedy tokens of three sequences after prompts, and the last logits."""
    backend = TorchBackend(BackendOptions(device="cpu", dtype=dtype, settings={SETTING: share}))
    backend.load([WHOLE], source, lambda _progress: None)
    backend.allocate_kv(num_blocks=6, block_size=16)
    prompts = np.random.default_rng(1).integers(0, 96, (3, 7)).astype(np.int32)
    rows = [step_row(0, 7, (2 * index, 2), sequence=index + 1) for index in range(3)]
    logits = run_step(backend, make_step(rows), prompts.reshape(-1))[6::7]
    tokens = [logits.argmax(-1).tolist()]
    for position in range(7, 15):
        rows = [step_row(position, 1, (2 * index, 2), sequence=index + 1) for index in range(3)]
        logits = run_step(backend, make_step(rows), np.array(tokens[-1], np.int32))
        tokens.append(logits.argmax(-1).tolist())
    backend.close()
    return tokens, logits


@pytest.mark.parametrize("share", ["all", "50%"])
def test_ids_are_those_of_one_place(source: WeightSource, share: str) -> None:
    tokens, logits = decoded(source, dtype="float32", share="none")
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


@pytest.mark.parametrize("shares", [("all", "none"), ("none", "all"), ("all", "all")])
def test_ids_of_two_stages_are_those_without_a_share(source: WeightSource, shares: tuple[str, str]) -> None:
    with counted_ram_steps() as steps:
        without = ring_tokens(source, ("none", "none"))
        assert not steps
        assert ring_tokens(source, shares) == without
        assert len(steps) == 12 * shares.count("all")


@contextmanager
def counted_ram_steps() -> Iterator[list[int]]:
    """Collect the rows of each call of experts in RAM within the context."""
    rows: list[int] = []
    original = ExpertsInRam.add

    def counting(self: ExpertsInRam, x: Tensor, chosen: Tensor, weights: Tensor, total: Tensor) -> None:
        rows.append(len(x))
        original(self, x, chosen, weights, total)

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
        [WHOLE],
        source,
        lambda _progress: None,
        dtype=dtype,
        device=CPU,
        workspace=Workspace(dtype, CPU),
        rotations=Rotations(source.config).kinds,
        ram_percent=ram_percent,
    )
    return found


def test_layers_of_the_share_have_their_experts_in_ram(source: WeightSource) -> None:
    found = loaded(source, dtype=torch.float32, ram_percent=50)
    places = [isinstance(layer.feed_forward._experts, ExpertsInRam) for layer in found.layers]  # type: ignore[attr-defined]
    assert places == [in_ram(index, 50) for index in range(2)] == [False, True]
    assert found.waits


def test_ram_holds_what_is_counted(tmp_path: Path) -> None:
    weights = whole_weights(expert_config(), stored_tensors(expert_config()))
    source = open_weights(write_expert_gguf(tmp_path / "m.gguf", weights, scheme="Q8_0"))
    found = loaded(source, dtype=torch.float32, ram_percent=100)
    table = table_of(source.weights(WHOLE))
    sizes = resident_sizes(source.config, table, kind="torch-cuda/100", dtype="bfloat16")
    mixtures = [layer.feed_forward for layer in found.layers if layer.feed_forward]
    held = [sum(each.num_bytes for each in mixture.linears) for mixture in mixtures]
    assert tuple(held) == sizes.in_ram


def test_a_stage_that_waits_records_no_graphs(tmp_path: Path) -> None:
    source = open_weights(write_expert_folder(tmp_path))
    options = BackendOptions(device="cpu", settings={SETTING: "all"})
    backend = TorchBackend(options, paging=cpu_paging(page_tokens=16))
    backend.load([WHOLE], source, lambda _progress: None)
    backend.allocate_kv(num_blocks=4, block_size=16)
    assert backend._graphs == {}


def test_bad_settings_and_too_little_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigInvalid, match="experts_in_ram"):
        TorchBackend(BackendOptions(device="cpu", settings={SETTING: "much"}))
    backend = TorchBackend(BackendOptions(device="cpu", settings={SETTING: "all"}))
    monkeypatch.setattr("edgepipe_torch.backend.free_bytes", lambda _device: 10)
    monkeypatch.setattr(backend, "_in_ram", lambda info: "experts" in info.name)
    with pytest.raises(DeviceOutOfMemory, match="the experts do not fit RAM"):
        backend.load([WHOLE], open_weights(write_expert_folder(tmp_path)), lambda _progress: None)
