"""Reads what a copy lacks from the daemon of the machine that owns the batch, again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from functools import partial

from edgepipe.clock import Clock
from edgepipe.errors import CapacityError, EdgepipeError, RemoteProtocolError
from edgepipe.gateway.batches.copies import Copy, Pull
from edgepipe.gateway.batches.open_store import OpenStore
from edgepipe.gateway.batches.store import Store
from edgepipe.link.channels import make_channel, translated
from edgepipe.security.mutual_tls import Security
from edgepipe.wire.batches import BatchPart, ReadBatchRequest, digest_of
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import node_pb2_grpc

logger = logging.getLogger(__name__)
MOST_ANSWER_BYTES = 16 << 20
_ANSWER_S = 60.0  # deadline of one answer: 20 s for news, then at most 16 MiB
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # pause after a failure, doubled each time


class CopyPuller:
    """Keeps one copy up to date. ``run`` ends by cancellation only."""

    def __init__(
        self,
        pull: Pull,
        *,
        store: OpenStore,
        clock: Clock,
        security: Security,
        hello: Hello,
        room: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        """``room`` returns the bytes that copies may still take; ``changed`` is called after each answer with news."""
        self._pull = pull
        self._store = store
        self._room = room
        self._clock = clock
        self._security = security
        self._hello = hello
        self._changed = changed

    async def run(self) -> None:
        """Read answers of the owner, each until it ends."""
        pause_s, told = _PAUSE_S, ""
        while True:
            try:
                owner = self._pull.owner
                async with make_channel(owner.address, self._security.to_node(owner.node_id)) as channel:
                    stub = node_pb2_grpc.NodeStub(channel)
                    while True:
                        await self._answer(stub)
                        pause_s, told = _PAUSE_S, ""
            except EdgepipeError as exc:
                level = logging.DEBUG if told == exc.what else logging.WARNING
                told = exc.what
                logger.log(level, "batch=%s is not copied now: %s", self._pull.batch_id, exc)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _answer(self, stub: node_pb2_grpc.NodeAsyncStub) -> None:
        """Read one answer, and make what came durable, also if it breaks off. Raises EdgepipeError."""
        batch_id, owner = self._pull.batch_id, self._pull.owner
        copy = known = await self._store.do(lambda store: store.copies.find(batch_id))
        if self._room() < MOST_ANSWER_BYTES:
            raise CapacityError(
                "this machine has no room for copies of batches",
                next_step="delete files of batches, or raise the setting files_limit_bytes",
            )
        try:
            async with aclosing(self._parts(stub, copy)) as parts:
                async for part in parts:
                    if part.record:
                        begin = partial(_begin, part=part, owner=owner, batch_id=batch_id)
                        copy = await self._store.do(partial(begin, now_s=int(self._clock.wall_s())))
                    elif copy is not None:
                        copy = await self._store.do(partial(_append, copy=copy, part=part))
        except BaseException:
            if copy is not None and copy is not known:
                with suppress(EdgepipeError):  # the first error counts, or the cancellation
                    await asyncio.shield(self._keep(copy))
            raise
        if copy is not None and copy is not known:
            await self._keep(copy)
            if copy.num_bytes == (known.num_bytes if known is not None else 0) and not copy.is_complete:
                raise RemoteProtocolError(
                    f"machine {owner.name} sends no more bytes of a batch", fact="its record counts more"
                )

    async def _parts(self, stub: node_pb2_grpc.NodeAsyncStub, copy: Copy | None) -> AsyncGenerator[BatchPart]:
        input_at, output_at, error_at = copy.sizes if copy is not None else (0, 0, 0)
        request = to_wire(
            ReadBatchRequest(
                batch_id=self._pull.batch_id,
                input_at=input_at,
                output_at=output_at,
                error_at=error_at,
                have=digest_of(copy.record) if copy is not None else b"",
            ),
            pb.ReadBatchRequest,
        )
        request.hello.CopyFrom(hello_to_wire(self._hello))
        with translated(f"machine {self._pull.owner.name}"):
            async for part in stub.ReadBatch(request, timeout=_ANSWER_S):
                yield from_wire(part, BatchPart)

    async def _keep(self, copy: Copy) -> None:
        await self._store.do(lambda store: store.copies.keep(copy))
        self._changed()


def _begin(store: Store, *, part: BatchPart, owner: NodeState, batch_id: str, now_s: int) -> Copy:
    return store.copies.begin(
        part.record, batch_id=batch_id, owner_node=owner.node_id, owner_name=owner.name, now_s=now_s
    )


def _append(store: Store, *, copy: Copy, part: BatchPart) -> Copy:
    store.check_free()
    return store.copies.append(copy, part)
