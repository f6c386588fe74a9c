"""``edgepipe node start|invite|join|stop|drain``"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli.node_process import wait_until_gone
from edgepipe.cli.node_start import NodeName, start
from edgepipe.cli.options import DataDir, data_dir_of
from edgepipe.cli.output import say
from edgepipe.errors import NodeUnreachable

if TYPE_CHECKING:
    from edgepipe.link.admin_client import Admin

app = typer.Typer(help="This machine's node.")


@app.callback()
def _group() -> None:
    """This machine's node."""


app.command()(start)


@app.command()
def invite(
    long_string: Annotated[
        bool, typer.Option("--long", help="Show a join string instead of a code, for a machine without a person.")
    ] = False,
    valid: Annotated[
        int,
        typer.Option(
            "--valid",
            metavar="MINUTES",
            min=1,
            max=1440,
            help="Minutes: at most 60 for a code, 1440 for a join string.",
        ),
    ] = 5,
    role: Annotated[
        str,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="owner or member.  [default: owner for the second machine, then member]",
            show_default=False,
        ),
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; let in any machine with the code.")] = False,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as JSON.")] = False,
) -> None:
    """Show a code with which one other machine may join this cluster."""
    from edgepipe.cli import inviting
    from edgepipe.cli.admin import run_async
    from edgepipe.wire.trust import InviteStart

    start = InviteStart(role=role, valid_s=60 * valid, long_string=long_string, accept_all=yes)
    run_async(inviting.invite(data_dir_of(data_dir), start, as_json=as_json))


@app.command()
def join(
    code: Annotated[
        str, typer.Argument(help="Code from 'edgepipe node invite' on another machine.", show_default=False)
    ],
    host: Annotated[
        str,
        typer.Option("--host", metavar="HOST", help="Inviting machine: HOST or HOST:PORT.  [default: found by mDNS]"),
    ] = "",
    name: NodeName = None,
    new_identity: Annotated[
        bool, typer.Option("--new-identity", help="Leave the present cluster and take a new key.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Join another machine's cluster."""
    from edgepipe.cli import joining
    from edgepipe.cli.admin import run_async
    from edgepipe.config import load_config
    from edgepipe.daemon.machine.data_dir import keep_name

    config = load_config({"name": name, "data_dir": data_dir}).values
    joined = run_async(
        joining.join(
            config.data_dir,
            node_name=config.name,
            code=code,
            host=host,
            new_identity=new_identity,
            listen_s=config.listen_s,
        )
    )
    joining.show_joined(joined)
    if name is not None:
        keep_name(config.data_dir, config.name)
        if joined.running and joined.node_name not in ("", config.name):
            say(f"it is named '{config.name}' from its next start: edgepipe node stop, then edgepipe node start")


@app.command()
def stop(data_dir: DataDir = None) -> None:
    """Stop this machine's node. Others take over its work if they can; a second 'node stop' or ^C does not wait."""
    from edgepipe.cli.admin import ask_node
    from edgepipe.link.admin_client import Admin

    folder = data_dir_of(data_dir)
    if note := ask_node(folder, Admin.shut_down):
        print(f"the node is leaving: {note}", flush=True)
    try:
        wait_until_gone(folder)
    except KeyboardInterrupt:
        print("it stops at once", flush=True)
        with contextlib.suppress(NodeUnreachable):  # the node has just stopped
            ask_node(folder, Admin.shut_down)
        wait_until_gone(folder)
    print("the node has stopped")


@app.command()
def drain(
    undo: Annotated[bool, typer.Option("--undo", help="Let the node accept work again.")] = False,
    wait: Annotated[
        int, typer.Option("--wait", metavar="SECONDS", min=1, help="Longest wait for the work to move, in seconds.")
    ] = 600,
    data_dir: DataDir = None,
) -> None:
    """Move all work of this machine to other machines. Returns when it is safe to switch it off."""
    from edgepipe.cli.admin import ask_node

    ask_node(data_dir_of(data_dir), lambda admin: _drain(admin, undo=undo, wait_s=wait))
    print("the node takes work again" if undo else "safe to switch off now")


async def _drain(admin: Admin, *, undo: bool, wait_s: float) -> None:
    """Drain the node. Raises NoFeasiblePlacement after ``wait_s``; the node then accepts work again."""
    from edgepipe.errors import NoFeasiblePlacement

    try:
        async with asyncio.timeout(wait_s):
            async for _ in admin.drain(undo=undo):
                pass
    except TimeoutError:
        async for _ in admin.drain(undo=True):
            pass
        raise NoFeasiblePlacement(
            "not everything could be moved away",
            fact=f"waited {wait_s:.0f} s; the node takes work again",
            next_step="see 'edgepipe status', start another node, or stop the model",
        ) from None
