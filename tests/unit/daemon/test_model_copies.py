"""Parts of models on their way between two nodes' disks."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.numpy import load_file, save_file

from edgepipe.config import Timeouts
from edgepipe.daemon.files.model_parts import held_parts, model_parts, part_tensors, parts_of, parts_on, runs_of
from edgepipe.daemon.files.models import LocalModel, Models
from edgepipe.daemon.files.pace import Pace, chunk_bytes
from edgepipe.daemon.serving.replication import Replication
from edgepipe.errors import ModelDownloadFailed, ModelInvalid, ModelUnknown, PeerClosed
from edgepipe.ids import NodeId
from edgepipe.planner.copies import ModelParts
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.store.store import ModelStore
from edgepipe.weights.manifest import Manifest
from edgepipe.weights.tensor_folder import TensorSink
from edgepipe.wire.children import PrepareProgress
from edgepipe.wire.common import Hello
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import NodeState
from tests.support.daemon.published_state import FakeState
from tests.support.models.for_nodes import CONFIG, pull_with_weights
from tests.support.processes.waiting import until

ALL = frozenset(range(CONFIG.num_layers + 2))


class NearClient:
    """In place of the calls to another node: its ``Models`` are in this process."""

    source: Models
    asked: list[str]
    gate: asyncio.Event

    def __init__(self, **_: Any) -> None: ...

    async def manifest(self, _source: NodeState, model: str) -> Manifest:
        return Manifest.from_json(await self.source.manifest_json(model))

    async def file(self, _source: NodeState, manifest: Manifest, name: str) -> AsyncIterator[bytes]:
        async for data in self.source.read_file(manifest.model_id, manifest.hash, name, offset=0):
            yield data

    async def tensor(
        self, _source: NodeState, manifest: Manifest, name: str, *, offset: int, bytes_per_s: float
    ) -> AsyncIterator[bytes]:
        self.asked.append(name)
        async for data in self.source.read_tensor(
            manifest.model_id, manifest.hash, name, offset=offset, bytes_per_s=bytes_per_s
        ):
            yield data
            await self.gate.wait()


async def make_models(folder: Path, others: Sequence[NodeState], **options: Any) -> Models:
    peers = SimpleNamespace(
        hello=Hello(role="node"), security=None, nodes=lambda: list(others), is_self=lambda _id: False, own_id="here"
    )
    made = Models(
        models_dir=folder,
        peers=cast("Any", peers),
        timeouts=Timeouts(connect_s=1.0),
        local=FakeState(),
        client=cast("Any", NearClient()),
        **options,
    )
    await made.rescan()
    return made


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Models:
    """A node without the model, beside one that has it."""
    pull_with_weights(tmp_path / "there", tmp_path / "tiny")
    NearClient.source, NearClient.asked, NearClient.gate = (
        await make_models(tmp_path / "there", []),
        [],
        asyncio.Event(),
    )
    NearClient.gate.set()
    monkeypatch.setattr("edgepipe.files.disk.HEADROOM_BYTES", 0)  # the disk of the tests may be nearly full
    there = NodeState(node_id=NodeId("there"), name="there", models=tuple(NearClient.source.on_disk()))
    return await make_models(tmp_path / "here", [there])


async def copy(here: Models, model: LocalModel, parts: Sequence[int]) -> list[PrepareProgress]:
    return [event async for event in here.keep_copy(model, parts, first_source="there", bytes_per_s=0.0)]


def parts_here(here: Models) -> frozenset[int]:
    (copy,) = here.on_disk()
    return parts_of(copy.parts, num_parts=len(ALL))


async def test_a_node_tells_which_parts_it_has(here: Models) -> None:
    model = await here.adopt("tiny")
    assert parts_here(here) == frozenset()
    progress = await copy(here, model, [1, 2, 3])
    assert parts_here(here) == {1, 2, 3}
    assert progress[-1].bytes_done == progress[-1].bytes_total > 0
    assert here.transfers() == []
    (whole,) = NearClient.source.on_disk()
    assert parts_of(whole.parts, num_parts=len(ALL)) == ALL
    node = NodeState(node_id=NodeId("there"), models=(*here.on_disk(), whole))
    assert parts_on(node, "tiny", model.manifest_hash, num_parts=len(ALL)) == ALL
    assert parts_on(node, "tiny", "another", num_parts=len(ALL)) == frozenset()


async def test_the_parts_of_a_slice_are_what_it_loads(here: Models) -> None:
    model = await here.adopt("tiny")
    part = Slice(index=1, layers=LayerRange(3, 6), embedding=False, head=True)
    async for _ in here.fetch(model, (part,), first_source="there"):
        pass
    sizes = model_parts(model.config, model.stored.manifest)
    assert held_parts(model.stored) == sizes.of([part]) == {4, 5, 6, 7}
    assert sizes.fetch_bytes(held_parts(model.stored), [part]) == 0
    assert sum(sizes.sizes) == sum(entry.info.num_bytes for entry in model.stored.manifest.tensors)


async def test_what_a_stage_waits_for_goes_before_a_copy_which_goes_on_after(here: Models) -> None:
    model = await here.adopt("tiny")
    NearClient.gate.clear()
    copying = asyncio.ensure_future(copy(here, model, sorted(ALL)))
    await until(lambda: NearClient.asked, timeout_s=5)
    part = Slice(index=1, layers=LayerRange(5, 6), embedding=False, head=True)

    async def fetch() -> None:
        async for _ in here.fetch(model, (part,), first_source="there"):
            pass

    fetching = asyncio.ensure_future(fetch())
    await asyncio.sleep(0)
    NearClient.gate.set()
    await fetching
    assert held_parts(model.stored) >= {6, 7}
    assert not copying.done()
    await copying
    assert parts_here(here) == ALL
    late = [name for name in NearClient.asked if name.startswith("model.layers.5")]
    assert len(late) == len(set(late)), "what came for the stage is not copied again"


async def test_a_copy_whose_source_is_slow_gives_way_to_a_stage_at_once(
    here: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of a large model takes minutes at a copy's pace, and a source may have gone silent."""
    model = await here.adopt("tiny")
    tensor, silent = NearClient.tensor, ["model.embed_tokens.weight"]

    async def slow(client: NearClient, source: NodeState, manifest: Manifest, name: str, **place: Any) -> Any:
        async for data in tensor(client, source, manifest, name, **place):
            if name in silent:
                silent.clear()
                await asyncio.Event().wait()
            yield data

    monkeypatch.setattr(NearClient, "tensor", slow)
    copying = asyncio.ensure_future(copy(here, model, sorted(ALL)))
    await until(lambda: not silent, timeout_s=30)
    part = Slice(index=1, layers=LayerRange(5, 6), embedding=False, head=True)
    async with asyncio.timeout(60):  # a busy machine
        async for _ in here.fetch(model, (part,), first_source="there"):
            pass
        await copying
    assert parts_here(here) == ALL


