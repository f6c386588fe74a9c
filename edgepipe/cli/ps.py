"""``edgepipe ps``"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli.options import DataDir, Json, data_dir_of
from edgepipe.cli.output import as_dict, make_console, make_table, print_json
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.link.admin_client import Admin
    from edgepipe.wire.engines import EngineState
    from edgepipe.wire.tasks import TaskState


def ps(
    tasks: Annotated[
        bool, typer.Option("--tasks", help="List the node's tasks instead: pulls, loads, copies, removals.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List the served models and their nodes, and tasks that run."""
    from edgepipe.cli.admin import ask_node
    from edgepipe.cli.views.status_view import news_of
    from edgepipe.link.admin_client import Admin

    known = ask_node(data_dir_of(data_dir), _tasks)
    if tasks:
        _show_tasks(known, as_json=as_json)
        return
    status = ask_node(data_dir_of(data_dir), Admin.status)
    engines = status.engines
    if as_json:
        print_json([as_dict(engine) for engine in engines])
    elif not engines:
        print("no model is served\nserve one: edgepipe serve MODEL    (see 'edgepipe models list')")
    else:
        numbers = ("CONTEXT", "RUNNING", "WAITING")
        table = make_table("MODEL", "STATE", "LAYERS BY NODE", *numbers, right=numbers)
        for engine in engines:
            table.add_row(*_row(engine))
        make_console().print(table)
        if news := news_of(status):
            print(news)
    if not as_json and (running := [task for task in known if not task.ended]):
        print()
        _show_tasks(running, as_json=False)


async def _tasks(admin: Admin) -> Sequence[TaskState]:
    """Return the node's tasks, newest first."""
    async with aclosing(admin.tasks()) as lists:
        return (await anext(lists)).tasks


def _show_tasks(tasks: Sequence[TaskState], *, as_json: bool) -> None:
    from edgepipe.units import format_bytes

    if as_json:
        print_json([as_dict(task) for task in tasks])
        return
    if not tasks:
        print("no tasks yet")
        return
    table = make_table("TASK", "MODEL", "STATE", "PROGRESS")
    for task in tasks:
        done = f" {format_bytes(task.bytes_done)} of {format_bytes(task.bytes_total)}" if task.bytes_total else ""
        progress = f"{task.phase}{done}" if not task.ended else task.error[-1] if task.error else ""
        table.add_row(task.kind, one_line(task.model) or "-", task.state, one_line(progress) or "-")
    make_console().print(table)


def _row(engine: EngineState) -> list[str]:
    from edgepipe.cli.serve import layers_of

    where = " ".join(f"{stage.node_name}:{layers_of(stage)}" for stage in engine.stages)
    context = str(engine.context_length or "-")
    name = f"{engine.title} ({', '.join(engine.names)})" if engine.names else engine.title
    return [name, engine.state, where or "-", context, str(engine.running), str(engine.waiting)]
