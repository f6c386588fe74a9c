"""What other machines and strangers say of themselves cannot steer a terminal or forge a line, wherever it is shown."""

from __future__ import annotations

import io
import json
import logging
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from edgepipe.cluster.founding import TrustFolders
from edgepipe.daemon.machine.data_dir import log_path
from edgepipe.errors import EdgepipeError, LinkError
from edgepipe.link.channels import from_rpc_error
from edgepipe.safe_text import MAX_LINE_CHARS, json_text, one_line, visible
from edgepipe.telemetry.audit import AuditKind, AuditLog
from edgepipe.telemetry.log import LineFormatter
from edgepipe.wire.codec import to_wire
from edgepipe.wire.errors import error_from_wire
from edgepipe.wire.v1 import common_pb2, trust_pb2
from edgepipe.wire.v1 import node_pb2 as pb
from tests.support.daemon.admin_server import answering
from tests.support.processes.command_line import Run, make_status

FORGED = "2026-01-01 00:00:00,000 ERROR   this line was never logged"
HOSTILE = f"x\n{FORGED}\r\x1b[2J\x1b]0;title\x07\x9b31m\x85{FORGED}\u2028\u202e\u2066[red]y[/z][link=http://a]b[/link]"
_DEPTH = 12  # levels of messages within messages


def fill(message: Message, text: str, *, depth: int = _DEPTH) -> None:
    """Put ``text`` into every string field, at any depth, also into fields that are yet to be added."""
    if isinstance(message, common_pb2.LayerRange):
        message.end = max(message.end, message.start + 1)  # other ranges are refused
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and depth:
            value = getattr(message, field.name)
            if field.is_repeated:
                value.add()
            for part in value if field.is_repeated else (value,):
                fill(part, text, depth=depth - 1)
                part.SetInParent()
        elif field.type == FieldDescriptor.TYPE_STRING and field.is_repeated:
            getattr(message, field.name).append(text)
        elif field.type == FieldDescriptor.TYPE_STRING:
            setattr(message, field.name, text)


