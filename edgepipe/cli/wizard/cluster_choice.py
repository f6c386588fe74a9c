"""The second step: which cluster the machine joins, keeps or creates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from edgepipe.addresses import with_port
from edgepipe.cli.admin import no_node, run_async
from edgepipe.cli.doctor.findings import multicast_findings
from edgepipe.cli.doctor.machine_findings import check_multicast, network_facts
from edgepipe.cli.wizard import own_node
from edgepipe.cli.wizard.asking import AskedChoice, Back, Quit, check_name, done, filled, say, warn
from edgepipe.cli.wizard.findings import ports_of, show_finding
from edgepipe.cli.wizard.state import Setup
from edgepipe.cluster.founding import OwnCluster
from edgepipe.cluster.tries import ADDRESS_TRIES
from edgepipe.errors import (
    ConfigInvalid,
    EdgepipeError,
    NodeUnreachable,
    NoPeersFound,
    PairingRejected,
)
from edgepipe.interrupts import run_interruptible

if TYPE_CHECKING:
    from edgepipe.cluster.discovery import Announcement
    from edgepipe.wire.nodes import ClusterStatus

_CODE_FLAGS = "--join CODE, or --cluster NAME to start a new cluster"
_NEW, _ADDRESS, _AGAIN, _DOCTOR, _QUIT = "new", "address", "again", "doctor", "quit"


def choose_cluster(setup: Setup, status: ClusterStatus | None) -> None:
    """Ask which cluster to join, or create one. ``status``: of the running node. Raises Quit, NoPeersFound."""
    own = status.node_id if status is not None else ""
    while True:
        say(f"     listening for other nodes, {setup.config.listen_s:g} s ...", style="dim")
        found = [node for node in browse_nodes(setup) if node.node_id != own]
        if not found:
            explain_silence(setup)
        choices = [
            AskedChoice(value=node.address, text=f"join '{node.cluster_name}', found on {node.node_name} ({node.host})")
            for node in _one_per_cluster(found)
        ]
        inviting = [node for node in found if node.pairing_port]
        keep = (
            f"keep '{status.cluster_name}' of this machine" if status else "this is my first machine: create a cluster"
        )
        default = choices[0].value if inviting or (choices and not status) else _NEW
        choices += [
            AskedChoice(value=_NEW, text=keep),
            AskedChoice(value=_ADDRESS, text="join by a machine's address"),
            AskedChoice(value=_AGAIN, text="search again"),
            AskedChoice(value=_DOCTOR, text="find problems (edgepipe doctor)"),
            AskedChoice(value=_QUIT, text="quit"),
        ]
        answer = setup.asking.choose("Which cluster?", choices, default=default)
        if answer == _QUIT:
            if found:
                raise Quit
            raise NoPeersFound(
                fact=f"none announced itself within {setup.config.listen_s:g} s",
                next_step="edgepipe setup    (continues where it stopped)",
            )
        if answer == _DOCTOR:
            _diagnose(setup)
        elif answer != _AGAIN:
            with suppress(Back):  # Back leads to the choice of a cluster again
                if _follow(setup, answer, found, status):
                    return


def _follow(setup: Setup, answer: str, found: Sequence[Announcement], status: ClusterStatus | None) -> bool:
    """Create, keep or join the cluster of an answer. Return False to choose again."""
    if answer == _NEW:
        if status is None:
            name = setup.asking.text("Name of the cluster:", default=setup.config.cluster or "home", check=check_name)
            create_cluster(setup, name, status)
        return True
    if answer == _ADDRESS:
        host = setup.asking.text("Address of a machine that runs edgepipe:", check=filled)
        return reachable(setup, host) and join_asking(setup, host)
    return join_asking(setup, _pairing_place(found, answer))


def join_asking(setup: Setup, host: str) -> bool:
    """Ask for the code, at most as often as the inviting machine allows. Return False to choose a cluster again."""
    say("     on that machine: edgepipe node invite    (it shows a code)", style="dim")
    for tries in range(ADDRESS_TRIES, 0, -1):
        code = setup.asking.text("Pairing code:", check=_check_code, flags=_CODE_FLAGS)
        try:
            join_with(setup, code, host)
        except PairingRejected as error:
            warn(error.what, remedy=error.fact or error.next_step)
            if tries == 1:
                raise
        except NodeUnreachable as error:
            warn(error.what, remedy=error.fact)
            return False
        except EdgepipeError as error:
            warn(error.what, remedy=error.next_step)
            return False
        else:
            return True
    return False


def join_with(setup: Setup, code: str, host: str) -> None:
    """Join the cluster that a code invites to, and start the node."""
    from edgepipe.cli.joining import join

    joined = run_async(
        join(
            setup.data_dir,
            node_name=setup.name,
            code=code,
            host=host,
            new_identity=False,
            listen_s=setup.config.listen_s,
        )
    )
    setup.joined = True
    setup.name = joined.node_name
    setup.commands += [f"edgepipe node join {f'--host {host} ' if host else ''}CODE", "edgepipe node start"]
    done(f"joined '{joined.cluster_name}' with {joined.num_peers} more")
    if joined.wanted_name:
        warn(f"the cluster already has a '{joined.wanted_name}': this machine is now '{joined.node_name}'")
    own_node.start_node(setup)


def start_at_home(setup: Setup, home: OwnCluster) -> None:
    """Start the node of a machine with a cluster; ask first if it has other members. Raises NodeUnreachable."""
    if home.others:
        say(
            f"     This machine belongs to '{home.cluster_name}', with {', '.join(home.others)}; its node does not run."
        )
        if not setup.asking.confirm("Start it now?", default=True):
            raise no_node(setup.data_dir)
    own_node.start_node(setup)


def create_cluster(setup: Setup, name: str, status: ClusterStatus | None) -> None:
    """Start the node in a new cluster, unless it runs."""
    if status is None:
        own_node.start_node(setup, "--cluster", name)
        setup.commands.append(f"edgepipe node start --cluster {name}")
        done(f"created '{name}'")
    elif status.cluster_name != name:
        setup.failure = ConfigInvalid(
            f"this node belongs to cluster '{status.cluster_name}', not '{name}'",
            next_step="leave --cluster out; to join another cluster: edgepipe node join CODE",
        )
        warn(setup.failure.what, remedy=setup.failure.next_step)
    else:
        done(f"this node has its cluster: '{name}'")


def explain_silence(setup: Setup) -> None:
    """Report that no node announced itself, and check multicast on this machine."""
    facts = network_facts(setup.config)
    warn(f"no node announced itself within {setup.config.listen_s:g} s")
    if facts.address:
        probe = run_async(check_multicast(facts, listen_s=setup.config.listen_s))
        finding = multicast_findings(probe, facts, known_peers=0, family="IPv4")
        show_finding(replace(finding, remedy="") if probe.sent else finding)  # the choices below contain the remedy
    say(
        f"       the others must be in the same network; this machine is at {facts.address or 'no address'}",
        style="dim",
    )


def reachable(setup: Setup, host: str) -> bool:
    """Check the address before asking for a code, and show the cause of a failure."""
    from edgepipe.cli.doctor.findings import reach_finding
    from edgepipe.cli.joining import split_host
    from edgepipe.cluster.probes import Reach, neighbour_is_known, probe_tcp

    try:
        name, port = split_host(host)
    except ConfigInvalid as error:
        warn(error.what, remedy=error.fact)
        return False
    ports = ports_of(setup)
    probe = run_async(probe_tcp(name, port or ports.last, timeout_s=3.0))
    if probe.reach is Reach.OPEN:
        return True
    if probe.reach is Reach.REFUSED:
        warn(f"{name} answers, but does not invite now", remedy="on that machine: edgepipe node invite")
        return False
    finding = reach_finding(probe, name, network_facts(setup.config), ports, neighbour_known=neighbour_is_known(name))
    show_finding(finding)
    return False


def _diagnose(setup: Setup) -> None:
    from edgepipe.cli.doctor.examining import examine

    run_interruptible(examine(setup.config, [], say=show_finding))


def browse_nodes(setup: Setup) -> list[Announcement]:
    """Listen for other nodes."""
    from edgepipe.cluster.browsing import browse

    return run_async(browse(listen_s=setup.config.listen_s, until=lambda node: bool(node.pairing_port)))


def _one_per_cluster(found: Sequence[Announcement]) -> list[Announcement]:
    """Return one node of each cluster, an inviting node if there is one."""
    ranked = sorted(found, key=lambda node: (not node.pairing_port, node.cluster_name, node.node_name))
    return list({node.cluster_id: node for node in reversed(ranked)}.values())[::-1]


def _pairing_place(found: Sequence[Announcement], address: str) -> str:
    """Return HOST or HOST:PORT of a machine that invites into the cluster at ``address``, else of that machine."""
    chosen = next(node for node in found if node.address == address)
    inviting = next((node for node in found if node.cluster_id == chosen.cluster_id and node.pairing_port), None)
    return with_port(inviting.host, inviting.pairing_port) if inviting else chosen.host


def _check_code(text: str) -> str:
    from edgepipe.cluster.codes import read_code

    try:
        read_code(text)
    except ConfigInvalid as error:
        return error.fact
    return ""
