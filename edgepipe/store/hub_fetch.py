"""Fetch a plan's files from the hub: each into a part that any later pull continues, then check its hash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path

from edgepipe.errors import EdgepipeError, ModelInvalid
from edgepipe.files.progress import OnProgress, PlannedFile, ProgressCounter
from edgepipe.interrupts import run_interruptible
from edgepipe.store.hub import HubDownload, failure_text
from edgepipe.store.hub_files import HubFiles
from edgepipe.store.hub_part import PartFile, hash_fits, part_bytes
from edgepipe.store.hub_patience import PullClock, persist
from edgepipe.store.install import METADATA_NAMES
from edgepipe.units import format_bytes

_IDLE_S = 20.0  # limit for silence of the hub


def fetch_hub(
    plan: HubDownload,
    folder: Path,
    on_progress: OnProgress,
    *,
    check: Callable[[Path], None],
    endpoint: str | None = None,
    pauses: PullClock | None = None,
) -> None:
    """Fetch a plan's files into ``folder``, metadata first. Blocks.

    ``check`` gets the folder before any weights are fetched, and raises for an unusable model. Raises its errors,
    ModelDownloadFailed, SendTimeout, RemoteProtocolError (partial files stay), ModelInvalid (a file with a wrong hash
    is deleted).
    """
    fetching = _Fetching(plan, folder, on_progress, endpoint, pauses or PullClock())
    run_interruptible(fetching.files([file for file in plan.files if file.name in METADATA_NAMES]))
    check(folder)
    run_interruptible(fetching.files([file for file in plan.files if file.name not in METADATA_NAMES]))


def kept_bytes(plan: HubDownload, folder: Path) -> int:
    """Return how many bytes of a plan's files an interrupted pull left in ``folder``, by sizes and records alone."""
    return sum(
        file.num_bytes
        if _size_fits(file, folder / plan.stored.get(file.name, file.name))
        else part_bytes(folder, plan.stored.get(file.name, file.name), file, commit=plan.commit)
        for file in plan.files
    )


def _size_fits(file: PlannedFile, path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == file.num_bytes


class _Fetching:
    """One pull's downloads."""

    def __init__(
        self, plan: HubDownload, folder: Path, on_progress: OnProgress, endpoint: str | None, pauses: PullClock
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._on_progress = on_progress
        self._endpoint = endpoint
        self._pauses = pauses
        self._counter = ProgressCounter(on_progress, "download", sum(file.num_bytes for file in plan.files))
        self._arrived = 0  # bytes from the hub, also those that were dropped
        self._without_ranges = False  # a person has read that the hub sends whole files only
        self._strange_tags: set[str] = set()  # files whose entity tag changed while their hash did not

    async def files(self, files: Sequence[PlannedFile]) -> None:
        """Fetch files in order over the same connections."""
        source = replace(self._plan.source, revision=self._plan.commit)
        hub = HubFiles(source, endpoint=self._endpoint, idle_s=_IDLE_S)
        try:
            for file in files:
                await self._fetch(hub, file)
        finally:
            await hub.aclose()

    async def _fetch(self, hub: HubFiles, file: PlannedFile) -> None:
        """Fetch a file under its name in the store. A whole one of an earlier pull is not fetched again."""
        name = self._plan.stored.get(file.name, file.name)
        target = self._folder / name
        if _size_fits(file, target) and hash_fits(file, target):
            self._counter.add(file.name, file.num_bytes)
            return
        target.unlink(missing_ok=True)
        with closing(PartFile(self._folder, name, file, commit=self._plan.commit)) as part:
            resumed = self._resume(file, part)
            await self._complete(hub, file, part)
            if resumed and not part.is_right():
                self._begin_anew(file, part, part.etag or "", "what an earlier pull left of it is damaged")
                await self._complete(hub, file, part)
            if not part.is_right():
                raise self._damaged(file, part)
            part.finish(target)

    def _resume(self, file: PlannedFile, part: PartFile) -> bool:
        """Hash and count what an earlier pull left of a file. Return whether that is anything."""
        if not part.num_bytes:
            return False
        kept = format_bytes(part.num_bytes)
        checking = ProgressCounter(self._on_progress, "check", part.num_bytes)
        checking.say(file.name, f"{kept} of {file.name} are here; checking them, then fetching the rest")
        part.compute_hash(lambda num_bytes: checking.add(file.name, num_bytes))
        self._counter.add(file.name, part.num_bytes)
        return True

    async def _complete(self, hub: HubFiles, file: PlannedFile, part: PartFile) -> None:
        """Fetch until all bytes of a file are here. Raises the failures that do not pass."""

        def waits(error: EdgepipeError, pause_s: float) -> None:
            self._counter.waits(file.name, failure_text(error), pause_s=pause_s)

        while part.num_bytes < file.num_bytes:
            await persist(
                lambda: self._read_rest(hub, file, part),
                pauses=self._pauses,
                on_wait=waits,
                num_arrived=lambda: self._arrived,
            )

    async def _read_rest(self, hub: HubFiles, file: PlannedFile, part: PartFile) -> None:
        """Append what one answer brings. Returns early if the part must begin anew with another request."""
        async with aclosing(hub.rest(file, part.num_bytes)) as pieces:
            async for piece in pieces:
                if not piece.offset:
                    self._begin_whole(file, part, piece.etag)
                elif self._changed(file, part, piece.etag):
                    self._begin_anew(file, part, piece.etag, "the hub's file has another ETag than before")
                    return
                self._arrived += len(piece.data)
                part.add(piece.data)
                self._counter.add(file.name, len(piece.data))

    def _changed(self, file: PlannedFile, part: PartFile, etag: str) -> bool:
        """Return whether the hub has another file than the part's. A tag that changes twice proves nothing."""
        if not etag or not part.etag or etag == part.etag or file.name in self._strange_tags:
            return False
        if file.sha256 or file.git_sha1:
            self._strange_tags.add(file.name)
        return True

    def _begin_whole(self, file: PlannedFile, part: PartFile, etag: str) -> None:
        """Begin a part with the first byte of an answer."""
        why = "" if self._without_ranges else "the hub sends whole files only, so each interruption costs its beginning"
        self._without_ranges = self._without_ranges or bool(part.num_bytes)
        self._begin_anew(file, part, etag, why)

    def _begin_anew(self, file: PlannedFile, part: PartFile, etag: str, why: str) -> None:
        """Drop a part's bytes and say why if there are any."""
        dropped = part.num_bytes
        part.begin(etag)
        if not dropped:
            return
        self._counter.add(file.name, -dropped)
        if why:
            self._counter.say(file.name, f"{file.name} begins anew after {format_bytes(dropped)}: {why}")

    def _damaged(self, file: PlannedFile, part: PartFile) -> ModelInvalid:
        arrived = part.num_bytes
        part.begin("")
        return ModelInvalid(
            f"'{file.name}' arrived damaged and was deleted",
            fact=f"{arrived} bytes arrived, {file.num_bytes} and another hash were announced",
            next_step="pull again; if it happens again, do not trust this source",
        )
