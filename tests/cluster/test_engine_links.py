"""A stage does not reach the next one, though the engine reaches both: the next epoch has another order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from edgepipe_emulated import EmulatedWeights

from edgepipe.backend.types import StageSettings
from edgepipe.engine.placing import EpochPlacement, Nodes, Planner, SamePlacement
from edgepipe.errors import ConnectTimeout, LinkError, PeerClosed
from edgepipe.ids import NodeId
from edgepipe.link.protocol import OnSample, Outgoing, RingTarget
from edgepipe.spec.facts import LayerRange, Slice, make_slices
from edgepipe.stage.stage import Stage
from edgepipe.wire.engines import ServeSpec
from tests.support.engine.lab import CONFIG, EngineLab, engine_lab, oracle_tokens, submission
from tests.support.engine.pipeline import BLOCK_SIZE
from tests.support.network.ports import free_port
from tests.support.network.tcp_proxy import TcpProxy, tcp_proxy

PROMPT = [3, 1, 4, 1, 5]
THERE = NodeId("node0"), NodeId("node1")
BACK = THERE[::-1]


class TurnsRound:
    """Places two stages where they were, or the other way round."""

    def __init__(self) -> None:
        self.asked_without: list[frozenset[tuple[NodeId, NodeId]]] = []

    async def plan(
        self, spec: ServeSpec, *, quarantined: Collection[NodeId], quarantined_links: Collection[tuple[NodeId, NodeId]]
    ) -> EpochPlacement:
        """See Planner."""
        self.asked_without.append(frozenset(quarantined_links))
        assert not quarantined, "no node is at fault"
        order = tuple(stage.node_id for stage in spec.stages)
        if order in quarantined_links:
            order = order[::-1]
        stages = tuple(replace(stage, node_id=node_id) for stage, node_id in zip(spec.stages, order, strict=True))
        return EpochPlacement(spec=replace(spec, stages=stages), nodes=Nodes(addresses={}, names={}))


async def load(stage: Stage, asked: tuple[Slice, ...]) -> None:
    """As a node does, which keeps a stage that holds what is asked for."""
    shard = stage._shard
    if shard is not None and shard.slices == asked:
        return
    while stage._current is not None:  # the last epoch's stream ends a moment after its engine has closed it
        await stage._changed.wait()
    await stage.load(
        slices=asked,
        open_weights=lambda: EmulatedWeights(CONFIG),
        progress=lambda _: None,
        settings=StageSettings(block_size=BLOCK_SIZE),
    )


def go_through(proxy: TcpProxy, stage: Stage, *, deadline_s: float) -> None:
    """What the stage sends to the next one; it gives up soon once nothing goes through."""
    dial = stage._tools.dial

    def dial_proxy(target: RingTarget, *, on_sample: OnSample) -> Outgoing:
        reach_s = 20.0 if proxy.flowing.is_set() else 0.5
        proxied = replace(target, address=proxy.address, reach_s=reach_s, deadline_s=deadline_s)
        return dial(proxied, on_sample=on_sample)

    stage._tools = replace(stage._tools, dial=dial_proxy)


@asynccontextmanager
async def ring(
    planner: Planner, *, deadline_s: float = 20.0, blocked: bool = False, **spec: Any
) -> AsyncGenerator[tuple[EngineLab, TcpProxy]]:
    """Two nodes that load what they are asked for; only node0's stage sends through the proxy, which may be
    ``blocked`` from the beginning."""
    async with engine_lab(planner=planner, ready=False, link="1gbit,2ms", constraints=spec) as lab:
        proxied = asyncio.Event()
        for node, stage in zip(lab.nodes, lab.stages.stages, strict=True):
            node.hold, node.load = proxied, partial(load, stage)
        async with tcp_proxy(lab.nodes[1].stage_address) as proxy:
            go_through(proxy, lab.stages.stages[0], deadline_s=deadline_s)
            if blocked:
                proxy.flowing.clear()
            proxied.set()
            await lab.until(lambda: lab.engine.state().state == "ready")
            yield lab, proxy


async def goes_on(lab: EngineLab) -> None:
    gateway = await lab.gateway()
    gateway.send(submission("b", PROMPT, 10))
    assert (await gateway.ended("b")).ids == oracle_tokens(PROMPT, 10)
    await lab.settle()
    assert tuple(stage.node_id for stage in lab.engine.state().stages) == BACK


@pytest.mark.parametrize("breaks", [True, False], ids=["breaks", "stalls"])
async def test_a_link_that_fails_in_mid_epoch_is_not_used_by_the_next_one(breaks: bool) -> None:
    planner = TurnsRound()
    async with ring(planner, deadline_s=0.7) as (lab, proxy):
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 60))
        await gateway.has("a", 5)
        proxy.flowing.clear()
        if breaks:
            proxy.cut()
        assert (await gateway.ended("a")).ids == oracle_tokens(PROMPT, 60)
        assert planner.asked_without == [{THERE}]
        recovering = next(state for state in lab.states if state.state == "recovering")
        assert isinstance(recovering.error, LinkError)
        assert recovering.error.node == "node0"
        await goes_on(lab)


async def test_an_epoch_that_cannot_be_opened_over_a_link_is_tried_without_it() -> None:
    planner = TurnsRound()
    async with ring(planner) as (lab, proxy):
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 60))
        await gateway.has("a", 5)
        session = lab.stages.stages[1]._current
        assert session is not None
        proxy.flowing.clear()
        session.fault(PeerClosed("a fault of its own"))
        assert (await gateway.ended("a")).ids == oracle_tokens(PROMPT, 60)
        assert planner.asked_without == [frozenset(), {THERE}]
        await goes_on(lab)


async def test_a_model_is_served_in_the_other_order_where_its_first_one_needs_a_blocked_port() -> None:
    planner = TurnsRound()
    async with ring(planner, blocked=True) as (lab, _):
        assert planner.asked_without == [{THERE}]
        assert any("node0 does not reach node1" in state.message for state in lab.states)
        assert lab.engine.state().recoveries == 0
        await goes_on(lab)


@pytest.mark.parametrize("fixed", [True, False], ids=["somebody said where", "there is no other order"])
async def test_where_there_is_no_other_order_both_machines_are_named_and_what_to_do(fixed: bool) -> None:
    planner = TurnsRound() if fixed else SamePlacement(Nodes(addresses={}, names={}))
    async with ring(planner, blocked=True, fixed=fixed) as (lab, _):
        assert isinstance(lab.failure, ConnectTimeout)
        assert lab.failure.what == "node0 does not reach node1"
        assert lab.nodes[1].stage_address in lab.failure.fact
        assert "through the firewall of node1" in lab.failure.next_step
        assert len(lab.nodes[0].prepared) == 1, "nothing was tried in vain"


class LeavesOut:
    """All layers go to the node that is not quarantined, if there is one."""

    async def plan(
        self, spec: ServeSpec, *, quarantined: Collection[NodeId], quarantined_links: Collection[tuple[NodeId, NodeId]]
    ) -> EpochPlacement:
        """See Planner."""
        stages = spec.stages
        if quarantined:
            whole = make_slices([LayerRange(0, CONFIG.num_layers)], CONFIG.num_layers)
            stages = tuple(replace(stage, slices=whole) for stage in stages if stage.node_id not in quarantined)
        return EpochPlacement(spec=replace(spec, stages=stages), nodes=Nodes(addresses={}, names={}))


@pytest.mark.parametrize("wished", [0, 2], ids=["as is best", "two nodes"])
async def test_a_node_whose_port_the_engine_does_not_reach_is_left_out_after_the_second_time(wished: int) -> None:
    async with engine_lab(planner=LeavesOut(), ready=False, constraints={"num_nodes": wished}) as lab:
        lab.nodes[1].stage_address = f"127.0.0.1:{free_port('127.0.0.1')}"
        lab.nodes[0].load = partial(load, lab.stages.stages[0])
        await lab.until(lambda: lab.engine.state().state == "ready")
        assert len(lab.nodes[1].prepared) == 2
        if wished:
            assert isinstance(lab.failure, ConnectTimeout)
            assert lab.failure.what == "node0 does not reach node1"
            return
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 10))
        assert (await gateway.ended("a")).ids == oracle_tokens(PROMPT, 10)
        assert [len(node.released) for node in lab.nodes] == [0, 1], "what is not used is given back"
