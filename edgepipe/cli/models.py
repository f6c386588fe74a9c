"""``edgepipe models pull|list|rm|replicate``"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli.options import DataDir, Json, ModelsDir, complete_model, data_dir_of, models_dir_of
from edgepipe.cli.output import make_console, make_table, print_json
from edgepipe.errors import ConfigInvalid
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.model.progress import PullProgress
    from edgepipe.model.pull import PullResult

app = typer.Typer(help="Models on this machine's disk.")


@app.callback()
def _group() -> None:
    """Models on this machine's disk."""


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="ORG/NAME on the Hugging Face Hub, a folder, a GGUF file, or 'demo'.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show which files a pull would fetch; fetch nothing.")
    ] = False,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
) -> None:
    """Fetch a model; an interrupted pull resumes."""
    result = pull_model(models_dir_of(data_dir, models_dir), model, dry_run=dry_run)
    if dry_run:
        _print_plan(result)
    else:
        print(f"{one_line(result.model_id)} is {'already ' * result.already_here}here: {result.path}")
        tell_node(data_dir_of(data_dir))


def pull_model(root: Path, model: str, *, dry_run: bool = False) -> PullResult:
    """Pull with a progress bar on stderr. Raises the errors of ModelStore.pull."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from edgepipe.model.store import ModelStore

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(one_line(model), total=None)

        def show(now: PullProgress) -> None:
            progress.update(
                task, description=f"{now.phase:<8}", completed=now.done_bytes, total=now.total_bytes or None
            )

        return ModelStore(root).pull(model, on_progress=show, dry_run=dry_run)


@app.command("list")
def list_models(data_dir: DataDir = None, models_dir: ModelsDir = None, as_json: Json = False) -> None:
    """List the models on the cluster's disks; without a running node, this machine's models."""
    from edgepipe.cli.views.copies_view import copies_text, members_of
    from edgepipe.cli.views.model_rows import model_rows
    from edgepipe.model.store import ModelStore

    root = models_dir_of(data_dir, models_dir)
    members = members_of(data_dir_of(data_dir))
    rows = model_rows(ModelStore(root).list(), members)
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"no models in {root}")
        print("fetch one: edgepipe models pull demo")
        return
    from edgepipe.units import format_bytes

    shared = ("WHERE", "COPIES") if members else ("STATE",)
    table = make_table("MODEL", "SIZE", "LAYERS", "CONTEXT", *shared, right=("SIZE", "LAYERS", "CONTEXT"))
    for row in rows:
        state = "whole" if row["whole"] else "in part"
        where = ", ".join(holder["node"] + " (part)" * (not holder["whole"]) for holder in row["nodes"])
        last = (where, copies_text(row["copies"])) if members else (state,)
        name = f"{row['model']} @{row['content'][:8]}" if row["ambiguous"] else row["model"]
        sizes = (format_bytes(row["size_bytes"]), str(row["layers"] or "-"), str(row["context"] or "-"))
        table.add_row(one_line(name), *sizes, *map(one_line, last))
    make_console().print(table)


@app.command()
def rm(
    model: Annotated[str, typer.Argument(help="The model to delete.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; stop the model if it is served.")] = False,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
) -> None:
    """Delete a model from this machine's disk. A served model is stopped first."""
    from edgepipe.cli.views.copies_view import members_of, served_by
    from edgepipe.model.store import ModelStore
    from edgepipe.units import format_bytes

    folder, store = data_dir_of(data_dir), ModelStore(models_dir_of(data_dir, models_dir))
    on_this_disk = any(stored.id == model for stored in store.list())
    if on_this_disk and (nodes := served_by(folder, model)):
        _stop_first(folder, model, nodes, yes=yes)
    freed = store.rm(model)
    print(f"deleted {one_line(model)} from this machine: {format_bytes(freed)} are free again")
    tell_node(folder)
    elsewhere = [
        member.node.name
        for member in members_of(folder)
        if not member.self and any(stored.model == model for stored in member.node.models)
    ]
    if elsewhere:
        print(f"it is still on {', '.join(map(one_line, elsewhere))}")


def _stop_first(data_dir: Path, model: str, nodes: Sequence[str], *, yes: bool) -> None:
    """Stop a served model, which would be fetched again at once. Raises ConfigInvalid without a terminal to ask at."""
    from edgepipe.cli.admin import connect, run_async

    served = f"{one_line(model)} is served by {', '.join(map(one_line, nodes))}"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigInvalid(
                served,
                fact="this machine would fetch it again at once",
                next_step=f"edgepipe models rm {one_line(model)} --yes    (stops and deletes it)",
            )
        typer.confirm(f"{served}. Stop it, and delete it from this machine?", abort=True)

    async def stop() -> None:
        async with connect(data_dir) as admin:
            await admin.stop_model(model)

    run_async(stop())


@app.command()
def replicate(
    model: Annotated[str, typer.Argument(help="A model on any node of the cluster.", autocompletion=complete_model)],
    copies: Annotated[
        int, typer.Option("--copies", metavar="N", min=1, max=16, help="Number of disks for each part.")
    ] = 2,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Copy a model's parts to other nodes' disks, so that no machine holds the only copy."""
    from edgepipe.cli.admin import run_async
    from edgepipe.cli.views.copies_view import replicate_with_progress

    made = run_async(replicate_with_progress(data_dir_of(data_dir), model, copies=copies))
    if as_json:
        print_json({"model": model, "copies": copies, "fetched": made})
    elif made:
        from edgepipe.units import format_bytes

        copied = ", ".join(f"{format_bytes(copy['num_bytes'])} to {one_line(copy['node'])}" for copy in made)
        print(f"every part of {one_line(model)} is on {copies} disks now: copied {copied}")
    else:
        print(f"every part of {one_line(model)} is on {copies} disks already")


def tell_node(data_dir: Path) -> None:
    """Make this machine's node, if it runs, report its models to the other nodes at once."""
    from edgepipe.daemon.machine.data_dir import socket_path

    if not socket_path(data_dir).exists():
        return
    from edgepipe.cli.admin import connect, run_async
    from edgepipe.errors import EdgepipeError

    async def tell() -> None:
        async with connect(data_dir) as admin:
            await admin.rescan_models()

    with contextlib.suppress(EdgepipeError):  # a node reads its disk again before it serves a model
        run_async(tell())


def _print_plan(result: PullResult) -> None:
    from edgepipe.units import format_bytes

    table = make_table("FILE", "SIZE", right=("SIZE",))
    for file in result.files:
        table.add_row(one_line(file.name), format_bytes(file.num_bytes))
    table.add_row("in all", format_bytes(result.total_bytes))
    make_console().print(table)
