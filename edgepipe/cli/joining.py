"""``edgepipe node join``: uses the code of another machine, through the running node or without it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe.addresses import host_maybe_port, with_port
from edgepipe.cli.admin import connect, no_node, status_if_running
from edgepipe.cli.output import say
from edgepipe.daemon.machine.data_dir import DataDir
from edgepipe.errors import ConfigInvalid, NodeUnreachable, NoPeersFound
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.cluster.discovery import Announcement


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Result of a join."""

    cluster_name: str
    num_peers: int  # other members of the cluster
    running: bool  # the node runs, and restarts itself as a member
    node_name: str  # this machine's name in the cluster
    wanted_name: str = ""  # this machine's own name, if another machine has it; empty: the same name


async def join(data_dir: Path, *, node_name: str, code: str, host: str, new_identity: bool, listen_s: float) -> Joined:
    """Pair, and store the cluster. Without a host, find the inviting node by mDNS.

    Raises NoPeersFound when no node invites, NodeUnreachable on a member whose node is stopped, and errors of pairing.
    """
    from edgepipe.cluster.codes import read_code
    from edgepipe.cluster.founding import home_of

    understood = read_code(code)  # a wrong code fails before the search
    running = await status_if_running(data_dir) is not None  # a killed node leaves its socket behind
    if not (new_identity or running) and home_of(data_dir) is not None:
        error = no_node(data_dir)
        error.next_step += "    (to leave that cluster: edgepipe node join --new-identity CODE)"
        raise error
    address, port = split_host(host)
    if not (address or understood.host):
        address, port = await find_inviting(listen_s)
    if running:
        return await _through_node(data_dir, code, address, port, new_identity=new_identity)
    return await _alone(data_dir, node_name, code, address, port, new_identity=new_identity)


async def find_inviting(listen_s: float) -> tuple[str, int]:
    """Find the one node that invites on this network: host, pairing port. Raises NoPeersFound, ConfigInvalid."""
    from edgepipe.cluster.browsing import browse

    found = await browse(listen_s=listen_s, until=lambda node: bool(node.pairing_port))
    inviting = sorted(
        {(node.host, node.pairing_port): node for node in found if node.pairing_port}.values(), key=_address
    )
    if len(inviting) == 1:
        return inviting[0].host, inviting[0].pairing_port
    if inviting:
        raise ConfigInvalid(
            f"{len(inviting)} nodes are inviting",
            fact=_found_text(inviting),
            next_step="name one: edgepipe node join --host "
            f"{with_port(inviting[0].host, inviting[0].pairing_port)} CODE",
        )
    if found:
        raise NoPeersFound(
            "no node invites now",
            fact=f"found {_found_text(sorted(found, key=_address))}",
            next_step="on one of them: edgepipe node invite",
        )
    raise NoPeersFound(
        fact=f"no node announced _edgepipe._tcp by mDNS within {listen_s:g} s",
        next_step="name the inviting machine: edgepipe node join --host HOST CODE    (or: edgepipe doctor)",
    )


def show_joined(joined: Joined) -> None:
    """Print the result for people."""
    others = f"{joined.num_peers} other node{'s' * (joined.num_peers != 1)}"
    say(f"joined '{one_line(joined.cluster_name)}', {others}", first="✓ ")
    if joined.wanted_name:
        say(f"this machine is named '{joined.node_name}': the cluster has another '{joined.wanted_name}'", first="  ")
    print("  next    edgepipe status" if joined.running else "  next    edgepipe node start", flush=True)


async def _through_node(data_dir: Path, code: str, host: str, port: int, *, new_identity: bool) -> Joined:
    from edgepipe.wire.trust import JoinRequest, JoinWaiting

    request = JoinRequest(code=code, host=host, port=port, new_identity=new_identity)
    async with connect(data_dir) as admin:
        async for event in admin.join(request):
            if isinstance(event.event, JoinWaiting):
                _say_waiting(event.event.host_name)
            else:
                done = event.event
                return Joined(
                    cluster_name=done.cluster_name,
                    num_peers=done.num_peers,
                    running=True,
                    node_name=done.node_name,
                    wanted_name=done.wanted_name,
                )
    raise NodeUnreachable("the node ended before it had joined", next_step="edgepipe logs")


async def _alone(data_dir: Path, node_name: str, code: str, host: str, port: int, *, new_identity: bool) -> Joined:
    """Join without a running node. Lock the data directory meanwhile, so that no node starts."""
    from edgepipe.cluster.founding import TrustFolders
    from edgepipe.daemon.pairing.joining import join_cluster
    from edgepipe.system import SystemClock
    from edgepipe.telemetry.audit import AuditLog

    opened = await asyncio.to_thread(DataDir, data_dir)
    try:
        member = await join_cluster(
            data_dir,
            node_name=node_name,
            code=code,
            host=host,
            port=port,
            new_identity=new_identity,
            audit=AuditLog(TrustFolders(data_dir).audit, SystemClock().wall_s),
            on_waiting=_say_waiting,
        )
    finally:
        opened.close()
    return Joined(
        cluster_name=member.store.cluster_name,
        num_peers=len(member.store.peers) - 1,
        running=False,
        node_name=member.node_name,
        wanted_name=member.wanted_name,
    )


def _say_waiting(host_name: str) -> None:
    say(f"code accepted; waiting for a person at '{one_line(host_name)}' to let this machine in ...", first="  ")


def split_host(host: str) -> tuple[str, int]:
    """Split ``HOST`` or ``HOST:PORT``; port 0: the default port. Raises ConfigInvalid."""
    name, port = host_maybe_port(host)
    if not port and not host.endswith(":"):
        return name, 0
    if not (name and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigInvalid(
            f"the host cannot be '{host}'",
            fact="a port is a number from 1 to 65535",
            next_step="give HOST, or HOST:PORT as 'node invite' shows it",
        )
    return name, int(port)


def _address(node: Announcement) -> tuple[str, int]:
    return node.host, node.port


def _found_text(found: Sequence[Announcement]) -> str:
    return "; ".join(f"'{node.node_name}' at {node.host}, cluster '{node.cluster_name}'" for node in found[:4])