def assert_harmless(text: str) -> None:
    """No control or format character but line ends, and no line of the attacker's own."""
    for line in text.split("\n"):
        bad = [char for char in line if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
        assert not bad, line
        assert not line.lstrip().startswith(FORGED[:20]), line


class _Node:
    """The parts of a node's services that commands ask below; all that its neighbours told it is hostile."""

    def __init__(self) -> None:
        self.state = ""  # state of engines

    def __getattr__(self, name: str) -> None:
        """Any other method is asked by no command below."""

    def Status(self, request: Any, context: Any) -> pb.ClusterStatus:
        status = to_wire(make_status(), pb.ClusterStatus)
        fill(status, HOSTILE)
        for member in status.members:
            for index, device in enumerate(member.node.devices):
                device.state = ("failed", "alive", "starting")[index % 3]
            member.state = "alive"
        for engine in (*status.engines, *(served for member in status.members for served in member.node.engines)):
            engine.state = self.state
        status.members[0].self = True
        return status

    def MeasureLinks(self, request: Any, context: Any) -> pb.MeasuredLinks:
        reply = pb.MeasuredLinks()
        fill(reply, HOSTILE)
        return reply

    def Logs(self, request: Any, context: Any) -> Iterator[pb.LogLine]:
        yield pb.LogLine(source=HOSTILE, text=HOSTILE)

    def Serve(self, request: Any, context: Any) -> Iterator[pb.ServeEvent]:
        event = pb.ServeEvent()
        fill(event, HOSTILE)
        yield event

    def StopModel(self, request: Any, context: Any) -> pb.StopModelReply:
        error = common_pb2.Error()
        fill(error, HOSTILE)
        detail = (("edgepipe-error-bin", error.SerializeToString()),)
        context.set_trailing_metadata(detail)
        context.abort(grpc.StatusCode.INTERNAL, "broken")
        raise AssertionError

    def WatchTasks(self, request: Any, context: Any) -> Iterator[pb.TaskList]:
        reply = pb.TaskList()
        fill(reply, HOSTILE)
        yield reply

    def ListPeers(self, request: Any, context: Any) -> trust_pb2.ListPeersReply:
        reply = trust_pb2.ListPeersReply()
        fill(reply, HOSTILE)
        return reply

    def RemovePeer(self, request: Any, context: Any) -> trust_pb2.RemovePeerReply:
        reply = trust_pb2.RemovePeerReply()
        fill(reply, HOSTILE)
        return reply

    def Invite(self, commands: Any, context: Any) -> Iterator[trust_pb2.InviteEvent]:
        for kind in ("opened", "failed", "joined"):
            event = trust_pb2.InviteEvent()
            part = getattr(event, kind)
            fill(part, HOSTILE)
            part.SetInParent()
            yield event


@pytest.fixture
def node(run: Run, tmp_path: Path) -> Iterator[_Node]:
    """A node at the socket that the commands of ``run`` ask."""
    with answering(tmp_path / "data", _Node()) as node:
        yield node


def test_the_status_has_no_line_of_a_member_s_own(run: Run, node: _Node) -> None:
    for node.state in ("ready", "waiting", HOSTILE):
        done = run("status")
        assert "[link=http://a]b" in done.out
        assert_harmless(done.out + done.err)
    shown = run("status", "--json").out
    assert_harmless(shown)
    assert json.loads(shown)


def test_no_command_prints_what_a_member_sent_as_it_is(
    run: Run, node: _Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGEPIPE_LISTEN_S", "0.1")
    node.state = "waiting"
    AuditLog(TrustFolders(tmp_path / "data").audit, lambda: 0.0).record(AuditKind.DENIED, who=HOSTILE, detail=HOSTILE)
    for words in (
        ("ps",),
        ("peers",),
        ("peers", "remove", "y", "--yes"),
        ("peers", "log"),
        ("logs",),
        ("stop", "y"),
        ("--debug", "stop", "y"),
        ("serve", "y"),
        ("node", "invite", "--yes"),
        ("doctor",),
        (),
    ):
        done = run(*words)
        assert "[2J" in done.out + done.err, words
        assert "made a mistake" not in done.err
        assert_harmless(done.out + done.err)


def test_a_log_file_of_an_older_version_is_shown_harmlessly(run: Run, tmp_path: Path) -> None:
    path = log_path(tmp_path / "data")
    path.parent.mkdir(parents=True)
    path.write_text(HOSTILE.replace("\n", " ") + "\nlast\n", encoding="utf-8", newline="")
    done = run("logs")
    assert_harmless(done.out)
    assert done.out.count("\n") == 2


def test_a_log_has_one_line_per_message_and_marks_what_follows() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logger = logging.Logger("told")
    logger.addHandler(handler)
    logger.warning("studio says: %s", HOSTILE)
    assert stream.getvalue().count("\n") == 1
    try:
        raise ValueError(HOSTILE) from LinkError(HOSTILE, fact=HOSTILE)
    except ValueError:
        logger.exception("it failed")
    assert_harmless(stream.getvalue())
    _, failed, *traceback = stream.getvalue().splitlines()
    assert failed.endswith("it failed")
    assert len(traceback) > 5
    assert all(line.startswith("  | ") for line in traceback)


def test_errors_of_other_machines_are_harmless_in_every_text() -> None:
    wire = common_pb2.Error()
    fill(wire, HOSTILE)
    error = error_from_wire(wire)
    for text in (error.what, error.fact, error.next_step, error.node, error.stage, error.request_id, str(error)):
        assert text == one_line(text)
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN):
        no_metadata = grpc.aio.Metadata()
        failed = from_rpc_error(grpc.aio.AioRpcError(code, no_metadata, no_metadata, details=HOSTILE), peer="studio")
        assert failed.fact == one_line(failed.fact)
        assert "[2J" not in failed.fact
    assert EdgepipeError("a\nb").lines() == ["a\\nb"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer als 東京\u3000\u00a0🚀", "größer als 東京\u3000\u00a0🚀"),
        ("👩\u200d👩\u200d👧 می\u200cخواهم", "👩\u200d👩\u200d👧 می\u200cخواهم"),
        ("a\r\n\tb\x1b\x7f\x9b", "a\\r\\n\\tb\\x1b\\x7f\\x9b"),
        ("\u202e\u2066\u2028\u2029\ufeff\udc80", "\\u202e\\u2066\\u2028\\u2029\\ufeff\\udc80"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_what_steers_or_hides_is_shown_and_what_people_write_stays(text: str, shown: str) -> None:
    assert visible(text) == one_line(text) == shown
    assert one_line(shown) == shown
    assert json.loads(json_text({"a": text})) == {"a": text}


def test_lines_are_cut_and_kept_line_ends_stay() -> None:
    assert len(one_line("\x1b" * 10_000)) == len(one_line("y" * 10_000)) == MAX_LINE_CHARS
    assert one_line("y" * MAX_LINE_CHARS) == "y" * MAX_LINE_CHARS
    assert one_line("abcdef", most_chars=4) == "abc…"
    assert visible("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"
