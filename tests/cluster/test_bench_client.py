"""The bench's client against a real engine: every run asks anew, whoever asked the same before."""

from __future__ import annotations

from edgepipe.cli.bench.client import MeasuredRun, connected
from edgepipe.security.mutual_tls import Plaintext
from edgepipe.simulation.workload import Arrivals, FixedLengths, WorkloadSpec, make_workload
from edgepipe.wire.common import Hello
from tests.support.engine.lab import EngineLab, engine_lab

WORKLOAD = make_workload(
    WorkloadSpec(
        arrivals=Arrivals.CLOSED,
        concurrency=3,
        num_requests=6,
        prompt=FixedLengths(tokens=20),
        output=FixedLengths(tokens=5),
        prefix_tokens=32,
    )
)


async def measured(lab: EngineLab) -> MeasuredRun:
    hello = Hello(role="gateway", node_id="bench", cluster_id="lab")
    async with connected(lab.engine.state(), hello, Plaintext()) as client:
        return await client.run(WORKLOAD, num_stages=2)


async def test_a_ready_engine_tells_its_blocks_and_its_context() -> None:
    """A bench divides by the number of blocks in the first report of a ready engine."""
    async with engine_lab(num_stages=2) as lab:
        ready = next(state for state in lab.states if state.state == "ready")
        assert ready.num_blocks == lab.engine.state().num_blocks > 0
        assert ready.context_length == lab.engine.state().context_length > 0


async def test_the_second_bench_of_an_engine_is_computed_like_the_first() -> None:
    async with engine_lab(num_stages=2, device="rtx4090") as lab:
        first = await measured(lab)
        second = await measured(lab)
    for run in (first, second):
        assert [record.output_tokens for record in run.requests] == [5] * 6
        assert not any(record.error for record in run.requests)
        assert sum(step.num_tokens for step in run.steps) > 6 * 5
    assert first.steps[-1].step < second.steps[0].step
    assert sum(record.cached_tokens for record in second.requests) >= 6 * 32, "prompts are the same, and known now"
