"""The six steps. Each measures first, asks only what it cannot measure, and skips work that is already done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from edgepipe.addresses import with_port
from edgepipe.cli.admin import ask_node, no_node, run_async, status_if_running
from edgepipe.cli.doctor.findings import Finding, Level, Ports, multicast_findings, network_findings
from edgepipe.cli.doctor.machine_findings import check_multicast, machine_findings, network_facts
from edgepipe.cli.node_process import start_in_background
from edgepipe.cli.settings_file import write_settings
from edgepipe.cli.wizard.asking import AskedChoice, Back, Quit, done, filled, note, say, warn
from edgepipe.cli.wizard.links import MachineLink, link_meaning, links_of
from edgepipe.cli.wizard.model_choice import SKIP, choose_model, on_disk
from edgepipe.cli.wizard.state import Setup
from edgepipe.cluster.founding import OwnCluster, cluster_of
from edgepipe.cluster.tries import ADDRESS_TRIES
from edgepipe.config import HTTP_PORT, NODE_PORT
from edgepipe.daemon.machine.http_keys import asks_on_loopback, key_file
from edgepipe.errors import (
    ConfigInvalid,
    EdgepipeError,
    NodeUnreachable,
    NoPeersFound,
    PairingRejected,
)
from edgepipe.interrupts import run_interruptible
from edgepipe.link.admin_client import Admin

if TYPE_CHECKING:
    from edgepipe.cluster.discovery import Announcement
    from edgepipe.wire.nodes import ClusterStatus
    from edgepipe.wire.trust import PeerState

Step = Callable[[Setup], None]

_PEERS_S, _LOOK_S = 20.0, 0.2  # a node that has just joined restarts, which takes a second or two
_KNOWN_PEERS_S = 5.0  # an earlier member appears at once, or is off
_GONE = ("dead", "asleep", "left")
_CODE_FLAGS = "--join CODE, or --cluster NAME to start a new cluster"
_NEW, _ADDRESS, _AGAIN, _DOCTOR, _QUIT = "new", "address", "again", "doctor", "quit"


def machine(setup: Setup) -> None:
    """Show this machine; ask for its name."""
    say("1/6  This machine", style="bold")
    for finding in machine_findings(setup.config):
        _show(finding)
    for finding in network_findings(network_facts(setup.config), _ports(setup)):
        _show(finding)
    status = _status(setup)
    settings = {"models_dir": str(setup.config.models_dir.absolute())} if setup.given.models_dir else {}
    if status is None:
        default = setup.name or setup.config.name
        setup.name = setup.given.name or _ask_name(setup, default)
        write_settings(setup.settings_file, {"name": setup.name, **settings})
        return
    setup.name = next(member.node.name for member in status.members if member.self)
    done(f"its node runs already, as '{setup.name}'")
    if setup.given.name not in ("", setup.name):
        settings["name"] = setup.given.name
    if settings:
        write_settings(setup.settings_file, settings)
        changed = " and ".join(sorted(settings))
        note(f"it reads its new {changed} at its next start: edgepipe node stop, then edgepipe node start")


def _ask_name(setup: Setup, default: str) -> str:
    """Ask the first question, which has no step before it."""
    while True:
        try:
            return setup.asking.text("Name of this machine:", default=default, check=_name)
        except Back:
            note("this is the first question; ^C stops the setup")


def cluster(setup: Setup) -> None:
    """Join a cluster or create one. The node runs afterwards."""
    say("\n2/6  Cluster", style="bold")
    if setup.given.join:
        _join(setup, setup.given.join, setup.given.host)
        return
    status = _status(setup)
    home = cluster_of(setup.data_dir) if status is None else None
    if home is not None:
        _start_at_home(setup, home)
        status = _status(setup)
    if setup.given.cluster:
        _create(setup, setup.given.cluster, status)
    elif home is not None and home.others:
        return
    elif status is not None and len(status.members) > 1:
        done(f"already in '{status.cluster_name}' with {len(status.members) - 1} more")
    else:
        _choose_cluster(setup, status)


def others(setup: Setup) -> None:
    """Invite other machines."""
    say("\n3/6  Your other machines", style="bold")
    if setup.given.invite is False:
        say("     later: edgepipe node invite", style="dim")
        return
    wanted = setup.given.invite or setup.asking.confirm("Add another machine now?", default=False)
    while wanted:
        _invite(setup)
        wanted = setup.given.invite is None and setup.asking.confirm("Add one more?", default=False)
    say("     any time: edgepipe node invite on this machine, then edgepipe setup on the other", style="dim")


def links(setup: Setup) -> None:
    """Measure the links to other machines and rate them."""
    say("\n4/6  Links", style="bold")
    status = _status_with_peers(setup)
    peers = [member for member in status.members if not member.self] if status is not None else []
    if not peers:
        say("     no links: the cluster has no other machine", style="dim")
    measured = _measured_links(setup) if peers else {}
    for member in peers:
        link = measured.get(member.node.node_id, MachineLink(rtt_ms=member.rtt_ms))
        meaning = link_meaning(rtt_ms=link.rtt_ms, bytes_per_s=link.bytes_per_s)
        (done if meaning.good else warn)(f"{setup.name} - {member.node.name}: {meaning.text}")


def model(setup: Setup) -> None:
    """Ask which fitting model to fetch, and fetch it."""
    say("\n5/6  Model", style="bold")
    if setup.given.skip_model:
        say("     later: edgepipe models pull MODEL", style="dim")
        return
    folder = setup.config.models_dir
    name = setup.given.model or choose_model(setup.asking, data_dir=setup.data_dir, models_dir=folder)
    if name == SKIP:
        say("     later: edgepipe models pull MODEL", style="dim")
        return
    from edgepipe.cli.models import pull_model, tell_node

    try:
        result = pull_model(folder, name)
    except EdgepipeError as error:
        warn(error.what, remedy=error.fact)
        kept = "    (resumes the download)" if on_disk(folder, [name])[1] else ""
        say(f"     later: edgepipe models pull {name}{kept}", style="dim")
        setup.failure = error if setup.given.model else None
        return
    tell_node(setup.data_dir)
    setup.model = result.model_id
    setup.commands.append(f"edgepipe models pull {name}")
    done(f"{result.model_id} is {'already ' * result.already_here}on this disk")


def service(setup: Setup) -> None:
    """Ask whether to start the node at boot; install the service."""
    say("\n6/6  At boot", style="bold")
    from edgepipe.cli.service import (
        install_service,
        manager_runs,
        read_state,
        run_command,
        service_plan,
        wait_until_answers,
    )

    if not manager_runs() and not setup.given.service:
        note("this system has neither systemd nor launchd, so no service can start the node")
        say("     after each boot: edgepipe node start --background", style="dim")
        return
    plan = service_plan(setup.data_dir, system=False)
    if read_state(plan, run_command)["state"] == "active":
        done(f"the service runs: {plan.path}")
        return
    wanted = setup.given.service
    if wanted is None:
        wanted = setup.asking.confirm(f"Start edgepipe at boot? ({plan.manager.value})", default=False)
    if not wanted:
        say("     later: edgepipe service install", style="dim")
        return
    _stop_own(setup)
    try:
        install_service(plan)
        wait_until_answers(setup.data_dir)
    except EdgepipeError as error:
        warn(error.what, remedy=error.fact)
        _start(setup)
        return
    setup.commands.append("edgepipe service install")
    done(f"{plan.path}")


STEPS: Sequence[Step] = (machine, cluster, others, links, model, service)


def show_end(setup: Setup) -> None:
    """Print the next commands, and commands that are equivalent to this run."""
    say("\nReady.", style="bold")
    status = _status(setup)
    own = next((member.node for member in status.members if member.self), None) if status is not None else None
    say(f"   chat       edgepipe chat{f' {setup.model}' if setup.model else ''}")
    if own is not None:
        say(f"   API        http://127.0.0.1:{own.http_port}/v1")
        if asks_on_loopback(setup.config):
            say(f"   API key    in {key_file(setup.data_dir)}; other programs on this machine need it")
    say("   status     edgepipe status            problems?  edgepipe doctor")
    if setup.node_pid:
        say("   the node runs until this machine is switched off, or: edgepipe node stop")
    if setup.commands:
        say("\nThe same without questions:", style="dim")
        for command in setup.commands:
            say(f"   {command}", style="dim")


def _choose_cluster(setup: Setup, status: ClusterStatus | None) -> None:
    own = status.node_id if status is not None else ""
    while True:
        say(f"     listening for other nodes, {setup.config.listen_s:g} s ...", style="dim")
        found = [node for node in _browse(setup) if node.node_id != own]
        if not found:
            _explain_silence(setup)
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
                if _chosen(setup, answer, found, status):
                    return


def _chosen(setup: Setup, answer: str, found: Sequence[Announcement], status: ClusterStatus | None) -> bool:
    """Create, keep or join the cluster of an answer. Return False to choose again."""
    if answer == _NEW:
        if status is None:
            name = setup.asking.text("Name of the cluster:", default=setup.config.cluster or "home", check=_name)
            _create(setup, name, status)
        return True
    if answer == _ADDRESS:
        host = setup.asking.text("Address of a machine that runs edgepipe:", check=filled)
        return _reachable(setup, host) and join_asking(setup, host)
    return join_asking(setup, _pairing_place(found, answer))


def join_asking(setup: Setup, host: str) -> bool:
    """Ask for the code, at most as often as the inviting machine allows. Return False to choose a cluster again."""
    say("     on that machine: edgepipe node invite    (it shows a code)", style="dim")
    for tries in range(ADDRESS_TRIES, 0, -1):
        code = setup.asking.text("Pairing code:", check=_code, flags=_CODE_FLAGS)
        try:
            _join(setup, code, host)
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


def _join(setup: Setup, code: str, host: str) -> None:
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
    _start(setup)


def _start_at_home(setup: Setup, home: OwnCluster) -> None:
    """Start the node of a machine with a cluster; ask first if it has other members. Raises NodeUnreachable."""
    if home.others:
        say(
            f"     This machine belongs to '{home.cluster_name}', with {', '.join(home.others)}; its node does not run."
        )
        if not setup.asking.confirm("Start it now?", default=True):
            raise no_node(setup.data_dir)
    _start(setup)


def _create(setup: Setup, name: str, status: ClusterStatus | None) -> None:
    if status is None:
        _start(setup, "--cluster", name)
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


def _start(setup: Setup, *flags: str) -> None:
    """Start this machine's node unless it runs."""
    if _status(setup) is not None:
        return
    say("     starting the node, about 10 s ...", style="dim")
    ready = start_in_background(setup.data_dir, flags, name=setup.name)
    setup.node_pid = ready["pid"]
    done(f"the node runs at {ready['address']}")


