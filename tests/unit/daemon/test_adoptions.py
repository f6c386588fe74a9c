"""What a node may make another one fetch, keep and read: models that hostile members announce and hand out (R4, R5)."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.cluster.changes import Changes
from edgepipe.config import Timeouts
from edgepipe.daemon import services
from edgepipe.daemon.files import adoptions as bounds
from edgepipe.daemon.files.adoptions import FORGET_S, Adopted, Adoptions, ModelKey
from edgepipe.daemon.files.models import Models
from edgepipe.daemon.files.transfer import WeightsClient
from edgepipe.daemon.services import MAX_READS_PER_NODE, WeightsService
from edgepipe.errors import LinkError, ModelDownloadFailed, ModelInvalid, ModelUnknown, QueueFull, RemoteProtocolError
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.link.channels import bind, make_server
from edgepipe.security.mutual_tls import Plaintext
from edgepipe.store.adoption import MetadataSink
from edgepipe.store.store import ModelStore, StoredModel
from edgepipe.weights.emulated_folder import config_json
from edgepipe.weights.manifest import Manifest
from edgepipe.wire.common import Hello
from edgepipe.wire.engines import EngineState
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import node_pb2_grpc
from tests.support.daemon.published_state import FakeState
from tests.support.models.for_nodes import CONFIG
from tests.support.processes.waiting import until

NODES = ("n1", "n2", "n3")
KEYS = [ModelKey(f"m{i}", "h") for i in range(12)]

# --- The decisions


def held(key: ModelKey, node_id: str, num_bytes: int, since_s: float) -> Adopted:
    return Adopted(key=key, node_id=node_id, num_bytes=num_bytes, since_s=since_s)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(NODES), st.sampled_from(KEYS), st.integers(0, 80 << 20), st.sets(st.sampled_from(KEYS))
        )
    )
)
def test_a_nodes_word_never_fills_more_than_its_share(
    steps: list[tuple[str, ModelKey, int, set[ModelKey]]],
) -> None:
    """Whatever is announced, fetched and given up in whatever order; what is announced is never deleted."""
    adoptions, disk = Adoptions(), dict[ModelKey, Adopted]()
    for step, (node_id, key, num_bytes, announced) in enumerate(steps):
        adoptions.note_announced({node_id: sorted(announced)})
        adoptions.note_held(list(disk.values()))
        if key in disk:
            continue
        try:
            with adoptions.coming(node_id, num_bytes) as surplus:
                assert not {model.key for model in surplus} & announced
                for model in surplus:
                    del disk[model.key]
                disk[key] = held(key, node_id, num_bytes, step)
        except ModelDownloadFailed:
            pass
        for node in NODES:
            sizes = [copy.num_bytes for copy in disk.values() if copy.node_id == node]
            assert len(sizes) <= bounds.MAX_MODELS_PER_NODE
            assert sum(sizes) <= bounds.MAX_BYTES_PER_NODE


def test_what_comes_at_the_same_time_counts_together() -> None:
    adoptions = Adoptions()
    with adoptions.coming("n1", 80 << 20), adoptions.coming("n1", 80 << 20), adoptions.coming("n1", 80 << 20):
        with pytest.raises(ModelDownloadFailed, match="announces more models"), adoptions.coming("n1", 80 << 20):
            pass
        with adoptions.coming("n2", 80 << 20) as surplus:
            assert surplus == []
    with adoptions.coming("n1", 80 << 20):
        pass


def test_the_oldest_goes_first_and_only_of_that_node() -> None:
    adoptions = Adoptions()
    adoptions.note_held([held(key, "n1", 1, -index) for index, key in enumerate(KEYS[:8])])
    adoptions.note_announced({"n2": [KEYS[7]]})
    with adoptions.coming("n1", 1) as surplus:
        assert [model.key for model in surplus] == [KEYS[6]], "the oldest is announced"
    with adoptions.coming("n2", 1) as surplus:
        assert surplus == []


def test_one_model_of_each_node_is_fetched_at_a_time_and_all_have_their_turn() -> None:
    adoptions = Adoptions()
    adoptions.note_announced({"n1": KEYS[:3], "n2": KEYS[:1], "n3": KEYS[2:4]})
    first = adoptions.due({KEYS[2]})
    assert [(copy.node_id, copy.key) for copy in first] == [("n1", KEYS[0]), ("n2", KEYS[0]), ("n3", KEYS[3])]
    assert adoptions.due({KEYS[2]}) == [], "all are busy"
    assert adoptions.rest_s(first[0], {}) == bounds.RETRY_S
    adoptions.done(first[0])
    (second,) = adoptions.due({KEYS[2]})
    assert second.key == KEYS[1], "what failed is tried again after the others"
    adoptions.note_held([held(KEYS[1], "n1", 8 << 20, 0)])
    assert adoptions.rest_s(second, {KEYS[1]}) == 2.0
    adoptions.done(second)
    assert [model.key for model in adoptions.due({KEYS[2], KEYS[1]})] == [KEYS[0]]


def test_what_is_remembered_of_a_node_is_bounded() -> None:
    adoptions = Adoptions()
    adoptions.note_announced({"n1": [ModelKey(f"x{i}", "h") for i in range(1000)]})
    seen: set[ModelKey] = set()
    for _ in range(200):
        (wanted,) = adoptions.due({})
        seen.add(wanted.key)
        adoptions.done(wanted)
    assert len(seen) == bounds.MAX_ANNOUNCED
    assert [adoptions.tell("n1", "no room") for _ in range(3)] == [True, False, False]


def test_a_model_whose_engine_is_gone_for_long_is_forgotten() -> None:
    adoptions = Adoptions()
    adoptions.note_held([held(KEYS[0], "n1", 1, 0), held(KEYS[1], "n1", 1, 0)])
    adoptions.note_announced({"n1": [KEYS[0], KEYS[1]]})
    assert adoptions.forgotten(now_s=0.0) == []
    adoptions.note_announced({"n1": [KEYS[0]]})
    assert adoptions.forgotten(now_s=FORGET_S) == []
    assert [model.key for model in adoptions.forgotten(now_s=FORGET_S + 1)] == [KEYS[1]]


# --- A node beside hostile ones


def pull_bare(store: ModelStore, folder: Path, name: str, *, template: str) -> StoredModel:
    """A model that has neither weights nor a tokenizer: quick to take in."""
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text(json.dumps(config_json(CONFIG)))
    (folder / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    store.pull(str(folder / name))
    return store.resolve(name)


def engine_of(model: StoredModel) -> EngineState:
    """A ready engine of a model."""
    return EngineState(
        model=model.id,
        pipeline_id=PipelineId("p"),
        epoch=Epoch(1, EngineId("e")),
        state="ready",
        manifest_hash=model.manifest_hash,
    )


class Members:
    """The other members, in place of calls to them: each hands out its own store, or what a test puts in its way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, NodeState] = {}
        self.stores: dict[str, ModelStore] = {}
        self.manifests: dict[str, Manifest] = {}  # these replace the genuine ones
        self.files: dict[str, Callable[[], AsyncIterator[bytes]]] = {}  # these replace the genuine ones
        self.asked: list[str] = []
        self.changes = Changes()

    def add(self, node_id: str, models: Mapping[str, str]) -> None:
        """A member with these models, each with its template; it announces an engine of each."""
        store = self.stores[node_id] = ModelStore(self.folder / node_id)
        folder = self.folder / f"{node_id}-sources"
        stored = [pull_bare(store, folder, name, template=template) for name, template in models.items()]
        self.nodes[node_id] = NodeState(
            node_id=NodeId(node_id), name=node_id, engines=tuple(engine_of(model) for model in stored)
        )

    def ends_engines(self, node_id: str, count: int) -> None:
        """The member announces its first engines no more."""
        node = self.nodes[node_id]
        self.nodes[node_id] = replace(node, engines=node.engines[count:])

    def genuine(self, node_id: str, name: str) -> StoredModel:
        return self.stores[node_id].resolve(name)

    async def manifest(self, source: NodeState, model: str) -> Manifest:
        self.asked.append(source.node_id)
        if source.node_id in self.manifests:
            return self.manifests[source.node_id]
        return Manifest.from_json(self.stores[source.node_id].resolve(model).manifest.to_json())

    async def file(self, source: NodeState, manifest: Manifest, name: str) -> AsyncIterator[bytes]:
        self.asked.append(f"{source.node_id} {name}")
        if source.node_id in self.files:
            async for data in self.files[source.node_id]():
                yield data
            return
        stored = self.stores[source.node_id].resolve(manifest.model_id)
        yield stored.read_file(name, offset=0, num_bytes=stored.metadata_file(name).num_bytes).tobytes()

    def models(self, adoptions: Adoptions | None = None, *, piece_bytes: int = 1 << 19) -> Models:
        """The node under test."""
        peers = SimpleNamespace(
            hello=Hello(role="node"),
            security=None,
            nodes=lambda: list(self.nodes.values()),
            is_self=lambda node_id: node_id == "here",
        )
        return Models(
            models_dir=self.folder / "here",
            peers=cast("Any", peers),
            timeouts=Timeouts(connect_s=1.0),
            local=FakeState(on_change=lambda _: self.changes.notify()),
            client=cast("Any", self),
            adoptions=adoptions,
            piece_bytes=piece_bytes,
        )

    def on_disk(self) -> set[str]:
        root = self.folder / "here"
        return {path.name.split("@")[0] for path in root.iterdir()} if root.exists() else set()


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Members:
    made = Members(tmp_path)
    monkeypatch.setattr("edgepipe.files.disk.HEADROOM_BYTES", 0)  # the disk of the tests may be nearly full
    return made


