"""The child's side of the one stream between a child and its daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from edgepipe.backend.types import DeviceProfile
from edgepipe.link.channels import make_unix_channel, translated
from edgepipe.security.access import ProcessKind
from edgepipe.security.certificates import make_key_pair, read_certificate
from edgepipe.security.mutual_tls import Denial, MutualTls, Peer
from edgepipe.wire.children import (
    ChildCommand,
    ChildProgress,
    ChildReport,
    ChildStarted,
    Command,
    DeniedCall,
    Introduced,
    IntroducedPeer,
    IntroducedPeers,
    Report,
    StopChild,
)
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.v1 import node_pb2, node_pb2_grpc
from edgepipe.workers.settings import ChildSettings

_MAX_WAITING = 64  # more reports wait only while the daemon does not run: then progress reports are dropped
_MAX_REPORTS = 1024  # the daemon reads at once; more waiting means that it hangs, and then the child ends
_CALLERS: dict[str, tuple[ProcessKind, ...]] = {  # kinds of processes that connect to a child of that kind
    "gateway": (),
    "engine": (ProcessKind.GATEWAY, ProcessKind.NODE),
    "stage": (ProcessKind.ENGINE, ProcessKind.STAGE),
}


class DaemonLink:
    """Sends reports to the daemon and takes its commands, while ``run`` runs."""

    def __init__(self, settings: ChildSettings) -> None:
        self.settings = settings
        self.security = MutualTls(  # this process has a key of its own; it denies all calls until it knows peers
            make_key_pair(),
            callers=_CALLERS[settings.kind],
            on_denied=self._denied,
            keepalive=settings.keepalive,
        )
        self.has_reported = False
        self._reports: asyncio.Queue[node_pb2.ChildReport | None] = asyncio.Queue(_MAX_REPORTS)
        self._commands: asyncio.Queue[Command | None] = asyncio.Queue()

    async def run(self) -> None:
        """Carry both ways until the daemon says stop, goes away, or this is cancelled; send the last reports.

        Raises LinkError when the daemon is gone, and PairingRejected when it does not know this child.
        """
        async with make_unix_channel(self.settings.socket, keepalive=self.settings.keepalive) as channel:
            with translated("the node's daemon"):
                call = node_pb2_grpc.ChildrenStub(channel).Attach(self._outgoing())
                async for message in call:
                    match from_wire(message, ChildCommand).command:
                        case StopChild():
                            break
                        case IntroducedPeers() as introduced:
                            self._introduce(introduced)
                        case command:
                            self._commands.put_nowait(command)
                self._commands.put_nowait(None)

    async def commands(self) -> AsyncIterator[Command]:
        """Yield commands other than stop, in order; end when the daemon says stop."""
        while (command := await self._commands.get()) is not None:
            yield command

    def started(self, *, port: int, profile: DeviceProfile | None = None) -> None:
        """Report that this child is ready for work."""
        started = ChildStarted(
            child_id=self.settings.child_id,
            kind=self.settings.kind,
            port=port,
            profile=profile,
            certificate=self.security.certificate,
        )
        self.report(started)

    def report(self, report: Report) -> None:
        """Queue a report. An error is the reason why this child cannot continue."""
        child_id = "" if self.has_reported else self.settings.child_id
        self.has_reported = True
        self._reports.put_nowait(to_wire(ChildReport(report=report, child_id=child_id), node_pb2.ChildReport))

    def progress(self, progress: ChildProgress) -> None:
        """Report this child's progress; drop it while many reports wait, as when the daemon is stopped."""
        if self._reports.qsize() < _MAX_WAITING:
            self.report(replace(progress, refused_handshakes=self.security.refused_handshakes))

    def finish(self) -> None:
        """End the reports."""
        self._reports.put_nowait(None)

    def _denied(self, denial: Denial) -> None:
        if self._reports.qsize() < _MAX_WAITING:  # a peer can cause more of them than the daemon reads
            self.report(DeniedCall(who=denial.who, what=f"{self.settings.kind}: {denial.what}"))

    def _introduce(self, introduced: IntroducedPeers) -> None:
        """Replace the known peers. Raises CertificateInvalid, but the daemon has checked them all before."""
        peers = [(_peer(entry), entry.may_not_call) for entry in introduced.peers]
        self.security.introduce(
            (peer for peer, may_not_call in peers if not may_not_call), nodes=(peer for peer, _ in peers)
        )
        self.report(Introduced(version=introduced.version))

    async def _outgoing(self) -> AsyncIterator[node_pb2.ChildReport]:
        while (report := await self._reports.get()) is not None:
            yield report


def _peer(entry: IntroducedPeer) -> Peer:
    return Peer(node_id=entry.node_id, kind=ProcessKind(entry.kind), certificate=read_certificate(entry.certificate))
