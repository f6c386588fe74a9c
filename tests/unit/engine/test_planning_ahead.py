"""The engine plans ahead once tokens go home, and compares what both stages say of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.engine.pump import Pump, StepNews
from edgepipe.engine.settings import EngineTimeouts
from edgepipe.engine.sites import StageSite
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import EngineId, Epoch, NodeId, SequenceId, StepId
from edgepipe.sampling import SamplingParams
from edgepipe.scheduler import Scheduler, SchedulerLimits, SequenceSpec, ThrottledPolicy
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.registrations import Registration
from edgepipe.wire.reports import Drafted, HomeOpened, HomeTokens, StageTimings, StepDone
from edgepipe.wire.v1 import stage_pb2

EPOCH = Epoch(3, EngineId("engine"))


class Ring:
    """A pump and two stages that only write down their plans."""

    def __init__(self) -> None:
        slices = make_slices([LayerRange(0, 1), LayerRange(1, 2)], 2)
        self.sites = [
            StageSite(
                index=index,
                node_id=NodeId(f"node{index}"),
                node_name=f"node{index}",
                address="",
                slices=(part,),
                backend="emulated",
                device="",
                weight_bytes=1,
                kv_block_bytes=1,
                max_blocks=64,
            )
            for index, part in enumerate(slices)
        ]
        self.messages: list[list[stage_pb2.Plan]] = []  # plans of each message to the first stage
        self.news: list[StepNews] = []
        self.clock = FakeClock()
        self.pump = Pump(
            scheduler=Scheduler(
                SchedulerLimits(num_blocks=64, block_size=16, context_length=64, micro_batches=1), ThrottledPolicy()
            ),
            micro_batches=MicroBatches(slices=[[0], [1]], row_bytes=1, fixed=1),
            epoch=EPOCH,
            num_slices=2,
            vocab_size=256,
            clock=self.clock,
            timeouts=EngineTimeouts(),
        )
        stages: Any = [
            SimpleNamespace(site=site, send=self._send if not site.index else lambda _: None) for site in self.sites
        ]
        self.pump.connect(stages, registration=_registration, on_news=self.news.append, on_over=lambda: None)

    @property
    def plans(self) -> list[stage_pb2.Plan]:
        return [plan for message in self.messages for plan in message]

    def ask(self, *, max_tokens: int = 9) -> None:
        self.pump.submit([SequenceSpec(sequence=SequenceId(1), prompt=(1, 2, 3), max_tokens=max_tokens)])
        self.pump._fill()

    def open_home(self, *, stage: int = 1, epoch: Epoch = EPOCH) -> None:
        self.pump.on_report(self.sites[stage], HomeOpened(epoch=epoch))

    def done(self, step: int, token: int) -> None:
        self.pump.on_report(self.sites[1], StepDone(epoch=EPOCH, step=StepId(step), ids=((token,),)))

    def came(self, step: int, token: int, *, stage: int = 0) -> None:
        self.pump.on_report(self.sites[stage], StageTimings(home=(HomeTokens(step=StepId(step), ids=(token,)),)))

    def _send(self, messages: list[stage_pb2.ControlMessage]) -> None:
        for message in messages:
            if message.HasField("plan"):
                self.messages.append([message.plan, *message.next_plans])


def _registration(sequence: SequenceId, tokens: Any) -> Registration:
    return Registration(sequence=sequence, sampling=SamplingParams(temperature=0.0), prompt_tokens=3)


@pytest.fixture
async def ring() -> Any:
    ring = Ring()
    yield ring
    ring.pump._watch.close()


async def test_no_step_is_planned_ahead_until_tokens_go_home(ring: Ring) -> None:
    ring.ask()
    ring.open_home(stage=0)
    ring.open_home(epoch=Epoch(2, EngineId("engine")))
    ring.pump._fill()
    assert [(plan.after, plan.home) for plan in ring.plans] == [(0, False)]
    ring.open_home()
    ring.done(1, 7)
    assert [(plan.step, plan.after, plan.home) for plan in ring.plans] == [(1, 0, False), (2, 0, True), (3, 2, True)]
    assert [list(plan.token_ids) for plan in ring.plans] == [[1, 2, 3], [7], []]


@pytest.mark.parametrize(
    ("turn_s", "sizes"),
    [(0.008, [7, 6, 6]), (0.011, [5, 4, 4, 4]), (0.028, [2] * 8), (0.04, [1] * 18)],
)
async def test_plans_of_fast_turns_share_a_message(ring: Ring, turn_s: float, sizes: list[int]) -> None:
    ring.open_home()
    ring.ask(max_tokens=48)
    for step in range(1, 23):
        ring.clock.advance(turn_s)
        ring.done(step, 7)
        await asyncio.sleep(0)  # the turn is measured behind its plans
    assert [*map(len, ring.messages)][: 3 + len(sizes)] == [2, 1, 1, *sizes]
    assert [plan.step for plan in ring.plans] == [*range(1, len(ring.plans) + 1)]
    assert [plan.after for plan in ring.plans[2:]] == [plan.step - 1 for plan in ring.plans[2:]]


@pytest.mark.parametrize("first", ["done", "came"])
async def test_tokens_that_differ_end_the_epoch_and_name_the_stage_that_sent_them(ring: Ring, first: str) -> None:
    ring.open_home()
    ring.ask()
    ring.done(1, 7)
    ring.came(1, 7)
    tell = {"done": lambda: ring.done(2, 8), "came": lambda: ring.came(2, 9)}
    tell.pop(first)()
    with pytest.raises(RemoteProtocolError, match="other tokens of step 2") as caught:
        tell.popitem()[1]()
    assert caught.value.node == "node1"


@pytest.mark.parametrize(("step", "stage"), [(9, 0), (0, 0), (1, 1)])
async def test_tokens_that_cannot_have_come_end_the_epoch(ring: Ring, step: int, stage: int) -> None:
    ring.open_home()
    ring.ask()
    with pytest.raises(RemoteProtocolError, match=f"tokens of step {step} came to it"):
        ring.came(step, 7, stage=stage)


@pytest.mark.parametrize(
    ("stage", "change", "fact"),
    [
        (0, {}, "another stage samples"),
        (1, {"ids": (), "sources": ()}, "it drafts 0 tokens"),
        (1, {"ids": (1,) * 8, "sources": (5,) * 8}, "it drafts 8 tokens"),
        (1, {"sources": (5, 5)}, "with 2 sources"),
        (1, {"ids": (256,)}, "the vocabulary ends at 255"),
        (1, {"step": StepId(9)}, "step 1 is the newest"),
    ],
)
async def test_drafts_that_cannot_be_end_the_epoch(ring: Ring, stage: int, change: dict[str, Any], fact: str) -> None:
    ring.ask()
    drafted = Drafted(epoch=EPOCH, step=StepId(1), sequence=SequenceId(1), position=4, ids=(1,), sources=(5,))
    ring.pump.on_report(ring.sites[1], drafted)  # nothing asked for it: it is dropped
    ring.pump.on_report(ring.sites[1], replace(drafted, epoch=Epoch(2, EngineId("engine")), ids=(999,)))
    with pytest.raises(RemoteProtocolError) as raised:
        ring.pump.on_report(ring.sites[stage], replace(drafted, **change))
    assert fact in str(raised.value.fact)