async def test_a_cancelled_transfer_writes_nothing_into_the_next_one(
    here: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled, a transfer cannot stop a write that the disk holds up; the next transfer measures the file."""
    model = await here.adopt("tiny")
    NearClient.source = await make_models(tmp_path / "there", [], piece_bytes=1024)
    write, calls = TensorSink.write, 0
    held, go_on, written = threading.Event(), threading.Event(), threading.Event()

    def stuck(sink: TensorSink, chunk: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:  # the kernel has the write, and the file stays open for it
            descriptor = os.dup(sink._file.fileno())  # pyright: ignore[reportPrivateUsage]
            held.set()
            go_on.wait(10)
            os.write(descriptor, chunk)
            os.close(descriptor)
            written.set()
            return
        if calls == 3:
            go_on.set()
            written.wait(10)
        write(sink, chunk)

    monkeypatch.setattr(TensorSink, "write", stuck)
    first = asyncio.ensure_future(copy(here, model, [1]))
    await asyncio.to_thread(held.wait, 30)
    first.cancel()
    asyncio.get_running_loop().call_later(0.3, go_on.set)
    await asyncio.wait([first])
    await copy(here, model, [1])
    for name in part_tensors(model.config)[1]:
        data = model.stored.read_tensor(name)
        assert hashlib.sha256(data.tobytes()).hexdigest() == model.stored.manifest.by_name[name].sha256


async def test_a_stage_that_waits_for_another_transfer_reports_that_it_waits(
    here: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgepipe.daemon.files.models._TELL_S", 0.01)
    model = await here.adopt("tiny")
    NearClient.gate.clear()

    async def fetch(layer: int) -> list[PrepareProgress]:  # both of one model, whose folder has one writer
        part = Slice(index=1, layers=LayerRange(layer, layer + 1), embedding=False, head=False)
        return [done async for done in here.fetch(model, (part,), first_source="there")]

    first = asyncio.ensure_future(fetch(1))
    await until(lambda: NearClient.asked, timeout_s=5)
    second = asyncio.ensure_future(fetch(2))
    await asyncio.sleep(0.1)
    NearClient.gate.set()
    await first
    waited = [done for done in await second if not done.bytes_done]
    assert len(waited) >= 2
    assert waited[0].bytes_total > 0


async def test_a_connection_that_breaks_often_brings_a_large_tensor_all_the_same(
    here: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wi-Fi at its limit: a tensor of some GB outlives any number of connections, as long as each brings a part."""
    model = await here.adopt("tiny")
    NearClient.source = await make_models(tmp_path / "there", [], piece_bytes=1024)
    tensor = NearClient.tensor

    async def flaky(client: NearClient, source: NodeState, manifest: Manifest, name: str, **place: Any) -> Any:
        async for data in tensor(client, source, manifest, name, **place):
            yield data
            if len(data) == 1024:
                raise PeerClosed("the connection broke")

    monkeypatch.setattr(NearClient, "tensor", flaky)
    await copy(here, model, [1])
    assert max(NearClient.asked.count(name) for name in NearClient.asked) > 3
    assert parts_here(here) == {1}


async def test_a_model_that_was_pulled_anew_is_not_read_for_the_one_before(tmp_path: Path) -> None:
    """Under the same name and in the same folder, such as another revision."""
    former, name = pull_with_weights(tmp_path / "there", tmp_path / "tiny").manifest_hash, "model.norm.weight"
    models = await make_models(tmp_path / "there", [])
    read = models.read_tensor("tiny", former, name, offset=0)
    assert sum([len(data) async for data in read]) > 0
    tensors = load_file(tmp_path / "tiny" / "model.safetensors")
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / "tiny" / "model.safetensors")
    ModelStore(tmp_path / "there").rm("tiny")
    ModelStore(tmp_path / "there").pull(str(tmp_path / "tiny"))
    await models.rescan()
    with pytest.raises(ModelUnknown):
        _ = [data async for data in models.read_tensor("tiny", former, name, offset=0)]


