"""``edgepipe models pull|list|rm|replicate``"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgepipe.cli.options import DataDir, Json, ModelsDir, complete_model, data_dir_of, models_dir_of
from edgepipe.cli.output import make_console, make_table, print_json
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.cli.copies_view import ModelCopies
    from edgepipe.model.progress import PullProgress
    from edgepipe.model.pull import PullResult
    from edgepipe.model.store import StoredModel

app = typer.Typer(help="Models on this machine's disk.")


@app.callback()
def _group() -> None:
    """Models on this machine's disk."""


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="org/name of the Hub, a folder, a GGUF file, or 'demo'.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be fetched, fetch nothing.")] = False,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
) -> None:
    """Fetch a model, resuming what an earlier pull left."""
    result = pull_model(models_dir_of(data_dir, models_dir), model, dry_run=dry_run)
    if dry_run:
        _print_plan(result)
    else:
        print(f"{one_line(result.model_id)} is {'already ' * result.already_here}here: {result.path}")
        _tell_node(data_dir_of(data_dir))


def pull_model(root: Path, model: str, *, dry_run: bool = False) -> PullResult:
    """Pull with a progress bar on stderr. Raises what ModelStore.pull raises."""
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
    """List the models on this machine's disk."""
    from edgepipe.cli.copies_view import copies_in_cluster, copies_text
    from edgepipe.model.store import ModelStore

    root = models_dir_of(data_dir, models_dir)
    known = copies_in_cluster(data_dir_of(data_dir))
    rows = [_row(model, known.get((model.id, model.manifest_hash))) for model in ModelStore(root).list()]
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"no models in {root}")
        print("fetch one: edgepipe models pull demo")
        return
    from edgepipe.units import format_bytes

    shared = ("COPIES",) if known else ()
    table = make_table("MODEL", "SIZE", "LAYERS", "CONTEXT", "STATE", *shared, right=("SIZE", "LAYERS", "CONTEXT"))
    for row in rows:
        size, layers, context = format_bytes(row["size_bytes"]), str(row["layers"]), str(row["context"])
        copies = (copies_text(row["copies"]),) if known else ()
        table.add_row(one_line(row["model"]), size, layers, context, "whole" if row["whole"] else "in part", *copies)
    make_console().print(table)


@app.command()
def rm(
    model: Annotated[str, typer.Argument(help="The model to delete.")],
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
) -> None:
    """Delete a model from this machine's disk."""
    from edgepipe.model.store import ModelStore
    from edgepipe.units import format_bytes

    freed = ModelStore(models_dir_of(data_dir, models_dir)).rm(model)
    print(f"deleted {one_line(model)}: {format_bytes(freed)} are free again")
    _tell_node(data_dir_of(data_dir))


@app.command()
def replicate(
    model: Annotated[str, typer.Argument(help="A model on any node of the cluster.", autocompletion=complete_model)],
    copies: Annotated[
        int, typer.Option("--copies", metavar="N", min=1, max=16, help="Disks that each part shall be on.")
    ] = 2,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Copy a model's parts to other nodes' disks. No machine then takes the last copy along."""
    from edgepipe.cli.admin import run_async
    from edgepipe.cli.copies_view import replicate_with_progress

    made = run_async(replicate_with_progress(data_dir_of(data_dir), model, copies=copies))
    if as_json:
        print_json({"model": model, "copies": copies, "fetched": made})
    elif made:
        from edgepipe.units import format_bytes

        told = ", ".join(f"{format_bytes(one['num_bytes'])} to {one_line(one['node'])}" for one in made)
        print(f"every part of {one_line(model)} is on {copies} disks now: copied {told}")
    else:
        print(f"every part of {one_line(model)} is on {copies} disks already")


def _tell_node(data_dir: Path) -> None:
    """The disk has other models now: this machine's node, if one runs, tells the others at once."""
    from edgepipe.daemon.data_dir import socket_path

    if not socket_path(data_dir).exists():
        return
    from edgepipe.cli.admin import connect, run_async
    from edgepipe.errors import EdgepipeError

    async def tell() -> None:
        async with connect(data_dir) as admin:
            await admin.rescan_models()

    with contextlib.suppress(EdgepipeError):  # it looks again when it is asked to serve something
        run_async(tell())


def _row(model: StoredModel, copies: ModelCopies | None) -> dict[str, Any]:
    config = model.config
    return {
        "model": model.id,
        "size_bytes": model.size_bytes,
        "layers": config.num_layers,
        "context": config.context_length,
        "architecture": config.architecture,
        "whole": model.whole,
        "path": str(model.path),
        "copies": copies and {"fewest": copies.fewest, "nodes": list(copies.nodes)},
    }


def _print_plan(result: PullResult) -> None:
    from edgepipe.units import format_bytes

    table = make_table("FILE", "SIZE", right=("SIZE",))
    for file in result.files:
        table.add_row(one_line(file.name), format_bytes(file.num_bytes))
    table.add_row("in all", format_bytes(result.total_bytes))
    make_console().print(table)
