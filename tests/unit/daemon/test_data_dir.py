"""Identity, lock and socket of a data directory."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from edgepipe.daemon.data_dir import DataDir, socket_path
from edgepipe.daemon.system import RandomIds, SystemClock
from edgepipe.errors import ConfigInvalid

IDS, CLOCK = RandomIds(), SystemClock()


@pytest.fixture
def data_dir(tmp_path: Path):
    opened = DataDir(tmp_path / "node")
    yield opened
    opened.close()


def test_the_identity_stays_and_the_incarnation_grows(tmp_path: Path):
    identities = []
    for _ in range(3):
        opened = DataDir(tmp_path / "node")
        identities.append(opened.identity(IDS, CLOCK))
        opened.close()
    assert len({identity.node_id for identity in identities}) == 1
    incarnations = [identity.incarnation for identity in identities]
    assert incarnations == sorted(set(incarnations))


def test_a_second_node_is_refused_and_told_of_the_first(data_dir: DataDir):
    with pytest.raises(ConfigInvalid) as error:
        DataDir(data_dir.path)
    assert "process id" in error.value.fact
    assert "--data-dir" in error.value.next_step


def test_closing_leaves_the_identity_and_nothing_else(tmp_path: Path):
    opened = DataDir(tmp_path / "node")
    opened.identity(IDS, CLOCK)
    opened.close()
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["identity.json"]


def test_the_folder_is_private(data_dir: DataDir):
    assert stat.S_IMODE(data_dir.path.stat().st_mode) == 0o700


def test_a_damaged_identity_is_replaced(data_dir: DataDir):
    (data_dir.path / "identity.json").write_text("{")
    assert data_dir.identity(IDS, CLOCK).node_id.startswith("node-")


def test_an_identity_that_another_has_is_replaced(data_dir: DataDir):
    first = data_dir.identity(IDS, CLOCK)
    second = data_dir.new_identity(IDS, CLOCK)
    assert first.node_id != second.node_id
    assert json.loads((data_dir.path / "identity.json").read_text())["node_id"] == second.node_id


def test_a_long_folder_gets_a_short_socket(tmp_path: Path):
    deep = tmp_path / ("x" * 90) / ("y" * 90)
    assert len(str(socket_path(deep))) <= 100
    assert socket_path(deep) != socket_path(deep / "other")
    assert socket_path(Path("/tmp/short")) == Path("/tmp/short/daemon.sock")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigInvalid):
        DataDir(tmp_path / "file" / "node")
