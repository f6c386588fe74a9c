"""Starts ``edgepipe node start`` as a process and waits until it is ready or failed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgepipe.cluster.private_files import make_private_folder
from edgepipe.config import environment_with
from edgepipe.errors import ClusterError, EdgepipeError, error_class

_START_S = 60.0  # the first import of a backend, from a cold disk
_STOP_S = 45.0  # a node's work moves to other nodes in 30 s; then children get 5 s until they are killed
_LOOK_S = 0.05


def node_command(*flags: str) -> list[str]:
    """Build the command line of a node that reports as JSON that it is ready or failed."""
    return [sys.executable, "-P", "-m", "edgepipe.cli", "node", "start", "--json", *flags]


def reported_error(document: dict[str, Any], *, node: str) -> EdgepipeError:
    """Build the error from the JSON document of a node that did not start."""
    problem, fact, next_step = document["error"]["lines"]
    return error_class(document["error"]["code"])(problem, fact=fact, next_step=next_step, node=node)


def silent_node(log: Path, *, node: str, next_step: str) -> ClusterError:
    """Build the error for a node that ended or hung without a report."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
    return ClusterError(f"node '{node}' did not start", fact=last[:200], next_step=next_step)


def start_in_background(
    data_dir: Path, flags: Sequence[str], *, name: str, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Start this machine's node so that it outlives this process. Return its report and its ``pid``.

    ``variables``: set in its environment beside those of this process.

    Raises the node's error, ClusterError with its last log line, or ConfigInvalid if the folder is another user's.
    """
    make_private_folder(data_dir)
    log = data_dir / "start.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            node_command("--data-dir", str(data_dir), "--quiet-when-ready", *flags),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment_with(variables or {}),
            start_new_session=True,  # ^C reaches the wizard alone
        )
    document = _first_document(process)
    if "error" in document:
        process.wait(_START_S)
        raise reported_error(document, node=name)
    if "address" not in document:
        process.kill()
        process.wait(_START_S)
        raise silent_node(log, node=name, next_step="edgepipe node start    (shows why)")
    return {**document, "pid": process.pid}


def wait_until_gone(data_dir: Path) -> None:
    """Wait until the node has removed its lock, its last step. Raises ClusterError if that takes too long."""
    deadline_s = time.monotonic() + _STOP_S
    while (data_dir / "daemon.lock").exists():
        if time.monotonic() > deadline_s:
            raise ClusterError(
                "the node has not stopped yet",
                fact=f"{data_dir / 'daemon.lock'} is still there after {_STOP_S:.0f} s",
                next_step="see 'edgepipe logs'",
            )
        time.sleep(_LOOK_S)


def _first_document(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Read the JSON document on its standard output; empty if it ends or times out first."""
    assert process.stdout is not None
    text = b""
    watch = threading.Timer(_START_S, process.kill)
    watch.start()
    try:
        for line in process.stdout:
            text += line
            if line.rstrip() == b"}":
                return json.loads(text)
    finally:
        watch.cancel()
        process.stdout.close()
    return {}
