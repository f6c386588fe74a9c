"""A model whose tokens prefer some experts: what the sizer sees by itself, and what the engine reports of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.backend.cost import CostModel, SliceCost, StepWork
from edgepipe.backend.devices import named_device
from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.ids import StepId
from edgepipe.scheduler.pacing import HOST_S
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.weights.mixes import named_model
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.reports import StageTimings, StepTiming
from edgepipe.wire.v1 import stage_pb2
from tests.support.engine.ring_model import ROW_BYTES, RingModel

SEQUENCES, ONE_WAY_MS, SKEW = 32, 10.0, 1.5


def half_of_the_model(skew: float) -> SliceCost:
    config, weights = named_model("qwen3-30b-a3b:q4_k_m")
    cost = CostModel(config, named_device("m4max"), weights=weights, kind="emulated", expert_skew=skew)
    return cost.slice_cost(make_slices([LayerRange(0, 24), LayerRange(24, 48)], 48)[0])


def work(tokens: int) -> StepWork:
    return StepWork.of_rows([512] * tokens, [1] * tokens, logit_rows=0)


def make_ring(truth: SliceCost, *, fixed: int = 0) -> RingModel:
    """Two stages with half of the model each, whose engine knows the upper bound of the experts only."""
    assumed = replace(truth, expert_shares=())
    sizes = MicroBatches(slices=[[0], [1]], row_bytes=ROW_BYTES, fixed=fixed, costs={0: assumed, 1: assumed})
    return RingModel(
        reads_ms=[0.0, 0.0],
        sizes=sizes,
        step_ms=lambda tokens: 1e3 * truth.step_s(work(tokens)),
        expert_share=truth.distinct_share,
        one_way_ms=ONE_WAY_MS,
        return_ms=ONE_WAY_MS,
    )


def rate(truth: SliceCost, micro_batches: int) -> float:
    ring = make_ring(truth, fixed=micro_batches)
    ring.run(sequences=SEQUENCES, steps=60)
    before_ms = ring.now_ms
    ring.run(sequences=SEQUENCES, steps=120)
    return 120 * SEQUENCES / micro_batches / (ring.now_ms - before_ms)


def best(truth: SliceCost) -> int:
    return max(range(1, 9), key=lambda micro_batches: rate(truth, micro_batches))


def test_the_sizer_finds_the_m_of_the_experts_that_steps_read_not_of_the_bound() -> None:
    even, skewed = half_of_the_model(0.0), half_of_the_model(SKEW)
    assert best(even) < best(skewed), "fewer experts to read again make further micro-batches cheaper"
    for truth in (even, skewed):
        assert make_ring(truth).run(sequences=SEQUENCES, steps=300)[-1] == best(truth)


def test_predicted_times_follow_the_experts_that_steps_read() -> None:
    truth = half_of_the_model(SKEW)
    ring = make_ring(truth)
    ring.run(sequences=SEQUENCES, steps=300)
    for tokens in (1, 24):
        expected = ring.sizes.pacer.passage(work(tokens))
        assert expected is not None
        assert expected.server_s - HOST_S == pytest.approx(truth.step_s(work(tokens)), rel=0.08), (
            "the bound alone is 40 % off"
        )


def test_the_engine_reports_the_shares_of_its_steps() -> None:
    truth = half_of_the_model(SKEW)
    ring = make_ring(truth)
    assert ring.sizes.experts.shares() == ()
    ring.run(sequences=SEQUENCES, steps=300)
    shares = ring.sizes.experts.shares()
    assert shares
    for each in shares:
        assert each.share == pytest.approx(truth.distinct_share(round(each.tokens)), rel=0.1)


def test_a_timing_carries_the_share() -> None:
    timing = StepTiming(
        step=StepId(1), slice_index=0, num_tokens=4, num_rows=4, started_us=1, compute_us=5, expert_share=0.375
    )
    report = to_wire(StageTimings(timings=(timing,)), stage_pb2.StageTimings)
    assert from_wire(report, StageTimings).timings == (timing,)
