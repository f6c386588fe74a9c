"""What the cluster serves, as nodes remember and agree on it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from edgepipe.daemon.serve_book import ServeBook
from edgepipe.wire.v1 import node_pb2 as pb


def book(path: Path) -> ServeBook:
    return ServeBook(path / "served.bin", on_change=lambda: None)


def spec(model: str = "tiny") -> pb.ServeSpec:
    return pb.ServeSpec(model=model, manifest_hash="h")


def test_a_stop_is_newer_than_what_it_stops_and_two_nodes_agree(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    a, b = book(tmp_path), book(tmp_path / "b")
    a.note_served("p1", spec(), engine_node="a")
    a.note_served("p1", spec(), engine_node="a")  # nothing new
    b.merge(a.records())
    assert [(one.pipeline_id, one.version) for one in b.served()] == [("p1", 1)]
    b.note_stopped("tiny")
    b.merge(a.records())  # what a does not know yet changes nothing
    assert b.served() == []
    a.merge(b.records())
    assert a.served() == []
    a.note_served("p2", spec(), engine_node="b")
    b.merge(a.records())
    assert [one.pipeline_id for one in b.served()] == ["p2"]


def test_two_sides_that_counted_alike_end_up_with_the_same(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    a, b = book(tmp_path), book(tmp_path / "b")
    a.note_served("p", spec(), engine_node="a")
    b.note_served("p", spec(), engine_node="b")
    first, second = a.records(), b.records()
    a.merge(second)
    b.merge(first)
    assert a.records() == b.records()


async def test_it_outlives_its_process_and_a_damaged_file_is_an_empty_book(tmp_path: Path) -> None:
    one = book(tmp_path)
    one.note_served("p", spec(), engine_node="a")
    writing = asyncio.create_task(one.run())
    async with asyncio.timeout(10):
        while not (tmp_path / "served.bin").exists():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)
    writing.cancel()
    assert [record.pipeline_id for record in book(tmp_path).served()] == ["p"]
    (tmp_path / "served.bin").write_bytes(b"\xff\xff")
    assert book(tmp_path).records() == []