def _stop_own(setup: Setup) -> None:
    """Stop the node that the wizard started; the service starts it again."""
    if _status(setup) is not None:
        from edgepipe.cli.node import stop

        stop(setup.data_dir)
    setup.node_pid = 0


def _invite(setup: Setup) -> None:
    from edgepipe.cli.inviting import invite
    from edgepipe.wire.trust import InviteStart

    try:
        run_async(invite(setup.data_dir, InviteStart(), as_json=False))
    except KeyboardInterrupt:
        say("\n     the invitation is over", style="dim")
    except EdgepipeError as error:
        warn(error.what, remedy=error.fact)


def _explain_silence(setup: Setup) -> None:
    """Report that no node announced itself, and check multicast on this machine."""
    facts = network_facts(setup.config)
    warn(f"no node announced itself within {setup.config.listen_s:g} s")
    if facts.address:
        probe = run_async(check_multicast(facts, listen_s=setup.config.listen_s))
        finding = multicast_findings(probe, facts, known_peers=0, family="IPv4")
        _show(replace(finding, remedy="") if probe.sent else finding)  # the choices below contain the remedy
    say(
        f"       the others must be in the same network; this machine is at {facts.address or 'no address'}",
        style="dim",
    )


def _reachable(setup: Setup, host: str) -> bool:
    """Check the address before asking for a code, and show the cause of a failure."""
    from edgepipe.cli.doctor.findings import reach_finding
    from edgepipe.cli.joining import split_host
    from edgepipe.cluster.probes import Reach, neighbour_is_known, probe_tcp

    try:
        name, port = split_host(host)
    except ConfigInvalid as error:
        warn(error.what, remedy=error.fact)
        return False
    ports = _ports(setup)
    probe = run_async(probe_tcp(name, port or ports.last, timeout_s=3.0))
    if probe.reach is Reach.OPEN:
        return True
    if probe.reach is Reach.REFUSED:
        warn(f"{name} answers, but does not invite now", remedy="on that machine: edgepipe node invite")
        return False
    finding = reach_finding(probe, name, network_facts(setup.config), ports, neighbour_known=neighbour_is_known(name))
    _show(finding)
    return False


