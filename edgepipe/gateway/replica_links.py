"""The links to all pipelines of one model. Requests are shared out, and go on at another replica if theirs is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from edgepipe.errors import EdgepipeError, QueueFull, Retry, StageLost, StepFailed
from edgepipe.gateway.engine_link import EngineLink, LinkLimits
from edgepipe.gateway.engine_types import RoutedModel
from edgepipe.gateway.generation import Generation
from edgepipe.gateway.routing import Outages, ReplicaLoad, ReplicaRouter
from edgepipe.ids import PipelineId, RequestId
from edgepipe.wire.requests import Submission

logger = logging.getLogger(__name__)

_MOST_MOVES = 8  # moves of one request: then it stays, and ends with its engine's error


@dataclass(slots=True, kw_only=True)
class _Replica:
    link: EngineLink
    served: RoutedModel | None = None  # newest report; None while no engine is known


class ReplicaLinks:
    """Opens requests at the pipelines of a model. One event loop; ``run`` moves requests of lost replicas."""

    def __init__(self, limits: LinkLimits) -> None:
        self._max_requests = limits.max_requests
        self._replicas: dict[PipelineId, _Replica] = {}
        self._router: ReplicaRouter[PipelineId] = ReplicaRouter()
        self._outages: Outages[PipelineId] = Outages(patience_s=limits.patience_s)
        self._where: dict[RequestId, PipelineId] = {}  # pipeline of each open request
        self._news = asyncio.Event()

    @property
    def links(self) -> Mapping[PipelineId, EngineLink]:
        """The link of each pipeline."""
        return {key: replica.link for key, replica in self._replicas.items()}

    def add(self, key: PipelineId, link: EngineLink) -> None:
        """Add a pipeline."""
        self._replicas[key] = _Replica(link=link)
        link.on_change, link.on_refusal = self._news.set, self._goes_on
        self._news.set()

    def remove(self, key: PipelineId, error: EdgepipeError, *, moves: bool) -> None:
        """Remove a pipeline. ``moves``: its requests go on at others that work; else they end with ``error``."""
        if moves:
            self._move_all(key, anyway=True)
        self._replicas.pop(key).link.fail_all(error)
        self._outages.forget(key)
        self._router.forget(key)

    def update(self, key: PipelineId, served: RoutedModel | None) -> None:
        """Take a pipeline's newest report; None while no engine of it is known."""
        replica = self._replicas[key]
        replica.served = served
        replica.link.move(served)
        self._news.set()

    def check_room(self, num_requests: int) -> None:
        """Raise QueueFull if that many more requests would exceed the limit."""
        if len(self._where) + num_requests > self._max_requests:
            raise QueueFull(
                "too many requests are running",
                fact=f"{len(self._where)} run on this gateway, the limit is {self._max_requests}",
                next_step="try again in a moment",
            )

    @contextmanager
    def open(self, request: Submission, *, changed: asyncio.Event) -> Generator[Generation]:
        """Send the request to a replica; leaving the block stops its running choices. Raises QueueFull, StageLost."""
        self.check_room(1)
        if not self._replicas:  # the last one ended while the request waited for its turn
            raise StageLost("the model's engine ended", next_step="see 'edgepipe status', then send the request again")
        key = self._choose(request, list(self._replicas))
        generation = Generation(request, changed=changed, send_cancel=self._cancel)
        generation.pipelines.append(key)
        self._where[request.request_id] = key
        self._replicas[key].link.take(generation)
        try:
            yield generation
        finally:
            generation.abandon()
            key = self._where.pop(request.request_id)
            if (replica := self._replicas.get(key)) is not None:
                replica.link.drop(generation)
                if len(self._replicas) > 1:
                    self._router.note([*request.prompt, *generation.log.tokens(0)], key)

    def fail_all(self, error: EdgepipeError) -> None:
        """End every request with ``error``."""
        for replica in self._replicas.values():
            replica.link.fail_all(error)

    async def run(self) -> None:
        """Move requests of replicas that are silent, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            now_s = loop.time()
            for key in self._replicas:
                self._outages.look(key, works=self._works(key), now_s=now_s)
            for key in self._outages.lost(now_s):
                self._move_all(key)
            due_s = self._outages.next_s(now_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._news.wait()

    def _works(self, key: PipelineId) -> bool:
        replica = self._replicas[key]
        return replica.served is not None and replica.served.state == "ready" and replica.link.works

    def _load(self, key: PipelineId) -> ReplicaLoad:
        """Return a pipeline's load. A report is some tenths of a second old; own requests since then count, too."""
        replica = self._replicas[key]
        served, own = replica.served, replica.link.num_active
        if served is None:
            return ReplicaLoad(works=False, requests=own)
        return ReplicaLoad(
            works=self._works(key),
            requests=max(own, served.num_requests),
            waiting=served.num_waiting,
            free_tokens=served.free_tokens,
            share=served.share,
        )

    def _choose(self, request: Submission, keys: Sequence[PipelineId]) -> PipelineId:
        if len(keys) == 1:
            return keys[0]
        key = self._router.choose(request.prompt, {key: self._load(key) for key in keys})
        self._router.note(request.prompt, key)
        return key

    def _cancel(self, generation: Generation, choice: int, at_position: int) -> None:
        replica = self._replicas.get(self._where[generation.request.request_id])
        if replica is not None:
            replica.link.cancel(generation, choice, at_position)

    def _move_all(self, key: PipelineId, *, anyway: bool = False) -> None:
        """Continue a replica's requests at others that work; they stay if none does, or wait at another ``anyway``."""
        for generation in self._replicas[key].link.active:
            self._move(generation, key, anyway=anyway)

    def _move(self, generation: Generation, key: PipelineId, *, anyway: bool = False) -> bool:
        """Continue a request at another replica. Return whether there is one."""
        everywhere = [other for other in self._replicas if other != key]
        others = [other for other in everywhere if self._works(other)] or (everywhere if anyway else [])
        if not others or generation.failure is not None or len(generation.pipelines) > _MOST_MOVES:
            return False
        self._replicas[key].link.give_up(generation)
        request = generation.next_attempt()
        target = self._choose(request, others)
        logger.warning("request=%s goes on at another replica: pipeline=%s", request.request_id, target)
        generation.pipelines.append(target)
        self._where[request.request_id] = target
        self._replicas[target].link.take(generation)
        return True

    def _goes_on(self, generation: Generation, error: EdgepipeError) -> bool:
        """Continue a request that its engine cannot finish at a replica where it has not been."""
        if error.retry is Retry.NEVER or isinstance(error, StepFailed):
            return False  # the request may be the cause
        if len(generation.pipelines) >= len(self._replicas):
            return False
        return self._move(generation, self._where[generation.request.request_id])
