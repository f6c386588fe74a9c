"""``edgepipe node start|invite|join|stop|drain``"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from edgepipe.cli.node_process import start_in_background, wait_until_gone
from edgepipe.cli.options import DataDir, ModelsDir, data_dir_of, given_flags
from edgepipe.cli.output import print_json
from edgepipe.errors import EdgepipeError, NodeUnreachable
from edgepipe.telemetry.log import show_held_lines

if TYPE_CHECKING:
    from edgepipe.daemon.node import NodeReady
    from edgepipe.link.admin_client import Admin

app = typer.Typer(help="This machine's node.")


@app.callback()
def _group() -> None:
    """This machine's node."""


@app.command()
def start(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of this node.  [default: the host's name]")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NAME", help="Name of the cluster that a new node creates.  [default: home]"),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="Device, as the backend names it: cuda:0.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", metavar="BACKEND", help="torch, mlx, emulated, none or auto.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="TYPE", help="auto, float32 or bfloat16.")] = None,
    interface: Annotated[
        str | None, typer.Option("--interface", metavar="NAME", help="Network interface: its name or its address.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="PORT", help="Port; the node also uses the 15 above it.  [default: 7117]"),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option("--http-port", metavar="PORT", help="Port of the API; 0: any free port.  [default: 8117]"),
    ] = None,
    http_host: Annotated[
        str | None,
        typer.Option(
            "--http-host", metavar="ADDRESS", help="Also serve the API on this address, with a key; 0.0.0.0: on all."
        ),
    ] = None,
    http_name: Annotated[
        list[str] | None,
        typer.Option("--http-name", metavar="NAME", help="Host name that clients may use for the API; repeatable."),
    ] = None,
    http_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--http-origin", metavar="ORIGIN", help="Web origin that may use the API: app://obsidian.md; repeatable."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", metavar="KEY", help="Key of the API, better set in EDGEPIPE_API_KEY; repeatable."),
    ] = None,
    local_key: Annotated[
        str | None,
        typer.Option(
            "--local-key",
            metavar="WHEN",
            help="Require a key from clients on this computer: auto (if it has several users), yes or no.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", metavar="HOST:PORT", help="Another node of the cluster; repeatable.")
    ] = None,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    discovery: Annotated[
        bool | None,
        typer.Option(
            "--discovery/--no-discovery", help="Announce this node and find others by mDNS.", show_default=False
        ),
    ] = None,
    copies: Annotated[
        int | None,
        typer.Option(
            "--copies",
            metavar="N",
            help="Number of disks for each part of a model served from this node.  [default: 2]",
        ),
    ] = None,
    files_limit: Annotated[
        str | None,
        typer.Option("--files-limit", metavar="SIZE", help="Disk for files of batches.  [default: 20GB]"),
    ] = None,
    files_days: Annotated[
        int | None,
        typer.Option("--files-days", metavar="DAYS", help="Days until files of batches are deleted.  [default: 30]"),
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", metavar="SIZE", help="Most memory for models: 8GB.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", help="Compute threads of a stage.")] = None,
    backend_option: Annotated[
        list[str] | None,
        typer.Option("--backend-option", metavar="KEY=VALUE", help="Option of the backend; repeatable."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link", metavar="LINK", help="Emulate a slower network for data that this node sends: 1gbit,0.3ms."
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
    ] = None,
    background: Annotated[
        bool, typer.Option("--background", help="Return when the node is ready; 'node stop' ends it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON that the node is ready.")] = False,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
    quiet_when_ready: Annotated[bool, typer.Option("--quiet-when-ready", hidden=True)] = False,
) -> None:
    """Run this machine's node. It ends with ^C, in the background with 'edgepipe node stop'."""
    from edgepipe.config import load_config

    loaded = load_config(
        {
            "name": name,
            "cluster": cluster,
            "device": device,
            "backend": backend,
            "dtype": dtype,
            "interface": interface,
            "port": port,
            "http_port": http_port,
            "http_host": http_host,
            "http_names": http_name or None,
            "http_origins": http_origin or None,
            "api_key": api_key or None,
            "local_key": local_key,
            "peers": peer or None,
            "data_dir": data_dir,
            "models_dir": models_dir,
            "discovery": discovery,
            "copies": copies,
            "files_limit_bytes": files_limit,
            "files_days": files_days,
            "memory_limit_bytes": memory_limit,
            "threads": threads,
            "backend_options": backend_option or None,
            "link": link,
            "log_level": log_level,
        }
    )
    show = print_json if as_json else _show_ready
    if background:
        config, flags = loaded.values, given_flags(context, without=("background", "as_json", "data_dir"))
        show(start_in_background(config.data_dir, flags, name=config.name))
        return
    from edgepipe.daemon.node import run, start_nursery

    nursery = start_nursery()
    if end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True, name="watch-stdin").start()

    def on_ready(ready: NodeReady) -> None:  # called again after each new address or cluster
        try:
            show(_as_dict(ready))
            sys.stdout.flush()
        except OSError:  # the pipe's reader is gone, which must not end the node
            _leave(sys.stdout)
        show_held_lines()
        if quiet_when_ready:
            _leave(sys.stdout, sys.stderr)

    try:
        run(loaded.values, on_ready=on_ready, nursery=nursery)
    except EdgepipeError as error:
        if as_json:
            print_json({"error": {"code": error.code, "lines": [error.what, error.fact, error.next_step]}})
        raise


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
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of this node.  [default: the host's name]")
    ] = None,
    new_identity: Annotated[
        bool, typer.Option("--new-identity", help="Leave the present cluster and take a new key.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Join another machine's cluster."""
    from edgepipe.cli import joining
    from edgepipe.cli.admin import run_async
    from edgepipe.config import load_config

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


def _show_ready(ready: Mapping[str, Any]) -> None:
    """Print for people that a node is ready: this process, or one in the background, which has a ``pid``."""
    print(f"node '{ready['name']}' of cluster '{ready['cluster']}' is ready at {ready['address']}")
    everywhere = ready["http_host"] in ("0.0.0.0", "::")  # the name of this machine may not resolve elsewhere
    host = ready["address"].rpartition(":")[0].strip("[]") if everywhere else ready["http_host"]
    print(f"  API     http://{f'[{host}]' if ':' in host else host}:{ready['http_port']}/v1")
    if ready["key_file"]:
        where = ", needed also on this computer" if ready["key_on_loopback"] else ""
        print(f"  key     in {ready['key_file']}{where}")
    print("  next    edgepipe status · edgepipe serve MODEL · edgepipe chat")
    print(f"  stop    {'edgepipe node stop' if 'pid' in ready else '^C'}")


def _as_dict(ready: NodeReady) -> dict[str, Any]:
    return {
        "node_id": ready.node_id,
        "name": ready.name,
        "address": ready.address,
        "http_port": ready.http_port,
        "http_host": ready.http_host,
        "key_file": str(ready.key_file or ""),
        "key_on_loopback": ready.key_on_loopback,
        "socket": str(ready.socket),
        "cluster": ready.cluster,
    }


def _leave(*streams: TextIO) -> None:
    """Write no more to these streams. The log file has the same lines as stderr, and a bounded size."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _end_with_stdin() -> None:
    """Stop the node when its parent process ends, even by SIGKILL."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