def _diagnose(setup: Setup) -> None:
    from edgepipe.cli.doctor.examining import examine

    run_interruptible(examine(setup.config, [], say=_show))


def _browse(setup: Setup) -> list[Announcement]:
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


def _status(setup: Setup) -> ClusterStatus | None:
    """Return the running node's status, None without a running node."""
    return run_async(status_if_running(setup.data_dir))


def _status_with_peers(setup: Setup) -> ClusterStatus | None:
    """Return the status once every expected peer has a measured round trip, or after a while."""
    most_s = _PEERS_S if setup.joined else _KNOWN_PEERS_S

    async def ask(admin: Admin) -> ClusterStatus:
        status = await admin.status()
        if missing_peers((await admin.peers()).peers, status):
            say(f"     waiting for the others, {most_s:.0f} s at the most ...", style="dim")
        for _ in range(round(most_s / _LOOK_S)):
            if not missing_peers((await admin.peers()).peers, status):
                break
            await asyncio.sleep(_LOOK_S)  # the daemon's socket has no notifications
            status = await admin.status()
        return status

    with suppress(EdgepipeError):
        return ask_node(setup.data_dir, ask)
    return None


def missing_peers(peers: Iterable[PeerState], status: ClusterStatus) -> list[str]:
    """Return the peers without a measured round trip, except those that have left, sleep or are dead."""
    seen = {member.node.node_id for member in status.members if member.rtt_ms > 0}
    return [peer.name for peer in peers if not peer.self and peer.state not in _GONE and peer.node_id not in seen]


def _measured_links(setup: Setup) -> dict[str, MachineLink]:
    """Measure the links from this machine, by node; the slower direction counts."""

    async def ask(admin: Admin) -> dict[str, MachineLink]:
        own = (await admin.status()).node_id
        return links_of(own, (await admin.measure_links()).links)

    say("     measuring ...", style="dim")
    with suppress(EdgepipeError):
        return ask_node(setup.data_dir, ask)
    return {}


def _ports(setup: Setup) -> Ports:
    return Ports(node=setup.config.port or NODE_PORT, http=setup.config.http_port or HTTP_PORT)


def _show(finding: Finding) -> None:
    text = finding.what + (f" ({finding.fact})" if finding.fact else "")
    if finding.level is Level.OK:
        done(text)
    elif finding.level is Level.NOTE:
        note(text)
    else:
        warn(text, remedy=finding.remedy)


def _name(text: str) -> str:
    from edgepipe.config import load_config

    try:
        load_config({"name": text}, environ={})
    except ConfigInvalid as error:
        return error.next_step
    return ""


def _code(text: str) -> str:
    from edgepipe.cluster.codes import read_code

    try:
        read_code(text)
    except ConfigInvalid as error:
        return error.fact
    return ""
