"""``edgepipe open`` and ``edgepipe ps --tasks``: what they ask the node, and what other users may read of it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from edgepipe.cli.models_task import pull_in_node
from edgepipe.files.progress import PullProgress
from edgepipe.ids import NodeId
from edgepipe.wire.nodes import ClusterStatus, MemberState, NodeState
from tests.support.daemon.admin_server import answering
from tests.support.daemon.managed_node import ManagedNode
from tests.support.processes.command_line import Run


@pytest.fixture
def node() -> ManagedNode:
    own = MemberState(node=NodeState(node_id=NodeId("node-1"), name="a", http_port=8117), state="alive", self=True)
    made = ManagedNode()
    made.status = ClusterStatus(node_id=NodeId("node-1"), members=(own,))
    return made


def test_the_browser_gets_a_ticket_from_a_file_that_only_this_user_reads(
    run: Run, tmp_path: Path, node: ManagedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def take(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr("webbrowser.open", take)
    with answering(tmp_path, node):
        assert run("open", "--data-dir", str(tmp_path)).out == ""
    (address,) = opened
    assert address.startswith("file://")
    assert "ticket-" not in address
    file = Path(address.removeprefix("file://"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "http://127.0.0.1:8117/#ticket=ticket-0" in file.read_text()
    assert node.tickets.redeem("ticket-0")


def test_without_a_browser_the_address_is_printed(
    run: Run, tmp_path: Path, node: ManagedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda address: False)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with answering(tmp_path, node):
        for flags in ([], ["--show"]):
            result = run("open", *flags, "--data-dir", str(tmp_path))
            assert result.out.startswith("http://127.0.0.1:8117/#ticket=ticket-")


def test_tasks_are_listed(run: Run, tmp_path: Path, node: ManagedNode) -> None:
    node.book.add("task-1", kind="pull", model="qwen3:8b", now_us=10**15)
    node.book.started("task-1")
    node.book.progressed("task-1", phase="download", bytes_done=3_000_000_000, bytes_total=5_000_000_000)
    with answering(tmp_path, node):
        shown = run("ps", "--tasks", "--data-dir", str(tmp_path)).out
        (task,) = json.loads(run("ps", "--tasks", "--json", "--data-dir", str(tmp_path)).out)
        node.ended.set()
    assert all(part in shown for part in ("pull", "qwen3:8b", "running", "download 3.0 GB of 5.0 GB"))
    assert (task["state"], task["bytes_done"]) == ("running", 3_000_000_000)


def test_a_pull_of_the_node_gives_its_result_and_no_node_gives_none(tmp_path: Path, node: ManagedNode) -> None:
    seen: list[PullProgress] = []
    assert pull_in_node(tmp_path, "org/name", on_progress=seen.append) is None
    row = {"model": "org/name", "path": "/models/org/name", "already_here": False, "note": ""}
    node.results["pull"] = json.dumps(row).encode()
    with answering(tmp_path, node):
        assert pull_in_node(tmp_path, "org/name", on_progress=seen.append) == row
        assert pull_in_node(tmp_path, "./a folder", on_progress=seen.append) is None, "the node takes names only"
        node.ended.set()
    assert node.asked == ["pull org/name"]
