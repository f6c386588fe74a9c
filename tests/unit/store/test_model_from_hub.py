"""Tensors that no peer gives come from a hub on loopback that breaks off, lies, is silent and is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgepipe.config import Timeouts
from edgepipe.daemon.files.models import LocalModel, Models
from edgepipe.errors import EdgepipeError, ModelInvalid, ModelUnknown, PeerClosed
from edgepipe.ids import NodeId
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.store.hub import parse_pinned, pinned_text
from edgepipe.store.install import install
from edgepipe.store.store import ModelStore, StoredModel, tensor_names
from edgepipe.weights.manifest import Manifest
from edgepipe.wire.common import Hello
from edgepipe.wire.nodes import NodeState
from tests.support.daemon.published_state import FakeState
from tests.support.models.fake_hub import COMMIT, FakeHub, running
from tests.support.models.files import (
    adopt,
    hf_values,
    metadata_of,
    random_tensors,
    write_gguf,
    write_hf_folder,
    write_split_gguf,
    write_tensor,
)
from tests.support.models.specs import first_attention

REPO = "org/tiny"
MIDDLE = Slice(index=1, layers=LayerRange(1, 2), embedding=False, head=False)
QUERY = "model.layers.1.self_attn.q_proj.weight"
FORMATS = ("one file", "shards", "gguf", "split gguf")


@dataclass
class Place:
    """A node without tensors, the hub, and the model as somebody once pulled it."""

    hub: FakeHub
    whole: StoredModel
    store: ModelStore
    peers: list[NodeState]
    idle_s: float = 5.0
    client: Peer | None = None  # answers for the peers

    async def fetch(self, *, endpoint: str = "") -> list[str]:
        """Where each piece of progress came from, while the middle layer was fetched."""
        models, model = await self.open(endpoint=endpoint)
        came: list[str] = []
        async for _ in models.fetch(model, (MIDDLE,), first_source=""):
            came += [transfer.source for transfer in models.transfers()]
        assert models.transfers() == []
        return came

    async def open(self, *, endpoint: str = "") -> tuple[Models, LocalModel]:
        hello = Hello(role="node")
        peers = SimpleNamespace(hello=hello, security=None, nodes=lambda: self.peers, is_self=lambda _id: False)
        models = Models(
            models_dir=self.store.root,
            peers=cast("Any", peers),
            timeouts=Timeouts(connect_s=1.0, transfer_idle_s=self.idle_s),
            local=FakeState(),
            hub_endpoint=endpoint or self.hub.endpoint,
            client=cast("Any", self.client),
        )
        return models, await models.adopt(REPO)

    def held(self) -> list[str]:
        return self.store.resolve(REPO).held_tensors()

    def begun(self, name: str, data: bytes) -> None:
        """What an earlier transfer left."""
        writer = self.store.resolve(REPO).writer()
        assert not write_tensor(writer, name, [data])

    def file_of(self, name: str) -> str:
        """The hub's file with a tensor, found by its bytes."""
        data = self.whole.read_tensor(name).tobytes()[:64]
        return next(file for file, content in self.hub.files.items() if data in content)


def make_place(tmp_path: Path, form: str) -> Place:
    folder = tmp_path / "whole" / "org--tiny"
    if form == "gguf":
        folder.mkdir(parents=True)
        config = hf_config(hf_values())
        write_gguf(folder / "model.gguf", random_tensors(config), config, scheme="Q8_0")
        data = (folder / "model.gguf").read_bytes()
        files = {"tiny-Q8_0.gguf": data, "tiny-F32.gguf": data[::-1]}
    elif form == "split gguf":
        folder.mkdir(parents=True)
        parts = write_split_gguf(folder, hf_config(hf_values()), stem="model", scheme="Q8_0", metadata_alone=True)
        files = {f"Q8_0/tiny-{path.name}": path.read_bytes() for path in parts}
    else:
        write_hf_folder(folder, shards=2 if form == "shards" else 1)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    install(folder, model_id=REPO, source=pinned_text(REPO, COMMIT), on_progress=lambda _: None)
    whole, store = ModelStore(tmp_path / "whole").resolve(REPO), ModelStore(tmp_path / "here")
    adopt(store, Manifest.from_json(whole.manifest.to_json()), metadata_of(whole))
    return Place(hub=FakeHub(repo=REPO, files=files, lfs_from=0), whole=whole, store=store, peers=[])


