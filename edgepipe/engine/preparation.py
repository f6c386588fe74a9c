"""Requests memory and loaded stages from nodes, and releases both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, replace

import grpc.aio

from edgepipe.engine.groups import first_error
from edgepipe.engine.kv_carryover import HeldNumbers
from edgepipe.engine.placing import Nodes
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.sites import StageSite
from edgepipe.errors import (
    ConnectTimeout,
    EdgepipeError,
    LinkError,
    NodeUnreachable,
    RemoteProtocolError,
    VersionMismatch,
)
from edgepipe.ids import Epoch, NodeId, PipelineId, StepId
from edgepipe.link.channels import from_rpc_error, is_refused, make_channel
from edgepipe.link.shut_ports import shut_port
from edgepipe.planner.profiles import slice_costs
from edgepipe.security.mutual_tls import Security
from edgepipe.spec.expert_places import split_kind
from edgepipe.spec.facts import ModelConfig
from edgepipe.units import format_bytes
from edgepipe.weights.weight_table import FLOATS, WeightTable
from edgepipe.wire.children import Prepared, PrepareEvent, PrepareProgress, PrepareRequest
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, epoch_to_wire, hello_to_wire
from edgepipe.wire.engines import ServeSpec, StagePlacement
from edgepipe.wire.v1 import node_pb2, node_pb2_grpc

logger = logging.getLogger(__name__)

OnProgress = Callable[[str, float], None]
"""Arguments: the current activity for people, and the progress of all stages together (0..1)."""


class Preparation:
    """Prepares and releases the stages of one epoch."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        spec: ServeSpec,
        nodes: Nodes,
        pipeline_id: PipelineId,
        epoch: Epoch,
        fresh: Collection[NodeId],
        hello: Hello,
        security: Security,
        limits: EngineLimits,
        timeouts: EngineTimeouts,
        on_progress: OnProgress,
        weights: WeightTable = FLOATS,
    ) -> None:
        """``fresh``: nodes that must run their stage in a new process."""
        self._config = config
        self._weights = weights
        self._spec = spec
        self._settings = replace(spec.settings, context_length=spec.settings.context_length or config.context_length)
        self._nodes = nodes
        self._pipeline_id = pipeline_id
        self._epoch = epoch
        self._fresh = fresh
        self._hello = hello
        self._security = security
        self._limits = limits
        self._timeouts = timeouts
        self._on_progress = on_progress
        self._bytes: dict[int, tuple[int, int]] = {}  # bytes done and bytes in total of each stage
        self.failed: NodeId | None = None  # first node that refused or did not answer

    async def prepare(self) -> list[StageSite]:
        """Prepare all stages concurrently. On the first error, cancel the others and raise it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                sites = [
                    tasks.create_task(self._prepare_stage(index, placement), name=f"prepare:{placement.node_id}")
                    for index, placement in enumerate(self._spec.stages)
                ]
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        return [site.result() for site in sites]

    async def release(self, node_ids: Iterable[NodeId]) -> frozenset[NodeId]:
        """Release the stages on these nodes. Return the nodes that did not answer."""
        async with asyncio.TaskGroup() as tasks:
            releasing = {
                node_id: tasks.create_task(self._release_node(node_id), name=f"release:{node_id}")
                for node_id in node_ids
            }
        return frozenset(node_id for node_id, answered in releasing.items() if not answered.result())

    async def _prepare_stage(self, index: int, placement: StagePlacement) -> StageSite:
        name = self._nodes.name(placement.node_id)
        prepared = None
        try:
            async with self._channel(placement.node_id) as channel, asyncio.timeout(self._timeouts.prepare_s) as limit:
                async for message in node_pb2_grpc.NodeStub(channel).Prepare(self._request(placement)):
                    limit.reschedule(asyncio.get_running_loop().time() + self._timeouts.prepare_s)
                    event = from_wire(message, PrepareEvent).event
                    if isinstance(event, Prepared):
                        prepared = event
                    else:
                        self._note_progress(index, name, event)
        except TimeoutError as exc:
            self.failed = self.failed or placement.node_id
            raise NodeUnreachable(
                f"node {name} does not report progress", fact=f"silent for {self._timeouts.prepare_s:.0f} s", node=name
            ) from exc
        except grpc.aio.AioRpcError as exc:
            self.failed = self.failed or placement.node_id
            raise self._failed(exc, placement.node_id) from exc
        if prepared is None:
            raise RemoteProtocolError(f"node {name} ended the preparation without a stage", node=name)
        self._check_settings(placement.node_id, prepared)
        return self._site(index, placement, prepared)

    def _check_settings(self, node_id: NodeId, prepared: Prepared) -> None:
        """Refuse a stage that is built with other settings. Raises VersionMismatch, as a node of this version obeys."""
        if prepared.settings == self._settings:
            return
        self.failed = self.failed or node_id
        name, wanted = self._nodes.name(node_id), asdict(self._settings)
        other = next(key for key, value in asdict(prepared.settings).items() if value != wanted[key])
        raise VersionMismatch(
            f"node {name} does not obey a setting of this model",
            fact=f"{other} is {getattr(prepared.settings, other)!r} there, {wanted[other]!r} was asked for",
            next_step=f"on {name}: edgepipe update",
            node=name,
        )

    def _channel(self, node_id: NodeId) -> grpc.aio.Channel:
        return make_channel(self._nodes.address(node_id), self._security.to_node(node_id))

    def _request(self, placement: StagePlacement) -> node_pb2.PrepareRequest:
        request = PrepareRequest(
            pipeline_id=self._pipeline_id,
            epoch=self._epoch,
            model=self._spec.model,
            manifest_hash=self._spec.manifest_hash,
            placement=placement,
            settings=self._settings,
            kv_tokens=self._spec.kv_tokens or self._limits.default_contexts * self._settings.context_length,
            weights_node=self._hello.node_id,
            fresh=placement.node_id in self._fresh,
            promised_tokens=self._settings.context_length if self._spec.must_keep_context else 0,
        )
        message = to_wire(request, node_pb2.PrepareRequest)
        message.hello.CopyFrom(hello_to_wire(self._hello))
        return message

    def _note_progress(self, index: int, name: str, progress: PrepareProgress) -> None:
        self._bytes[index] = (progress.bytes_done, max(progress.bytes_total, 1))
        doing = "fetching weights to" if progress.phase == "fetching" else "loading weights on"
        share = sum(done / total for done, total in self._bytes.values()) / len(self._spec.stages)
        size = f"{format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}"
        self._on_progress(f"{doing} {name}: {size}", min(share, 1.0))

    def _site(self, index: int, placement: StagePlacement, prepared: Prepared) -> StageSite:
        self._bytes[index] = (1, 1)
        return StageSite(
            index=index,
            node_id=placement.node_id,
            node_name=self._nodes.name(placement.node_id),
            address=prepared.address,
            slices=placement.slices,
            backend=prepared.profile.backend,
            device=prepared.profile.name or prepared.profile.device,
            weight_bytes=prepared.weight_bytes,
            ram_percent=split_kind(prepared.profile.packing)[1],
            products=prepared.products,
            slow_paths=prepared.slow_paths,
            kv_block_bytes=prepared.kv_block_bytes,
            window_block_bytes=prepared.window_block_bytes,
            state_bytes=self._config.state_bytes(layer for part in placement.slices for layer in part.layers),
            max_blocks=prepared.max_blocks,
            max_host_blocks=prepared.max_host_blocks,
            max_disk_blocks=prepared.max_disk_blocks,
            held_blocks=HeldNumbers(prepared.held_blocks, prepared.held_host_blocks, prepared.held_disk_blocks),
            contiguous_kv=prepared.profile.contiguous_kv,
            certificate=prepared.certificate,
            costs=slice_costs(
                prepared.profile, self._config, placement.slices, weights=self._weights, kv=self._settings.kv
            ),
            crashed_in=(prepared.crashed_epoch, StepId(prepared.crashed_step)) if prepared.crashed_step else None,
        )

    async def _release_node(self, node_id: NodeId) -> bool:
        """Release the node's stage. Return whether the node answered."""
        request = node_pb2.ReleaseRequest(
            hello=hello_to_wire(self._hello), pipeline_id=self._pipeline_id, epoch=epoch_to_wire(self._epoch)
        )
        try:
            async with self._channel(node_id) as channel:
                await node_pb2_grpc.NodeStub(channel).Release(request, timeout=self._timeouts.release_s)
        except (grpc.aio.AioRpcError, EdgepipeError) as exc:
            logger.warning("release failed node=%s pipeline=%s: %s", node_id, self._pipeline_id, exc)
            return False
        return True

    def _failed(self, exc: grpc.aio.AioRpcError, node_id: NodeId) -> EdgepipeError:
        """Return the error of a call to a node: its own, or why it does not answer."""
        name, address = self._nodes.name(node_id), self._nodes.address(node_id)
        error = from_rpc_error(exc, peer=f"node {name}")
        if isinstance(error, ConnectTimeout) and not is_refused(error):
            source = self._nodes.name(NodeId(self._hello.node_id))
            return shut_port(source, name, address=address, node_address=address)
        if isinstance(error, LinkError):
            error = NodeUnreachable(
                f"node {name} does not answer", fact=error.fact, next_step="see which nodes are up: edgepipe status"
            )
        return error.on_node(name)
