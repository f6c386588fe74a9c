"""``edgepipe peers``: lists, removes and promotes members of the cluster, and shows the trust log."""

from __future__ import annotations

import shlex
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli.confirming import confirm
from edgepipe.cli.options import DataDir, Json, data_dir_of
from edgepipe.cli.output import as_dict, columns, make_console, make_table, print_json, say
from edgepipe.safe_text import one_line
from edgepipe.telemetry.audit import AuditEntry, AuditKind

if TYPE_CHECKING:
    from edgepipe.wire.trust import ListPeersReply

app = typer.Typer(help="List and change the members of the cluster.", invoke_without_command=True)

_KEY_CHARS = 8
_LOG_LINES = 50
_WIDE, _MEDIUM = 100, 78  # columns of a terminal with room for the whole table, or for all but LET IN BY


@app.callback()
def peers(context: typer.Context, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List and change the members of the cluster. Without a command: list them."""
    if context.invoked_subcommand is None:
        _list(data_dir, as_json)


@app.command("list")
def list_peers(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the peers with their roles and when each was last seen."""
    _list(data_dir, as_json)


@app.command()
def remove(
    peer: Annotated[str, typer.Argument(help="Its name, or the first characters of its key.", show_default=False)],
    keep_added: Annotated[
        bool | None,
        typer.Option(
            "--keep-added/--drop-added", help="Keep or drop nodes that only this peer let in.", show_default=False
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Remove a peer for ever: the cluster never accepts its key again."""
    from edgepipe.cli.admin import ask_node
    from edgepipe.link.admin_client import Admin

    others = {None: "", True: "keep", False: "drop"}[keep_added]

    folder = data_dir_of(data_dir)
    if not yes:
        _ask_to_remove(ask_node(folder, Admin.peers), peer)
    removed = ask_node(folder, lambda admin: admin.remove_peer(peer, others=others))
    print(f"'{removed.name}' is removed; its connections are cut")
    if removed.others:
        print(f"  {'kept' if keep_added else 'removed with it'}: {', '.join(removed.others)}")


@app.command()
def promote(
    peer: Annotated[str, typer.Argument(help="Its name, or the first characters of its key.", show_default=False)],
    data_dir: DataDir = None,
) -> None:
    """Make a peer an owner, which may invite, remove and promote peers."""
    from edgepipe.cli.admin import ask_node

    name = ask_node(data_dir_of(data_dir), lambda admin: admin.promote_peer(peer))
    print(f"'{name}' is an owner now")


@app.command()
def log(
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=1, max=10000, help="Number of newest entries.")
    ] = _LOG_LINES,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show which machines this one saw join, leave or be refused."""
    from dataclasses import asdict

    from edgepipe.cluster.founding import TrustFolders
    from edgepipe.telemetry.audit import read_audit

    entries = read_audit(TrustFolders(data_dir_of(data_dir)).audit, last=lines)
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    if not entries:
        print("no entries yet")
        return
    console = make_console()
    for entry in entries:  # lines, not a table: a narrow terminal cuts no text off
        when = datetime.fromtimestamp(entry.at_s).astimezone().isoformat(" ", "seconds")[:19]
        times = f" ({entry.times} times)" if entry.times > 1 else ""
        console.print(one_line(f"{when}  {_event(entry, times)}"), soft_wrap=True)


def _list(data_dir: DataDir, as_json: bool) -> None:
    from edgepipe.cli.admin import ask_node
    from edgepipe.link.admin_client import Admin

    found = ask_node(data_dir_of(data_dir), Admin.peers)
    if as_json:
        print_json(as_dict(found))
        return
    names = ("PEER", "ROLE", "STATE", "ADDRESS", "KEY", "SINCE", "LET IN BY")
    shown = names[: len(names) - sum(columns(sys.stdout) < wide for wide in (_WIDE, _MEDIUM))]  # 'peers log' has all
    table = make_table(*shown, whole=("ADDRESS", "KEY", "SINCE"))
    for peer in found.peers:
        since = time.strftime("%Y-%m-%d", time.localtime(peer.added_ms / 1000)) if peer.added_ms else "-"
        state = "this machine" if peer.self else peer.state
        by = "-" if peer.added_by == peer.name else peer.added_by[:20]
        cells = (peer.name, peer.role, state, peer.address or "-", peer.node_id[:_KEY_CHARS], since, by)
        table.add_row(*cells[: len(shown)])
    console = make_console()
    console.print(f"cluster '{found.cluster_name}'")
    console.print(table)
    if not any(peer.self for peer in found.peers):
        console.print("this machine was removed from it; to join again: edgepipe node join CODE")


def _ask_to_remove(members: ListPeersReply, peer: str) -> None:
    """Ask about the peer that was named. An unknown or ambiguous name is left to the node, which refuses it."""
    found = [each for each in members.peers if each.name == peer or each.node_id.startswith(peer)]
    if len(found) != 1:
        return
    name = one_line(found[0].name)
    role = f"{found[0].role}, {found[0].state or 'away'}"
    say(f"'{name}' ({role}) loses its connections, and its key is never accepted again.")
    say(f"It can come back as a new machine: edgepipe node join --new-identity CODE, on '{name}'.")
    confirm(f"Remove '{name}'?", yes=False, command=f"edgepipe peers remove {shlex.quote(peer)} --yes")


def strangers_text(entry: AuditEntry) -> str:
    """Format an entry: ``1 connection ended before it said who it is``."""
    theirs = "it said who it is" if entry.detail == "1 connection" else "they said who they are"
    return f"{entry.detail} ended before {theirs}"


def _event(entry: AuditEntry, times: str) -> str:
    if entry.kind == AuditKind.HANDSHAKE_REFUSED:
        return strangers_text(entry) + times
    return f"{entry.kind + times:<16}  {_short(entry.who)}  {entry.detail}"


def _short(who: str) -> str:
    """Shorten node ids to their first characters."""
    return " ".join(word[:_KEY_CHARS] if len(word) == 52 else word for word in who.split())
