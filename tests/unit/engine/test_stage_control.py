"""A stage that opened is watched while the others open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from edgepipe.backend.types import ActivationType
from edgepipe.engine.control import StageControl
from edgepipe.engine.sites import StageSite
from edgepipe.errors import ConnectTimeout, DeviceOutOfMemory, EdgepipeError, StageLost
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.link.channels import bind, make_server
from edgepipe.security.mutual_tls import Plaintext
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.wire.common import Hello
from edgepipe.wire.errors import error_to_wire
from edgepipe.wire.pipelines import PipelineSpec
from edgepipe.wire.v1 import stage_pb2, stage_pb2_grpc

SLICES = (Slice(index=0, layers=LayerRange(0, 1), embedding=True, head=True),)


class OpensAndEnds(stage_pb2_grpc.StageServicer):
    """Opens, and ends when it is told to: with the fault, if there is one."""

    def __init__(self, fault: EdgepipeError | None, *, next_unreached: bool) -> None:
        self.ends = asyncio.Event()
        self._fault = fault
        self._next_unreached = next_unreached

    async def Control(self, request_iterator: Any, context: Any) -> AsyncIterator[stage_pb2.StageReport]:
        await anext(aiter(request_iterator))
        yield stage_pb2.StageReport(opened=stage_pb2.Opened())
        await self.ends.wait()
        if self._fault is not None:
            yield stage_pb2.StageReport(fault=error_to_wire(self._fault), next_unreached=self._next_unreached)

    async def Ring(self, request_iterator: Any, context: Any) -> AsyncIterator[stage_pb2.Credit]:
        for credit in ():
            yield credit


@asynccontextmanager
async def opened(
    fault: EdgepipeError | None = None, *, next_unreached: bool = False
) -> AsyncIterator[tuple[OpensAndEnds, StageControl]]:
    stage = OpensAndEnds(fault, next_unreached=next_unreached)
    server = make_server(Plaintext())
    stage_pb2_grpc.add_StageServicer_to_server(stage, server)  # pyright: ignore[reportArgumentType]
    address = f"127.0.0.1:{bind(server, Plaintext(), host='127.0.0.1', port=0)}"
    await server.start()
    site = StageSite(
        index=1,
        node_id=NodeId("b"),
        node_name="b",
        address=address,
        slices=SLICES,
        backend="",
        device="",
        weight_bytes=0,
        kv_block_bytes=1,
        max_blocks=1,
    )
    spec = PipelineSpec(
        pipeline_id=PipelineId("p"),
        epoch=Epoch(counter=1, engine_id=EngineId("e")),
        slices=SLICES,
        num_slices=2,
        hidden_size=8,
        activation_type=ActivationType.BF16,
        num_blocks=1,
        block_size=16,
        next_address="",
        max_in_flight=1,
        step_deadline_ms=1000,
    )
    control = StageControl(site, on_report=lambda *_: None, max_queued=1, security=Plaintext())
    try:
        await control.open(spec, Hello(role="engine"), timeout_s=10)
        yield stage, control
    finally:
        await control.close()
        await server.stop(None)


@pytest.mark.parametrize(("fault", "kind"), [(None, StageLost), (DeviceOutOfMemory("no memory"), DeviceOutOfMemory)])
async def test_a_stage_lost_while_others_open_is_noticed_at_once(
    fault: EdgepipeError | None, kind: type[EdgepipeError]
) -> None:
    async with opened(fault) as (stage, control), asyncio.timeout(10):
        standing = asyncio.create_task(control.wait_until_all_open(asyncio.Event().wait()))
        stage.ends.set()
        with pytest.raises(kind) as caught:
            await standing
        assert (caught.value.stage, caught.value.node) == ("stage 1", "b")


async def test_when_all_are_open_its_reports_are_read_from_the_first_on() -> None:
    async with opened(DeviceOutOfMemory("no memory")) as (stage, control), asyncio.timeout(10):
        others = asyncio.Event()
        others.set()
        await control.wait_until_all_open(others.wait())
        running = asyncio.create_task(control.run())
        stage.ends.set()
        with pytest.raises(BaseExceptionGroup) as caught:
            await running
        assert caught.group_contains(DeviceOutOfMemory, match="no memory")


@pytest.mark.parametrize("next_unreached", [True, False])
async def test_a_fault_says_whether_it_is_the_way_to_the_next_stage(next_unreached: bool) -> None:
    async with opened(ConnectTimeout("nobody there"), next_unreached=next_unreached) as (stage, control):
        assert control.reached
        assert not control.next_unreached
        stage.ends.set()
        with pytest.raises(ConnectTimeout, match="nobody there"):
            await control.wait_until_all_open(asyncio.Event().wait())
        assert control.next_unreached is next_unreached
        await control.close()
        assert not control.reached
