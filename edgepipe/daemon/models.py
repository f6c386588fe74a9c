"""The models of this node as the daemon uses them: found, adopted from peers, filled with missing tensors, read out."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from edgepipe.config import Timeouts
from edgepipe.daemon.model_parts import held_parts, part_tensors, parts_to_wire
from edgepipe.daemon.pace import Pace, chunk_bytes
from edgepipe.daemon.peers import Peers
from edgepipe.daemon.transfer import Transfers, WeightsClient
from edgepipe.errors import EdgepipeError, ModelDownloadFailed, ModelInvalid, ModelUnknown
from edgepipe.model.config_json import config_to_json
from edgepipe.model.disk import COPY_HEADROOM_BYTES, check_room, disk_errors, free_bytes
from edgepipe.model.facts import ModelConfig
from edgepipe.model.hub_tensors import hub_tensors
from edgepipe.model.manifest import Manifest
from edgepipe.model.store import ModelStore, StoredModel, tensor_names
from edgepipe.model.tensor_folder import ShardWriter
from edgepipe.wire.common import slices_from_wire
from edgepipe.wire.v1 import common_pb2
from edgepipe.wire.v1 import node_pb2 as pb

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 512 << 10  # as activations: larger ones delay what shares the machine's network
_FREE_STEP_BYTES = 64 << 20  # others need not hear of every file that somebody writes


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model whose metadata is on this node's disk; its tensors may be missing."""

    name: str
    path: Path
    manifest_hash: str
    config: ModelConfig
    stored: StoredModel

    @property
    def config_json(self) -> str:
        """The shape for an engine."""
        return json.dumps(config_to_json(self.config))


