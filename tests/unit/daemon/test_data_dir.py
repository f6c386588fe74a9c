"""Lock, count of starts and socket of a data directory."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from edgepipe.daemon.machine.data_dir import DataDir, socket_path, tier_dir
from edgepipe.errors import ConfigInvalid
from edgepipe.system import SystemClock
from edgepipe.testing.clock import FakeClock

CLOCK = SystemClock()


@pytest.fixture
def data_dir(tmp_path: Path):
    opened = DataDir(tmp_path / "node")
    yield opened
    opened.close()


def test_the_incarnation_grows_with_every_start(tmp_path: Path) -> None:
    incarnations = []
    for _ in range(3):
        opened = DataDir(tmp_path / "node")
        incarnations.append(opened.next_incarnation(CLOCK))
        opened.close()
    assert incarnations == sorted(set(incarnations))


def test_the_incarnation_never_goes_back_with_the_clock(data_dir: DataDir) -> None:
    clock = FakeClock()
    clock.advance(1000)
    later = data_dir.next_incarnation(clock)
    assert data_dir.next_incarnation(FakeClock()) > later


def test_a_second_node_is_refused_and_told_of_the_first(data_dir: DataDir) -> None:
    with pytest.raises(ConfigInvalid) as error:
        DataDir(data_dir.path)
    assert "process id" in error.value.fact
    assert "--data-dir" in error.value.next_step


def test_closing_leaves_the_count_of_starts_and_nothing_else(tmp_path: Path) -> None:
    opened = DataDir(tmp_path / "node")
    opened.next_incarnation(CLOCK)
    opened.close()
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["incarnation"]


def test_the_folder_is_private(data_dir: DataDir) -> None:
    assert stat.S_IMODE(data_dir.path.stat().st_mode) == 0o700


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00"])
def test_a_damaged_count_of_starts_begins_anew(data_dir: DataDir, content: bytes) -> None:
    (data_dir.path / "incarnation").write_bytes(content)
    assert data_dir.next_incarnation(CLOCK) > 0


def test_a_long_folder_gets_a_short_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90) / ("y" * 90)
    assert len(str(socket_path(deep))) <= 100
    assert socket_path(deep) != socket_path(deep / "other")
    assert socket_path(Path("/tmp/short")) == Path("/tmp/short/daemon.sock")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigInvalid):
        DataDir(tmp_path / "file" / "node")


def test_files_of_stages_that_were_killed_are_gone_at_the_next_start(tmp_path: Path) -> None:
    left = tier_dir(tmp_path) / "kv-left"
    left.parent.mkdir()
    left.write_bytes(b"encrypted")
    DataDir(tmp_path).close()
    assert not left.exists()
