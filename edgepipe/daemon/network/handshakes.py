"""Connections that did not prove their identity: counted over all of a node's processes, and audited."""

from __future__ import annotations

import asyncio

from edgepipe.daemon.processes.children import Children
from edgepipe.security.mutual_tls import MutualTls
from edgepipe.telemetry.audit import AuditKind, AuditLog

_LOOK_S = 5.0  # a handshake may take 3 s


class RefusedHandshakes:
    """Counts refused handshakes (``count``) and audits new ones (``run``)."""

    def __init__(self, *, tls: MutualTls, children: Children, audit: AuditLog) -> None:
        self._tls = tls
        self._children = children
        self._audit = audit

    def count(self) -> int:
        """Return the refused handshakes of all living processes."""
        return self._tls.refused_handshakes + sum(
            child.progress.refused_handshakes for child in self._children.running()
        )

    async def run(self) -> None:
        """Audit new refusals, until cancelled. A handshake still under way is counted at the next check."""
        audited = earlier = self.count()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = self.count()
            settled, earlier = min(earlier, now), now
            if settled > audited:
                refused = settled - audited
                detail = f"{refused} connection{'s' * (refused != 1)}"
                self._audit.record(AuditKind.HANDSHAKE_REFUSED, who="strangers", detail=detail)
            audited = settled  # the counts of ended children are gone
