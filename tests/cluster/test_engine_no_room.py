"""The model does not fit any more: everybody is told what is missing, and it is served again when there is room."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from edgepipe.engine.placing import EpochPlacement, Nodes, ReachableNodes
from edgepipe.errors import NoFeasiblePlacement, PeerClosed
from edgepipe.ids import NodeId
from edgepipe.wire.engines import ServeSpec
from tests.support.engine.lab import QUICK, engine_lab, oracle_tokens, submission

PROMPT = [3, 1, 4, 1, 5]


class Cramped:
    """Places stages where they were, as long as there is room."""

    def __init__(self) -> None:
        self.room = True

    async def plan(
        self, spec: ServeSpec, *, quarantined: Collection[NodeId], quarantined_links: Collection[tuple[NodeId, NodeId]]
    ) -> EpochPlacement:
        """See Planner."""
        if not self.room:
            raise NoFeasiblePlacement("the model does not fit any more", fact="3.0 GB are missing")
        return EpochPlacement(spec=spec, nodes=Nodes(addresses={}, names={}))


async def test_without_room_requests_end_with_what_is_missing_until_a_machine_comes_back() -> None:
    planner = Cramped()
    async with engine_lab(planner=planner, link="1gbit,2ms", timeouts=replace(QUICK, patience_s=0.2)) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 400))
        await gateway.has("a", 5)
        planner.room = False
        session = lab.stages.stages[1]._current  # pyright: ignore[reportPrivateUsage]
        assert session is not None
        session.fault(PeerClosed("the machine is gone"))
        answer = await gateway.ended("a")
        assert isinstance(answer.error, NoFeasiblePlacement)
        assert answer.error.fact == "3.0 GB are missing"
        assert answer.ids == oracle_tokens(PROMPT, len(answer.ids))
        await lab.until(lambda: lab.engine.state().state == "waiting")
        gateway.send(submission("b", PROMPT, 5))
        assert isinstance((await gateway.ended("b")).error, NoFeasiblePlacement)

        planner.room = True
        addresses = dict(lab.engine._core.nodes.addresses)  # pyright: ignore[reportPrivateUsage]
        lab.engine.note_reachable(ReachableNodes(addresses=addresses))
        await lab.until(lambda: lab.engine.state().state == "ready")
        gateway.send(submission("c", PROMPT, 10))
        assert (await gateway.ended("c")).ids == oracle_tokens(PROMPT, 10)
        await lab.settle()