async def test_bytes_that_another_program_wrote_are_not_sent(tmp_path: Path) -> None:
    """The user's file is the store's, too, where the disk clones no files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgepipe.store.taking.clone", lambda _path, _place: False, raising=False)
        manifest = pull_with_weights(tmp_path / "there", tmp_path / "tiny").manifest
    models, refused = await make_models(tmp_path / "there", []), 0
    with (tmp_path / "tiny" / "model.safetensors").open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\xff\xff")
    for entry in manifest.tensors:
        data = b""
        try:
            async for part in models.read_tensor("tiny", manifest.hash, entry.info.name, offset=0):
                data += part
        except ModelInvalid:
            refused += 1
        else:
            assert hashlib.sha256(data).hexdigest() == entry.sha256
    assert refused == 1


async def test_the_parts_of_a_served_model_are_computed_once_not_at_every_change(
    here: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a model of 37,000 tensors that takes 0.7 s, and a node that serves changes several times a second."""
    model, computed, looks = await here.adopt("tiny"), 0, 0

    def counted(*args: Any) -> ModelParts:
        nonlocal computed
        computed += 1
        return model_parts(*args)

    async def changes() -> AsyncIterator[None]:
        nonlocal looks
        for looks in range(20):  # noqa: B007
            yield
        await asyncio.Event().wait()

    async def adopt(*_: object, **__: object) -> LocalModel:
        return model

    monkeypatch.setattr("edgepipe.daemon.serving.replication.model_parts", counted)
    replication = Replication(
        peers=cast("Any", SimpleNamespace(nodes=lambda: [NodeState(node_id=NodeId("here"))])),
        models=cast("Any", SimpleNamespace(adopt=adopt)),
        engines=cast("Any", SimpleNamespace(ready=lambda: [("p", ServeSpec(model="tiny", manifest_hash="h"))])),
        copies=2,
        local=FakeState(changes=changes),
    )
    running = asyncio.ensure_future(replication.run())
    await until(lambda: looks == 19, timeout_s=30)
    running.cancel()
    assert computed == 1
    assert part_tensors(model.config) is part_tensors(model.config)


