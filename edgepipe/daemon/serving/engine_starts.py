"""Starting the engines of pipelines that were just recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from edgepipe.daemon.network.peers import Peers
from edgepipe.ids import PipelineId
from edgepipe.spec.expert_places import in_words
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import ServeRecord, StartEngineRequest


def start_request(pipeline_id: PipelineId, spec: ServeSpec, record: ServeRecord, peers: Peers) -> StartEngineRequest:
    """Return the request that starts a pipeline's engine. Raises NodeUnreachable."""
    nodes = tuple(peers.node(stage.node_id).introduction for stage in spec.stages)
    return StartEngineRequest(pipeline_id=pipeline_id, spec=spec, record=record, nodes=nodes)


async def start_all(peers: Peers, requests: Sequence[tuple[str, StartEngineRequest]]) -> None:
    """Start engines on their nodes, all at once. Raises the first error once every start has ended."""
    ends = await asyncio.gather(
        *(peers.start_engine(node_id, request) for node_id, request in requests), return_exceptions=True
    )
    if error := next((end for end in ends if isinstance(end, BaseException)), None):
        raise error


def described(spec: ServeSpec, peers: Peers) -> str:
    """Describe a placement: ``layers 0-14 on gamer, 15-29 on mac``. Raises NodeUnreachable."""
    parts = [
        f"{part.layers.shown} on {peers.node(stage.node_id).name}{in_words(stage.ram_percent)}"
        for stage in spec.stages
        for part in stage.slices
    ]
    return f"layers {', '.join(parts)}"
