"""Pulls that this machine's node runs as a task, so that the page and ``edgepipe ps`` show them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgepipe.errors import ModelDownloadFailed, NodeUnreachable, RequestInvalid

if TYPE_CHECKING:
    from edgepipe.files.progress import OnProgress
    from edgepipe.link.admin_client import Admin
    from edgepipe.wire.tasks import TaskState

_KIND = "pull"


def pull_in_node(data_dir: Path, model: str, *, on_progress: OnProgress) -> dict[str, Any] | None:
    """Pull in this machine's node; ^C cancels the task. Return what ``models pull --json`` prints.

    Return None if no node answers or takes such a name. Print the error of a failed pull and raise typer.Exit.
    """
    from edgepipe.daemon.machine.data_dir import socket_path

    if not socket_path(data_dir).exists():
        return None
    from edgepipe.cli.admin import ask_node

    try:
        task = ask_node(data_dir, lambda admin: _run(admin, model, on_progress))
    except (NodeUnreachable, RequestInvalid):
        return None
    if task.state == "done":
        return json.loads(task.result)
    for line in task.error:
        print(line, file=sys.stderr)
    raise typer.Exit(ModelDownloadFailed.exit_code)


async def _run(admin: Admin, model: str, on_progress: OnProgress) -> TaskState:
    """Start the task and follow it to its end. Cancel it if this command ends first."""
    from edgepipe.files.progress import PullProgress

    task = await admin.start_task(_KIND, model)
    try:
        async for tasks in admin.tasks():
            found = next((each for each in tasks.tasks if each.task_id == task.task_id), None)
            if found is None or found.ended:
                break
            on_progress(
                PullProgress(phase=found.phase, file=model, done_bytes=found.bytes_done, total_bytes=found.bytes_total)
            )
    except asyncio.CancelledError:
        await admin.cancel_task(task.task_id)
        print("the pull stops; the same command goes on from there", file=sys.stderr)
        raise
    return await admin.task(task.task_id)
