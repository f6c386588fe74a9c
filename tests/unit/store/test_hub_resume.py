"""Interrupted downloads go on where they stopped: any stop, any fault of the hub."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgepipe.errors import ModelDownloadFailed
from edgepipe.files.progress import OnProgress, PlannedFile, PullProgress
from edgepipe.store.hub import HubDownload, HubSource
from edgepipe.store.hub_fetch import fetch_hub
from tests.support.models.fake_hub import COMMIT, FakeHub, running, virtual_pauses

REPO, NAME = "org/large", "model.safetensors"
DATA = random.Random(1).randbytes(12_000_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
MOST_TWICE = 1_000_000  # bytes per stop that may be fetched again


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running(FakeHub(repo=REPO, files={NAME: DATA})) as served:
        yield served


def fetch(hub: FakeHub, folder: Path, on_progress: OnProgress, *, sha256: str = SHA256) -> None:
    folder.mkdir(exist_ok=True)
    file = PlannedFile(name=NAME, num_bytes=len(DATA), sha256=sha256)
    plan = HubDownload(source=HubSource(repo=REPO), commit=COMMIT, model_id=REPO, files=(file,))
    pauses = virtual_pauses([])
    fetch_hub(plan, folder, on_progress, check=lambda _: None, endpoint=hub.endpoint, pauses=pauses)


def is_whole(folder: Path) -> bool:
    return [path.name for path in folder.iterdir()] == [NAME] and (folder / NAME).read_bytes() == DATA


def fetched_twice(hub: FakeHub) -> int:
    return hub.sent_bytes[NAME] - len(DATA)


def notes(progress: list[PullProgress]) -> list[str]:
    return [event.note for event in progress if event.note]


def test_ten_cut_connections_cost_no_byte_twice(hub: FakeHub, tmp_path: Path) -> None:
    progress: list[PullProgress] = []
    hub.cuts = {NAME: [1, 100_000, 65_536, 700_001, 3_000_000, 17, 0, 2_000_000, 1_000_000, 4096]}
    fetch(hub, tmp_path / "x", progress.append)
    assert is_whole(tmp_path / "x")
    assert len(hub.asked) == 11
    assert fetched_twice(hub) == 0
    assert progress[-1].done_bytes == progress[-1].total_bytes == len(DATA)
    assert [event for event in progress if event.phase == "waiting"]
    assert f"{NAME}: no connection to the hub, or it broke; asking again in 2 s" in notes(progress)


class Stops:
    """Raises KeyboardInterrupt, as ^C does, at the next of some positions."""

    def __init__(self, positions: list[int]) -> None:
        self._positions = positions

    def __call__(self, now: PullProgress) -> None:
        if now.phase == "download" and self._positions and now.done_bytes >= self._positions[0]:
            del self._positions[0]
            raise KeyboardInterrupt


def test_ten_stops_by_a_person_cost_at_most_a_megabyte_each(hub: FakeHub, tmp_path: Path) -> None:
    positions = [1 + round(len(DATA) * place / 10) for place in range(10)]
    stops = Stops(positions.copy())
    for _ in positions:
        with pytest.raises(KeyboardInterrupt):
            fetch(hub, tmp_path / "x", stops)
    progress: list[PullProgress] = []
    fetch(hub, tmp_path / "x", progress.append)
    assert is_whole(tmp_path / "x")
    starts = [int(asked.removeprefix("bytes=").removesuffix("-") or 0) for _, asked in hub.asked]
    assert all(start >= position - MOST_TWICE for start, position in zip(starts[1:], positions, strict=True))
    assert any("are here; checking them" in note for note in notes(progress))
    assert progress[-1].done_bytes == len(DATA)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support.models.fake_hub import FakeHub
from tests.unit.store.test_hub_resume import fetch
def kill(now):
    if now.done_bytes > 5_000_000:
        os.kill(os.getpid(), signal.SIGKILL)
fetch(FakeHub(repo="org/large", files={}, endpoint=sys.argv[1]), Path(sys.argv[2]), kill)
"""


def test_a_killed_pull_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, hub.endpoint, str(tmp_path / "x")], check=False)
    assert killed.returncode == -signal.SIGKILL
    fetch(hub, tmp_path / "x", lambda _: None)
    assert is_whole(tmp_path / "x")
    start = int(hub.asked[-1][1].removeprefix("bytes=").removesuffix("-"))
    assert start > 5_000_000 - MOST_TWICE


