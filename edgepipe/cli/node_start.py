"""``edgepipe node start``

Each of its options but the last four is a setting of a node. None: the environment or the settings file has the value,
or the default of ``config.py`` holds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from edgepipe.cli.node_process import start_in_background
from edgepipe.cli.options import DataDir, ModelsDir, given_flags
from edgepipe.cli.output import print_json
from edgepipe.errors import EdgepipeError
from edgepipe.telemetry.log import show_held_lines

if TYPE_CHECKING:
    from edgepipe.daemon.node import NodeReady

# The node and its cluster.
NodeName = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Name of this node, also at later starts.  [default: the host's name]"),
]
ClusterName = Annotated[
    str | None,
    typer.Option("--cluster", metavar="NAME", help="Name of the cluster that a new node creates.  [default: home]"),
]
Interface = Annotated[
    str | None, typer.Option("--interface", metavar="NAME", help="Network interface: its name or its address.")
]
Port = Annotated[
    int | None,
    typer.Option("--port", metavar="PORT", help="Port; the node also uses the 15 above it.  [default: 7117]"),
]
Peers = Annotated[
    list[str] | None, typer.Option("--peer", metavar="HOST:PORT", help="Another node of the cluster; repeatable.")
]
Discovery = Annotated[
    bool | None,
    typer.Option("--discovery/--no-discovery", help="Announce this node and find others by mDNS.", show_default=False),
]
EmulatedLink = Annotated[
    str | None,
    typer.Option("--link", metavar="LINK", help="Emulate a slower network for data that this node sends: 1gbit,0.3ms."),
]
LogLevel = Annotated[str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")]

# The API.
HttpPort = Annotated[
    int | None,
    typer.Option("--http-port", metavar="PORT", help="Port of the API; 0: any free port.  [default: 8117]"),
]
HttpHost = Annotated[
    str | None,
    typer.Option(
        "--http-host", metavar="ADDRESS", help="Also serve the API on this address, with a key; 0.0.0.0: on all."
    ),
]
HttpNames = Annotated[
    list[str] | None,
    typer.Option("--http-name", metavar="NAME", help="Host name that clients may use for the API; repeatable."),
]
HttpOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--http-origin", metavar="ORIGIN", help="Web origin that may use the API: app://obsidian.md; repeatable."
    ),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option("--api-key", metavar="KEY", help="Key of the API, better set in EDGEPIPE_API_KEY; repeatable."),
]
LocalKey = Annotated[
    str | None,
    typer.Option(
        "--local-key",
        metavar="WHEN",
        help="Require a key from clients on this computer: auto (if it has several users), yes or no.",
    ),
]

# Its device.
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="Device, as the backend names it: cuda:0.")
]
BackendName = Annotated[
    str | None, typer.Option("--backend", metavar="BACKEND", help="torch, mlx, emulated, none or auto.")
]
NodeDtype = Annotated[str | None, typer.Option("--dtype", metavar="TYPE", help="auto, float32 or bfloat16.")]
MemoryLimit = Annotated[str | None, typer.Option("--memory-limit", metavar="SIZE", help="Most memory for models: 8GB.")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="Compute threads of a stage.")]
BackendOptions = Annotated[
    list[str] | None,
    typer.Option("--backend-option", metavar="KEY=VALUE", help="Option of the backend; repeatable."),
]

# Its disk.
Copies = Annotated[
    int | None,
    typer.Option(
        "--copies",
        metavar="N",
        help="Number of disks for each part of a model served from this node.  [default: 2]",
    ),
]
FilesLimit = Annotated[
    str | None,
    typer.Option("--files-limit", metavar="SIZE", help="Disk for files of batches.  [default: 20GB]"),
]
FilesDays = Annotated[
    int | None,
    typer.Option("--files-days", metavar="DAYS", help="Days until files of batches are deleted.  [default: 30]"),
]


def start(
    context: typer.Context,
    name: NodeName = None,
    cluster: ClusterName = None,
    device: Device = None,
    backend: BackendName = None,
    dtype: NodeDtype = None,
    interface: Interface = None,
    port: Port = None,
    http_port: HttpPort = None,
    http_host: HttpHost = None,
    http_name: HttpNames = None,
    http_origin: HttpOrigins = None,
    api_key: ApiKeys = None,
    local_key: LocalKey = None,
    peer: Peers = None,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    discovery: Discovery = None,
    copies: Copies = None,
    files_limit: FilesLimit = None,
    files_days: FilesDays = None,
    memory_limit: MemoryLimit = None,
    threads: Threads = None,
    backend_option: BackendOptions = None,
    link: EmulatedLink = None,
    log_level: LogLevel = None,
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
    from edgepipe.daemon.machine.data_dir import keep_name
    from edgepipe.daemon.node import run, start_nursery

    nursery = start_nursery()
    if end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True, name="watch-stdin").start()

    def on_ready(ready: NodeReady) -> None:  # called again after each new address or cluster
        if name is not None:
            keep_name(loaded.values.data_dir, loaded.values.name)
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
