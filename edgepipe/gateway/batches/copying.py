"""Keeps copies of batches: has the copies of this node's batches kept elsewhere, and keeps those of other nodes.

``copies.py`` decides. One loop carries that out after every change of a batch or of the cluster's view.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError, RequestInvalid
from edgepipe.gateway.batches.copies import (
    MOST_COPIES,
    Copy,
    LocalUsers,
    Pull,
    choose_keeper,
    copy_text,
    facts_of,
    first_to_copy,
    is_needed,
    may_run,
    pulls,
    refusal,
    reported_room,
    superseded_by,
)
from edgepipe.gateway.batches.copy_puller import CopyPuller
from edgepipe.gateway.batches.open_store import OpenStore
from edgepipe.gateway.batches.records import Batch
from edgepipe.gateway.shares import Shares
from edgepipe.security.mutual_tls import Security
from edgepipe.wire.batches import BatchFacts, BatchReport, BatchSource, HeldBatch, OwnedBatch
from edgepipe.wire.common import Hello
from edgepipe.wire.nodes import ClusterView, NodeState

logger = logging.getLogger(__name__)
COPIES = "copies"  # owner of the disk share that all copies count to; no key's fingerprint and no address
_ROUND_S = 0.5  # least time between two rounds: lines are recorded many times a second
LISTEN_S = 8.0  # a node is dead after 6 s of silence at most: then this gateway misses only lost owners
KEEPER_S = 20.0  # how long a batch of an earlier gateway waits for the machine with its copy
MOST_OWNERS = 256  # machines of a report
_AGAIN_S = 5.0  # pause after the disk failed


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySettings:
    """What copies need of the gateway."""

    hello: Hello
    security: Security
    report: Callable[[BatchReport], None] = lambda _: None  # takes each report for the daemon
    users: LocalUsers


class BatchCopies:
    """Copies of one gateway's batches. ``run`` owns the work."""

    def __init__(
        self,
        settings: CopySettings,
        *,
        store: OpenStore,
        disk: Shares,
        clock: Clock,
        hand_over: Callable[[Batch, NodeState], Awaitable[None]],
        keeper_chosen: Callable[[Batch], None],
    ) -> None:
        """
        hand_over      gives a batch up that another machine owns by now
        keeper_chosen  takes a batch with another keeper
        """
        self._settings = settings
        self._store = store
        self._disk = disk
        self._clock = clock
        self._hand_over = hand_over
        self._keeper_chosen = keeper_chosen
        self._counted = 0  # bytes of all copies, as counted to the disk's quota
        self._owned: dict[str, Batch] = {}  # batches that want a copy
        self._view = ClusterView()
        self._since_s: float | None = None  # time of the first view, on the event loop's clock
        self._changed = asyncio.Event()
        self._pulling: dict[str, tuple[Pull, asyncio.Task[None]]] = {}
        self._taken: set[str] = set()  # batches that are being taken over: nothing is pulled
        self._reported: BatchReport | None = None
        self._records: dict[str, tuple[Batch, bytes, int]] = {}  # for each owned batch: its record, its input's size

    def update(self, view: ClusterView) -> None:
        """Take the newest view of the cluster."""
        self._view = view
        if self._since_s is None:
            self._since_s = asyncio.get_running_loop().time()
        self._changed.set()

    def note(self, batch: Batch) -> None:
        """Take note of a new or changed batch of this node."""
        if batch.wants_copy:
            self._owned[batch.batch_id] = batch
        elif self._owned.pop(batch.batch_id, None) is None:
            return
        self._changed.set()

    def text(self, batch: Batch) -> str:
        """Say where a batch's copy is."""
        known = self._records.get(batch.batch_id)
        num_bytes = (known[2] if known is not None else 0) + batch.output_bytes + batch.error_bytes
        return copy_text(self._owned.get(batch.batch_id, batch), num_bytes=num_bytes, view=self._view)

    def may_run(self, batch: Batch) -> bool:
        """Return whether a batch of an earlier gateway may go on, see ``copies.may_run``."""
        if batch.wants_copy and superseded_by(batch, own_id=self._settings.hello.node_id, view=self._view) is not None:
            return False  # it is given up within a moment
        return may_run(batch, view=self._view, waited=self._has_listened(KEEPER_S))

    async def reload(self) -> None:
        """Read the batches that want a copy: some may be forgotten by now. Raises EdgepipeError."""
        self._owned = {batch.batch_id: batch for batch in await self._store.do(lambda store: store.copied())}
        self._changed.set()

    async def withdraw(self, file_id: str) -> None:
        """Let the copies of batches go whose user deletes a file of them. Raises EdgepipeError."""
        for batch in list(self._owned.values()):
            if file_id in (batch.input_file, batch.output_file, batch.error_file):
                batch_id = batch.batch_id
                self.note(await self._store.do(lambda store, key=batch_id: store.change(key, Batch.without_copy)))

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                await self.reload()
                break
            except EdgepipeError:
                await asyncio.sleep(_AGAIN_S)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._since_s is not None:
                    try:
                        await self._round(tasks)
                    except EdgepipeError as exc:
                        logger.warning("copies of batches wait: %s", exc)
                        self._changed.set()
                        await asyncio.sleep(_AGAIN_S)
                await asyncio.sleep(_ROUND_S)

    async def take_over(self, batch_id: str, user: str) -> tuple[Batch, int]:
        """Make a copy on this node a batch of this node. Return it, and the bytes of files that are new.

        Raises RequestInvalid, EdgepipeError.
        """
        copy = await self._store.do(lambda store: store.copies.find(batch_id))
        own = await self._store.do(lambda store: store.find(batch_id))
        owns = own is not None and not own.handed_to
        reason = refusal(batch_id, copy, owns=owns, listened=self._has_listened(LISTEN_S), view=self._view)
        if reason is not None:
            raise RequestInvalid(reason.what, fact=reason.fact, next_step=reason.next_step)
        assert copy is not None, "else refused"
        users, now_s = self._settings.users, int(self._clock.wall_s())
        if not users.may_take(user, copy.batch):
            raise RequestInvalid(
                f"this key may not take {batch_id} over",
                fact="another key made it",
                next_step="send the key that made it, or use this machine's command line",
            )
        if batch_id in self._taken:
            raise _under_way(batch_id)
        self._taken.add(batch_id)
        try:
            await self._stop_pull(batch_id)
            kept = await self._store.do(lambda store: store.copies.find(batch_id))
            if kept is None:
                raise _under_way(batch_id)
            owner = users.owner_here(kept.batch, user)
            batch, num_bytes = await self._store.do(lambda store: store.take_over(kept, owner=owner, now_s=now_s))
        finally:
            self._taken.discard(batch_id)
            self._changed.set()
        self.note(batch)
        logger.info("batch=%s taken over from machine %s in term %d", batch_id, kept.owner_name, batch.term)
        return batch, num_bytes

    async def _round(self, tasks: asyncio.TaskGroup) -> None:
        """Carry out what follows from the newest view and batches. Raises EdgepipeError."""
        view, own_id, now_s = self._view, self._settings.hello.node_id, int(self._clock.wall_s())
        for batch in list(self._owned.values()):
            if (winner := superseded_by(batch, own_id=own_id, view=view)) is not None:
                await self._hand_over(batch, winner)
        owned = first_to_copy(self._owned.values())
        sources = [await self._source(batch, view) for batch in owned]
        held = await self._store.do(lambda store: store.copies.all())
        wanted = {key: pull for key, pull in pulls(own_id, view, held=held).items() if key not in self._taken}
        for batch_id, (pull, _) in list(self._pulling.items()):
            if _origin(wanted.get(batch_id)) != _origin(pull):
                await self._stop_pull(batch_id)
        for copy in held:
            key = copy.batch.batch_id
            if key not in self._taken and not is_needed(copy, own_id=own_id, view=view, now_s=now_s):
                await self._stop_pull(key)
                await self._store.do(lambda store, key=key: store.copies.drop(key))
        for batch_id, pull in wanted.items():
            if batch_id not in self._pulling:
                task = tasks.create_task(self._puller(pull).run(), name=f"copy:{batch_id}")
                self._pulling[batch_id] = pull, task
        self._tell([source for source in sources if source is not None], await self._count())

    async def _source(self, batch: Batch, view: ClusterView) -> tuple[OwnedBatch, BatchSource] | None:
        """Choose a batch's keeper. Return the facts for it; None once the batch's input is deleted."""
        key = batch.batch_id
        known = self._records.get(key)
        num_bytes = (known[2] if known is not None else 0) + batch.output_bytes + batch.error_bytes
        keeper = choose_keeper(key, current=batch.keeper, num_bytes=num_bytes, view=view)
        if keeper != batch.keeper:
            batch = await self._store.do(lambda store: store.change(key, lambda now: now.kept_by(keeper)))
            self._keeper_chosen(batch)
        if known is None or known[0] is not batch:
            made = await self._store.do(lambda store: store.record_for_keeper(batch))
            if made is None:
                self._owned.pop(key, None)
                return None
            known = self._records[key] = (batch, *made)
        sizes = (known[2], batch.output_bytes, batch.error_bytes)
        fact = OwnedBatch(batch_id=key, keeper=keeper, term=batch.term, num_bytes=sum(sizes))
        files = (batch.input_file, batch.output_file, batch.error_file)
        return fact, BatchSource(batch_id=key, keeper=keeper, record=known[1], files=files, num_bytes=sizes)

    async def _count(self) -> list[Copy]:
        """Return all copies, and count their bytes to the disk's quota."""
        held = await self._store.do(lambda store: store.copies.all())
        total = sum(copy.num_bytes for copy in held)
        self._disk.add(COPIES, total - self._counted)
        self._counted = total
        return held

    def _room(self) -> int:
        """Return the bytes that copies may still take."""
        return self._disk.share(COPIES) - self._counted

    def _tell(self, sources: list[tuple[OwnedBatch, BatchSource]], held: list[Copy]) -> None:
        """Report to the daemon if something has changed."""
        owners = sorted(node_id for node_id, (_, facts) in facts_of(self._view).items() if facts.owned)
        report = BatchReport(
            facts=BatchFacts(
                room_bytes=reported_room(self._room()),
                owned=tuple(fact for fact, _ in sources),
                held=tuple(
                    HeldBatch(
                        batch_id=copy.batch.batch_id,
                        owner=copy.owner_node,
                        term=copy.batch.term,
                        num_bytes=copy.num_bytes,
                    )
                    for copy in held[:MOST_COPIES]
                ),
                owners=tuple(owners[:MOST_OWNERS]),
            ),
            sources=tuple(source for _, source in sources if source.keeper),
        )
        if report != self._reported:
            self._reported = report
            self._settings.report(report)
        self._records = {key: known for key, known in self._records.items() if key in self._owned}

    def _puller(self, pull: Pull) -> CopyPuller:
        return CopyPuller(
            pull,
            store=self._store,
            clock=self._clock,
            security=self._settings.security,
            hello=replace(self._settings.hello, cluster_id=self._view.cluster_id),
            room=self._room,
            changed=self._changed.set,
        )

    async def _stop_pull(self, batch_id: str) -> None:
        """End the reads of a copy, once what came is durable."""
        _, task = self._pulling.pop(batch_id, (None, None))
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    def _has_listened(self, seconds: float) -> bool:
        return self._since_s is not None and asyncio.get_running_loop().time() - self._since_s >= seconds


def _under_way(batch_id: str) -> RequestInvalid:
    return RequestInvalid(
        f"{batch_id} is being taken over",
        fact="another command asked for it a moment ago",
        next_step=f"edgepipe batch show {batch_id}",
    )


def _origin(pull: Pull | None) -> tuple[str, str, int] | None:
    """Return where a copy is read from; a change ends the reads."""
    return None if pull is None else (pull.owner.node_id, pull.owner.address, pull.term)
