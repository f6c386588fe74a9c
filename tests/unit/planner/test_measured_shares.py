"""Speeds by a probe for a model that reads other experts than the probe did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import named_device
from edgepipe.backend.expert_reads import ExpertShare, skewed_shares
from edgepipe.ids import NodeId
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.drift import ScaledSpeed, with_expert_shares
from edgepipe.planner.layer_profile import LayerProfile, Point
from edgepipe.planner.placement import NodeRoom
from edgepipe.planner.profiles import Links, Machine, MeasuredSpeed, TableSpeed
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model

CONFIG, WEIGHTS = named_model("qwen3-30b-a3b:q4_k_m")
COST = CostModel(CONFIG, named_device("m4max"), weights=WEIGHTS)
EVEN, SKEWED = (skewed_shares(128, 8, skew) for skew in (0.0, 1.5))


def work(tokens: int) -> StepWork:
    return StepWork.of_rows([0] * tokens, [1] * tokens, logit_rows=0)


def probed(shares: tuple[ExpertShare, ...], *, slower: float = 1.0, counted: bool = True) -> MeasuredSpeed:
    """A probe of layers that read these shares, on a device ``slower`` than its data sheet says."""
    truth, read = TableSpeed(COST, expert_shares=shares), {each.tokens: each.share for each in shares}
    decode = tuple(
        Point(size, slower * truth.parts(work(size)).layer_s.mean(), read.get(size, 0.0) if counted else 0.0)
        for size in (1, 4, 16, 64)
    )
    profile = LayerProfile(
        base_s=0.0,
        decode=decode,
        prefill=(Point(128, 2 * decode[-1].seconds),),
        head=(Point(1, 1e-4),),
        kv_token_s=0.0,
        decode_context=0,
    )
    return MeasuredSpeed(profile, COST)


def layer_s(speed: MeasuredSpeed | TableSpeed | ScaledSpeed, tokens: int) -> float:
    return float(speed.parts(work(tokens)).layer_s.mean())


@pytest.mark.parametrize("tokens", [1, 3, 4, 8, 16, 40, 64])
def test_a_skewed_probe_tells_the_times_of_a_model_that_chooses_evenly(tokens: int) -> None:
    """A probe of few experts on a device 1.4 times as slow as its sheet, then the model's own shares."""
    before, after = probed(SKEWED, slower=1.4), probed(SKEWED, slower=1.4).with_expert_shares(EVEN)
    assert layer_s(before, tokens) == pytest.approx(
        1.4 * layer_s(TableSpeed(COST, expert_shares=SKEWED), tokens), rel=0.05
    )
    assert layer_s(after, tokens) == pytest.approx(
        1.4 * layer_s(TableSpeed(COST, expert_shares=EVEN), tokens), rel=0.05
    )


def test_one_token_takes_as_long_whatever_the_model_prefers() -> None:
    speed = probed(EVEN)
    assert layer_s(speed.with_expert_shares(SKEWED), 1) == pytest.approx(layer_s(speed, 1))
    assert layer_s(speed.with_expert_shares(SKEWED), 16) < 0.7 * layer_s(speed, 16)


def test_the_newest_shares_count_and_shares_of_the_probe_change_nothing() -> None:
    speed = probed(EVEN)
    assert layer_s(speed.with_expert_shares(EVEN), 16) == pytest.approx(layer_s(speed, 16), rel=1e-6)
    twice = speed.with_expert_shares(SKEWED).with_expert_shares(EVEN)
    assert layer_s(twice, 16) == pytest.approx(layer_s(speed, 16), rel=1e-6)


def test_a_probe_that_did_not_count_keeps_its_times() -> None:
    speed = probed(EVEN, counted=False)
    assert speed.with_expert_shares(SKEWED) is speed
    counted = probed(EVEN)
    assert counted.with_expert_shares(()) is counted


def test_shares_and_experts_in_host_memory_go_together() -> None:
    speed = probed(EVEN)
    first, second = (
        speed.with_ram_percent(50).with_expert_shares(SKEWED),
        speed.with_expert_shares(SKEWED).with_ram_percent(50),
    )
    assert list(first.parts(work(16)).layer_s) == pytest.approx(list(second.parts(work(16)).layer_s))
    assert layer_s(first, 16) < layer_s(speed.with_ram_percent(50), 16)


def test_a_correction_by_the_ring_stays_for_experts_in_host_memory() -> None:
    speed = TableSpeed(COST)
    corrected = ScaledSpeed(speed, 2.0).with_ram_percent(50)
    assert layer_s(corrected, 16) == pytest.approx(2.0 * layer_s(speed.with_ram_percent(50), 16))


def test_every_machine_of_the_cluster_gets_them_and_a_correction_by_the_ring_stays() -> None:
    room = NodeRoom(node_id=NodeId("a"), name="a", free_bytes=10**11, bytes_per_weight=2)
    machine = Machine(room=room, device="M4 Max", speed=probed(EVEN))
    slow = replace(machine, room=replace(room, node_id=NodeId("b"), name="b"), speed=ScaledSpeed(TableSpeed(COST), 2.0))
    cluster = Cluster(model="", config=CONFIG, machines=(machine, slow), links=Links(assumed=parse_link("1gbit,1ms")))
    found = with_expert_shares(cluster, (*SKEWED, ExpertShare(0.5, 0.1), ExpertShare(7, 3.0)))
    expected = TableSpeed(COST, expert_shares=SKEWED).parts(work(16)).layer_s.mean()
    assert [each.speed.parts(work(16)).layer_s.mean() for each in found.machines] == pytest.approx(
        [expected, 2 * expected], rel=0.01
    )
    assert with_expert_shares(cluster, (ExpertShare(1, 0.1),)) is cluster
