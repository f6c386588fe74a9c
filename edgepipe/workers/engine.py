"""An engine process: gets one model to serve, and serves it until it is stopped or a stage fails."""

from __future__ import annotations

import asyncio

import grpc.aio

from edgepipe.addresses import with_port
from edgepipe.clock import Clock
from edgepipe.engine import Engine, ReachableNodes
from edgepipe.files.strict_json import parse_json_object
from edgepipe.ids import NodeId
from edgepipe.link.channels import make_server
from edgepipe.link.shaped import Network, make_network
from edgepipe.spec.config_json import config_from_json
from edgepipe.system import RandomIds, SystemClock
from edgepipe.weights.weight_table import table_from_json
from edgepipe.wire import serving
from edgepipe.wire.children import ChildProgress
from edgepipe.wire.common import Hello
from edgepipe.wire.serving import PlanMade, RunEngine
from edgepipe.workers.daemon_link import DaemonLink
from edgepipe.workers.grpc_server import bind_one_of
from edgepipe.workers.planning import DaemonPlanner
from edgepipe.workers.progress import report_progress
from edgepipe.workers.settings import ChildSettings


async def run(settings: ChildSettings, link: DaemonLink) -> None:
    """Wait for the task and serve it until cancelled. Raises the reason of the engine's end."""
    server = make_server(link.security, keepalive=settings.keepalive)
    clock = SystemClock()
    network = make_network(settings.link, clock)
    port = bind_one_of(server, link.security, settings)
    link.started(port=port)
    reporter = asyncio.create_task(report_progress(link, ChildProgress), name="progress")
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
        if not isinstance(command, RunEngine):
            continue
        planner = DaemonPlanner(link)
        address = with_port(settings.host, port)
        engine = _engine(settings, link, command, address=address, clock=clock, network=network, planner=planner)
        engine.add_to(server)
        await server.start()
        listening = asyncio.create_task(_listen(link, engine, planner), name="daemon")
        try:
            if not command.resuming:
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
        match command:
            case PlanMade():
                if (plan := planner.take(command)) is not None:
                    engine.move_to(plan)
            case serving.Reachable():
                engine.note_reachable(
                    ReachableNodes(
                        addresses={node.node_id: node.address for node in command.nodes},
                        leaving=frozenset(NodeId(node_id) for node_id in command.leaving),
                    )
                )
            case _:
                pass


def _engine(
    settings: ChildSettings,
    link: DaemonLink,
    task: RunEngine,
    *,
    address: str,
    clock: Clock,
    network: Network | None,
    planner: DaemonPlanner,
) -> Engine:
    hello = Hello(role="engine", node_id=settings.node_id, node_name=settings.node_name, cluster_id=settings.cluster_id)
    config = config_from_json(parse_json_object(task.model_config.encode(), what="the model's shape"))
    return Engine(
        config=config,
        weights=table_from_json(task.model_weights, config),
        spec=task.spec,
        nodes={node.node_id: node.address for node in task.nodes},
        node_names={node.node_id: node.name for node in task.nodes if node.name},
        pipeline_id=task.pipeline_id,
        hello=hello,
        security=link.security,
        clock=clock,
        network=network,
        ids=RandomIds(),
        on_state=link.report,
        address=address,
        epoch_counter=max(1, task.epoch_counter),
        planner=planner,
    )
