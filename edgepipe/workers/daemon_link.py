"""The child's side of the one stream between a child and its daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from edgepipe.errors import EdgepipeError
from edgepipe.ids import NodeId
from edgepipe.link.channels import make_unix_channel, translated
from edgepipe.security.access import Kind
from edgepipe.security.certificates import make_key_pair, read_certificate
from edgepipe.security.mutual_tls import Denial, MutualTls, Peer, Plaintext, Security
from edgepipe.wire.common import error_to_wire
from edgepipe.wire.v1 import common_pb2, node_pb2, node_pb2_grpc
from edgepipe.workers.settings import ChildSettings

_MAX_WAITING = 64  # more reports than this wait only while the daemon does not run: progress is worth nothing then
_MAX_REPORTS = 1024  # the daemon reads at once; more waiting means that it hangs, and then the child ends
_CALLERS: dict[str, tuple[Kind, ...]] = {  # who connects to a child of that kind
    "gateway": (),
    "engine": (Kind.GATEWAY, Kind.NODE),
    "stage": (Kind.ENGINE, Kind.STAGE),
}


class DaemonLink:
    """Reports to the daemon and takes its commands. ``run`` must be running for either to move."""

    def __init__(self, settings: ChildSettings) -> None:
        self.settings = settings
        self._tls = self._mutual_tls() if settings.encrypted else None
        self.security: Security = self._tls or Plaintext()
        self.has_reported = False
        self._reports: asyncio.Queue[node_pb2.ChildReport | None] = asyncio.Queue(_MAX_REPORTS)
        self._commands: asyncio.Queue[node_pb2.ChildCommand | None] = asyncio.Queue()

    async def run(self) -> None:
        """Carry both ways until the daemon says stop, goes away, or this is cancelled; the last reports still go out.

        Raises LinkError when the daemon is gone and PairingRejected when it does not know this child.
        """
        async with make_unix_channel(self.settings.socket) as channel:
            with translated("the node's daemon"):
                call = node_pb2_grpc.ChildrenStub(channel).Attach(self._outgoing())
                async for command in call:
                    if command.HasField("stop"):
                        break
                    if command.HasField("introduce"):
                        self._introduce(command.introduce)
                        continue
                    self._commands.put_nowait(command)
                self._commands.put_nowait(None)

    async def commands(self) -> AsyncIterator[node_pb2.ChildCommand]:
        """Commands other than stop, in order; ends when the daemon says stop."""
        while (command := await self._commands.get()) is not None:
            yield command

    def started(self, *, port: int, profile: common_pb2.DeviceProfile | None = None) -> None:
        """Say that this child is ready for work."""
        told = node_pb2.ChildStarted(
            child_id=self.settings.child_id, kind=self.settings.kind, port=port, certificate=self.security.certificate
        )
        if profile is not None:
            told.profile.CopyFrom(profile)
        self.report(node_pb2.ChildReport(started=told))

    def report(self, report: node_pb2.ChildReport) -> None:
        """Queue a report."""
        if not self.has_reported:
            report.child_id = self.settings.child_id
        self.has_reported = True
        self._reports.put_nowait(report)

    def progress(self, progress: node_pb2.ChildProgress) -> None:
        """Report how far this child is; left out while many reports wait, as when the machine's daemon was stopped."""
        if self._tls is not None:
            progress.refused_handshakes = self._tls.refused_handshakes
        if self._reports.qsize() < _MAX_WAITING:
            self.report(node_pb2.ChildReport(progress=progress))

    def fault(self, error: EdgepipeError) -> None:
        """Report why this child cannot go on."""
        self.report(node_pb2.ChildReport(fault=error_to_wire(error)))

    def finish(self) -> None:
        """No report follows."""
        self._reports.put_nowait(None)

    def _mutual_tls(self) -> MutualTls:
        """With a key of this process alone; nobody is let in before the daemon has introduced somebody."""
        return MutualTls(make_key_pair(), callers=_CALLERS[self.settings.kind], on_denied=self._denied)

    def _denied(self, denial: Denial) -> None:
        if self._reports.qsize() < _MAX_WAITING:  # a peer can make more of them than anybody reads
            denied = node_pb2.DeniedCall(who=denial.who, what=f"{self.settings.kind}: {denial.what}")
            self.report(node_pb2.ChildReport(denied=denied))

    def _introduce(self, told: node_pb2.IntroducedPeers) -> None:
        """Raises CertificateInvalid: the daemon checks them all before."""
        if self._tls is not None:
            peers = [(_peer(one), one.may_not_call) for one in told.peers]
            self._tls.introduce(
                (peer for peer, may_not_call in peers if not may_not_call), nodes=(peer for peer, _ in peers)
            )
        self.report(node_pb2.ChildReport(introduced=told.version))

    async def _outgoing(self) -> AsyncIterator[node_pb2.ChildReport]:
        while (report := await self._reports.get()) is not None:
            yield report


def _peer(told: node_pb2.IntroducedPeer) -> Peer:
    return Peer(node_id=NodeId(told.node_id), kind=Kind(told.kind), certificate=read_certificate(told.certificate))
