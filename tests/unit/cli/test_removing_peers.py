"""``peers remove`` asks before it does what cannot be undone."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgepipe.wire.v1 import trust_pb2
from tests.support.daemon.admin_server import answering
from tests.support.processes.command_line import Run


class _Node:
    """A node of two members that notes whom it removes."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def __getattr__(self, name: str) -> None:
        """Any other method is asked by no command below."""

    def ListPeers(self, request: Any, context: Any) -> trust_pb2.ListPeersReply:
        reply = trust_pb2.ListPeersReply(cluster_name="home")
        reply.peers.add(name="gamer", node_id="a" * 52, role="owner", self=True)
        reply.peers.add(name="attic", node_id="b" * 52, role="member", state="alive")
        return reply

    def RemovePeer(self, request: Any, context: Any) -> trust_pb2.RemovePeerReply:
        self.removed.append(request.peer)
        return trust_pb2.RemovePeerReply(name="attic")


@pytest.fixture
def node(run: Run, tmp_path: Path) -> Iterator[_Node]:
    """A node at the socket that the commands of ``run`` ask."""
    with answering(tmp_path / "data", _Node()) as node:
        yield node


class _Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
@pytest.mark.parametrize("peer", ["attic", "bbbb"])
def test_a_person_is_asked_by_name(
    run: Run, node: _Node, monkeypatch: pytest.MonkeyPatch, peer: str, typed: str, code: int
) -> None:
    monkeypatch.setattr(sys, "stdin", _Keyboard(typed))
    done = run("peers", "remove", peer)
    assert done.code == code
    assert node.removed == ([peer] if code == 0 else [])
    assert "Remove 'attic'?" in done.out
    assert "its key is never accepted again" in done.out
    assert "node join --new-identity" in done.out


def test_a_script_says_yes_or_is_refused(run: Run, node: _Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    done = run("peers", "remove", "attic")
    assert done.code == 2
    assert "edgepipe peers remove attic --yes" in done.err
    assert node.removed == []
    assert run("peers", "remove", "attic", "--yes").code == 0
    assert node.removed == ["attic"]
