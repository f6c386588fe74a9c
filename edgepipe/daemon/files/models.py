"""The models of this node: found on disk, adopted from peers, completed with missing tensors, and read for peers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

from edgepipe.config import Timeouts
from edgepipe.daemon.files.adoptions import MAX_FETCHES, Adopted, Adoptions, ModelKey, Wanted
from edgepipe.daemon.files.model_parts import held_parts, part_tensors, runs_of
from edgepipe.daemon.files.pace import Pace, chunk_bytes
from edgepipe.daemon.files.precedence import Precedence, in_thread
from edgepipe.daemon.files.transfer import Transfers, WeightsClient
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.offers import PublishedState
from edgepipe.errors import EdgepipeError, ModelDownloadFailed, ModelInvalid, ModelUnknown
from edgepipe.files.disk import COPY_HEADROOM_BYTES, check_room, disk_errors, free_bytes
from edgepipe.spec.config_json import config_to_json
from edgepipe.spec.drafting import draft_kv_tokens, drafting
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.names import canonical_name, is_name
from edgepipe.store.hub_tensors import hub_tensors
from edgepipe.store.store import ModelStore, StoredModel, tensor_names
from edgepipe.store.typed_names import meant_names, nearest, understood
from edgepipe.weights.manifest import Manifest
from edgepipe.weights.tensor_folder import ShardWriter
from edgepipe.weights.weight_table import DraftModelNeed, WeightTable
from edgepipe.wire.children import PrepareProgress
from edgepipe.wire.engines import StagePlacement
from edgepipe.wire.nodes import ModelOnDisk, NodeState, Transfer

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 512 << 10  # same size as activations: larger chunks delay other traffic of this machine
_FREE_STEP_BYTES = 64 << 20  # free space is rounded down to this, so that small files cause no report
_MAX_OPEN = 4  # models kept open for reading peers; the least recently read one is closed first
_LEAST_BYTES_PER_S = 64 << 10  # lowest rate that a peer may ask for: a slower copy delays the others in their queue
_MOST_BYTES_PER_S = 1 << 40
_TELL_S = 10.0  # interval between two reports of a transfer that waits for another one
_UNASKED_S = 600.0  # time to fetch one announced model, over all its sources


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model whose metadata is on this node's disk; its tensors may be missing."""

    name: str
    path: Path
    manifest_hash: str
    config: ModelConfig
    stored: StoredModel
    draft: LocalModel | None = None  # drafts beside the head, and takes memory there

    @property
    def config_json(self) -> str:
        """The model's shape, as an engine takes it."""
        return json.dumps(config_to_json(self.config))

    @property
    def weights(self) -> WeightTable:
        """The forms of its weights, with the memory that its draft model needs."""
        table, draft = self.stored.weight_table, self.draft
        if draft is None:
            return table
        tokens = draft_kv_tokens(draft.config)
        return replace(table, draft=DraftModelNeed(config=draft.config, weights=draft.weights, kv_tokens=tokens))

    @property
    def weights_json(self) -> str:
        """The forms of its weights, as an engine takes them."""
        return self.weights.to_json()

    def drafting(self) -> LocalModel:
        """Return the model with the layer that predicts one token more. Raises ConfigInvalid if it has none."""
        return replace(self, config=drafting(self.config, self.name))

    def drafted_by(self, draft: LocalModel | None) -> LocalModel:
        """Return the model with a draft model, or without one."""
        return replace(self, draft=draft)

    def as_placed(self, stages: Iterable[StagePlacement]) -> LocalModel:
        """Return the model as stages hold it: with the layer that predicts one token more, or without."""
        return replace(self, config=self.config.holding([part for stage in stages for part in stage.slices]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScannedModel:
    """A model that a scan of the disk found."""

    on_disk: ModelOnDisk
    path: Path
    adopted: Adopted | None


class Models:
    """This node's store, the peers that may have missing tensors, and the transfers under way."""

    def __init__(
        self,
        *,
        models_dir: Path,
        peers: Peers,
        timeouts: Timeouts,
        local: PublishedState,
        hub_endpoint: str | None = None,
        client: WeightsClient | None = None,
        adoptions: Adoptions | None = None,
        piece_bytes: int = _CHUNK_BYTES,
    ) -> None:
        """
        hub_endpoint  None for the default of ``huggingface_hub``
        client        asks other nodes for files; None for the one over the network
        adoptions     decides which models are kept for other nodes; None for the usual limits
        piece_bytes   most bytes of a file or tensor sent at once
        """
        self._store = ModelStore(models_dir)
        self._piece_bytes = piece_bytes
        self._hub_endpoint = hub_endpoint
        self._hub_idle_s = timeouts.transfer_idle_s
        self._peers = peers
        self._local = local
        self._client = client or WeightsClient(hello=peers.hello, security=peers.security, timeouts=timeouts)
        self._transfers = Transfers(self._client, local)
        self.free_bytes = 0  # disk space left for copies at the last scan
        self._on_disk: list[ModelOnDisk] = []
        self._paths: dict[ModelKey, Path] = {}  # folders of models whose metadata is here
        self._reading: OrderedDict[ModelKey, StoredModel] = OrderedDict()  # the most recently read at the end
        self._scanning = asyncio.Lock()
        self._adoptions = adoptions or Adoptions()
        self._adopting: WeakValueDictionary[tuple[ModelKey, str], asyncio.Lock] = WeakValueDictionary()
        self._fetching = asyncio.Semaphore(MAX_FETCHES)  # fetches of models that no user here asked for
        self._checking = asyncio.Lock()  # one at a time: a hostile tokenizer takes 3 GB until its process is killed
        self._writing: WeakValueDictionary[ModelKey, asyncio.Lock] = WeakValueDictionary()  # one writer per folder
        self._copying = asyncio.Lock()  # one copy at a time: the disk and the link are shared anyway
        self._precedence = Precedence()  # transfers that stages wait for interrupt copies
        self._pace = Pace()  # rate of copies that peers read from here

    def on_disk(self) -> list[ModelOnDisk]:
        """Return the models that the last ``rescan`` found."""
        return self._on_disk

    def transfers(self) -> list[Transfer]:
        """Return the transfers under way."""
        return self._transfers.running()

    async def rescan(self) -> None:
        """Scan the disk, where the command line pulls and removes models, too. Read headers only."""
        async with self._scanning:
            found, room = await asyncio.to_thread(self._scan)
            self._on_disk = [entry.on_disk for entry in found]
            self._paths.clear()
            for entry in found:
                self._paths.setdefault(ModelKey(entry.on_disk.model, entry.on_disk.manifest_hash), entry.path)
            for key, stored in list(self._reading.items()):
                if self._paths.get(key) != stored.path:  # its folder now holds another content
                    self._reading.pop(key, None)
            self._adoptions.note_held([entry.adopted for entry in found if entry.adopted])
            self.free_bytes = room
        self._local.refresh()

    def _scan(self) -> tuple[list[_ScannedModel], int]:
        """Return the models on the disk, and the room for copies."""
        found: list[_ScannedModel] = []
        for stored in self._listed():
            try:
                found.append(_look_at(stored))
            except (EdgepipeError, OSError) as error:
                logger.warning("model cannot be used model=%s: %s", stored.id, error)
        room = free_bytes(self._store.root) - COPY_HEADROOM_BYTES
        return found, max(0, room) // _FREE_STEP_BYTES * _FREE_STEP_BYTES

    def _listed(self) -> list[StoredModel]:
        try:
            return self._store.list()
        except OSError as exc:  # a disk that fails must not end the node
            logger.error("the models in %s cannot be listed: %s", self._store.root, exc)
            return []

    def metadata_path(self, model: str, manifest_hash: str) -> Path | None:
        """Return the folder with config, tokenizer and template, if it is here."""
        return self._paths.get(ModelKey(model, manifest_hash))

    async def resolve(self, name: str) -> LocalModel:
        """Find the model that a person means; fetch its metadata if only a peer has it. Raises ModelUnknown."""
        local = [entry.model for entry in self._on_disk]
        remote = [entry.model for node in self._peers.nodes() for entry in node.models]
        for known in (local, remote):
            found = meant_names(name, known)
            if len(found) == 1:
                return await self.adopt(found[0])
            if found:
                raise ModelUnknown(f"several models match '{name[:120]}'", fact=", ".join(found), next_step="name one")
        meant = understood(name)
        exact = canonical_name(name if meant is None else meant.source.partition("@")[0])
        with contextlib.suppress(ModelUnknown):
            if is_name(exact):
                return await self.adopt(exact)  # a peer may have pulled it since its last report
        on_nodes = f"on its nodes: {', '.join(sorted({*local, *remote})) or 'none'}"
        raise ModelUnknown(
            f"no model '{name[:120]}' is in the cluster",
            fact=on_nodes if meant is not None else f"{on_nodes}; nearest known names: {', '.join(nearest(name))}",
            next_step=f"edgepipe models pull {meant.source if meant is not None else 'NAME'}",
        )

    async def adopt(
        self, name: str, *, manifest_hash: str = "", first_source: str = "", wanted_by: str = ""
    ) -> LocalModel:
        """Return the model of that name (and content, if given); fetch its metadata from a peer if it is not here.

        ``wanted_by``: the announcing node, whose limits apply (``adoptions.py``); empty: this node's user. Raises
        ModelUnknown if no reachable node has the model, ModelDownloadFailed if there is no room for it.
        """
        key = ModelKey(name, manifest_hash)
        lock = self._adopting.setdefault((key, first_source), asyncio.Lock())  # a slow source delays no other
        async with lock:
            model = await asyncio.to_thread(self._stored_here, key, keep=not wanted_by)
            if model is None:
                model = await self._fetch_metadata(key, first_source, wanted_by)
                await self.rescan()
        return model

    async def fetch(
        self, model: LocalModel, slices: tuple[Slice, ...], *, first_source: str
    ) -> AsyncGenerator[PrepareProgress]:
        """Fetch the tensors that the slices need and that are not here; yield nothing if all are here.

        Peers are asked first, then the hub if the model was pulled from there. Raises ModelUnknown when no source has a
        tensor, ModelInvalid when received data was damaged, ModelDownloadFailed when the disk is full or cannot be
        written.
        """
        lacking = await asyncio.to_thread(model.stored.missing, slices)
        if not lacking:
            return
        lock = self._lock_of(model)
        with self._precedence.first():
            async for _ in _acquired(lock):
                total = sum(tensor.num_bytes for tensor in lacking)
                yield PrepareProgress(phase="fetching", bytes_done=0, bytes_total=total)
            try:
                writer = await asyncio.to_thread(_writer, model)
                missing = await asyncio.to_thread(lambda: writer.missing(tensor_names(model.config, slices)))
                check_room(
                    model.name, self._store.root, sum(tensor.num_bytes - tensor.have_bytes for tensor in missing)
                )
                peers = self._sources(model.name, model.manifest_hash, first_source)
                async with hub_tensors(writer.manifest, endpoint=self._hub_endpoint, idle_s=self._hub_idle_s) as hub:
                    with self._transfers.begin(model.name, missing, peers, hub=hub) as transfer:
                        async with aclosing(transfer.run(writer)) as progress:
                            async for done in progress:
                                yield done
                await self.rescan()
            finally:
                lock.release()

    def _lock_of(self, model: LocalModel) -> asyncio.Lock:
        return self._writing.setdefault(ModelKey(model.name, model.manifest_hash), asyncio.Lock())

    async def keep_copy(
        self, model: LocalModel, parts: Sequence[int], *, first_source: str, bytes_per_s: float
    ) -> AsyncGenerator[PrepareProgress]:
        """Fetch parts for a copy; pause while a stage waits for tensors. Raises like ``fetch``.

        Never asks the hub: no user asked for the download.
        """
        names, lock = await asyncio.to_thread(part_tensors, model.config), self._lock_of(model)
        wanted = [name for part in parts if part < len(names) for name in names[part]]
        if model.stored.whole or model.stored.card.emulated:
            await self.rescan()  # the other nodes do not know it yet
            return
        writer = await asyncio.to_thread(_writer, model)
        missing = await asyncio.to_thread(writer.missing, wanted)
        check_room(model.name, self._store.root, sum(tensor.num_bytes - tensor.have_bytes for tensor in missing))
        sources = self._sources(model.name, model.manifest_hash, first_source)
        with self._transfers.begin(model.name, missing, sources, copy=True, bytes_per_s=bytes_per_s) as transfer:
            while not transfer.complete:
                await self._precedence.calm()
                async with (
                    self._copying,
                    lock,
                    aclosing(transfer.run(writer)) as running,
                    aclosing(self._precedence.while_calm(running)) as progress,
                ):
                    async for done in progress:
                        yield done
        await self.rescan()

    async def keep_served_metadata(self, changes: Callable[[], AsyncIterator[None]]) -> None:
        """Fetch the metadata of every served model, so that this node's gateway can answer for it.

        Each announcing node has limits. Metadata is deleted when the engines are gone for long: see ``adoptions.py``.
        """
        await asyncio.to_thread(self._store.tidy)
        await self.rescan()
        async with asyncio.TaskGroup() as tasks:
            async for _ in changes():
                self._adoptions.note_announced(
                    {node.node_id: _announced(node) for node in self._peers.nodes() if node.engines}
                )
                await self._delete(self._adoptions.forgotten(now_s=asyncio.get_running_loop().time()))
                for wanted in self._adoptions.due(self._paths):
                    tasks.create_task(self._adopt_announced(wanted), name=f"adopt:{wanted.node_id}")

    async def _adopt_announced(self, wanted: Wanted) -> None:
        """Fetch an announced model. Return when its node's next model may be fetched."""
        key, node_id = wanted.key, wanted.node_id
        try:
            async with self._fetching, asyncio.timeout(_UNASKED_S):
                await self.adopt(key.model, manifest_hash=key.manifest_hash, first_source=node_id, wanted_by=node_id)
        except (EdgepipeError, TimeoutError) as error:
            first = self._adoptions.tell(node_id, str(error))
            level = logging.WARNING if first else logging.DEBUG
            logger.log(level, "gateway cannot answer for model=%s of node=%s: %s", key.model, node_id, error)
        await asyncio.sleep(self._adoptions.rest_s(wanted, self._paths))
        self._adoptions.done(wanted)
        self._local.refresh()

    async def _delete(self, adopted: Sequence[Adopted]) -> None:
        """Delete models that are here only because other nodes announced them."""
        gone = [await asyncio.to_thread(self._drop, model) for model in adopted]
        if any(gone):
            await self.rescan()

    def _drop(self, model: Adopted) -> bool:
        """Delete an adopted model; return whether it is gone."""
        stored = self._store.find(*model.key)
        if stored is None or not stored.adopted_for:  # it was deleted or used meanwhile
            return False
        try:
            self._store.drop(stored)
        except OSError as exc:
            logger.debug("metadata of model=%s was not deleted: %s", model.key.model, exc)
            return False
        logger.info("deleted the metadata of model=%s, adopted for node=%s", model.key.model, model.node_id)
        return True

    async def manifest_json(self, name: str) -> bytes:
        """Return a model's manifest, for a peer. Raises ModelUnknown."""
        return await asyncio.to_thread(lambda: self._store.resolve(name).manifest.to_json())

    async def read_tensor(
        self, name: str, manifest_hash: str, tensor: str, *, offset: int, bytes_per_s: float = 0.0
    ) -> AsyncGenerator[bytes]:
        """Yield a tensor's bytes for a peer, at no more than ``bytes_per_s`` (0: no limit).

        Raises ModelUnknown if it is not here, ModelInvalid if the model has no such tensor or another program changed
        it.
        """
        stored = await asyncio.to_thread(self._opened, name, manifest_hash)
        entry = stored.manifest.by_name.get(tensor)
        if entry is None:
            raise ModelInvalid(f"the model has no tensor '{tensor[:80]}'")
        if not await asyncio.to_thread(stored.holds, tensor):
            raise ModelUnknown(f"tensor '{tensor}' is not on this node", fact="only parts of the model are")
        if offset < entry.info.num_bytes:
            await asyncio.to_thread(stored.check_tensor, tensor)
        rate = max(_LEAST_BYTES_PER_S, min(bytes_per_s, _MOST_BYTES_PER_S)) if bytes_per_s else 0.0
        most = min(self._piece_bytes, chunk_bytes(rate)) if rate else self._piece_bytes
        while offset < entry.info.num_bytes:
            size = min(most, entry.info.num_bytes - offset)
            if rate:
                await self._pace.take(size, bytes_per_s=rate)
            data = await asyncio.to_thread(stored.read_tensor, tensor, offset=offset, num_bytes=size)
            yield data.tobytes()
            offset += size

    async def read_file(self, name: str, manifest_hash: str, file: str, *, offset: int) -> AsyncGenerator[bytes]:
        """Yield a metadata file's bytes for a peer. Raises ModelUnknown, and ModelInvalid for any other file."""
        stored = await asyncio.to_thread(self._opened, name, manifest_hash)
        end = stored.metadata_file(file).num_bytes
        for start in range(offset, end, self._piece_bytes):
            size = min(self._piece_bytes, end - start)
            data = await asyncio.to_thread(stored.read_file, file, offset=start, num_bytes=size)
            yield data.tobytes()

    def _stored_here(self, key: ModelKey, *, keep: bool) -> LocalModel | None:
        """Return the model if its metadata is here; ``keep`` marks it as wanted by this node's user."""
        stored = self._store.find(*key)
        if stored is None:
            return None
        if keep:
            stored.keep()
        return LocalModel(
            name=stored.id,
            path=stored.path,
            manifest_hash=stored.manifest_hash,
            config=stored.config,
            stored=stored,
        )

    def _opened(self, name: str, manifest_hash: str) -> StoredModel:
        """Open a model for reading. Runs in threads, several at once."""
        key = ModelKey(name, manifest_hash)
        stored = self._reading.pop(key, None)
        if stored is None or not stored.path.exists():
            stored = self._store.resolve(name, manifest_hash=manifest_hash)
        self._reading[key] = stored
        while len(self._reading) > _MAX_OPEN:
            self._reading.popitem(last=False)
        return stored

    async def _fetch_metadata(self, key: ModelKey, first_source: str, wanted_by: str) -> LocalModel:
        problem: EdgepipeError | None = None
        for source in self._sources(key.model, key.manifest_hash, first_source):
            try:
                return await self._fetch_from(source, key, wanted_by)
            except ModelDownloadFailed:
                raise  # this node's own disk failed
            except EdgepipeError as error:
                problem = error
                logger.info("no metadata from node=%s model=%s: %s", source.name, key.model, error)
        raise ModelUnknown(
            f"no reachable node has the model '{key.model[:120]}'",
            fact=str(problem) if problem else "no other node is in the cluster",
            next_step=f"edgepipe models pull {key.model[:120]}",
        )

    async def _fetch_from(self, source: NodeState, key: ModelKey, wanted_by: str) -> LocalModel:
        """Fetch a model's metadata from one source. Raises ModelInvalid if it does not match the hash: ask the next."""
        manifest = await self._client.manifest(source, key.model)
        await asyncio.to_thread(_check_offer, manifest, key)
        check_room(key.model, self._store.root, manifest.metadata_bytes)
        if not wanted_by:
            return await self._receive(source, manifest, adopted_for="")
        with self._adoptions.coming(wanted_by, manifest.metadata_bytes) as surplus:
            await self._delete(surplus)
            return await self._receive(source, manifest, adopted_for=wanted_by)

    async def _receive(self, source: NodeState, manifest: Manifest, *, adopted_for: str) -> LocalModel:
        """Write each metadata file to the disk as it arrives."""
        with disk_errors(manifest.model_id), self._store.adoption(manifest, adopted_for=adopted_for) as adoption:
            for entry in manifest.metadata_files:
                with adoption.open(entry) as sink:
                    async with aclosing(self._client.file(source, manifest, entry.name)) as chunks:
                        async for data in chunks:
                            await in_thread(sink.write, data)
                    sink.finish()
            async with self._checking:
                await in_thread(adoption.finish)
        model = await asyncio.to_thread(
            self._stored_here, ModelKey(manifest.model_id, manifest.hash), keep=not adopted_for
        )
        if model is None:
            raise ModelUnknown(f"the model '{manifest.model_id}' was deleted while it came")
        return model

    def _sources(self, name: str, manifest_hash: str, first: str) -> list[NodeState]:
        """Return other nodes in the order to ask: ``first``, those with the whole model, those with parts, the rest."""

        def rank(node: NodeState) -> tuple[bool, int]:
            copies = [copy for copy in node.models if copy.model == name and manifest_hash in ("", copy.manifest_hash)]
            return node.node_id != first, 0 if any(copy.complete for copy in copies) else 1 if copies else 2

        return sorted((node for node in self._peers.nodes() if not self._peers.is_self(node.node_id)), key=rank)


def _look_at(stored: StoredModel) -> _ScannedModel:
    """Describe a stored model. Raises ModelInvalid."""
    on_disk = ModelOnDisk(
        model=stored.id,
        manifest_hash=stored.manifest_hash,
        num_bytes=stored.size_bytes,
        complete=stored.whole,
        parts=runs_of(held_parts(stored)),
    )
    node_id, key = stored.adopted_for, ModelKey(stored.id, stored.manifest_hash)
    adopted = (
        Adopted(key=key, node_id=node_id, num_bytes=on_disk.num_bytes, since_s=stored.adopted_s) if node_id else None
    )
    return _ScannedModel(on_disk=on_disk, path=stored.path, adopted=adopted)


def _announced(node: NodeState) -> list[ModelKey]:
    """Return the models of a node's engines."""
    running = [engine for engine in node.engines if engine.manifest_hash and engine.state != "failed"]
    return [ModelKey(engine.model, engine.manifest_hash) for engine in running]


def _check_offer(manifest: Manifest, key: ModelKey) -> None:
    """Check that a peer's manifest is that of the model. Raises ModelUnknown, ModelInvalid."""
    if manifest.model_id != key.model:
        raise ModelInvalid("the peer's manifest is of another model", fact=manifest.model_id[:120])
    if key.manifest_hash not in ("", manifest.hash):
        raise ModelUnknown("the peer has other content under this name", fact=f"its hash is {manifest.hash}")


async def _acquired(lock: asyncio.Lock) -> AsyncGenerator[None]:
    """Acquire a lock; yield now and then while another task has it."""
    while True:
        try:
            async with asyncio.timeout(_TELL_S):
                await lock.acquire()
                return
        except TimeoutError:
            yield


def _writer(model: LocalModel) -> ShardWriter:
    """Open the model for writing tensors. Raises ModelDownloadFailed."""
    with disk_errors(model.name):
        return model.stored.writer()
