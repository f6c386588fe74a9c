"""Tensors and files from peers: each transfer on a channel of its own, resumed where it broke, checked by hash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from edgepipe.config import Timeouts
from edgepipe.errors import EdgepipeError, ModelInvalid, ModelUnknown, RemoteProtocolError, SendTimeout
from edgepipe.link.channels import make_channel, translated
from edgepipe.link.security import Security
from edgepipe.model.manifest import Manifest
from edgepipe.model.tensor_folder import MissingTensor, ShardWriter
from edgepipe.wire.v1 import common_pb2, node_pb2_grpc
from edgepipe.wire.v1 import node_pb2 as pb

logger = logging.getLogger(__name__)

_PROGRESS_STEP = 100  # progress is told about a hundred times a transfer
_ATTEMPTS = 3  # with the same peer: a broken connection is normal, a third one in a row is not


class WeightsClient:
    """Calls of another node's ``Weights`` service."""

    def __init__(self, *, hello: common_pb2.Hello, security: Security, timeouts: Timeouts) -> None:
        self._hello = hello
        self._security = security
        self._timeouts = timeouts

    async def manifest(self, source: pb.NodeState, model: str) -> Manifest:
        """What a model of ``source`` consists of. Raises ModelUnknown, ModelInvalid, LinkError."""
        request = pb.ManifestRequest(hello=self._hello, model=model)
        async with self._stub(source) as stub:
            reply = await stub.GetManifest(request, timeout=self._timeouts.transfer_idle_s)
        return Manifest.from_json(reply.manifest)

    async def metadata(self, source: pb.NodeState, manifest: Manifest) -> dict[str, bytes]:
        """All metadata files. Raises as ``manifest``, and RemoteProtocolError if a file grows."""
        return {entry.name: await self._file(source, manifest, entry.name) for entry in manifest.metadata_files}

    async def tensor(
        self, source: pb.NodeState, manifest: Manifest, name: str, *, offset: int
    ) -> AsyncGenerator[pb.DataChunk]:
        """A tensor's bytes from ``offset`` on. Raises LinkError, SendTimeout, and what the source raises."""
        request = pb.ReadTensorRequest(
            hello=self._hello, model=manifest.model_id, name=name, offset=offset, manifest_hash=manifest.hash
        )
        async with self._stub(source) as stub:
            chunks = aiter(stub.ReadTensor(request))
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
                yield chunk

    async def _file(self, source: pb.NodeState, manifest: Manifest, name: str) -> bytes:
        most = next(entry.num_bytes for entry in manifest.metadata_files if entry.name == name)
        request = pb.ReadFileRequest(hello=self._hello, model=manifest.model_id, name=name, manifest_hash=manifest.hash)
        data = bytearray()
        async with self._stub(source) as stub, asyncio.timeout(6 * self._timeouts.transfer_idle_s):
            async for chunk in stub.ReadFile(request):
                data += chunk.data
                if len(data) > most:
                    raise RemoteProtocolError(f"node {source.name} sends more of '{name}' than it promised")
        return bytes(data)

    @asynccontextmanager
    async def _stub(self, source: pb.NodeState) -> AsyncGenerator[node_pb2_grpc.WeightsAsyncStub]:
        async with make_channel(source.address, self._security.to_node(source.node_id)) as channel:
            with translated(f"node {source.name}"):
                yield node_pb2_grpc.WeightsStub(channel)


class Transfers:
    """Fetches missing tensors, one after the other, and tells how far it is."""

    def __init__(self, client: WeightsClient, on_change: Callable[[], None]) -> None:
        self._client = client
        self._on_change = on_change
        self._running: list[pb.Transfer] = []

    def running(self) -> list[pb.Transfer]:
        """Transfers under way."""
        return [_copy(transfer) for transfer in self._running]

    async def fetch(
        self, model: str, writer: ShardWriter, missing: Sequence[MissingTensor], sources: Sequence[pb.NodeState]
    ) -> AsyncGenerator[pb.PrepareProgress]:
        """Fetch each tensor from the first source that gives it whole. Raises ModelUnknown, ModelInvalid."""
        total = sum(tensor.num_bytes for tensor in missing)
        transfer = pb.Transfer(model=model, source=sources[0].node_id if sources else "", bytes_total=total)
        self._running.append(transfer)
        done, told = 0, -1
        try:
            for tensor in missing:
                async for position in self._tensor(writer, tensor, sources):
                    transfer.bytes_done = done + position
                    if (step := transfer.bytes_done * _PROGRESS_STEP // max(1, total)) != told:
                        told = step
                        self._on_change()
                        yield pb.PrepareProgress(phase="fetching", bytes_done=done + position, bytes_total=total)
                done += tensor.num_bytes
        finally:
            self._running.remove(transfer)
            self._on_change()

    async def _tensor(
        self, writer: ShardWriter, tensor: MissingTensor, sources: Sequence[pb.NodeState]
    ) -> AsyncGenerator[int]:
        """Positions reached; on return the tensor is complete and checked."""
        problem: EdgepipeError | None = None
        for source in sources:
            for _ in range(_ATTEMPTS):
                try:
                    async for position in self._from(source, writer, tensor.name):
                        yield position
                    return
                except EdgepipeError as error:
                    problem = error
                    logger.warning("transfer broke tensor=%s node=%s: %s", tensor.name, source.name, error)
                    if isinstance(error, ModelUnknown | ModelInvalid):
                        break  # asking the same node again gives the same
        if isinstance(problem, ModelInvalid):
            raise problem
        raise ModelUnknown(
            f"no reachable node has tensor '{tensor.name}'",
            fact=str(problem) if problem else "no other node is in the cluster",
            next_step=f"edgepipe models pull {writer.manifest.model_id}",
        )

    async def _from(self, source: pb.NodeState, writer: ShardWriter, name: str) -> AsyncGenerator[int]:
        with await asyncio.to_thread(writer.open, name) as sink:
            async for chunk in self._client.tensor(source, writer.manifest, name, offset=sink.position):
                if chunk.offset != sink.position:
                    raise RemoteProtocolError(f"node {source.name} sent another part of '{name}' than asked")
                await asyncio.to_thread(sink.write, chunk.data)
                yield sink.position
            if not await asyncio.to_thread(sink.finish):
                raise RemoteProtocolError(f"node {source.name} sent too little of '{name}'")


def _copy(transfer: pb.Transfer) -> pb.Transfer:
    copied = pb.Transfer()
    copied.CopyFrom(transfer)
    return copied
