"""Decides which nodes may hold a heartbeat stream with this node; the status shows refusals, the log has each once."""

from __future__ import annotations

import logging
from collections import OrderedDict

from edgepipe.errors import EdgepipeError, PairingRejected
from edgepipe.security.trust_view import TrustedPeer
from edgepipe.telemetry.log import Once
from edgepipe.wire.common import MAX_HELLO_CHARS, Hello, check_hello
from edgepipe.wire.errors import error_from_wire, error_to_wire

logger = logging.getLogger(__name__)

_MAX_REFUSALS = 64  # refused addresses shown in the status


class GreetingChecks:
    """Checks greetings and keeps the refusals."""

    def __init__(self, hello: Hello) -> None:
        """``hello``: this node's introduction."""
        self.refusals: OrderedDict[str, EdgepipeError] = OrderedDict()  # address or name -> why it does not join
        self._hello = hello
        self._once = Once(logger)

    def require(self, peer: TrustedPeer | None, hello: Hello) -> None:
        """Raise PairingRejected unless the node is a member."""
        if peer is None:
            error = PairingRejected(
                f"{hello.node_name or hello.node_id} is not paired with this node",
                fact=f"{hello.node_id[:12]} is no member of cluster '{self._hello.cluster_name}' as known here",
                next_step="pair it: edgepipe node invite here, edgepipe node join there",
                node=hello.node_name,
            )
            self.refuse(f"node {hello.node_name or hello.node_id}", error)
            raise error

    def admit(self, hello: Hello) -> str:
        """Return the caller's node id. Raises VersionMismatch, RemoteProtocolError, PairingRejected (other cluster)."""
        who = f"node {(hello.node_name or hello.node_id)[:MAX_HELLO_CHARS]}"
        try:
            check_hello(hello, own_name=self._hello.node_name or "this node")
            if hello.cluster_id != self._hello.cluster_id:
                raise PairingRejected(
                    f"node {hello.node_name} belongs to another cluster",
                    fact=f"it is in {cluster_label(hello)}, this node in {cluster_label(self._hello)}",
                    next_step="to bring them together: edgepipe node invite on one, edgepipe node join on the other",
                    node=hello.node_name,
                )
        except EdgepipeError as error:
            self.refuse(who, error)
            raise
        self.refusals.pop(who, None)
        return hello.node_id

    def refuse(self, who: str, error: EdgepipeError) -> None:
        """Note why a node does not join."""
        self._once.log(logging.WARNING, f"{who} {error.code}", "does not join: %s: %s", who, error)
        self.refusals[who] = error_from_wire(error_to_wire(error))  # a copy: a raised error keeps its messages alive
        self.refusals.move_to_end(who)
        if len(self.refusals) > _MAX_REFUSALS:
            self.refusals.popitem(last=False)


def cluster_label(hello: Hello) -> str:
    """Return ``'home' (4kq3zt)``: the ids distinguish two clusters of one name."""
    return f"'{hello.cluster_name or hello.cluster_id}' ({hello.cluster_id[:6]})"
