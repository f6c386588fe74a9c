"""Shares of experts that stay in host memory: which experts, their sizes, and what reading them costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import named_device
from edgepipe.errors import ConfigInvalid
from edgepipe.spec.expert_places import SETTING, chosen_share, num_in_ram, numbers_in_ram, split_kind, with_ram_percent
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.weights.mixes import named_model
from edgepipe.weights.resident import resident_sizes

MIXTURE = named_model("qwen3-30b-a3b:q4_k_m")


@given(st.integers(0, 100), st.integers(1, 512))
def test_at_least_the_share_is_in_ram_and_groups_have_it_too(percent: int, count: int) -> None:
    numbers = numbers_in_ram(count, percent)
    assert len(numbers) == num_in_ram(count, percent)
    assert 0 <= len(numbers) - count * percent / 100 < 1
    for first in range(0, count, 8):
        group = range(first, min(count, first + 8))
        assert abs(len({*group} & {*numbers}) - len(group) * len(numbers) / count) < 2


@given(st.integers(0, 100), st.lists(st.integers(0, 9), min_size=1, max_size=64))
def test_the_experts_used_least_are_in_ram(percent: int, uses: list[int]) -> None:
    numbers = numbers_in_ram(len(uses), percent, uses)
    assert len(numbers) == num_in_ram(len(uses), percent)
    assert list(numbers) == sorted({*numbers})
    others = [uses[number] for number in range(len(uses)) if number not in numbers]
    assert not others or all(uses[number] <= min(others) for number in numbers)
    assert numbers_in_ram(len(uses), percent, [7] * len(uses)) == numbers_in_ram(len(uses), percent)


@pytest.mark.parametrize(("text", "percent"), [("none", 0), ("all", 100), ("0%", 0), ("40%", 40), ("100%", 100)])
def test_settings(text: str, percent: int) -> None:
    assert chosen_share({SETTING: text}) == percent


@pytest.mark.parametrize("text", ["", "%", "-1%", "101%", "4.5%", "40", "some", "½%", "9" * 5000 + "%"])
def test_bad_settings(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="experts_in_ram cannot be"):
        chosen_share({SETTING: text})


def test_without_a_setting_nothing_changes() -> None:
    assert chosen_share({}) == 0
    assert with_ram_percent("torch-cuda", 0) == "torch-cuda"


@given(st.sampled_from(["", "torch-cuda", "mlx"]), st.integers(1, 100))
def test_a_kind_keeps_its_share(kind: str, percent: int) -> None:
    assert split_kind(with_ram_percent(kind, percent)) == (kind, percent)


@given(st.text(max_size=30))
def test_kinds_of_other_nodes(kind: str) -> None:
    base, percent = split_kind(kind)
    assert kind == base or kind.startswith(base + "/")
    assert 0 <= percent <= 100


@pytest.mark.parametrize("percent", [0, 40, 100])
def test_sizes_split_into_device_and_ram(percent: int) -> None:
    config, table = MIXTURE
    every = resident_sizes(config, table, kind="torch-cuda", dtype="bfloat16")
    split = resident_sizes(config, table, kind=with_ram_percent("torch-cuda", percent), dtype="bfloat16")
    cpu = resident_sizes(config, table, kind="torch-cpu", dtype="float32")
    moved = num_in_ram(128, percent)
    for layer in range(config.num_layers):
        assert split.in_ram[layer] == cpu.experts[layer] // 128 * moved
        assert split.experts[layer] == every.experts[layer] // 128 * (128 - moved)
        assert split.layers[layer] - split.experts[layer] == every.layers[layer] - every.experts[layer]
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    assert every.of_slice(whole) - split.of_slice(whole) == sum(every.experts) // 128 * moved


def test_estimates_read_the_experts_in_ram_more_slowly() -> None:
    config, table = MIXTURE
    device = replace(named_device("rtx4090"), bandwidth_bytes_per_s=1e12)
    part = Slice(index=1, layers=LayerRange(0, config.num_layers), embedding=False, head=False)
    work = StepWork.of_rows([0], [1], logit_rows=0)
    seconds = [
        CostModel(config, device, weights=table, kind=with_ram_percent("torch-cuda", percent))
        .slice_cost(part)
        .step_s(work)
        for percent in (0, 40, 100)
    ]
    assert seconds[0] < seconds[1] < seconds[2]
    assert CostModel(config, device, weights=table, kind="torch-cuda/40").weight_bytes([part]) < CostModel(
        config, device, weights=table, kind="torch-cuda"
    ).weight_bytes([part])


def test_a_shared_expert_stays_on_the_device() -> None:
    config, table = named_model("glm-4.5-air:q4_k_m")
    sizes = resident_sizes(config, table, kind="torch-cuda/100", dtype="bfloat16")
    assert sum(sizes.experts) == 0
    assert sizes.shared[0] == 0, "the first layer is dense"
    assert 0 < sizes.shared[1] < sizes.layers[1]
    assert sum(resident_sizes(*MIXTURE, kind="torch-cuda", dtype="bfloat16").shared) == 0