def test_a_hub_without_ranges_begins_anew_and_says_so_once(hub: FakeHub, tmp_path: Path) -> None:
    progress: list[PullProgress] = []
    hub.ranges, hub.cuts = False, {NAME: [3_000_000, 4_000_000, 5_000_000]}
    fetch(hub, tmp_path / "x", progress.append)
    assert is_whole(tmp_path / "x")
    assert [note for note in notes(progress) if "begins anew" in note] == [
        "model.safetensors begins anew after 3.0 MB: the hub sends whole files only, "
        "so each interruption costs its beginning"
    ]
    assert progress[-1].done_bytes == len(DATA)
    assert all(0 <= event.done_bytes <= event.total_bytes for event in progress)


def test_a_file_with_another_etag_begins_anew(hub: FakeHub, tmp_path: Path) -> None:
    progress: list[PullProgress] = []
    hub.cuts, hub.etags = {NAME: [3_000_000]}, {NAME: ['"old"', '"new"', '"new"']}
    fetch(hub, tmp_path / "x", progress.append)
    assert is_whole(tmp_path / "x")
    assert [asked for _, asked in hub.asked] == ["", "bytes=3000000-", ""]
    assert any("has another ETag" in note for note in notes(progress))


def test_etags_that_always_change_do_not_stop_a_pull(hub: FakeHub, tmp_path: Path) -> None:
    hub.cuts = {NAME: [1_000_000, 1_000_000, 1_000_000, 1_000_000]}
    hub.etags = {NAME: [f'"{number}"' for number in range(9)]}
    fetch(hub, tmp_path / "x", lambda _: None)
    assert is_whole(tmp_path / "x")
    assert len(hub.asked) == 5, "after one new beginning, the announced hash decides"


@pytest.mark.parametrize("sha256", [SHA256, ""])
def test_a_hub_without_etag_resumes(hub: FakeHub, tmp_path: Path, sha256: str) -> None:
    progress: list[PullProgress] = []
    hub.cuts, hub.etags = {NAME: [3_000_000, 2_000_000]}, {NAME: [""] * 3}
    fetch(hub, tmp_path / "x", progress.append, sha256=sha256)
    assert is_whole(tmp_path / "x")
    assert fetched_twice(hub) == 0
    assert progress[-1].done_bytes == len(DATA)


@pytest.mark.parametrize("left", ["other model", "damaged", "too long", "no record", "link"])
def test_a_part_that_is_not_of_this_file_harms_nothing(hub: FakeHub, tmp_path: Path, left: str) -> None:
    folder, progress = tmp_path / "x", list[PullProgress]()
    with pytest.raises(KeyboardInterrupt):
        fetch(hub, folder, Stops([3_000_000]))
    part, record = folder / f"{NAME}.part", folder / f"{NAME}.part.json"
    if left == "other model":
        record.write_text(record.read_text().replace(SHA256[:8], "0" * 8))
    elif left == "damaged":
        part.write_bytes(bytes(part.stat().st_size))
    elif left == "too long":
        part.write_bytes(bytes(len(DATA) + 1))
    elif left == "no record":
        record.write_text("{")
    else:
        (tmp_path / "private").write_bytes(b"a user's")
        part.unlink()
        part.symlink_to(tmp_path / "private")
    fetch(hub, folder, progress.append)
    assert is_whole(folder)
    assert left != "link" or (tmp_path / "private").read_bytes() == b"a user's"
    assert left != "damaged" or any("left of it is damaged" in note for note in notes(progress))


def test_a_login_page_in_the_middle_of_a_pull_costs_nothing(hub: FakeHub, tmp_path: Path) -> None:
    hub.cuts, hub.portal = {NAME: [3_000_000]}, {NAME}
    with pytest.raises(ModelDownloadFailed) as caught:
        fetch(hub, tmp_path / "x", lambda _: None)
    assert "is there a login page on this network?" in caught.value.fact
    hub.portal = set()
    fetch(hub, tmp_path / "x", lambda _: None)
    assert is_whole(tmp_path / "x")
    assert fetched_twice(hub) == 0


def test_a_proxy_of_the_environment_is_used(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", hub.endpoint)
    beyond = FakeHub(repo=REPO, files={}, endpoint="http://hub.invalid")
    hub.cuts = {NAME: [3_000_000]}
    fetch(beyond, tmp_path / "x", lambda _: None)
    assert is_whole(tmp_path / "x")
    assert set(hub.tokens) == {"hub.invalid"}


def test_the_token_stays_with_the_hub(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.cdn, hub.cuts = True, {NAME: [3_000_000]}
    fetch(hub, tmp_path / "x", lambda _: None)
    assert is_whole(tmp_path / "x")
    tokens: dict[str, Any] = {host.split(":")[0]: seen for host, seen in hub.tokens.items()}
    assert tokens == {"127.0.0.1": {"Bearer hf_secret"}, "localhost": {""}}
