"""Tensors and files from peers, and from the hub tensors that no peer has: resumed after a break, checked by hash.

Each tensor or file from a peer comes on a channel of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from edgepipe.config import Timeouts
from edgepipe.daemon.files.precedence import in_thread, opened_in_thread
from edgepipe.daemon.offers import PublishedState
from edgepipe.errors import (
    EdgepipeError,
    LinkError,
    ModelDownloadFailed,
    ModelInvalid,
    ModelUnknown,
    RemoteProtocolError,
    SendTimeout,
)
from edgepipe.files.disk import disk_errors
from edgepipe.link.channels import make_channel, translated
from edgepipe.security.mutual_tls import Security
from edgepipe.store.hub_tensors import HubTensors
from edgepipe.weights.manifest import MAX_MANIFEST_BYTES, Manifest
from edgepipe.weights.tensor_folder import MissingTensor, ShardWriter
from edgepipe.wire.children import PrepareProgress
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.nodes import Transfer as TransferState
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import node_pb2_grpc

logger = logging.getLogger(__name__)

_PROGRESS_STEP = 100  # progress is reported about a hundred times per transfer
_QUIET_S = 30.0  # longest pause between reports while bytes arrive
_ATTEMPTS = 3  # tries per source: one broken connection is normal, three in a row that bring nothing are not
_LATER_S = 60.0  # a source that does not answer is asked last for so long; else every tensor would wait for it
_FILE_WAITS = 6  # a manifest or a metadata file may take so many times the idle limit of a peer
_HUB = "hub"  # stands in place of a node id


class WeightsClient:
    """Calls of another node's ``Weights`` service."""

    def __init__(self, *, hello: Hello, security: Security, timeouts: Timeouts) -> None:
        self._hello = hello_to_wire(hello)
        self._security = security
        self._timeouts = timeouts

    async def manifest(self, source: NodeState, model: str) -> Manifest:
        """Fetch the manifest of a source's model. Raises ModelUnknown, ModelInvalid, LinkError."""
        request = pb.ManifestRequest(hello=self._hello, model=model)
        found = bytearray()
        async with self._stub(source) as stub:
            async for part in stub.GetManifest(request, timeout=_FILE_WAITS * self._timeouts.transfer_idle_s):
                found += part.manifest
                if len(found) > MAX_MANIFEST_BYTES:
                    break  # ``from_json`` refuses it
        return await asyncio.to_thread(Manifest.from_json, bytes(found))

    async def file(self, source: NodeState, manifest: Manifest, name: str) -> AsyncGenerator[bytes]:
        """Yield a metadata file's bytes, in order and unchecked. Raises LinkError, SendTimeout, the source's errors."""
        request = pb.ReadFileRequest(hello=self._hello, model=manifest.model_id, name=name, manifest_hash=manifest.hash)
        async with self._stub(source) as stub:
            stream = stub.ReadFile(request, timeout=_FILE_WAITS * self._timeouts.transfer_idle_s)
            async with aclosing(self._chunks(source, stream)) as chunks:
                async for chunk in chunks:
                    yield chunk.data

    async def tensor(
        self, source: NodeState, manifest: Manifest, name: str, *, offset: int, bytes_per_s: float
    ) -> AsyncGenerator[bytes]:
        """Yield a tensor's bytes from ``offset`` on, in order. Raises LinkError, SendTimeout, the source's errors."""
        request = pb.ReadTensorRequest(
            hello=self._hello,
            model=manifest.model_id,
            name=name,
            offset=offset,
            manifest_hash=manifest.hash,
            bytes_per_s=bytes_per_s,
        )
        async with self._stub(source) as stub, aclosing(self._chunks(source, stub.ReadTensor(request))) as chunks:
            async for chunk in chunks:
                if chunk.offset != offset:
                    raise RemoteProtocolError(f"node {source.name} sent another part of '{name}' than asked")
                yield chunk.data
                offset += len(chunk.data)

    async def _chunks(self, source: NodeState, stream: AsyncIterable[pb.DataChunk]) -> AsyncGenerator[pb.DataChunk]:
        """Yield chunks. Raises SendTimeout when the source falls silent, RemoteProtocolError for an empty chunk.

        A source that sends empty chunks would never be silent, and never done.
        """
        chunks = aiter(stream)
        while True:
            try:
                async with asyncio.timeout(self._timeouts.transfer_idle_s):
                    chunk = await anext(chunks, None)
            except TimeoutError as exc:
                raise SendTimeout(
                    f"node {source.name} stopped sending", fact=f"silent for {self._timeouts.transfer_idle_s:.0f} s"
                ) from exc
            if chunk is None:
                return
            if not chunk.data:
                raise RemoteProtocolError(f"node {source.name} sent a part without bytes")
            yield chunk

    @asynccontextmanager
    async def _stub(self, source: NodeState) -> AsyncGenerator[node_pb2_grpc.WeightsAsyncStub]:
        async with make_channel(source.address, self._security.to_node(source.node_id)) as channel:
            try:
                with translated(f"node {source.name}"):
                    yield node_pb2_grpc.WeightsStub(channel)
            except ModelDownloadFailed as error:  # a peer's error is no failure of this node's own disk
                raise LinkError(error.what, fact=error.fact) from error


