"""This machine's node, as the wizard starts and stops it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgepipe.cli.admin import run_async, status_if_running
from edgepipe.cli.node_process import start_in_background
from edgepipe.cli.wizard.asking import done, say
from edgepipe.cli.wizard.state import Setup

if TYPE_CHECKING:
    from edgepipe.wire.nodes import ClusterStatus


def node_status(setup: Setup) -> ClusterStatus | None:
    """Return the running node's status, None without a running node."""
    return run_async(status_if_running(setup.data_dir))


def start_node(setup: Setup, *flags: str) -> None:
    """Start this machine's node unless it runs."""
    if node_status(setup) is not None:
        return
    say("     starting the node, about 10 s ...", style="dim")
    ready = start_in_background(setup.data_dir, flags, name=setup.name)
    setup.node_pid = ready["pid"]
    done(f"the node runs at {ready['address']}")


def stop_node(setup: Setup) -> None:
    """Stop the node that the wizard started; the service starts it again."""
    if node_status(setup) is not None:
        from edgepipe.cli.node import stop

        stop(setup.data_dir)
    setup.node_pid = 0
