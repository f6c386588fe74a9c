"""Copies of models on the cluster's disks, and the progress of copying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgepipe.cli.output import make_console

if TYPE_CHECKING:
    from edgepipe.wire.nodes import ClusterStatus, MemberState
    from edgepipe.wire.serving import ReplicateEvent


def members_of(data_dir: Path) -> Sequence[MemberState]:
    """Return the cluster's members as this machine's node knows them; empty if it does not run."""
    status = _status(data_dir)
    return status.members if status is not None else ()


def served_by(data_dir: Path, model: str) -> tuple[str, ...]:
    """Return the nodes with stages of a served model; ``the cluster`` while its engine has no stages yet."""
    status = _status(data_dir)
    engines = (
        [engine for engine in status.engines if engine.model == model and engine.state != "failed"] if status else []
    )
    holders = {stage.node_name for engine in engines for stage in engine.stages}
    return tuple(sorted(holders)) or ("the cluster",) * bool(engines)


def _status(data_dir: Path) -> ClusterStatus | None:
    """Return the node's status, None if it does not run. Imports gRPC only if the node's socket exists."""
    from edgepipe.daemon.machine.data_dir import socket_path

    if not socket_path(data_dir).exists():
        return None
    from edgepipe.cli.admin import run_async, status_if_running

    return run_async(status_if_running(data_dir))


def copies_text(copies: Mapping[str, Any] | None) -> str:
    """Format the copies: ``2 (gamer, studio)``."""
    if copies is None:
        return "-"
    return f"{copies['fewest']} ({', '.join(copies['nodes'])})"


async def replicate_with_progress(
    data_dir: Path, model: str, *, copies: int, lines: bool = False
) -> list[dict[str, Any]]:
    """Replicate, with a progress bar per node on stderr, or with ``lines`` of JSON on stdout. Return the copies.

    Raises errors of ``Admin.replicate``.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from edgepipe.cli.admin import connect
    from edgepipe.cli.views.progress_lines import ProgressLines

    printed = ProgressLines()
    console = make_console(stderr=True)
    columns = (TextColumn("to {task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    last: ReplicateEvent | None = None
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        async with connect(data_dir) as admin:
            async for event in admin.replicate(model, copies=copies):
                last = event
                if lines:
                    done, total = (
                        sum(copy.bytes_done for copy in event.copies),
                        sum(copy.bytes_total for copy in event.copies),
                    )
                    printed.show("copying", bytes_done=done, bytes_total=total)
                for number, copy in enumerate(event.copies):
                    if number == len(progress.tasks):
                        progress.add_task(copy.node_name)
                    progress.update(progress.task_ids[number], completed=copy.bytes_done, total=copy.bytes_total)
    made = last.copies if last is not None else ()
    return [{"node": copy.node_name, "node_id": copy.node_id, "num_bytes": copy.bytes_total} for copy in made]
