"""The six steps. Each measures first, asks only what it cannot measure, and skips work that is already done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from edgepipe.cli.admin import ask_node, run_async
from edgepipe.cli.doctor.findings import network_findings
from edgepipe.cli.doctor.machine_findings import machine_findings, network_facts
from edgepipe.cli.settings_file import write_settings
from edgepipe.cli.wizard import own_node
from edgepipe.cli.wizard.asking import Back, check_name, done, note, say, warn
from edgepipe.cli.wizard.cluster_choice import choose_cluster, create_cluster, join_with, start_at_home
from edgepipe.cli.wizard.findings import ports_of, show_finding
from edgepipe.cli.wizard.links import MachineLink, link_meaning, links_of
from edgepipe.cli.wizard.model_choice import SKIP, choose_model, on_disk
from edgepipe.cli.wizard.state import Setup
from edgepipe.cluster.founding import cluster_of
from edgepipe.daemon.machine.http_keys import asks_on_loopback, key_file
from edgepipe.errors import EdgepipeError
from edgepipe.link.admin_client import Admin

if TYPE_CHECKING:
    from edgepipe.wire.nodes import ClusterStatus
    from edgepipe.wire.trust import PeerState

Step = Callable[[Setup], None]

_PEERS_S, _LOOK_S = 20.0, 0.2  # a node that has just joined restarts, which takes a second or two
_KNOWN_PEERS_S = 5.0  # an earlier member appears at once, or is off
_GONE = ("dead", "asleep", "left")


def machine(setup: Setup) -> None:
    """Show this machine; ask for its name."""
    say("1/6  This machine", style="bold")
    for finding in machine_findings(setup.config):
        show_finding(finding)
    for finding in network_findings(network_facts(setup.config), ports_of(setup)):
        show_finding(finding)
    status = own_node.node_status(setup)
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
            return setup.asking.text("Name of this machine:", default=default, check=check_name)
        except Back:
            note("this is the first question; ^C stops the setup")


def cluster(setup: Setup) -> None:
    """Join a cluster or create one. The node runs afterwards."""
    say("\n2/6  Cluster", style="bold")
    if setup.given.join:
        join_with(setup, setup.given.join, setup.given.host)
        return
    status = own_node.node_status(setup)
    home = cluster_of(setup.data_dir) if status is None else None
    if home is not None:
        start_at_home(setup, home)
        status = own_node.node_status(setup)
    if setup.given.cluster:
        create_cluster(setup, setup.given.cluster, status)
    elif home is not None and home.others:
        return
    elif status is not None and len(status.members) > 1:
        done(f"already in '{status.cluster_name}' with {len(status.members) - 1} more")
    else:
        choose_cluster(setup, status)


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
    own_node.stop_node(setup)
    try:
        install_service(plan)
        wait_until_answers(setup.data_dir)
    except EdgepipeError as error:
        warn(error.what, remedy=error.fact)
        own_node.start_node(setup)
        return
    setup.commands.append("edgepipe service install")
    done(f"{plan.path}")


STEPS: Sequence[Step] = (machine, cluster, others, links, model, service)


def show_end(setup: Setup) -> None:
    """Print the next commands, and commands that are equivalent to this run."""
    say("\nReady.", style="bold")
    status = own_node.node_status(setup)
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


def _invite(setup: Setup) -> None:
    from edgepipe.cli.inviting import invite
    from edgepipe.wire.trust import InviteStart

    try:
        run_async(invite(setup.data_dir, InviteStart(), as_json=False))
    except KeyboardInterrupt:
        say("\n     the invitation is over", style="dim")
    except EdgepipeError as error:
        warn(error.what, remedy=error.fact)


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
