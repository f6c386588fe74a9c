"""An engine process: gets one model to serve, and serves it until it is stopped or a stage fails."""

from __future__ import annotations

import asyncio

import grpc.aio

from edgepipe.clock import Clock
from edgepipe.engine import Engine, Reachable
from edgepipe.ids import NodeId, PipelineId
from edgepipe.link.channels import make_server
from edgepipe.link.shaped import Network, make_network
from edgepipe.model.config_json import config_from_json
from edgepipe.model.strict_json import parse_json_object
from edgepipe.system import RandomIds, SystemClock
from edgepipe.wire.common import make_hello
from edgepipe.wire.engines import EngineState, engine_state_to_wire, serve_spec_from_wire
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.workers.daemon_link import DaemonLink
from edgepipe.workers.grpc_server import bind_one_of
from edgepipe.workers.planning import DaemonPlanner
from edgepipe.workers.progress import report_progress
from edgepipe.workers.settings import ChildSettings


async def run(settings: ChildSettings, link: DaemonLink) -> None:
    """Wait for the task and serve it until cancelled. Raises the reason of the engine's end."""
    server = make_server(link.security)
    clock = SystemClock()
    network = make_network(settings.link, clock)
    port = bind_one_of(server, link.security, settings)
    link.started(port=port)
    reporter = asyncio.create_task(report_progress(link, pb.ChildProgress), name="progress")
    try:
        await _serve(settings, link, server, clock=clock, network=network, port=port)
    finally:
        reporter.cancel()


async def _serve(
    settings: ChildSettings,
    link: DaemonLink,
    server: grpc.aio.Server,
    *,
    clock: Clock,
    network: Network | None,
    port: int,
) -> None:
    async for command in link.commands():
        if not command.HasField("run"):
            continue
        planner = DaemonPlanner(link)
        address = f"{settings.host}:{port}"
        engine = _engine(settings, link, command.run, address=address, clock=clock, network=network, planner=planner)
        engine.add_to(server)
        await server.start()
        listening = asyncio.create_task(_listen(link, engine, planner), name="daemon")
        try:
            if not command.run.resuming:
                await engine.start()
            await engine.run()
        finally:
            listening.cancel()
            await server.stop(grace=0.2)
            if network is not None:
                network.close()
        return


async def _listen(link: DaemonLink, engine: Engine, planner: DaemonPlanner) -> None:
    async for command in link.commands():
        if command.HasField("plan") and (plan := planner.take(command.plan)) is not None:
            engine.move_to(plan)
        if command.HasField("reachable"):
            reachable = command.reachable
            engine.note_reachable(
                Reachable(
                    addresses={NodeId(node.node_id): node.address for node in reachable.nodes},
                    leaving=frozenset(NodeId(node_id) for node_id in reachable.leaving),
                )
            )


def _engine(
    settings: ChildSettings,
    link: DaemonLink,
    task: pb.RunEngine,
    *,
    address: str,
    clock: Clock,
    network: Network | None,
    planner: DaemonPlanner,
) -> Engine:
    def tell(state: EngineState) -> None:
        link.report(pb.ChildReport(engine=engine_state_to_wire(state)))

    hello = make_hello(
        role="engine", node_id=settings.node_id, node_name=settings.node_name, cluster_id=settings.cluster_id
    )
    return Engine(
        config=config_from_json(parse_json_object(task.model_config.encode(), what="the model's shape")),
        spec=serve_spec_from_wire(task.spec),
        nodes={NodeId(node.node_id): node.address for node in task.nodes},
        node_names={NodeId(node.node_id): node.name for node in task.nodes if node.name},
        pipeline_id=PipelineId(task.pipeline_id),
        hello=hello,
        security=link.security,
        clock=clock,
        network=network,
        ids=RandomIds(),
        on_state=tell,
        address=address,
        epoch_counter=max(1, task.epoch_counter),
        planner=planner,
    )