class Models:
    """One store, the peers that may have what it lacks, and the transfers under way."""

    def __init__(
        self,
        *,
        models_dir: Path,
        peers: Peers,
        timeouts: Timeouts,
        on_change: Callable[[], None],
        hub_endpoint: str | None = None,
    ) -> None:
        """``hub_endpoint``: None for that of ``huggingface_hub``."""
        self._store = ModelStore(models_dir)
        self._hub_endpoint = hub_endpoint
        self._hub_idle_s = timeouts.transfer_idle_s
        self._peers = peers
        self._on_change = on_change
        self._client = WeightsClient(hello=peers.hello, security=peers.security, timeouts=timeouts)
        self._transfers = Transfers(self._client, on_change)
        self.free_bytes = 0  # for copies, as of the last look
        self._on_disk: list[pb.ModelOnDisk] = []
        self._paths: dict[tuple[str, str], Path] = {}  # of models whose metadata is here, by name and hash
        self._reading: dict[tuple[str, str], StoredModel] = {}  # models that peers read, kept open
        self._adopting = asyncio.Lock()
        self._writing = asyncio.Lock()  # one transfer at a time: the disk and the link are shared anyway
        self._waited_for = 0  # fetches that stages wait for
        self._calm = asyncio.Event()  # there are none, so copies may go on
        self._calm.set()
        self._pace = Pace()  # of what peers copy from here

    def on_disk(self) -> list[pb.ModelOnDisk]:
        """What ``rescan`` found last."""
        return self._on_disk

    def transfers(self) -> list[pb.Transfer]:
        """What is being fetched."""
        return self._transfers.running()

    def rescan(self) -> None:
        """Look at the disk again, where the command line pulls and removes models too. Reads headers only."""
        found: list[pb.ModelOnDisk] = []
        self._paths.clear()
        for stored in self._store.list():
            try:
                told = pb.ModelOnDisk(
                    model=stored.id,
                    manifest_hash=stored.manifest_hash,
                    num_bytes=stored.size_bytes,
                    complete=stored.whole,
                    parts=parts_to_wire(held_parts(stored)),
                )
            except EdgepipeError as error:
                logger.warning("model cannot be used model=%s: %s", stored.id, error)
                continue
            found.append(told)
            self._paths.setdefault((told.model, told.manifest_hash), stored.path)
        self._on_disk = found
        room = free_bytes(self._store.root) - COPY_HEADROOM_BYTES
        self.free_bytes = max(0, room) // _FREE_STEP_BYTES * _FREE_STEP_BYTES
        self._on_change()

    def metadata_path(self, model: str, manifest_hash: str) -> Path | None:
        """The folder with config, tokenizer and template, if it is here."""
        return self._paths.get((model, manifest_hash))

    async def resolve(self, name: str) -> LocalModel:
        """The model that a person means, its metadata fetched if only a peer has it. Raises ModelUnknown."""
        local = [told.model for told in self._on_disk]
        remote = [told.model for node in self._peers.nodes() for told in node.models]
        for known in (local, remote):
            if match := next((model for model in known if model.lower() == name.lower()), None) or _by_last(
                name, known
            ):
                return await self.adopt(match)
        try:
            return await self.adopt(name)  # a peer may have pulled it since it last told
        except ModelUnknown as exc:
            everywhere = sorted({*local, *remote})
            raise ModelUnknown(
                f"no model '{name[:120]}' is in the cluster",
                fact=f"on its nodes: {', '.join(everywhere) or 'none'}",
                next_step=f"edgepipe models pull {name[:120] if '/' in name or name == 'demo' else 'ORG/NAME'}",
            ) from exc

    async def adopt(self, name: str, *, manifest_hash: str = "", first_source: str = "") -> LocalModel:
        """The model of that name (and content, if told), its metadata fetched from a peer if it is not here.

        Raises ModelUnknown if nobody has it.
        """
        async with self._adopting:
            stored = self._find(name, manifest_hash)
            if stored is None:
                stored = await self._fetch_metadata(name, manifest_hash, first_source)
                self.rescan()
        return LocalModel(
            name=stored.id,
            path=stored.path,
            manifest_hash=stored.manifest_hash,
            config=stored.config,
            stored=stored,
        )

    async def fetch(
        self, model: LocalModel, slices: Sequence[common_pb2.Slice], *, first_source: str
    ) -> AsyncGenerator[pb.PrepareProgress]:
        """Fetch the tensors that the slices need and that are not here; nothing to say when all are.

        From peers, and what no reachable one gives from the hub, if the model was pulled from there. Raises
        ModelUnknown when nobody gives one of them, ModelInvalid when what came was damaged, ModelDownloadFailed when
        the disk is full or cannot be written.
        """
        parts = slices_from_wire(slices)
        if not await asyncio.to_thread(model.stored.missing, parts):
            return
        self._waited_for += 1
        self._calm.clear()
        try:
            async with self._writing:
                writer = self._writer(model)
                missing = writer.missing(tensor_names(model.config, parts))
                check_room(model.name, self._store.root, sum(one.num_bytes - one.have_bytes for one in missing))
                peers = self._sources(model.name, model.manifest_hash, first_source)
                async with hub_tensors(writer.manifest, endpoint=self._hub_endpoint, idle_s=self._hub_idle_s) as hub:
                    with self._transfers.begin(model.name, missing, peers, hub=hub) as transfer:
                        async with aclosing(transfer.run(writer)) as progress:
                            async for done in progress:
                                yield done
                self.rescan()
        finally:
            self._waited_for -= 1
            if not self._waited_for:
                self._calm.set()

    async def keep_copy(
        self, model: LocalModel, parts: Sequence[int], *, first_source: str, bytes_per_s: float
    ) -> AsyncGenerator[pb.PrepareProgress]:
        """Fetch parts so that they are here too; whatever a stage waits for goes first. Raises as ``fetch``.

        Never from the hub: nobody asked for the download.
        """
        names = part_tensors(model.config)
        wanted = [name for part in parts if part < len(names) for name in names[part]]
        if model.stored.whole or model.stored.card.emulated:
            self.rescan()  # the others do not know it yet
            return
        writer = self._writer(model)
        missing = writer.missing(wanted)
        check_room(model.name, self._store.root, sum(one.num_bytes - one.have_bytes for one in missing))
        sources = self._sources(model.name, model.manifest_hash, first_source)
        with self._transfers.begin(model.name, missing, sources, copy=True, bytes_per_s=bytes_per_s) as transfer:
            while not transfer.complete:
                await self._calm.wait()
                async with self._writing, aclosing(transfer.run(writer)) as progress:
                    async for done in progress:
                        yield done
                        if not self._calm.is_set():
                            break
        self.rescan()

    async def keep_served_metadata(self, changes: Callable[[], AsyncIterator[None]]) -> None:
        """Fetch the metadata of every model that is served anywhere, so that this node's gateway can answer for it."""
        self.rescan()
        failed: set[tuple[str, str]] = set()
        async for _ in changes():
            for node in self._peers.nodes():
                for engine in node.engines:
                    key = (engine.model, engine.manifest_hash)
                    if not engine.manifest_hash or engine.state == "failed" or key in self._paths or key in failed:
                        continue
                    try:
                        await self.adopt(engine.model, manifest_hash=engine.manifest_hash, first_source=node.node_id)
                    except EdgepipeError as error:
                        failed.add(key)
                        logger.warning("gateway cannot answer for model=%s: %s", engine.model, error)

    async def manifest_json(self, name: str) -> bytes:
        """For a peer. Raises ModelUnknown."""
        return (await asyncio.to_thread(self._store.resolve, name)).manifest.to_json()

    async def read_tensor(
        self, name: str, manifest_hash: str, tensor: str, *, offset: int, bytes_per_s: float = 0.0
    ) -> AsyncGenerator[pb.DataChunk]:
        """For a peer, which wants at most ``bytes_per_s`` (0: as fast as it goes).

        Raises ModelUnknown if it is not here, ModelInvalid if the model has no such tensor.
        """
        stored = await asyncio.to_thread(self._opened, name, manifest_hash)
        entry = stored.manifest.by_name.get(tensor)
        if entry is None:
            raise ModelInvalid(f"the model has no tensor '{tensor[:80]}'")
        if not await asyncio.to_thread(stored.holds, tensor):
            raise ModelUnknown(f"tensor '{tensor}' is not on this node", fact="only parts of the model are")
        most = min(_CHUNK_BYTES, chunk_bytes(bytes_per_s)) if bytes_per_s else _CHUNK_BYTES
        while offset < entry.info.num_bytes:
            size = min(most, entry.info.num_bytes - offset)
            if bytes_per_s:
                await self._pace.take(size, bytes_per_s=bytes_per_s)
            data = await asyncio.to_thread(stored.read_tensor, tensor, offset=offset, num_bytes=size)
            yield pb.DataChunk(offset=offset, data=data.tobytes())
            offset += size

    async def read_file(self, name: str, manifest_hash: str, file: str, *, offset: int) -> AsyncGenerator[pb.DataChunk]:
        """For a peer. Raises ModelUnknown, ModelInvalid if it is no file that nodes exchange."""
        stored = await asyncio.to_thread(self._opened, name, manifest_hash)
        data = await asyncio.to_thread(stored.read_file, file)
        for start in range(offset, len(data), _CHUNK_BYTES):
            yield pb.DataChunk(offset=start, data=data[start : start + _CHUNK_BYTES])

    def _find(self, name: str, manifest_hash: str) -> StoredModel | None:
        try:
            return self._store.resolve(name, manifest_hash=manifest_hash)
        except ModelUnknown:
            return None

    def _opened(self, name: str, manifest_hash: str) -> StoredModel:
        key = (name, manifest_hash)
        if key not in self._reading or not self._reading[key].path.exists():
            self._reading[key] = self._store.resolve(name, manifest_hash=manifest_hash)
        return self._reading[key]

    async def _fetch_metadata(self, name: str, manifest_hash: str, first_source: str) -> StoredModel:
        problem: EdgepipeError | None = None
        for source in self._sources(name, manifest_hash, first_source):
            try:
                manifest = await self._client.manifest(source, name)
                if manifest_hash and manifest.hash != manifest_hash:
                    continue
                metadata = await self._client.metadata(source, manifest)
                return await asyncio.to_thread(self._install, manifest, metadata)
            except ModelDownloadFailed:
                raise  # it is this node's own disk
            except EdgepipeError as error:
                problem = error
                logger.info("no metadata from node=%s model=%s: %s", source.name, name, error)
        raise ModelUnknown(
            f"no reachable node has the model '{name[:120]}'",
            fact=str(problem) if problem else "no other node is in the cluster",
            next_step=f"edgepipe models pull {name[:120]}",
        )

    def _writer(self, model: LocalModel) -> ShardWriter:
        with disk_errors(model.name):
            return self._store.shard_writer(model.stored.manifest, {})

    def _install(self, manifest: Manifest, metadata: dict[str, bytes]) -> StoredModel:
        with disk_errors(manifest.model_id):
            self._store.shard_writer(manifest, metadata)
        return self._store.resolve(manifest.model_id, manifest_hash=manifest.hash)

    def _sources(self, name: str, manifest_hash: str, first: str) -> list[pb.NodeState]:
        """Other nodes to ask: ``first``, those that tell of the whole model, of parts, and then everybody else."""

        def rank(node: pb.NodeState) -> tuple[bool, int]:
            told = [one for one in node.models if one.model == name and manifest_hash in ("", one.manifest_hash)]
            return node.node_id != first, 0 if any(one.complete for one in told) else 1 if told else 2

        return sorted((node for node in self._peers.nodes() if not self._peers.is_self(node.node_id)), key=rank)


def _by_last(name: str, known: Sequence[str]) -> str | None:
    """The one model whose last part is ``name``: ``Qwen3-8B`` for ``Qwen/Qwen3-8B``."""
    found = {model for model in known if model.rsplit("/", 1)[-1].lower() == name.lower()}
    return found.pop() if len(found) == 1 else None
