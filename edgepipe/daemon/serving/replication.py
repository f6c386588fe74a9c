"""Copies of models' parts on several nodes' disks: made on request, and in the background for served models.

The node of a model's engine plans its copies, so one node decides per model. A node with room fetches from a node that
has the part. While models are served, the copy takes at most a share of the rate of the link between them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from edgepipe.daemon.files.model_parts import model_parts, parts_on
from edgepipe.daemon.files.models import LocalModel, Models
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.offers import PublishedState
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.errors import (
    EdgepipeError,
    ModelUnknown,
    NoFeasiblePlacement,
    PlanInvalid,
    RemoteProtocolError,
    SendTimeout,
)
from edgepipe.ids import NodeId
from edgepipe.planner.copies import Disk, ModelParts, PartCopies, plan_copies
from edgepipe.units import format_bytes
from edgepipe.wire.children import PrepareProgress
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import CopyProgress, KeepCopyRequest, ReplicateEvent

logger = logging.getLogger(__name__)

_LINK_SHARE = 0.3
_SETTLED_S = 5.0  # the stages of a newly served model fetch their parts first
_AGAIN_MIN_S, _AGAIN_MAX_S = 30.0, 600.0  # shortest and longest pause after a copy broke off
_SILENT_S = 600.0  # a copy waits while a stage fetches its tensors; the next try goes on where this one stopped
_TELL_S = 0.25


@dataclass(kw_only=True, eq=False)
class Replication:
    """Plans copies, asks other nodes to make theirs, and makes this node's."""

    peers: Peers
    models: Models
    engines: EngineHost
    copies: int  # how many disks should hold each part of the models that this node's engines serve
    local: PublishedState

    def __post_init__(self) -> None:
        self._served: dict[str, LocalModel] = {}  # keys are manifest hashes
        self._parts: dict[str, ModelParts] = {}  # keys are manifest hashes; many tensors take long to group
        self._logged_lacking: set[str] = set()  # manifest hashes of models whose lack of room was logged

    async def run(self) -> None:
        """Complete the copies of models served from here, until cancelled."""
        again_s = _AGAIN_MIN_S
        while self.copies > 1:
            async for _ in self.local.watch():
                if await self._wanted():
                    break
            await asyncio.sleep(_SETTLED_S)
            try:
                for model in await self._wanted():
                    async for _ in self._copy(model, self._plan(model, self.copies)):
                        pass
                again_s = _AGAIN_MIN_S
            except EdgepipeError as error:
                if not await self._wanted():
                    continue  # what was copied is no longer served from here, as when the node stops
                logger.warning("copies are not complete, tried again in %.0f s: %s", again_s, error)
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, _AGAIN_MAX_S)

    async def replicate(self, name: str, *, copies: int) -> AsyncGenerator[ReplicateEvent]:
        """Bring every part to ``copies`` disks; yield each node's progress, at the end all completed copies.

        Raises ModelUnknown, PlanInvalid if the cluster has fewer nodes, and NoFeasiblePlacement with the numbers if
        disks lack room (then nothing is copied). A node's error is raised after the other nodes have finished.
        """
        model = await self.models.resolve(name)
        await self._size_up(model)
        num_nodes = len(self.peers.nodes())
        if copies > num_nodes:
            raise PlanInvalid(
                f"{copies} copies need {copies} nodes",
                fact=f"{num_nodes} {'is' if num_nodes == 1 else 'are'} in the cluster now",
                next_step="start another node, or ask for fewer copies with --copies",
            )
        plan = self._plan(model, copies)
        if plan.lost:
            raise ModelUnknown(
                f"parts of {model.name} are on no reachable node",
                fact=f"{len(plan.lost)} of its embedding, layers and head are missing",
                next_step=f"edgepipe models pull {model.name}",
            )
        if plan.lacking_bytes:
            raise self._no_room(model, plan)
        async for event in self._copy(model, plan):
            yield event

    async def keep(self, request: KeepCopyRequest, *, asking: str) -> AsyncGenerator[PrepareProgress]:
        """Make this node's copies. Raises like ``Models.keep_copy``, and LinkError if the link cannot be measured.

        ``asking``: id of the node that plans the copies.
        """
        model = await self.models.adopt(
            request.model,
            manifest_hash=request.manifest_hash,
            first_source=request.source,
            wanted_by="" if self.peers.is_self(asking) else asking,
        )
        bytes_per_s = 0.0
        if request.paced and not self.peers.is_self(request.source):
            answer = await self.peers.profile_links(request.source, [self.peers.own_id])
            rates = [link.bytes_per_s for link in answer.links if link.receiver == self.peers.own_id]
            if not rates:
                raise RemoteProtocolError("the copy's source does not say how fast the link is")
            bytes_per_s = _LINK_SHARE * min(rates)
        async for progress in self.models.keep_copy(
            model, request.parts, first_source=request.source, bytes_per_s=bytes_per_s
        ):
            yield progress

    async def _wanted(self) -> list[LocalModel]:
        """Return the models served from here that could get another copy of a part."""
        found: list[LocalModel] = []
        for _, spec in self.engines.ready():
            try:
                model = await self._model(spec)
            except EdgepipeError as error:
                logger.debug("no copies of model=%s: %s", spec.model, error)
                continue
            plan = self._plan(model, self.copies)
            if plan.fetch:
                found.append(model)
            if plan.lacking_bytes and model.manifest_hash not in self._logged_lacking:
                self._logged_lacking.add(model.manifest_hash)
                logger.warning("%s", self._no_room(model, plan))
        return found

    async def _model(self, spec: ServeSpec) -> LocalModel:
        """Return the served model, looked up on the disk once."""
        if spec.manifest_hash not in self._served:
            model = await self.models.adopt(spec.model, manifest_hash=spec.manifest_hash)
            await self._size_up(model)
            self._served[spec.manifest_hash] = model
        return self._served[spec.manifest_hash]

    async def _size_up(self, model: LocalModel) -> None:
        """Compute the sizes of a model's parts, once."""
        if model.manifest_hash not in self._parts:
            parts = await asyncio.to_thread(lambda: model_parts(model.config, model.stored.manifest))
            self._parts[model.manifest_hash] = parts

    def _plan(self, model: LocalModel, copies: int) -> PartCopies:
        return plan_copies(self._parts[model.manifest_hash], self._disks(model), copies=copies)

    def _disks(self, model: LocalModel) -> list[Disk]:
        num_parts = model.config.num_layers + 2
        return [
            Disk(
                node_id=node.node_id,
                holds=parts_on(node, model.name, model.manifest_hash, num_parts=num_parts),
                free_bytes=node.disk_free_bytes,
                computes=bool(node.devices),
                leaves=node.draining,
            )
            for node in self.peers.nodes()
        ]

    async def _copy(self, model: LocalModel, plan: PartCopies) -> AsyncGenerator[ReplicateEvent]:
        """Copy to all nodes at once. Yield progress at intervals and at the end; then raise the first error."""
        if not plan.fetch:
            return
        parts, paced = self._parts[model.manifest_hash], any(node.engines for node in self.peers.nodes())
        progress: dict[NodeId, CopyProgress] = {}
        copying: list[asyncio.Task[None]] = []
        for node_id, chosen in plan.fetch.items():
            progress[node_id] = CopyProgress(
                node_id=node_id, node_name=self.peers.node(node_id).name, bytes_total=parts.num_bytes(chosen)
            )
            request = KeepCopyRequest(
                model=model.name,
                manifest_hash=model.manifest_hash,
                parts=chosen,
                source=self._source(model, chosen, node_id),
                paced=paced,
            )
            copying.append(asyncio.ensure_future(self._copy_to(node_id, request, progress)))
        try:
            yield ReplicateEvent(copies=tuple(progress.values()))
            while any(not task.done() for task in copying):
                await asyncio.wait(copying, timeout=_TELL_S)
                yield ReplicateEvent(copies=tuple(progress.values()))
            for task in copying:
                task.result()
        finally:
            for task in copying:
                task.cancel()
            await asyncio.wait(copying)

    async def _copy_to(self, node_id: NodeId, request: KeepCopyRequest, progress: dict[NodeId, CopyProgress]) -> None:
        """Have a node copy, and keep its entry of ``progress`` up to date. Raises SendTimeout if it goes silent."""
        now = progress[node_id]
        logger.info("copying model=%s parts=%d to node=%s", request.model, len(request.parts), now.node_name)
        now_s = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(_SILENT_S) as silence:
                async for update in self.peers.keep_copy(node_id, request):
                    silence.reschedule(now_s() + _SILENT_S)
                    progress[node_id] = replace(now, bytes_done=update.bytes_done)
        except TimeoutError as exc:
            raise SendTimeout(
                f"node {now.node_name} makes no progress with its copy of {request.model}",
                fact=f"silent for {_SILENT_S:.0f} s",
                node=now.node_name,
            ) from exc
        progress[node_id] = replace(now, bytes_done=now.bytes_total)

    def _source(self, model: LocalModel, chosen: tuple[int, ...], target: str) -> str:
        """Return the node that holds most of the chosen parts."""
        disks = [disk for disk in self._disks(model) if disk.node_id != target]
        return max(disks, key=lambda disk: (len(disk.holds.intersection(chosen)), disk.node_id)).node_id

    def _no_room(self, model: LocalModel, plan: PartCopies) -> NoFeasiblePlacement:
        rooms = ", ".join(f"{node.name} {format_bytes(node.disk_free_bytes)}" for node in self.peers.nodes())
        return NoFeasiblePlacement(
            f"copies of {model.name} need {format_bytes(plan.lacking_bytes)} more on other disks",
            fact=f"free for copies: {rooms}",
            next_step="make room with 'edgepipe models rm MODEL', start another node, or ask for fewer --copies",
        )
