"""Files and batches of one gateway as one object: who runs when, what a client may do, what expires."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import TypeVar

from edgepipe.children.warm_child import WarmChild
from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError, FeatureMissing, QueueFull
from edgepipe.gateway.batches.checking import MODULE
from edgepipe.gateway.batches.copying import KEEPER_S, BatchCopies, CopySettings
from edgepipe.gateway.batches.line_runner import LineRunner
from edgepipe.gateway.batches.open_store import OpenStore
from edgepipe.gateway.batches.records import Batch, StoredFile, in_turn
from edgepipe.gateway.batches.run import BatchRun, BatchTools
from edgepipe.gateway.batches.store import FilesSettings
from edgepipe.gateway.loading import ModelLoads
from edgepipe.gateway.models import ModelTable
from edgepipe.gateway.shares import Quantity, Shares
from edgepipe.ids import IdSource
from edgepipe.units import format_bytes
from edgepipe.wire.nodes import ClusterView, NodeState

logger = logging.getLogger(__name__)
_MAX_RUNNING = 8  # batches, one of each user
_MAX_UNFINISHED, _MAX_OF_USER = 256, 64  # batches
_SWEEP_S = 600.0  # interval of the search for expired files
_START_S = 20.0  # start of an interpreter on an overloaded machine
_BUG_PAUSE_S = 60.0
_AGAIN_S = 5.0  # pause after the disk failed
T = TypeVar("T")


class BatchService:
    """Keeps files and runs batches. ``run`` owns the folder; ``update`` takes the daemon's views."""

    def __init__(
        self,
        *,
        settings: FilesSettings | None,
        lines: LineRunner,
        models: ModelTable,
        loads: ModelLoads,
        clock: Clock,
        ids: IdSource,
        copying: CopySettings | None = None,
    ) -> None:
        """``settings``: None for a gateway that keeps no files. ``copying``: None for one without copies elsewhere."""
        self._store = OpenStore(settings) if settings is not None else None
        self.disk = Shares(
            Quantity(
                total=settings.most_bytes if settings is not None else 0,
                what="this user's files would need too much disk",
                show=format_bytes,
            )
        )
        self._lines, self._models, self._loads = lines, models, loads
        self._checker = WarmChild(MODULE, start_s=_START_S)
        self._clock, self._ids = clock, ids
        self._unfinished: dict[str, Batch] = {}  # keys are ids, oldest first
        self._runs: dict[str, BatchRun] = {}
        self._changed = asyncio.Event()
        self._models_known = asyncio.Event()
        self._held_back = False  # an unfinished batch waits for the machine with its copy
        self._copies = (
            BatchCopies(
                copying,
                store=self._store,
                disk=self.disk,
                clock=clock,
                hand_over=self._hand_over,
                keeper_chosen=self._take_note,
            )
            if copying is not None and self._store is not None
            else None
        )

    @property
    def num_lines(self) -> int:
        """Number of lines under way."""
        return sum(run.num_under_way for run in self._runs.values())

    @property
    def store(self) -> OpenStore:
        """The store. Raises FeatureMissing if this gateway keeps no files."""
        if self._store is None:
            raise FeatureMissing("this gateway keeps no files", next_step="start it as a part of a node")
        return self._store

    def update(self, view: ClusterView) -> None:
        """Take the daemon's newest view: from the first one on, batches may go on."""
        if not self._models_known.is_set():
            asyncio.get_running_loop().call_later(KEEPER_S, self._changed.set)
        self._models_known.set()
        if self._copies is not None:
            self._copies.update(view)
        if self._held_back:
            self._changed.set()

    def now_s(self) -> int:
        """Return whole seconds since 1970."""
        return int(self._clock.wall_s())

    def new_id(self, prefix: str) -> str:
        """Return a new id in the form of OpenAI's: ``file-...``, ``batch_...``."""
        made = self._ids.new(prefix)
        return made if prefix == "file" else made.replace("-", "_")

    def note(self, batch: Batch) -> str:
        """Say why a batch does not advance; empty if it does."""
        if batch.is_final:
            return ""
        if (run := self._runs.get(batch.batch_id)) is not None:
            return run.note
        if self._copies is not None and not self._copies.may_run(batch):
            return "it waits for the machine with its copy, which may have taken it over"
        first = next((other for other in self._unfinished.values() if other.owner == batch.owner), batch)
        return "" if first.batch_id == batch.batch_id else f"it begins after {first.batch_id}"

    def copy_text(self, batch: Batch) -> str:
        """Say where a batch's copy is, and how far behind; empty if it wants none."""
        return self._copies.text(batch) if self._copies is not None else ""

    async def create(
        self,
        owner: str,
        *,
        endpoint: str,
        input_file: StoredFile,
        completion_window: str,
        window_s: int,
        metadata: Mapping[str, str],
        kept_s: int | None,
        copies: int = 1,
    ) -> Batch:
        """Begin a batch. Raises QueueFull, DiskFull."""
        of_user = sum(batch.owner == owner for batch in self._unfinished.values())
        if of_user >= _MAX_OF_USER or len(self._unfinished) >= _MAX_UNFINISHED:
            raise QueueFull(
                "too many batches are unfinished",
                fact=f"{of_user} of this user, {len(self._unfinished)} of all; "
                f"at most {_MAX_OF_USER} of one, {_MAX_UNFINISHED} of all",
                next_step="wait until some are completed, or cancel some",
            )
        store, now_s = self.store, self.now_s()
        most_s = store.settings.kept_s
        batch = Batch(
            batch_id=self.new_id("batch"),
            owner=owner,
            endpoint=endpoint,
            input_file=input_file.file_id,
            completion_window=completion_window,
            created_s=now_s,
            expires_s=now_s + window_s,
            output_file=self.new_id("file"),
            error_file=self.new_id("file"),
            kept_s=most_s if kept_s is None else min(kept_s, most_s),
            metadata=metadata,
            copies=copies,
            entered_s={"validating": now_s},
        )
        self._unfinished[batch.batch_id] = batch  # counts before it is durable, so that the limits hold
        try:
            await store.do(lambda each: each.add_batch(batch))
        except BaseException:
            del self._unfinished[batch.batch_id]
            raise
        self._take_note(batch)
        self._changed.set()
        return batch

    async def take_over(self, batch_id: str, user: str) -> Batch:
        """Go on with a batch of a lost machine, from the copy on this one. Raises RequestInvalid, EdgepipeError."""
        if self._copies is None:
            raise FeatureMissing("this gateway keeps no copies", next_step="start it as a part of a node")
        batch, num_bytes = await self._copies.take_over(batch_id, user)
        self.disk.add(batch.owner, num_bytes)
        if not batch.is_final:
            self._unfinished[batch_id] = batch
        self._changed.set()
        return batch

    async def _hand_over(self, batch: Batch, winner: NodeState) -> None:
        """Give a batch up: another machine took it over. Raises EdgepipeError."""
        now_s, batch_id = self.now_s(), batch.batch_id
        changed = await self.store.do(
            lambda store: store.change(
                batch_id, lambda now: now.handed_over(winner.node_id, name=winner.name, now_s=now_s)
            )
        )
        logger.warning("batch=%s is given up: machine %s took it over", batch_id, winner.name)
        self._take_note(changed)
        if (run := self._runs.get(batch_id)) is not None:
            run.changed(changed)
        self._changed.set()

    def _take_note(self, batch: Batch) -> None:
        """Take a batch's new form."""
        if batch.batch_id in self._unfinished:
            self._unfinished[batch.batch_id] = batch
        if self._copies is not None:
            self._copies.note(batch)

    async def cancel(self, batch: Batch) -> Batch:
        """Ask for a batch's end. Raises IllegalChange if it ends already, DiskFull."""
        now_s = self.now_s()
        changed = await self.store.do(
            lambda store: store.change(batch.batch_id, lambda current: current.cancelled(now_s=now_s))
        )
        self._unfinished[batch.batch_id] = changed
        if (run := self._runs.get(batch.batch_id)) is not None:
            run.changed(changed)
        self._changed.set()
        return changed

    async def delete(self, file: StoredFile) -> str:
        """Delete a file. Return the id of an unfinished batch that reads it, and so keeps it; else an empty text."""
        used_by = await self.store.do(lambda store: store.delete_file(file))
        if not used_by and self._copies is not None:
            await self._copies.withdraw(file.file_id)
        if not used_by:
            self.disk.add(file.owner, -file.num_bytes)
        return used_by

    async def run(self) -> None:
        """Run batches and delete expired files. Ends by cancellation only."""
        if self._store is None:
            return
        store = self._store
        try:
            await store.open()
            await self._load(store)
            await self._models_known.wait()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sweep(store), name="expired-files")
                if self._copies is not None:
                    tasks.create_task(self._copies.run(), name="copies-of-batches")
                while True:
                    self._changed.clear()
                    ready = [batch for batch in self._unfinished.values() if self._may_run(batch)]
                    self._held_back = len(ready) < len(self._unfinished)
                    for batch in in_turn(ready, most=_MAX_RUNNING):
                        if batch.batch_id not in self._runs:
                            self._begin(batch, store, tasks)
                    await self._changed.wait()
        finally:
            await self._checker.close()
            store.close()

    async def _load(self, store: OpenStore) -> None:
        """Read what an earlier gateway left. Try again if the disk fails: that must not end the gateway."""
        while True:
            try:
                held = await store.do(lambda each: each.held_bytes())
                found = await store.do(lambda each: each.unfinished())
            except EdgepipeError as exc:
                logger.warning("batches cannot be read: %s", exc)
                await asyncio.sleep(_AGAIN_S)
            else:
                break
        for owner, num_bytes in held.items():
            self.disk.add(owner, num_bytes)
        self._unfinished = {batch.batch_id: batch for batch in found} | self._unfinished

    def _may_run(self, batch: Batch) -> bool:
        return batch.batch_id in self._runs or self._copies is None or self._copies.may_run(batch)

    def _begin(self, batch: Batch, store: OpenStore, tasks: asyncio.TaskGroup) -> None:
        tools = BatchTools(
            store=store,
            lines=self._lines,
            models=self._models,
            loads=self._loads,
            checker=self._checker,
            disk=self.disk,
            clock=self._clock,
            changed=self._take_note,
        )
        run = self._runs[batch.batch_id] = BatchRun(batch, tools)
        tasks.create_task(self._until_final(run), name=f"batch:{batch.batch_id}")

    async def _until_final(self, run: BatchRun) -> None:
        """Run a batch. A mistake in it must not end the gateway, which answers everybody else."""
        batch_id = run.batch.batch_id
        try:
            await run.run()
        except Exception:
            logger.exception("batch=%s failed, it is tried again in %.0f s", batch_id, _BUG_PAUSE_S)
            run.note = "internal error of edgepipe; its log has the details"
            await asyncio.sleep(_BUG_PAUSE_S)
        else:
            self._unfinished.pop(batch_id, None)
        finally:
            del self._runs[batch_id]
            if batch_id in self._unfinished:
                self._unfinished[batch_id] = run.batch
            self._changed.set()

    async def _sweep(self, store: OpenStore) -> None:
        while True:
            with contextlib.suppress(EdgepipeError):
                for file in await store.do(lambda each: each.expire(self.now_s())):
                    self.disk.add(file.owner, -file.num_bytes)
                if self._copies is not None:
                    await self._copies.reload()
            await asyncio.sleep(_SWEEP_S)
