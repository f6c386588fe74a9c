"""Machines that a person stopped are listed as stopped, since when; they are no fault of the cluster."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edgepipe.cli.doctor.node_findings import trust_findings
from edgepipe.cli.views.status_view import is_healthy, render_status
from edgepipe.cluster.founding import TrustFolders
from edgepipe.config import load_config
from edgepipe.ids import NodeId
from edgepipe.telemetry.audit import AuditKind, AuditLog
from edgepipe.wire.nodes import AbsentNode, ClusterStatus, MemberState, NodeState

_NOON_US = int(time.mktime((2026, 3, 4, 12, 7, 0, 0, 0, -1)) * 1e6)


def _status(*absent: AbsentNode) -> ClusterStatus:
    alone = MemberState(node=NodeState(node_id=NodeId("n1"), name="gamer"), state="alive", self=True)
    return ClusterStatus(cluster_name="home", node_id=NodeId("n1"), members=(alone,), absent=absent)


def _lines(status: ClusterStatus, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False, emoji=False)
    for part in render_status(status):
        console.print(part)
    file: Any = console.file
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize(("state", "words"), [("left", "stopped since"), ("unseen", "not seen since")])
def test_a_stopped_machine_is_listed_with_the_time_and_is_no_fault(state: str, words: str, width: int) -> None:
    status = _status(AbsentNode(node_id=NodeId("n2"), name="attic", state=state, since_us=_NOON_US))
    lines = _lines(status, width)
    assert is_healthy(status)
    assert "1 node, 1 stopped" in " ".join(lines)
    (line,) = [line for line in lines if "attic" in line]
    assert words in line
    assert "12:07" in line
    assert max(map(len, lines)) <= width


def test_a_machine_that_went_without_a_goodbye_is_still_a_fault() -> None:
    status = _status(AbsentNode(node_id=NodeId("n2"), name="attic", state="dead", since_us=_NOON_US))
    assert not is_healthy(status)
    assert "attic gone since" in " ".join(_lines(status, 80))
    assert "stopped" not in " ".join(_lines(status, 80))


@pytest.mark.parametrize(("count", "reported"), [(3, False), (40, True)])
def test_doctor_takes_a_few_connections_without_an_identity_for_no_news(
    tmp_path: Path, count: int, reported: bool
) -> None:
    audit = AuditLog(TrustFolders(tmp_path).audit, time.time)
    audit.record(AuditKind.HANDSHAKE_REFUSED, who="strangers", detail=f"{count} connections")
    config = load_config({"data_dir": tmp_path}).values
    found = [finding for finding in trust_findings(config, replace(_status())) if finding.id == "trust.audit"]
    assert bool(found) is reported