class Source(Protocol):
    """A source that may have a tensor."""

    @property
    def source_id(self) -> str:
        """A node id, or ``hub``."""
        ...

    @property
    def name(self) -> str:
        """The name for people."""
        ...

    def tensor(self, manifest: Manifest, name: str, *, offset: int, bytes_per_s: float) -> AsyncGenerator[bytes]:
        """Yield a tensor's bytes from ``offset`` on, in order. Raises ModelUnknown, ModelInvalid (final), LinkError."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PeerSource:
    """Another node."""

    client: WeightsClient
    node: NodeState

    @property
    def source_id(self) -> str:
        """Its node id."""
        return self.node.node_id

    @property
    def name(self) -> str:
        """The name for people."""
        return f"node {self.node.name}"

    def tensor(self, manifest: Manifest, name: str, *, offset: int, bytes_per_s: float) -> AsyncGenerator[bytes]:
        """See ``WeightsClient.tensor``."""
        return self.client.tensor(self.node, manifest, name, offset=offset, bytes_per_s=bytes_per_s)


@dataclass(frozen=True, slots=True, eq=False)
class FromHub:
    """The hub, for tensors that a stage waits for; it sends as fast as it can."""

    tensors: HubTensors

    @property
    def source_id(self) -> str:
        """The value of ``Transfer.source``."""
        return _HUB

    @property
    def name(self) -> str:
        """The name for people."""
        return "the hub"

    async def tensor(self, manifest: Manifest, name: str, *, offset: int, bytes_per_s: float) -> AsyncGenerator[bytes]:
        """See ``HubTensors.read``; a refusal or an unreachable hub is a LinkError, as with peers."""
        try:
            async with aclosing(self.tensors.read(name, offset=offset)) as chunks:
                async for data in chunks:
                    yield data
        except ModelDownloadFailed as error:  # the hub's error is no failure of this node's own disk
            raise LinkError(error.what, fact=error.fact, next_step=error.next_step) from error


class TensorFetch:
    """Missing tensors, fetched one after the other; ``run`` may be left and started again."""

    def __init__(
        self,
        state: TransferState,
        missing: Sequence[MissingTensor],
        sources: Sequence[Source],
        local: PublishedState,
        *,
        bytes_per_s: float,
    ) -> None:
        self.state = state
        self._missing = deque(missing)
        self._sources = sources
        self._later_s: dict[str, float] = {}  # time until which a source that does not answer is asked last
        self._local = local
        self._bytes_per_s = bytes_per_s
        self._done_bytes = 0  # size of the complete tensors
        self._step = -1
        self._told_s = float("-inf")

    @property
    def complete(self) -> bool:
        """Whether every tensor is here."""
        return not self._missing

    async def run(self, writer: ShardWriter) -> AsyncGenerator[PrepareProgress]:
        """Fetch each tensor from the first source that gives it whole.

        Raises ModelUnknown, ModelInvalid, ModelDownloadFailed when the disk cannot take it.
        """
        while self._missing:
            tensor = self._missing[0]
            if writer.missing([tensor.name]):  # a stage may have fetched it while this transfer paused
                async with aclosing(self._tensor(writer, tensor)) as positions:
                    async for position in positions:
                        if self._moved(self._done_bytes + position):
                            yield self._progress()
            self._missing.popleft()
            self._done_bytes += tensor.num_bytes

    def _progress(self) -> PrepareProgress:
        done, total = self.state.bytes_done, self.state.bytes_total
        return PrepareProgress(phase="fetching", bytes_done=done, bytes_total=total)

    def _moved(self, bytes_done: int) -> bool:
        """Record the bytes done; return whether to report them."""
        self.state = replace(self.state, bytes_done=bytes_done)
        step = bytes_done * _PROGRESS_STEP // max(1, self.state.bytes_total)
        now_s = asyncio.get_running_loop().time()
        if step == self._step and now_s - self._told_s < _QUIET_S:
            return False
        self._step, self._told_s = step, now_s
        self._local.refresh()
        return True

    async def _tensor(self, writer: ShardWriter, tensor: MissingTensor) -> AsyncGenerator[int]:
        """Yield the positions reached; on return the tensor is complete and checked."""
        problems: dict[str, EdgepipeError] = {}
        now_s = asyncio.get_running_loop().time
        for source in sorted(self._sources, key=lambda each: now_s() < self._later_s.get(each.source_id, 0.0)):
            failures = 0
            while failures < _ATTEMPTS:
                began_bytes = _have_bytes(writer, tensor)
                try:
                    async with aclosing(self._from(source, writer, tensor.name)) as positions:
                        async for position in positions:
                            yield position
                    return
                except ModelDownloadFailed:
                    raise  # this node's own disk failed
                except EdgepipeError as error:
                    problems[source.source_id] = error
                    logger.warning("transfer broke tensor=%s source=%s: %s", tensor.name, source.name, error)
                    came_bytes = _have_bytes(writer, tensor) - began_bytes
                    failures = 1 if came_bytes * _PROGRESS_STEP >= tensor.num_bytes else failures + 1
                    if isinstance(error, ModelInvalid) and began_bytes:
                        continue  # the bytes from before may be the damaged part
                    if isinstance(error, ModelUnknown | ModelInvalid):
                        break  # the same source would answer the same
            else:
                self._later_s[source.source_id] = now_s() + _LATER_S
        raise _without_source(tensor.name, writer.manifest.model_id, problems)

    async def _from(self, source: Source, writer: ShardWriter, name: str) -> AsyncGenerator[int]:
        with disk_errors(writer.manifest.model_id):
            async with opened_in_thread(writer.open, name) as sink:
                chunks = source.tensor(writer.manifest, name, offset=sink.position, bytes_per_s=self._bytes_per_s)
                async with aclosing(chunks):
                    async for data in chunks:
                        await in_thread(sink.write, data)
                        self.state = replace(self.state, source=source.source_id)
                        yield sink.position
                if not await in_thread(sink.finish):
                    raise RemoteProtocolError(f"{source.name} sent too little of '{name}'")


def _have_bytes(writer: ShardWriter, tensor: MissingTensor) -> int:
    """Return the bytes of an incomplete tensor that are here."""
    return sum(part.have_bytes for part in writer.missing([tensor.name]))


def _without_source(tensor: str, model_id: str, problems: Mapping[str, EdgepipeError]) -> EdgepipeError:
    """Combine the sources' last errors into one; ``problems`` has them in the order in which the sources were asked."""
    hub = problems.get(_HUB)
    peers = [problem for source_id, problem in problems.items() if source_id != _HUB]
    facts = [str(peers[-1]) if peers else "no other node is in the cluster"]
    if hub is not None:
        facts.append(f"from the hub: {hub.what}, {hub.fact}" if hub.fact else f"from the hub: {hub.what}")
    damaged = next((problem for problem in (hub, *peers[-1:]) if isinstance(problem, ModelInvalid)), None)
    kind, message = (
        (ModelInvalid, damaged.what) if damaged else (ModelUnknown, f"no reachable node has tensor '{tensor}'")
    )
    return kind(message, fact="; ".join(facts), next_step=f"edgepipe models pull {model_id}")


