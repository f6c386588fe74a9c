"""The engine's planner: asks its daemon over their stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from edgepipe.engine import EpochPlacement, Nodes
from edgepipe.errors import SendTimeout
from edgepipe.ids import NodeId
from edgepipe.wire.common import error_from_wire
from edgepipe.wire.engines import ServeSpec, serve_spec_from_wire, serve_spec_to_wire
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.workers.daemon_link import DaemonLink

_PLAN_S = 20.0  # the daemon may first have to fetch a model's shape from a peer


class DaemonPlanner:
    """Numbers its questions, so that a move proposed by the daemon is not taken for an answer.

    See ``edgepipe.engine.Planner``.
    """

    def __init__(self, link: DaemonLink) -> None:
        self._link = link
        self._question = 0  # number of the newest
        self._answer: asyncio.Future[pb.PlanMade] | None = None  # to the newest question, while it is awaited

    async def plan(
        self,
        spec: ServeSpec,
        *,
        quarantined: Mapping[NodeId, float],
        quarantined_links: Mapping[tuple[NodeId, NodeId], float],
    ) -> EpochPlacement:
        """Ask the daemon for a placement. Raises the daemon's error, such as NoFeasiblePlacement; SendTimeout."""
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._question += 1
        wanted = pb.PlanWanted(spec=serve_spec_to_wire(spec), question=self._question)
        for node_id, seconds in quarantined.items():
            wanted.left_out.add(node_id=node_id, seconds=seconds)
        for (node_id, other), seconds in quarantined_links.items():
            wanted.left_out.add(node_id=node_id, other_id=other, seconds=seconds)
        self._link.report(pb.ChildReport(plan_wanted=wanted))
        try:
            async with asyncio.timeout(_PLAN_S):
                made = await answer
        except TimeoutError as exc:
            raise SendTimeout("the node did not answer with a placement", fact=f"waited {_PLAN_S:.0f} s") from exc
        if made.HasField("error"):
            raise error_from_wire(made.error)
        return _plan(made)

    def take(self, made: pb.PlanMade) -> EpochPlacement | None:
        """Take a message of the daemon: keep an answer; return a move that the daemon proposes."""
        if made.question == 0:
            return None if made.HasField("error") else _plan(made)
        if made.question == self._question and self._answer is not None and not self._answer.done():
            self._answer.set_result(made)
        return None


def _plan(made: pb.PlanMade) -> EpochPlacement:
    return EpochPlacement(
        spec=serve_spec_from_wire(made.spec),
        nodes=Nodes(
            addresses={NodeId(node.node_id): node.address for node in made.nodes},
            names={NodeId(node.node_id): node.name for node in made.nodes},
        ),
    )
