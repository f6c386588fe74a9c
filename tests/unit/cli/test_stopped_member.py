"""A machine that belongs to a cluster, while its node does not run: every command says so, and setup starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgepipe.cli.wizard import cluster_choice, own_node, steps
from edgepipe.cli.wizard.asking import Defaults
from edgepipe.cli.wizard.state import Given, Setup
from edgepipe.cluster.founding import found_local_cluster, home_of
from edgepipe.config import load_config
from edgepipe.daemon.machine.data_dir import socket_path
from edgepipe.ids import NodeId
from edgepipe.wire.nodes import ClusterStatus, MemberState, NodeState
from tests.support.processes.command_line import Run


@pytest.fixture
def member(tmp_path: Path) -> Path:
    """The data directory of 'studio', which shares a cluster with 'gamer'."""
    found_local_cluster([tmp_path / "gamer", tmp_path / "studio"], name="den")
    return tmp_path / "studio"


@pytest.mark.parametrize(
    "command",
    [
        "chat --prompt hi",
        "status",
        "serve demo",
        "node join 12345678",
        "node invite --yes",
        "peers",
        "logs --follow",
        "stop --all",
    ],
)
def test_every_command_names_the_cluster_and_what_to_type(run: Run, member: Path, command: str) -> None:
    done = run(*command.split(), "--data-dir", str(member))
    assert done.code == 3
    what, fact, next_step = done.err.splitlines()
    assert "this machine belongs to 'den', but its node does not run" in what
    assert str(socket_path(member)) in fact
    assert next_step.removeprefix("   try: ").startswith("edgepipe node start")
    assert ("--new-identity" in next_step) is (command.startswith("node join"))


def test_a_node_that_was_killed_and_left_its_socket_does_not_run_either(run: Run, member: Path) -> None:
    socket_path(member).touch()
    done = run("node", "join", "12345678", "--host", "127.0.0.1:9", "--data-dir", str(member))
    assert done.code == 3
    assert "this machine belongs to 'den', but its node does not run" in done.err


def test_the_first_screen_says_it_too(run: Run, member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEPIPE_DATA_DIR", str(member))
    shown = run().out
    assert "belongs to 'den', but does not run" in shown
    assert "edgepipe node start" in shown
    assert "edgepipe demo" not in shown
    assert "edgepipe setup" not in shown


def test_setup_starts_the_node_and_joins_nobody(
    member: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Path] = []

    def start(data_dir: Path, flags: tuple[str, ...], *, name: str) -> dict[str, Any]:
        started.append(data_dir)
        return {"pid": 1, "address": "10.0.0.1:7117"}

    monkeypatch.setattr(own_node, "start_in_background", start)
    monkeypatch.setattr(cluster_choice, "browse_nodes", None)
    config = load_config({"data_dir": member}).values
    steps.cluster(Setup(asking=Defaults(), given=Given(), config=config, settings_file=tmp_path / "config.toml"))
    assert started == [member]
    shown = capsys.readouterr()
    assert "This machine belongs to 'den', with gamer; its node does not run." in shown.out + shown.err


@pytest.mark.parametrize(
    ("asked", "refused"), [("", ""), ("den", ""), ("garden", "this node belongs to cluster 'den', not 'garden'")]
)
def test_setup_starts_the_node_of_a_machine_that_is_alone_in_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, refused: str
) -> None:
    alone = tmp_path / "alone"
    found_local_cluster([alone], name="den")
    started: list[tuple[str, ...]] = []

    def start(data_dir: Path, flags: tuple[str, ...], *, name: str) -> dict[str, Any]:
        started.append(flags)
        return {"pid": 1, "address": "10.0.0.1:7117"}

    def status(setup: Setup) -> ClusterStatus | None:
        own = MemberState(node=NodeState(node_id=NodeId("a")))
        return ClusterStatus(cluster_name="den", node_id=own.node.node_id, members=(own,)) if started else None

    monkeypatch.setattr(own_node, "start_in_background", start)
    monkeypatch.setattr(own_node, "node_status", status)
    monkeypatch.setattr(cluster_choice, "browse_nodes", lambda setup: [])  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(cluster_choice, "explain_silence", lambda setup: None)  # pyright: ignore[reportUnknownLambdaType]
    config = load_config({"data_dir": alone}).values
    setup = Setup(asking=Defaults(), given=Given(cluster=asked), config=config, settings_file=tmp_path / "config.toml")
    steps.cluster(setup)
    assert started == [()], "it keeps its cluster, and founds none"
    assert (setup.failure.what if setup.failure else "") == refused


def test_who_is_alone_or_new_belongs_to_nobody(tmp_path: Path) -> None:
    found_local_cluster([tmp_path / "alone"], name="den")
    assert home_of(tmp_path / "alone") is None
    assert home_of(tmp_path / "new") is None
    assert not (tmp_path / "new").exists()
