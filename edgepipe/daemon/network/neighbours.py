"""Nodes found on the network: members are dialled; others are listed, so that people see them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from edgepipe import PROTOCOL_VERSION
from edgepipe.cluster.discovery import Announcement
from edgepipe.cluster.trust_keeper import TrustKeeper
from edgepipe.ids import NodeId
from edgepipe.wire.nodes import ForeignNode

_MOST = 64  # a flood of invented nodes displaces invented nodes; members are dialled all the same

Dial = Callable[[str, str], None]  # address, node id


class Neighbours:
    """Separates members from other announced nodes."""

    def __init__(self, *, trust: TrustKeeper, dial: Dial) -> None:
        self._trust = trust
        self._dial = dial
        self._others: OrderedDict[str, Announcement] = OrderedDict()  # announcements by node id

    def found(self, announcement: Announcement) -> None:
        """Take an announcement. It may be false: TLS checks the node's identity."""
        earlier = [key for key, other in self._others.items() if other.address == announcement.address]
        for key in (*earlier, announcement.node_id):  # the machine came back under another key, or was let in
            self._others.pop(key, None)
        if self._is_trusted(announcement):
            self._dial(announcement.address, announcement.node_id)
        if self._belongs(announcement):
            return
        self._others[announcement.node_id] = announcement
        if len(self._others) > _MOST:
            self._others.popitem(last=False)

    def others(self) -> Iterator[ForeignNode]:
        """Yield the nodes that are no members, or that speak another version."""
        strange = [other for other in self._others.values() if not self._belongs(other)]  # trust may be newer
        for announcement in strange:
            yield ForeignNode(
                node_id=NodeId(announcement.node_id),
                name=announcement.node_name,
                address=announcement.address,
                cluster_id=announcement.cluster_id,
                cluster_name=announcement.cluster_name,
                edgepipe_version=announcement.edgepipe_version,
                protocol_version=announcement.protocol_version,
                pairing_port=announcement.pairing_port,
            )

    def _is_trusted(self, announcement: Announcement) -> bool:
        return any(peer.node_id == announcement.node_id for peer in self._trust.outbound())

    def _belongs(self, announcement: Announcement) -> bool:
        """Return whether this is a member that speaks this version."""
        return self._is_trusted(announcement) and announcement.protocol_version == PROTOCOL_VERSION
