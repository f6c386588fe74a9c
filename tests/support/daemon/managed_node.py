"""A node that the page's actions reach: tickets and tasks are real, nothing else happens."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgepipe.daemon.page_tickets import PageTickets
from edgepipe.daemon.tasks.book import TaskBook
from edgepipe.daemon.tasks.commands import arguments_of
from edgepipe.errors import EdgepipeError
from edgepipe.ids import NodeId
from edgepipe.testing.clock import START_S
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.serving import LinkProfile
from edgepipe.wire.tasks import NO_CHOICES, ServeChoices, TaskList
from edgepipe.wire.trust import (
    InviteAsks,
    InviteEvent,
    InviteJoined,
    InviteOpened,
    ListPeersReply,
    PeerState,
)
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import trust_pb2
from tests.support.daemon.admin_server import FakeNode, refuse

PEERS = ListPeersReply(
    cluster_name="home",
    node_id=NodeId("node-1"),
    peers=(
        PeerState(node_id=NodeId("node-1"), name="gamer", role="owner", state="alive", self=True),
        PeerState(node_id=NodeId("node-2"), name="studio", role="member", state="alive", added_by="gamer"),
        PeerState(node_id=NodeId("node-4"), name="attic", role="member", state="unseen", address="10.0.0.9:7117"),
    ),
)


class ManagedNode(FakeNode):
    """Notes what the page has asked for, in ``asked``."""

    def __init__(self) -> None:
        super().__init__(peers=PEERS)
        tokens = itertools.count()
        self.now_s = START_S
        self.tickets = PageTickets(now_s=lambda: self.now_s, new_token=lambda: f"ticket-{next(tokens)}")
        self.asked: list[str] = []
        self.book = TaskBook()
        self.results: dict[str, bytes] = {}  # results of tasks by kind: they end at once
        self.links = pb.MeasuredLinks()  # as last measured
        self.changed = threading.Condition()
        self.ended = threading.Event()
        self._ids = itertools.count(1)

    def IssueTicket(self, request: Any, context: Any) -> pb.PageTicket:
        return pb.PageTicket(ticket=self.tickets.issue())

    def RedeemTicket(self, request: Any, context: Any) -> pb.RedeemReply:
        return pb.RedeemReply(valid=self.tickets.redeem(request.ticket))

    def StartTask(self, request: Any, context: Any) -> pb.TaskState:
        try:
            choices = from_wire(request.choices, ServeChoices)
            words = arguments_of(request.kind, request.model, choices, data_dir=Path("/d"), models_dir=Path("/m"))
        except EdgepipeError as error:
            refuse(context, error)
        chosen = words[words.index("--json") + 1 : words.index("--data-dir")] if choices != NO_CHOICES else ()
        self.asked.append(" ".join((request.kind, request.model, *chosen)).strip())
        with self.changed:
            task = self.book.add(
                f"task-{next(self._ids)}", kind=request.kind, model=request.model, choices=choices, now_us=10**15
            )
            if task.state == "waiting":
                self.book.started(task.task_id)
            if request.kind in self.results:
                self.book.ended(task.task_id, state="done", now_us=10**15, result=self.results[request.kind])
            self.changed.notify_all()
        return to_wire(self.book.get(task.task_id), pb.TaskState)

    def CancelTask(self, request: Any, context: Any) -> pb.TaskState:
        self.asked.append(f"cancel {request.task_id}")
        with self.changed:
            self.book.ended(request.task_id, state="cancelled", now_us=10**15)
            self.changed.notify_all()
        return to_wire(self.book.get(request.task_id), pb.TaskState)

    def GetTask(self, request: Any, context: Any) -> pb.TaskState:
        return to_wire(self.book.get(request.task_id), pb.TaskState)

    def WatchTasks(self, request: Any, context: Any) -> Iterator[pb.TaskList]:
        known = None
        while context.is_active() and not self.ended.is_set():
            with self.changed:
                tasks = self.book.list()
                if tasks == known:
                    self.changed.wait(0.05)
                    continue
            known = tasks
            yield to_wire(TaskList(tasks=tasks), pb.TaskList)

    def RemovePeer(self, request: Any, context: Any) -> trust_pb2.RemovePeerReply:
        self.asked.append(f"remove peer {request.peer} {request.others}".strip())
        return trust_pb2.RemovePeerReply(name=request.peer)

    def PromotePeer(self, request: Any, context: Any) -> trust_pb2.PromotePeerReply:
        self.asked.append(f"promote {request.peer}")
        return trust_pb2.PromotePeerReply(name=request.peer)

    def MeasureLinks(self, request: Any, context: Any) -> pb.MeasuredLinks:
        if request.remembered:
            return self.links
        self.asked.append("measure")
        ends = ("node-1", "node-2", "node-3")
        links = [
            LinkProfile(sender=a, receiver=b, one_way_s=0.0004 if "node-3" not in (a, b) else 0.0062, bytes_per_s=1.1e8)
            for a in ends
            for b in ends
            if a != b
        ]
        self.links = pb.MeasuredLinks(links=[to_wire(link, pb.LinkProfile) for link in links], at_ms=10**12)
        return self.links

    def Drain(self, request: Any, context: Any) -> Iterator[pb.DrainEvent]:
        self.asked.append("undrain" if request.undo else "drain")
        yield from ()

    def Logs(self, request: Any, context: Any) -> Iterator[pb.LogLine]:
        for number in range(3):
            yield pb.LogLine(source="node", text=f"line {number} <b>bold</b>")
        while context.is_active() and not self.ended.wait(0.05):
            pass

    def Invite(self, request_iterator: Any, context: Any) -> Iterator[trust_pb2.InviteEvent]:
        first = next(request_iterator)
        self.asked.append(f"invite {first.start.role}".strip())
        yield _event(InviteOpened(code="4-crossover-clockwork", address="192.168.1.20:7133", valid_s=300))
        yield _event(InviteAsks(name="laptop", address="192.168.1.40", node_id=NodeId("coralfox"), at_most_s=60))
        answer = next(request_iterator).answer.accept
        self.asked.append(f"answer {answer}")
        if answer:
            yield _event(InviteJoined(name="laptop", address="192.168.1.40", node_id=NodeId("coralfox"), role="member"))


def _event(value: Any) -> trust_pb2.InviteEvent:
    return to_wire(InviteEvent(event=value), trust_pb2.InviteEvent)
