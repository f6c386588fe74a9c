"""Keeps an engine running for every served model: on the node that had it, else on another.

When an engine's node has passed its dead limit, or has long reported no engine, this node asks every reachable
member. ``engine_ownership`` decides from their answers whether this node takes over. It then signs a record, which
others believe because they see the same loss. After a partition each side may have an engine. When the sides meet, an
owner's node says which engine counts (``ServeBook.merge``); without an owner the newer claim yields.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from edgepipe.clock import Clock
from edgepipe.config import Timeouts
from edgepipe.daemon.alarm import TickAlarm
from edgepipe.daemon.files.models import Models
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.offers import NodeLife, PublishedState
from edgepipe.daemon.serving.alive_proof import AliveProofs
from edgepipe.daemon.serving.engine_ownership import (
    Answered,
    AskMembers,
    EndSuperseded,
    Event,
    Ownership,
    RivalSeen,
    Sight,
    SightChanged,
    StartEnded,
    StartEngine,
    StopEngine,
    WaitEnded,
    Yield,
)
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.daemon.serving.takeover import MemberReport, Vacancies
from edgepipe.errors import AccessDenied, EdgepipeError
from edgepipe.wire.serving import ServeBody, StartEngineRequest

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0  # interval of attempts: an engine may have ended for another one that was then lost


class EngineKeeper:
    """Compares the recorded models with the running engines after every change, and corrects the difference."""

    def __init__(
        self,
        *,
        book: ServeBook,
        engines: EngineHost,
        models: Models,
        peers: Peers,
        proofs: AliveProofs,
        vacancies: Vacancies,
        clock: Clock,
        timeouts: Timeouts,
        local: PublishedState,
        node: NodeLife,
        tasks: asyncio.TaskGroup,
        look_again_s: float = _LOOK_AGAIN_S,
    ) -> None:
        """``look_again_s``: between attempts to start an engine."""
        self._book = book
        self._engines = engines
        self._models = models
        self._peers = peers
        self._proofs = proofs
        self._clock = clock
        self._local = local
        self._node = node
        self._tasks = tasks
        self._ownership = Ownership(
            vacancies, gather_until_s=clock.monotonic_s() + timeouts.gather_s, rest_s=look_again_s
        )
        self._alarm = TickAlarm(
            tasks, clock, lambda at_s: self._happens(WaitEnded(), least_s=at_s), name="engine-keeper-alarm"
        )

    async def run(self) -> None:
        """Merge records, start missing engines and end stale ones, until cancelled."""
        async for _ in self._local.watch():
            for node in self._peers.nodes():
                if not self._peers.is_self(node.node_id):
                    for rival in self._book.merge(node.node_id, node.serves):
                        self._consider(rival, node.node_id)
            self._book.renew()
            for pipeline_id, spec in self._engines.ready():
                self._book.note_served(pipeline_id, spec)
            self._happens(SightChanged())

    def _consider(self, rival: ServeBody, node_id: str) -> None:
        """Claim the engine again if the rival's node is gone; else perhaps yield to that node."""
        with contextlib.suppress(AccessDenied):
            self._book.reassert(rival)
        if rival.engine_node == node_id:
            self._happens(RivalSeen(record=rival))

    def _sight(self) -> Sight:
        nodes = self._peers.nodes()
        records: dict[str, ServeBody] = {body.pipeline_id: body for body in self._book.bodies()}
        return Sight(
            own_id=self._peers.own_id,
            leaves=self._peers.own_drains or self._node.ends(),
            records=records,
            unconfirmed=frozenset(body.pipeline_id for body in records.values() if self._book.is_unconfirmed(body)),
            staying=frozenset(node.node_id for node in nodes if not node.draining),
            gone=frozenset(body.engine_node for body in records.values() if self._peers.is_gone(body.engine_node)),
            present=frozenset(
                node.node_id for node in nodes if any(device.state != "starting" for device in node.devices)
            ),
            engines=frozenset(engine.pipeline_id for node in nodes for engine in node.engines),
            own_engines=frozenset(state.pipeline_id for state in self._engines.states() if state.state != "stopping"),
        )

    def _happens(self, event: Event, *, least_s: float = 0.0) -> None:
        commands = self._ownership.handle(event, self._sight(), max(least_s, self._clock.monotonic_s()))
        self._alarm.set(self._ownership.wake_at_s)
        for command in commands:
            match command:
                case AskMembers():
                    self._tasks.create_task(self._ask(command), name=f"ask-of:{command.record.pipeline_id}")
                case StartEngine():
                    self._tasks.create_task(self._start(command), name=f"engine-for:{command.record.pipeline_id}")
                case StopEngine():
                    name = f"stop:{command.pipeline_id}"
                    self._tasks.create_task(self._engines.stop(command.pipeline_id), name=name)
                case EndSuperseded():
                    self._engines.end_superseded(command.pipeline_id)
                case Yield():
                    logger.warning("two engines claim pipeline=%s: the one here yields", command.rival.pipeline_id)
                    with contextlib.suppress(AccessDenied):
                        self._book.hand_back(command.rival)

    async def _ask(self, command: AskMembers) -> None:
        """Ask the other members whether they hear the engine's node, and check its proof."""
        pipeline_id, head = command.record.pipeline_id, command.record.engine_node
        challenge = self._proofs.challenge()
        replies = await self._peers.vouch_all(pipeline_id, head, challenge=challenge)
        answers = {
            node_id: MemberReport(
                hears=reply.hears,
                proven=reply.hears and self._proofs.holds(head, pipeline_id, challenge, reply.proof),
                draining=reply.draining,
            )
            for node_id, reply in replies.items()
        }
        self._happens(Answered(bid=command.bid, answers=answers))

    async def _start(self, command: StartEngine) -> None:
        record, failed = command.record, False
        logger.warning("starting the engine of model=%s pipeline=%s", record.spec.model, record.pipeline_id)
        nodes = tuple(node.introduction for node in self._peers.nodes())
        request = StartEngineRequest(pipeline_id=record.pipeline_id, spec=record.spec, nodes=nodes)
        try:
            self._book.take_over(record.pipeline_id)
            model = await self._models.adopt(record.spec.model, manifest_hash=record.spec.manifest_hash)
            if self._ownership.still_wants(record, self._sight()):
                model = model.as_placed(record.spec.stages)
                await self._engines.start(
                    request, model_config=model.config_json, model_weights=model.weights_json, resuming=True
                )
        except EdgepipeError as error:
            logger.error("engine not started model=%s: %s", record.spec.model, error)
            failed = True
        self._happens(StartEnded(bid=command.bid, failed=failed))
