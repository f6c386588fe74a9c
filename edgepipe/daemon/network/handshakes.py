"""Connections that did not prove who they are: counted over all of a node's processes, and audited."""

from __future__ import annotations

import asyncio

from edgepipe.daemon.processes.children import Children
from edgepipe.security.mutual_tls import MutualTls
from edgepipe.telemetry.audit import AuditKind, AuditLog

_LOOK_S = 5.0  # a handshake may take 3 s


class RefusedHandshakes:
    """``run`` looks now and then; ``count`` is what there is now."""

    def __init__(self, *, tls: MutualTls, children: Children, audit: AuditLog) -> None:
        self._tls = tls
        self._children = children
        self._audit = audit

    def count(self) -> int:
        """Of the processes that live."""
        return self._tls.refused_handshakes + sum(
            child.progress.refused_handshakes for child in self._children.running()
        )

    async def run(self) -> None:
        """Until cancelled. One that is still in its handshake is counted the next time."""
        told = earlier = self.count()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = self.count()
            settled, earlier = min(earlier, now), now
            if settled > told:
                refused = settled - told
                detail = f"{refused} connection{'s' * (refused != 1)}"
                self._audit.record(AuditKind.HANDSHAKE_REFUSED, who="strangers", detail=detail)
            told = settled  # children that ended took theirs with them