@pytest.fixture(params=["shards"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr("edgepipe.files.disk.HEADROOM_BYTES", 0)  # the disk of the tests may be nearly full
    made = make_place(tmp_path, request.param)
    with running(made.hub):
        yield made


class Peer:
    """In place of the calls to another node, which has the whole model unless it has an error to tell."""

    def __init__(self, whole: StoredModel) -> None:
        self.whole = whole
        self.error: EdgepipeError | None = None
        self.asked: list[str] = []

    async def tensor(
        self, _: NodeState, __: Manifest, name: str, *, offset: int, bytes_per_s: float
    ) -> AsyncIterator[bytes]:
        self.asked.append(name)
        if self.error:
            raise self.error
        yield self.whole.read_tensor(name, offset=offset).tobytes()


@pytest.fixture
def peer(place: Place) -> Peer:
    made = place.client = Peer(place.whole)
    place.peers.append(NodeState(node_id=NodeId("there"), name="there"))
    return made


@pytest.mark.parametrize("place", FORMATS, indirect=True)
async def test_what_no_peer_has_comes_from_the_hub_and_nothing_else_does(place: Place) -> None:
    assert set(await place.fetch()) == {"hub"}
    wanted = tensor_names(place.whole.config, (MIDDLE,))
    assert sorted(place.held()) == sorted(wanted)
    here = place.store.resolve(REPO)
    for name in wanted:
        assert here.read_tensor(name).tobytes() == place.whole.read_tensor(name).tobytes()
    weights = [(file, asked) for file, asked in place.hub.asked if not file.endswith(".json")]
    files = {file for file, _ in weights}
    assert len(weights) == len(files) + len(wanted), "one look at each file's header, one range for each tensor"
    assert "tiny-F32.gguf" not in files


@pytest.mark.parametrize("place", FORMATS, indirect=True)
async def test_it_goes_on_where_a_peer_or_the_hub_stopped(place: Place) -> None:
    sizes = [place.whole.manifest.by_name[name].info.num_bytes for name in tensor_names(place.whole.config, (MIDDLE,))]
    data = place.whole.read_tensor(QUERY).tobytes()
    half = len(data) // 2 + 3  # within a head, and within a row
    place.begun(QUERY, data[:half])
    await place.fetch()
    assert QUERY in place.held()
    head_bytes = len(data) // first_attention(place.whole.config).num_heads
    is_gguf = any(name.endswith(".gguf") for name in place.hub.files)
    begin = half - half % head_bytes if is_gguf else half  # its heads come whole
    sizes[sizes.index(len(data))] -= begin
    asked = [text.removeprefix("bytes=").split("-") for _, text in place.hub.asked if text]
    assert sorted(int(last) - int(first) + 1 for first, last in asked if first != "0") == sorted(sizes)


async def test_a_connection_that_breaks_is_made_again(place: Place) -> None:
    place.hub.cut_after = dict.fromkeys(place.hub.files, 100)
    await place.fetch()
    assert place.hub.cut_after.keys() & {name for name, _ in place.hub.asked} == set()
    assert QUERY in place.held()


async def test_the_token_is_for_the_hub_and_not_for_where_it_sends_us(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    place.hub.cdn = True
    await place.fetch()
    assert QUERY in place.held()
    (_, port) = place.hub.endpoint.rsplit(":", 1)
    assert place.hub.tokens == {f"127.0.0.1:{port}": {"Bearer hf_secret"}, f"localhost:{port}": {""}}


async def test_damaged_bytes_are_refused_and_forgotten(place: Place) -> None:
    file, data = place.file_of(QUERY), place.whole.read_tensor(QUERY).tobytes()
    place.hub.files[file] = place.hub.files[file].replace(data[:64], bytes(64))
    with pytest.raises(ModelInvalid, match="arrived damaged") as caught:
        await place.fetch()
    assert "from the hub" in caught.value.fact
    assert QUERY not in place.held()
    (missing,) = place.store.resolve(REPO).writer().missing([QUERY])
    assert missing.have_bytes == 0


async def test_a_damaged_beginning_is_not_laid_at_the_door_of_who_sent_the_rest(place: Place) -> None:
    place.begun(QUERY, bytes(1000))
    await place.fetch()
    assert QUERY in place.held()


@pytest.mark.parametrize("place", ["one file", "gguf"], indirect=True)
@pytest.mark.parametrize("change", ["longer", "shorter", "zeros", "header"])
async def test_another_file_than_the_manifests_is_refused(place: Place, change: str) -> None:
    file = next(name for name in place.hub.files if name in ("model.safetensors", "tiny-Q8_0.gguf"))
    data = place.hub.files[file]
    place.hub.files[file] = {
        "longer": data + b"x",
        "shorter": data[:-1],
        "zeros": bytes(len(data)),
        "header": data.replace(b"layers.1.", b"layers.7.").replace(b"blk.1.", b"blk.7."),
    }[change]
    with pytest.raises(EdgepipeError) as caught:
        await place.fetch()
    told_by_hash = file.endswith(".gguf")  # among the repository's files, so that it is not even asked for
    assert isinstance(caught.value, ModelUnknown if told_by_hash else ModelInvalid)
    assert "from the hub" in caught.value.fact
    assert place.held() == []


async def test_an_index_that_was_changed_is_refused(place: Place) -> None:
    place.hub.files["model.safetensors.index.json"] = place.hub.files["model.safetensors.index.json"].replace(
        b"layers.1", b"layers.2"
    )
    with pytest.raises(ModelInvalid) as caught:
        await place.fetch()
    assert "SHA-256" in caught.value.fact
    assert {name for name, _ in place.hub.asked} == {"model.safetensors.index.json"}


async def test_a_hub_without_ranges_is_told_and_does_not_send_whole_files(place: Place) -> None:
    place.hub.ranges = False
    with pytest.raises(ModelUnknown) as caught:
        await place.fetch()
    assert "does not send the requested part" in caught.value.fact


async def test_a_hub_out_of_reach_adds_its_reason_to_that_of_the_peers(place: Place, peer: Peer) -> None:
    peer.error = PeerClosed("node there hung up")
    with pytest.raises(ModelUnknown, match="no reachable node has tensor") as caught:
        await place.fetch(endpoint="http://127.0.0.1:9")
    assert "node there hung up" in caught.value.fact
    assert "could not be fetched from the hub" in caught.value.fact
    assert caught.value.next_step == f"edgepipe models pull {REPO}"


async def test_offline_mode_is_respected(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnknown) as caught:
        await place.fetch()
    assert "no other node is in the cluster" in caught.value.fact
    assert "HF_HUB_OFFLINE" in caught.value.fact
    assert place.hub.asked == []


async def test_a_peer_that_has_it_is_asked_alone(place: Place, peer: Peer) -> None:
    assert set(await place.fetch()) == {"there"}
    assert place.hub.asked == []


async def test_the_hub_steps_in_for_a_peer_that_does_not_answer_and_not_every_tensor_waits_for_it(
    place: Place, peer: Peer
) -> None:
    peer.error = PeerClosed("node there hung up")
    assert set(await place.fetch()) == {"hub"}
    assert QUERY in place.held()
    assert len(set(peer.asked)) == 1


async def test_the_hub_gives_what_a_peer_does_not_have(place: Place, peer: Peer) -> None:
    peer.error = ModelUnknown("it is not on this node")
    assert set(await place.fetch()) == {"hub"}
    wanted = tensor_names(place.whole.config, (MIDDLE,))
    assert sorted(peer.asked) == sorted(wanted), "it may have the next one"


async def test_copies_that_nobody_waits_for_do_not_come_from_the_hub(place: Place) -> None:
    models, model = await place.open()
    with pytest.raises(ModelUnknown):
        async for _ in models.keep_copy(model, [2], first_source="", bytes_per_s=0.0):
            pass
    assert place.hub.asked == []


async def test_a_silent_hub_is_given_up(place: Place) -> None:
    place.idle_s = 0.05
    place.hub.silent = set(place.hub.files)
    with pytest.raises(ModelUnknown) as caught:
        await place.fetch()
    assert "the hub does not answer" in caught.value.fact


async def test_who_waits_no_longer_leaves_nothing_behind(place: Place) -> None:
    place.hub.silent = {place.file_of(QUERY)}
    models, model = await place.open()

    async def fetch() -> None:
        async for _ in models.fetch(model, (MIDDLE,), first_source=""):
            pass

    waiting = asyncio.create_task(fetch())
    await asyncio.to_thread(place.hub.held.wait, 10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert models.transfers() == []
    place.hub.silent = set()
    await fetch()
    assert QUERY in place.held()


@pytest.mark.parametrize(
    "text", ["", "demo", "folder:x", f"hub:org/tiny@{COMMIT}x", "hub:org/tiny@main", f"hub:org/../x@{COMMIT}"]
)
def test_what_did_not_come_from_the_hub_is_not_looked_for_there(text: str) -> None:
    assert parse_pinned(text) is None
