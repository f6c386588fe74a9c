"""How an engine prepares its stages: how long it waits for nodes, and the settings that all stages are built with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.backend.types import DEFAULT_SETTINGS, StageSettings
from edgepipe.engine.placing import Nodes
from edgepipe.engine.preparation import Preparation
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.errors import NodeUnreachable, VersionMismatch
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.link.channels import bind, make_server
from edgepipe.security.mutual_tls import Plaintext
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices
from edgepipe.wire.common import Hello
from edgepipe.wire.engines import ServeSpec, StagePlacement
from edgepipe.wire.v1 import node_pb2, node_pb2_grpc
from tests.support.engine.lab import FakeNode
from tests.support.models.family_files import tiny_values

CONFIG = emulated_model_config(num_layers=4)
NODE = NodeId("node0")
LONGROPE = hf_config(tiny_values("phi3"))


class SlowNode(FakeNode):
    """Fetches weights over a thin link."""

    def __init__(self, *, reports: int, every_s: float) -> None:
        super().__init__("127.0.0.1:1", max_blocks=8)
        self.reports, self.every_s = reports, every_s

    async def Prepare(self, request: node_pb2.PrepareRequest, context: Any) -> AsyncGenerator[node_pb2.PrepareEvent]:
        """Report, then load."""
        for done in range(self.reports):
            progress = node_pb2.PrepareProgress(phase="fetching", bytes_done=done, bytes_total=self.reports)
            yield node_pb2.PrepareEvent(progress=progress)
            await asyncio.sleep(self.every_s)
        async for event in super().Prepare(request, context):
            yield event


def slow_node(*, reports: int, every_s: float) -> SlowNode:
    return SlowNode(reports=reports, every_s=every_s)  # pyright: ignore[reportAbstractUsage] - the rest is unused


@asynccontextmanager
async def preparation_on(
    node: FakeNode, *, prepare_s: float = 5.0, config: ModelConfig = CONFIG, settings: StageSettings = DEFAULT_SETTINGS
) -> AsyncIterator[Preparation]:
    server = make_server(Plaintext())
    node_pb2_grpc.add_NodeServicer_to_server(node, server)  # pyright: ignore[reportArgumentType]
    port = bind(server, Plaintext(), host="127.0.0.1", port=0)
    await server.start()
    slices = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    stages = (StagePlacement(node_id=NODE, slices=tuple(slices)),)
    try:
        yield Preparation(
            config=config,
            spec=ServeSpec(model="m", stages=stages, settings=settings),
            nodes=Nodes(addresses={NODE: f"127.0.0.1:{port}"}, names={NODE: "atlas"}),
            pipeline_id=PipelineId("p"),
            epoch=Epoch(1, EngineId("e")),
            fresh=(),
            hello=Hello(role="engine"),
            security=Plaintext(),
            limits=EngineLimits(),
            timeouts=EngineTimeouts(prepare_s=prepare_s),
            on_progress=lambda *_: None,
        )
    finally:
        await server.stop(None)


async def test_weights_may_take_longer_to_come_than_a_node_may_be_silent() -> None:
    async with preparation_on(slow_node(reports=5, every_s=0.5), prepare_s=2.0) as preparation:
        (site,) = await preparation.prepare()
    assert site.node_id == NODE


async def test_a_node_that_reports_nothing_any_more_is_left() -> None:
    async with preparation_on(slow_node(reports=1, every_s=60.0), prepare_s=0.5) as preparation:
        with pytest.raises(NodeUnreachable, match="atlas does not report progress"):
            await preparation.prepare()
    assert preparation.failed == NODE


class OlderNode(FakeNode):
    """Knows nothing of 8-bit KV."""

    async def Prepare(self, request: node_pb2.PrepareRequest, context: Any) -> AsyncGenerator[node_pb2.PrepareEvent]:
        """Load without that setting."""
        request.settings.ClearField("kv")
        async for event in super().Prepare(request, context):
            yield event


@pytest.mark.parametrize(("served", "expected"), [(64, 64), (0, LONGROPE.context_length)])
async def test_a_stage_is_told_the_served_context(served: int, expected: int) -> None:
    node = FakeNode("127.0.0.1:1", max_blocks=8)  # pyright: ignore[reportAbstractUsage] - the rest is unused
    async with preparation_on(node, config=LONGROPE, settings=StageSettings(context_length=served)) as preparation:
        await preparation.prepare()
    assert [request.settings.context_length for request in node.prepared] == [expected]


async def test_a_node_whose_stage_does_not_obey_a_setting_is_left() -> None:
    node = OlderNode("127.0.0.1:1", max_blocks=8)  # pyright: ignore[reportAbstractUsage] - the rest is unused
    async with preparation_on(node, settings=StageSettings(kv="8bit")) as preparation:
        with pytest.raises(VersionMismatch, match="atlas does not obey a setting of this model") as caught:
            await preparation.prepare()
    assert caught.value.fact == "kv is '' there, '8bit' was asked for"
    assert preparation.failed == NODE
