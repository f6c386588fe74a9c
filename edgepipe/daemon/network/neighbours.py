"""What was found on the network: members are dialled; others are shown, so that nobody wonders where they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from edgepipe import PROTOCOL_VERSION
from edgepipe.cluster.discovery import Announcement
from edgepipe.cluster.trust_keeper import TrustKeeper
from edgepipe.wire.v1 import node_pb2 as pb

_MOST = 64  # a flood of inventions pushes out inventions; members are dialled all the same

Dial = Callable[[str, str], None]  # address, node id


class Neighbours:
    """Sorts announcements."""

    def __init__(self, *, trust: TrustKeeper, dial: Dial) -> None:
        self._trust = trust
        self._dial = dial
        self._others: OrderedDict[str, Announcement] = OrderedDict()  # by node id

    def found(self, one: Announcement) -> None:
        """Somebody announced itself, perhaps falsely: TLS tells."""
        trusted = any(peer.node_id == one.node_id for peer in self._trust.outbound())
        if trusted:
            self._dial(one.address, one.node_id)
        if trusted and one.protocol_version == PROTOCOL_VERSION:
            self._others.pop(one.node_id, None)
            return
        self._others[one.node_id] = one
        self._others.move_to_end(one.node_id)
        if len(self._others) > _MOST:
            self._others.popitem(last=False)

    def others(self) -> Iterator[pb.Neighbour]:
        """Nodes that are no members, or that speak another version."""
        for one in self._others.values():
            yield pb.Neighbour(
                node_id=one.node_id,
                name=one.node_name,
                address=one.address,
                cluster_id=one.cluster_id,
                cluster_name=one.cluster_name,
                edgepipe_version=one.edgepipe_version,
                protocol_version=one.protocol_version,
                pairing_port=one.pairing_port,
            )
