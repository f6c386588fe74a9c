"""Calls to nodes whose addresses change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgepipe.config import Timeouts
from edgepipe.daemon.network.peers import Peers
from edgepipe.errors import LinkError
from edgepipe.ids import NodeId
from edgepipe.link.channels import bind, make_server
from edgepipe.security.access import ProcessKind
from edgepipe.security.mutual_tls import MutualTls
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.common import Hello
from edgepipe.wire.nodes import NodeState
from tests.support.network.tls_ends import Echo, Party


class Home:
    """This node, and the others at the addresses that they report now."""

    def __init__(self, own: Party, *others: Party) -> None:
        self.at: dict[str, str] = {}  # address by node id
        security = MutualTls(own.pair, callers=(ProcessKind.NODE,))
        security.introduce([], nodes=[party.peer for party in (own, *others)])
        self.peers = Peers(
            local=cast("Any", SimpleNamespace(state=NodeState(node_id=NodeId(own.pair.fingerprint), name="here"))),
            membership=cast("Any", SimpleNamespace(reachable=self._reachable, member=lambda _: None)),
            hello=Hello(role="node"),
            security=security,
            timeouts=Timeouts.loopback(),
            clock=FakeClock(),
            book=cast("Any", SimpleNamespace(binds=lambda *_: True)),
        )

    def _reachable(self) -> list[Any]:
        return [
            SimpleNamespace(node=NodeState(node_id=NodeId(node_id), name=node_id[:6], address=address))
            for node_id, address in self.at.items()
        ]


@asynccontextmanager
async def node_of(party: Party, *known: Party, port: int = 0) -> AsyncIterator[tuple[int, Echo]]:
    """A node that answers every call of ``known``; its port."""
    security, echo = MutualTls(party.pair, callers=(ProcessKind.NODE,)), Echo()
    security.introduce([other.peer for other in known], nodes=())
    server = make_server(security)
    server.add_generic_rpc_handlers((echo,))
    bound = bind(server, security, host="127.0.0.1", port=port)
    await server.start()
    try:
        yield bound, echo
    finally:
        await server.stop(None)


async def test_a_node_is_reached_at_an_address_that_another_node_had() -> None:
    """Two machines swap their addresses, or one is installed anew with another key."""
    own, former, present = Party(), Party(), Party()
    home = Home(own, former, present)
    before, after = former.pair.fingerprint, present.pair.fingerprint
    async with node_of(former, own) as (port, _):
        home.at = {before: f"127.0.0.1:{port}"}
        await home.peers.stand_by(before)
    async with node_of(present, own, port=port) as (port, echo):
        home.at = {after: f"127.0.0.1:{port}"}
        await home.peers.stand_by(after)
        assert echo.calls == ["Node/StandBy"]
    await home.peers.close()


async def test_a_node_that_has_moved_is_called_at_its_new_address() -> None:
    own, other = Party(), Party()
    home = Home(own, other)
    node_id = other.pair.fingerprint
    async with node_of(other, own) as (port, _):
        home.at = {node_id: f"127.0.0.1:{port}"}
        await home.peers.stand_by(node_id)
    with pytest.raises(LinkError):
        await home.peers.stand_by(node_id)
    async with node_of(other, own) as (port, echo):
        home.at = {node_id: f"127.0.0.1:{port}"}
        await home.peers.stand_by(node_id)
        assert echo.calls == ["Node/StandBy"]
    await home.peers.close()