class Transfers:
    """The transfers of this node."""

    def __init__(self, client: WeightsClient, local: PublishedState) -> None:
        self._client = client
        self._local = local
        self._running: list[TensorFetch] = []

    def running(self) -> list[TransferState]:
        """Return the transfers under way."""
        return [transfer.state for transfer in self._running]

    @contextmanager
    def begin(
        self,
        model: str,
        missing: Sequence[MissingTensor],
        peers: Sequence[NodeState],
        *,
        hub: HubTensors | None = None,
        copy: bool = False,
        bytes_per_s: float = 0.0,
    ) -> Generator[TensorFetch]:
        """List a transfer while the block runs; ``hub`` is asked for tensors that no peer has.

        ``copy``: no stage waits for it; ``bytes_per_s``: the highest rate of peers, 0 for no limit.
        """
        total = sum(tensor.num_bytes for tensor in missing)
        sources: list[Source] = [PeerSource(self._client, node) for node in peers]
        if hub is not None:
            sources.append(FromHub(hub))
        source = sources[0].source_id if sources else ""
        state = TransferState(model=model, source=source, bytes_total=total, copy=copy)
        transfer = TensorFetch(state, missing, sources, self._local, bytes_per_s=bytes_per_s)
        self._running.append(transfer)
        try:
            yield transfer
        finally:
            self._running.remove(transfer)
            self._local.refresh()