async def test_r4_who_hands_out_another_template_is_dropped_and_the_next_is_asked(members: Members) -> None:
    """The rogue takes the genuine manifest, of which it changes what the hash does not cover."""
    members.add("rogue", {"tiny": "evil {{ messages }}"})
    members.add("honest", {"tiny": "{{ messages }}"})
    genuine, evil = members.genuine("honest", "tiny").manifest, members.genuine("rogue", "tiny").manifest
    contents = {file.name: file.content for file in genuine.metadata_files}
    files = [replace(file, content=contents.get(file.name, "")) if file.metadata else file for file in evil.files]
    members.manifests["rogue"] = replace(genuine, files=tuple(files))
    assert members.manifests["rogue"].hash == genuine.hash != evil.hash
    model = await members.models().adopt("tiny", manifest_hash=genuine.hash, first_source="rogue", wanted_by="rogue")
    assert members.asked == ["rogue", "rogue edgepipe.json", "honest", "honest edgepipe.json"]
    assert model.stored.card.template.sources == {"default": "{{ messages }}"}
    assert members.on_disk() == {"tiny"}


async def test_manifests_of_another_model_are_refused(members: Members) -> None:
    members.add("rogue", {"tiny": "T", "other": "U"})
    genuine = members.genuine("rogue", "tiny").manifest
    members.manifests["rogue"] = members.genuine("rogue", "other").manifest
    for manifest_hash in ("", genuine.hash):
        with pytest.raises(ModelUnknown):
            await members.models().adopt("tiny", manifest_hash=manifest_hash, wanted_by="rogue")
    assert members.asked == ["rogue"] * 2, "no file is fetched"


