"""The engine's planner: asks its daemon over their stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from edgepipe.engine import EpochPlacement, Nodes
from edgepipe.errors import RemoteProtocolError, SendTimeout
from edgepipe.ids import NodeId
from edgepipe.wire.engines import Quarantined, ServeSpec
from edgepipe.wire.serving import PlanMade, PlanWanted
from edgepipe.workers.daemon_link import DaemonLink

_PLAN_S = 20.0  # the daemon may first have to fetch a model's shape from a peer


class DaemonPlanner:
    """Numbers its questions, so that a move proposed by the daemon is not taken for an answer.

    See ``edgepipe.engine.Planner``.
    """

    def __init__(self, link: DaemonLink) -> None:
        self._link = link
        self._question = 0  # number of the newest question
        self._answer: asyncio.Future[PlanMade] | None = None  # answer to the newest question, while it is awaited

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
        nodes = [Quarantined(node_id=node_id, seconds=seconds, reason="") for node_id, seconds in quarantined.items()]
        links = [
            Quarantined(node_id=node_id, other_id=other_id, seconds=seconds, reason="")
            for (node_id, other_id), seconds in quarantined_links.items()
        ]
        self._link.report(PlanWanted(spec=spec, left_out=(*nodes, *links), question=self._question))
        try:
            async with asyncio.timeout(_PLAN_S):
                made = await answer
        except TimeoutError as exc:
            raise SendTimeout("the node did not answer with a placement", fact=f"waited {_PLAN_S:.0f} s") from exc
        if made.error is not None:
            raise made.error
        return _plan(made)

    def take(self, made: PlanMade) -> EpochPlacement | None:
        """Take a message of the daemon: keep an answer; return a move that the daemon proposes."""
        if made.question == 0:
            return None if made.error is not None else _plan(made)
        if made.question == self._question and self._answer is not None and not self._answer.done():
            self._answer.set_result(made)
        return None


def _plan(made: PlanMade) -> EpochPlacement:
    if made.spec is None:
        raise RemoteProtocolError("the node answered without a placement")
    return EpochPlacement(
        spec=made.spec,
        nodes=Nodes(
            addresses={node.node_id: node.address for node in made.nodes},
            names={node.node_id: node.name for node in made.nodes},
        ),
    )
