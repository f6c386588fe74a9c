"""Keeps an engine running for every served model: on the node that had it, else on another.

When an engine's node has passed its dead limit, or has long reported no engine, this node asks every reachable
member. ``takeover`` decides from their answers which node takes over, and when. That node signs a record, which others
believe because they see the same loss. After a partition each side may have an engine. When the sides meet, an owner's
node says which engine counts (``ServeBook.merge``); without an owner the newer claim yields.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from edgepipe.clock import Clock
from edgepipe.config import Timeouts
from edgepipe.daemon.files.models import Models
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.serving.alive_proof import AliveProofs
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.daemon.serving.takeover import Answer, Vacancies
from edgepipe.errors import AccessDenied, EdgepipeError
from edgepipe.wire.engines import EngineState
from edgepipe.wire.serving import ServeBody, StartEngineRequest

logger = logging.getLogger(__name__)

_YIELD_S = 5.0  # an owner's reachable node has decided long before
_FAILED_MAX_S = 15.0  # longest pause after failed attempts, as while the model is on no reachable disk
_LOOK_AGAIN_S = 1.0  # between attempts: an engine may have ended for another one that was then lost


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
        changes: Callable[[], AsyncIterator[None]],
        ends: Callable[[], bool],
        tasks: asyncio.TaskGroup,
        look_again_s: float = _LOOK_AGAIN_S,
    ) -> None:
        """``ends``: whether this node is about to stop. ``look_again_s``: between attempts to start an engine."""
        self._look_again_s = look_again_s
        self._book = book
        self._engines = engines
        self._models = models
        self._peers = peers
        self._proofs = proofs
        self._vacancies = vacancies
        self._clock = clock
        self._timeouts = timeouts
        self._changes = changes
        self._ends = ends
        self._tasks = tasks
        self._starting: dict[str, asyncio.Task[None]] = {}  # by pipeline
        self._yielding: set[str] = set()  # pipelines
        self._since_s = clock.monotonic_s()

    async def run(self) -> None:
        """Merge records, start missing engines and end stale ones, until cancelled."""
        async for _ in self._changes():
            for node in self._peers.nodes():
                if not self._peers.is_self(node.node_id):
                    for rival in self._book.merge(node.node_id, node.serves):
                        self._consider(rival, node.node_id)
            self._book.renew()
            for pipeline_id, spec in self._engines.ready():
                self._book.note_served(pipeline_id, spec)
            served = self._book.served()
            self._vacancies.keep(frozenset(record.pipeline_id for record in served))
            for record in served:
                self._look_at(record)
            self._end_stale_engines()

    def _look_at(self, record: ServeBody) -> None:
        pipeline_id = record.pipeline_id
        has_engine = self._note(record)
        if pipeline_id not in self._starting and not has_engine:
            task = self._tasks.create_task(self._see_to(pipeline_id), name=f"engine-for:{pipeline_id}")
            self._starting[pipeline_id] = task
            task.add_done_callback(lambda _: self._starting.pop(pipeline_id, None))

    def _note(self, record: ServeBody) -> bool:
        """Note whether a reachable node has the pipeline's engine; return that."""
        has_engine = bool(self._engines_of(record.pipeline_id))
        self._vacancies.look(
            record.pipeline_id,
            record.engine_node,
            has_engine=has_engine,
            gone=self._peers.is_gone(record.engine_node),
            now_s=self._clock.monotonic_s(),
        )
        return has_engine

    def _engines_of(self, pipeline_id: str) -> list[tuple[str, EngineState]]:
        return [
            (node.node_id, engine)
            for node in self._peers.nodes()
            for engine in node.engines
            if engine.pipeline_id == pipeline_id
        ]

    def _wanted(self, pipeline_id: str) -> ServeBody | None:
        """Return the pipeline's record while no reachable node has its engine, else None."""
        record = next((body for body in self._book.served() if body.pipeline_id == pipeline_id), None)
        return record if record is not None and not self._note(record) else None

    async def _see_to(self, pipeline_id: str) -> None:
        """Start the engine when it is this node's turn; return once any node has the engine."""
        pause_s = self._look_again_s
        while (record := self._wanted(pipeline_id)) is not None:
            failed = False
            if await self._is_ours(record):
                await self._gather(record)
                failed = self._wanted(pipeline_id) is not None and not await self._start(record)
            pause_s = min(2 * pause_s, _FAILED_MAX_S) if failed else self._look_again_s
            await asyncio.sleep(pause_s)

    async def _is_ours(self, record: ServeBody) -> bool:
        """Return whether this node starts the engine: it had the engine, or the takeover rule chooses this node."""
        head = record.engine_node
        if self._peers.own_drains or self._ends():
            return False
        if self._peers.is_self(head):
            return True
        if not self._vacancies.must_ask(record.pipeline_id, now_s=self._clock.monotonic_s()):
            return False
        answers = await self._ask(record.pipeline_id, head)
        return self._vacancies.is_turn(record.pipeline_id, self._peers.own_id, answers, now_s=self._clock.monotonic_s())

    async def _ask(self, pipeline_id: str, head: str) -> dict[str, Answer]:
        """Ask the other members whether they hear the engine's node, and check its proof."""
        challenge = self._proofs.challenge()
        replies = await self._peers.vouch_all(pipeline_id, head, challenge=challenge)
        return {
            node_id: Answer(
                hears=reply.hears,
                proven=reply.hears and self._proofs.holds(head, pipeline_id, challenge, reply.proof),
                draining=reply.draining,
            )
            for node_id, reply in replies.items()
        }

    async def _gather(self, record: ServeBody) -> None:
        """Wait a while for the nodes that held the model: after a power cut the other machines start, too."""
        wanted = {stage.node_id for stage in record.spec.stages}
        left_s = self._since_s + self._timeouts.gather_s - self._clock.monotonic_s()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                async for _ in self._changes():
                    usable = {
                        node.node_id
                        for node in self._peers.nodes()
                        if any(device.state != "starting" for device in node.devices)
                    }
                    if wanted <= usable:
                        return
        except TimeoutError:
            return

    async def _start(self, record: ServeBody) -> bool:
        """Start the engine; return whether that succeeded."""
        logger.warning("starting the engine of model=%s pipeline=%s", record.spec.model, record.pipeline_id)
        nodes = tuple(node.introduction for node in self._peers.nodes())
        request = StartEngineRequest(pipeline_id=record.pipeline_id, spec=record.spec, nodes=nodes)
        try:
            self._book.take_over(record.pipeline_id)
            model = await self._models.adopt(record.spec.model, manifest_hash=record.spec.manifest_hash)
            await self._engines.start(
                request, model_config=model.config_json, model_weights=model.weights_json, resuming=True
            )
        except EdgepipeError as error:
            logger.error("engine not started model=%s: %s", record.spec.model, error)
            return False
        return True

    def _end_stale_engines(self) -> None:
        """End engines here that no longer count: the model was stopped, or another node has the engine."""
        for state in self._engines.states():
            held = self._book.held(state.pipeline_id)
            if held is not None and held.stopped:
                if state.state != "stopping":
                    name = f"stop:{state.pipeline_id}"
                    self._tasks.create_task(self._engines.stop(state.pipeline_id), name=name)
            elif held is None or not self._peers.is_self(held.engine_node):
                self._engines.end_superseded(state.pipeline_id)

    def _consider(self, rival: ServeBody, node_id: str) -> None:
        """Settle with a record that names another node for an engine that is here.

        Claim the engine again if that node is gone. Yield to that node if this one took its engine over.
        """
        with contextlib.suppress(AccessDenied):
            self._book.reassert(rival)
        held = self._book.held(rival.pipeline_id)
        if held is None or rival.engine_node != node_id or not self._yields(held, rival):
            return
        if rival.pipeline_id not in self._yielding:
            self._yielding.add(rival.pipeline_id)
            self._tasks.create_task(self._yield_to(rival), name=f"yield:{rival.pipeline_id}")

    def _yields(self, held: ServeBody, rival: ServeBody) -> bool:
        newer = (held.version, held.engine_node) > (rival.version, rival.engine_node)
        return newer and not held.stopped and self._book.is_unconfirmed(held)

    async def _yield_to(self, rival: ServeBody) -> None:
        await asyncio.sleep(_YIELD_S)
        self._yielding.discard(rival.pipeline_id)
        held = self._book.held(rival.pipeline_id)
        if held is not None and self._yields(held, rival) and self._peers.reaches(rival.engine_node):
            logger.warning("two engines claim pipeline=%s: the one here yields", rival.pipeline_id)
            with contextlib.suppress(AccessDenied):
                self._book.hand_back(rival)