async def test_r5_a_file_without_end_is_given_up_at_its_promised_length(members: Members) -> None:
    members.add("rogue", {"tiny": "T"})
    given_out = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal given_out
        while True:
            given_out += 1
            yield b"x" * 500

    members.files["rogue"] = endless
    with pytest.raises(ModelUnknown, match="no reachable node") as caught:
        await members.models().adopt("tiny")
    assert "more than the promised" in caught.value.fact
    promised = sum(file.num_bytes for file in members.genuine("rogue", "tiny").manifest.metadata_files)
    assert given_out == promised // 500 + 1
    assert members.on_disk() == set()


@pytest.mark.parametrize("when", ["before", "while it comes"])
async def test_r5_a_full_disk_is_said_and_left_as_it_was(
    when: str, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.add("a", {"tiny": "T"})
    members.add("b", {"tiny": "T"})
    here = members.models()
    if when == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    else:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(MetadataSink, "write", full)  # no test can fill a disk
    with pytest.raises(ModelDownloadFailed):
        await here.adopt("tiny", wanted_by="a")
    assert members.asked == (["a"] if when == "before" else ["a", "a edgepipe.json"]), "the disk is this node's own"
    assert members.on_disk() == set()


async def test_r5_what_a_node_announces_beyond_its_share_is_not_kept_and_told_once(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    members.add("rogue", {f"m{i}": "T" for i in range(4)})
    members.add("honest", {"mine": "T"})
    here = members.models(Adoptions(max_models=2, retry_s=0.01))
    with caplog.at_level(logging.WARNING):
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(here.keep_served_metadata(members.changes.watch))
            await until(lambda: members.asked.count("rogue") >= 8)
            assert members.on_disk() == {"m0", "m1", "mine"}
            assert caplog.text.count("announces more models") == 1
            members.ends_engines("rogue", 1)
            await until(lambda: members.on_disk() == {"m1", "m2", "mine"})
            assert here.metadata_path("m0", members.genuine("rogue", "m0").manifest_hash) is None
            keeping.cancel()


async def test_what_is_used_stays_and_what_is_not_goes_when_its_engine_is_gone(members: Members) -> None:
    members.add("a", {"used": "T", "unused": "U"})
    here = members.models(Adoptions(forget_s=0.0))
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(here.keep_served_metadata(members.changes.watch))
        await until(lambda: members.on_disk() == {"used", "unused"} and len(here.on_disk()) == 2)
        await here.adopt("used")
        await here.rescan()
        members.ends_engines("a", 2)
        members.changes.notify()
        await until(lambda: members.on_disk() == {"used"})
        keeping.cancel()


async def test_what_a_member_announces_is_not_taken_for_what_is_here_under_that_name(members: Members) -> None:
    """Whichever came first: a person who names a model gets the one that somebody here asked for."""
    for name in ("first", "second"):
        members.add(name, {"tiny": name})
    here = members.models()
    for asked, unasked in (("first", "second"), ("second", "first")):
        keys = {node: members.genuine(node, "tiny").manifest_hash for node in (asked, unasked)}
        await here.adopt("tiny", manifest_hash=keys[unasked], first_source=unasked, wanted_by=unasked)
        await here.adopt("tiny", manifest_hash=keys[asked], first_source=asked)
        assert (await here.adopt("tiny")).manifest_hash == keys[asked]
        assert len(list((members.folder / "here").iterdir())) == 2
        ModelStore(members.folder / "here").rm("tiny")


async def test_a_slow_source_delays_no_other(members: Members) -> None:
    members.add("slow", {"tiny": "T"})
    members.add("quick", {"tiny": "T"})

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    members.files["slow"] = never
    here, content = members.models(), members.genuine("slow", "tiny").manifest_hash
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(here.adopt("tiny", manifest_hash=content, first_source="slow", wanted_by="slow"))
        await until(lambda: "slow edgepipe.json" in members.asked)
        await here.adopt("tiny", manifest_hash=content, first_source="quick", wanted_by="quick")
        waiting.cancel()
    assert members.on_disk() == {"tiny"}


class FalseDisk(node_pb2_grpc.WeightsServicer):
    """A member that says that the disk is full: its own or the caller's, who could not tell."""

    async def GetManifest(self, request: Any, context: Any) -> AsyncIterator[pb.ManifestReply]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield pb.ManifestReply()
        raise ModelDownloadFailed("the disk is full")

    async def ReadFile(self, request: Any, context: Any) -> AsyncIterator[pb.DataChunk]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield pb.DataChunk(data=b"x")
        raise ModelDownloadFailed("the disk is full")

    ReadTensor = ReadFile


async def test_a_peer_cannot_speak_of_this_nodes_disk_or_send_another_part(members: Members) -> None:
    """Else the next source would not be asked."""
    members.add("a", {"tiny": "T"})
    server = make_server(Plaintext())
    node_pb2_grpc.add_WeightsServicer_to_server(FalseDisk(), server)
    port = bind(server, Plaintext(), host="127.0.0.1", port=0)
    await server.start()
    node = NodeState(node_id=NodeId("rogue"), name="rogue", address=f"127.0.0.1:{port}")
    client = WeightsClient(hello=Hello(role="node"), security=Plaintext(), timeouts=Timeouts(connect_s=1.0))
    with pytest.raises(LinkError, match="the disk is full"):
        await client.manifest(node, "tiny")
    file = client.file(node, members.genuine("a", "tiny").manifest, "edgepipe.json")
    assert await anext(file) == b"x"
    with pytest.raises(LinkError, match="the disk is full"):
        await anext(file)
    tensor = client.tensor(node, members.genuine("a", "tiny").manifest, "x", offset=5, bytes_per_s=0.0)
    with pytest.raises(RemoteProtocolError, match="another part of 'x'"):
        await anext(tensor)
    await server.stop(grace=0)


class NoBytes(FalseDisk):
    """A peer that sends without end, and nothing."""

    async def ReadTensor(self, request: Any, context: Any) -> AsyncIterator[pb.DataChunk]:
        while True:
            yield pb.DataChunk(offset=request.offset)


async def test_a_peer_that_sends_parts_without_bytes_is_left_for_the_next(members: Members) -> None:
    members.add("a", {"tiny": "T"})
    server = make_server(Plaintext())
    node_pb2_grpc.add_WeightsServicer_to_server(NoBytes(), server)
    port = bind(server, Plaintext(), host="127.0.0.1", port=0)
    await server.start()
    node = NodeState(node_id=NodeId("rogue"), name="rogue", address=f"127.0.0.1:{port}")
    client = WeightsClient(hello=Hello(role="node"), security=Plaintext(), timeouts=Timeouts(connect_s=1.0))
    tensor = client.tensor(node, members.genuine("a", "tiny").manifest, "x", offset=5, bytes_per_s=0.0)
    with pytest.raises(RemoteProtocolError, match="a part without bytes"):
        await anext(tensor)
    await server.stop(grace=0)


# --- What others read from here


class Reader:
    """A caller of the service."""

    def __init__(self, service: WeightsService, node_id: str, stored: StoredModel) -> None:
        self._service = service
        self._context = SimpleNamespace(node_id=node_id)
        self._request = pb.ReadFileRequest(model=stored.id, name="edgepipe.json", manifest_hash=stored.manifest_hash)

    async def begin(self) -> Any:
        """A read that has got its first bytes."""
        chunks = self._service.ReadFile(self._request, self._context)
        assert (await anext(chunks)).data
        return chunks


async def test_r5_one_node_reads_a_bounded_number_of_files_at_a_time(members: Members) -> None:
    members.add("here", {"tiny": "T"})
    stored = members.genuine("here", "tiny")
    security = SimpleNamespace(caller=lambda context, _kind: context)
    service = WeightsService(admit=lambda _hello: None, security=cast("Any", security), models=members.models())
    rogue, honest = (Reader(service, node_id, stored) for node_id in ("rogue", "honest"))
    reads = [await rogue.begin() for _ in range(MAX_READS_PER_NODE)]
    with pytest.raises(QueueFull):
        await rogue.begin()
    async with aclosing(await honest.begin()):
        pass
    await reads.pop().aclose()
    reads.append(await rogue.begin())
    for read in reads:
        await read.aclose()
    assert service._reads == {}  # pyright: ignore[reportPrivateUsage]


async def test_a_manifest_comes_in_pieces(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of models with very many tensors are larger than a message."""
    members.add("here", {"tiny": "T"})
    security = SimpleNamespace(caller=lambda _context, _kind: None)
    service = WeightsService(admit=lambda _hello: None, security=cast("Any", security), models=members.models())
    monkeypatch.setattr(services, "_MANIFEST_PART_BYTES", 100)
    pieces = [part.manifest async for part in service.GetManifest(pb.ManifestRequest(model="tiny"), None)]
    assert {len(piece) for piece in pieces[:-1]} == {100}
    assert Manifest.from_json(b"".join(pieces)) == members.genuine("here", "tiny").manifest


async def test_files_are_read_in_pieces_and_only_those_that_nodes_exchange(members: Members) -> None:
    members.add("here", {"tiny": "T"})
    stored, here = members.genuine("here", "tiny"), members.models(piece_bytes=100)
    whole = (stored.path / "edgepipe.json").read_bytes()
    security = SimpleNamespace(caller=lambda _context, _kind: None)
    service = WeightsService(admit=lambda _hello: None, security=cast("Any", security), models=here)
    request = pb.ReadFileRequest(model="tiny", name="edgepipe.json", offset=50)
    read = [chunk async for chunk in service.ReadFile(request, None)]
    assert b"".join(chunk.data for chunk in read) == whole[50:]
    assert [chunk.offset for chunk in read] == list(range(50, len(whole), 100))
    assert [part async for part in here.read_file("tiny", "", "edgepipe.json", offset=1 << 60)] == []
    with pytest.raises(ModelInvalid, match="nodes do not exchange files"):
        await anext(here.read_file("tiny", "", "config.json", offset=0))