async def test_a_stage_does_not_wait_for_another_model_that_comes_slowly(
    here: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One comes from the hub for hours, the other is on a disk of the LAN."""
    pull_with_weights(tmp_path / "there", tmp_path / "other")
    await NearClient.source.rescan()
    tensor, part = NearClient.tensor, Slice(index=1, layers=LayerRange(2, 3), embedding=False, head=False)

    async def slow(client: NearClient, source: NodeState, manifest: Manifest, name: str, **place: Any) -> Any:
        async for data in tensor(client, source, manifest, name, **place):
            if manifest.model_id == "tiny":
                await asyncio.Event().wait()
            yield data

    async def fetch(name: str) -> None:
        async for _ in here.fetch(await here.adopt(name), (part,), first_source="there"):
            pass

    monkeypatch.setattr(NearClient, "tensor", slow)
    waiting = asyncio.ensure_future(fetch("tiny"))
    await until(lambda: NearClient.asked, timeout_s=30)
    async with asyncio.timeout(60):  # a busy machine
        await fetch("other")
    assert not waiting.done()
    waiting.cancel()


async def test_a_full_disk_is_said_with_its_numbers_before_anything_is_fetched(
    here: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await here.adopt("tiny")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ModelDownloadFailed) as caught:
        await copy(here, model, [1])
    assert "1.0 KB are free" in caught.value.fact
    assert NearClient.asked == []


async def test_r4_a_disk_that_fills_up_keeps_what_came_and_the_next_try_goes_on(
    here: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await here.adopt("tiny")
    write, left = TensorSink.write, 3

    def full(sink: TensorSink, chunk: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(sink, chunk)

    monkeypatch.setattr(TensorSink, "write", full)  # no test can fill a disk
    part = Slice(index=0, layers=LayerRange(0, 6), embedding=True, head=True)
    with pytest.raises(ModelDownloadFailed, match="could not be written") as caught:
        async for _ in here.fetch(model, (part,), first_source="there"):
            pass
    assert caught.value.fact == "the disk is full"
    assert len(NearClient.asked) == 4, "no other peer is asked: the disk is this node's own"
    monkeypatch.setattr(TensorSink, "write", write)  # the disk has room again
    async for _ in here.fetch(model, (part,), first_source="there"):
        pass
    assert len(NearClient.asked) == 1 + len(model.stored.manifest.tensors)
    assert held_parts(ModelStore(model.path.parent).resolve("tiny")) == ALL


async def test_r8_a_disk_that_cannot_be_written_is_said(here: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ModelDownloadFailed, match="could not be written") as caught:
        await here.adopt("tiny")
    assert "read-only" in caught.value.fact


async def test_copies_at_impossible_paces_do_not_hold_up_the_others(here: Models) -> None:
    async with asyncio.timeout(5):
        for rate in (1e-9, -1.0, float("nan"), float("inf"), 1e9):
            read = NearClient.source.read_tensor("tiny", "", "model.norm.weight", offset=0, bytes_per_s=rate)
            assert sum([len(data) async for data in read]) > 0


def test_parts_travel_as_runs() -> None:
    runs = runs_of({0, 1, 2, 5, 7, 8})
    assert [(run.start, run.end) for run in runs] == [(0, 3), (5, 6), (7, 9)]
    assert parts_of(runs, num_parts=8) == {0, 1, 2, 5, 7}


async def test_all_copies_together_keep_to_their_share() -> None:
    loop, pace, rate = asyncio.get_running_loop(), Pace(), 1e6
    began_s = loop.time()
    await asyncio.gather(*(pace.take(10_000, bytes_per_s=rate) for _ in range(11)))
    assert loop.time() - began_s >= 10 * 0.01
    assert chunk_bytes(1e9) == 50_000_000
    assert chunk_bytes(1e3) == 16 << 10
