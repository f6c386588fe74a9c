"""Shares of layers whose experts stay in host memory: which layers, their sizes, and what reading them costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import named_device
from edgepipe.errors import ConfigInvalid
from edgepipe.model.expert_places import SETTING, chosen_share, in_ram, split_kind, with_share
from edgepipe.model.facts import LayerRange, Slice
from edgepipe.model.mixes import named_model
from edgepipe.model.resident import resident_sizes

MIXTURE = named_model("qwen3-30b-a3b:q4_k_m")


@given(st.integers(0, 100), st.integers(0, 60), st.integers(1, 60))
def test_every_run_of_layers_has_about_the_share(percent: int, first: int, count: int) -> None:
    found = sum(in_ram(layer, percent) for layer in range(first, first + count))
    assert abs(found - count * percent / 100) < 1


@pytest.mark.parametrize(("text", "percent"), [("none", 0), ("all", 100), ("0%", 0), ("40%", 40), ("100%", 100)])
def test_settings(text: str, percent: int) -> None:
    assert chosen_share({SETTING: text}) == percent


@pytest.mark.parametrize("text", ["", "%", "-1%", "101%", "4.5%", "40", "some", "½%", "9" * 5000 + "%"])
def test_bad_settings(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="experts_in_ram cannot be"):
        chosen_share({SETTING: text})


def test_without_a_setting_nothing_changes() -> None:
    assert chosen_share({}) == 0
    assert with_share("torch-cuda", 0) == "torch-cuda"


@given(st.sampled_from(["", "torch-cuda", "mlx"]), st.integers(1, 100))
def test_a_kind_keeps_its_share(kind: str, percent: int) -> None:
    assert split_kind(with_share(kind, percent)) == (kind, percent)


@given(st.text(max_size=30))
def test_kinds_of_other_nodes(kind: str) -> None:
    base, percent = split_kind(kind)
    assert kind == base or kind.startswith(base + "/")
    assert 0 <= percent <= 100


@pytest.mark.parametrize("percent", [0, 40, 100])
def test_sizes_split_into_device_and_ram(percent: int) -> None:
    config, table = MIXTURE
    every = resident_sizes(config, table, kind="torch-cuda", dtype="bfloat16")
    split = resident_sizes(config, table, kind=with_share("torch-cuda", percent), dtype="bfloat16")
    cpu = resident_sizes(config, table, kind="torch-cpu", dtype="float32")
    for layer in range(config.num_layers):
        if in_ram(layer, percent):
            assert split.layers[layer] == every.layers[layer] - every.experts[layer]
            assert (split.experts[layer], split.in_ram[layer]) == (0, cpu.experts[layer])
        else:
            assert (split.layers[layer], split.experts[layer]) == (every.layers[layer], every.experts[layer])
            assert split.in_ram[layer] == 0
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    moved = sum(every.experts[layer] for layer in range(config.num_layers) if in_ram(layer, percent))
    assert split.of_slice(whole) == every.of_slice(whole) - moved


def test_estimates_read_the_experts_in_ram_more_slowly() -> None:
    config, table = MIXTURE
    device = replace(named_device("rtx4090"), bandwidth_bytes_per_s=1e12)
    part = Slice(index=1, layers=LayerRange(0, config.num_layers), embedding=False, head=False)
    work = StepWork.of_rows([0], [1], logit_rows=0)
    seconds = [
        CostModel(config, device, weights=table, kind=with_share("torch-cuda", percent)).slice_cost(part).step_s(work)
        for percent in (0, 40, 100)
    ]
    assert seconds[0] < seconds[1] < seconds[2]
    assert CostModel(config, device, weights=table, kind="torch-cuda/40").weight_bytes([part]) < CostModel(
        config, device, weights=table, kind="torch-cuda"
    ).weight_bytes([part])


def test_layers_of_two_places_are_of_two_kinds() -> None:
    config, table = MIXTURE
    device = named_device("rtx4090")
    kinds = [len(set(CostModel(config, device, weights=table, kind=kind).kinds)) for kind in _KINDS]
    assert kinds[0] == kinds[2]
    assert kinds[1] > kinds[0]


_KINDS = ("torch-cuda", "torch-cuda/50", "torch-cuda/100")
