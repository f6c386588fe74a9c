"""``edgepipe models pull|list|check|rm|replicate|quantise``"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgepipe.cli.options import (
    DataDir,
    Json,
    ModelsDir,
    WithProgress,
    complete_known_model,
    complete_model,
    data_dir_of,
    models_dir_of,
)
from edgepipe.cli.output import make_console, make_table, print_json
from edgepipe.errors import ConfigInvalid
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.files.progress import OnProgress, PullProgress
    from edgepipe.store.pull import PullResult

app = typer.Typer(help="Models on this machine's disk.")


@app.callback()
def _group() -> None:
    """Models on this machine's disk."""


@app.command()
def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="A known name (qwen3:8b), ORG/NAME[:TYPE] or a page of the Hugging Face Hub, a folder, a GGUF file, "
            "or 'demo'.",
            autocompletion=complete_known_model,
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show which files a pull would fetch; fetch nothing.")
    ] = False,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    as_json: Json = False,
    progress: WithProgress = False,
) -> None:
    """Fetch a model; an interrupted pull resumes. Of a repository with GGUF files of several types, one is fetched."""
    root, folder = models_dir_of(data_dir, models_dir), data_dir_of(data_dir)
    named, lines = with_type(root, folder, model, as_json=as_json), as_json and progress
    if dry_run:
        planned = pull_model(root, named, dry_run=True)
        if as_json:
            print_json(_result_row(planned) | {"note": ""})
        else:
            _print_plan(planned)
        return
    row = _pulled_by_node(folder, named, lines=lines) if _node_may_pull(named, models_dir) else None
    if row is None:
        result = pull_model(root, named, lines=lines)
        row = _result_row(result) | {"note": _template_note(result.path)}
    if as_json:
        print_json(row)
    else:
        already = "already " if row["already_here"] else ""
        print(f"{one_line(row['model'])} is {already}here: {one_line(row['path'])}")
        if row["note"]:
            print(f"{one_line(row['model'])}: {one_line(row['note'])}", file=sys.stderr)
    tell_node(folder)


def _node_may_pull(model: str, models_dir: Path | None) -> bool:
    """Return whether the node would pull the same into the same folder: from the hub, with the settings of both."""
    from edgepipe.config import names_hub_settings
    from edgepipe.store.pull import hub_source

    return models_dir is None and hub_source(model) is not None and not names_hub_settings()


def _pulled_by_node(data_dir: Path, model: str, *, lines: bool) -> dict[str, Any] | None:
    """Pull as a task of this machine's node, with progress. Return its row; None if no node does it."""
    from edgepipe.cli.models_task import pull_in_node

    with _showing(model, lines=lines) as show:
        return pull_in_node(data_dir, model, on_progress=show)


def _showing(model: str, *, lines: bool) -> AbstractContextManager[OnProgress]:
    """Return the display of a pull's progress: a bar on stderr, or ``lines`` of JSON on stdout."""
    from edgepipe.cli.views.progress_bar import file_progress
    from edgepipe.cli.views.progress_lines import ProgressLines

    return contextlib.nullcontext(ProgressLines().show_pull) if lines else file_progress(model)


def _template_note(path: Path) -> str:
    """Return what a person should know about the model's chat template; usually nothing."""
    from edgepipe.text.conversations.known_traits import model_traits
    from edgepipe.weights.card import read_card

    return model_traits(path, read_card(path).template).note


def with_type(root: Path, data_dir: Path, model: str, *, as_json: bool) -> str:
    """Return ``model``, with the type that a person at the terminal chooses if its repository has several.

    Raises ConfigInvalid after printing the types if there is no terminal, and the errors of ``hub_types``.
    """
    from edgepipe.cli.waiting import HUB_IS_SLOW, line_if_slow
    from edgepipe.cli.wizard.asking import Back, Quit, Terminal
    from edgepipe.cli.wizard.type_choice import ask_type, memory_at_hand, refuse_without_type
    from edgepipe.store.hub import hub_types
    from edgepipe.store.pull import hub_source
    from edgepipe.store.store import ModelStore

    source = hub_source(model)
    if source is None or source.type or any(one.id == source.repo and one.whole for one in ModelStore(root).list()):
        return model
    with line_if_slow(HUB_IS_SLOW):
        types = hub_types(source)
    if not types:
        return model
    memory = memory_at_hand(data_dir)
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise refuse_without_type(source, types, memory, as_json=as_json)
    try:
        return ask_type(Terminal(), source, types, memory)
    except (Back, Quit) as stopped:
        raise typer.Abort from stopped


def pull_model(root: Path, model: str, *, dry_run: bool = False, lines: bool = False) -> PullResult:
    """Pull with a progress bar on stderr, or with ``lines`` of JSON on stdout; after ^C, say how much is kept.

    Raises the errors of ModelStore.pull.
    """
    from edgepipe.cli.waiting import HUB_IS_SLOW, line_if_slow
    from edgepipe.store.store import ModelStore
    from edgepipe.units import format_bytes

    store = ModelStore(root)
    store.tidy()
    try:
        with _showing(model, lines=lines) as show, line_if_slow(HUB_IS_SLOW) as answered:

            def on_progress(now: PullProgress) -> None:
                answered()
                show(now)

            return store.pull(model, on_progress=on_progress, dry_run=dry_run)
    except KeyboardInterrupt:
        if kept := store.interrupted_bytes(model):
            print(f"{format_bytes(kept)} are kept; the same command goes on from there", file=sys.stderr)
        raise


@app.command("list")
def list_models(
    known: Annotated[
        bool, typer.Option("--known", help="List well-known models instead, and which of them fit this cluster.")
    ] = False,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    as_json: Json = False,
) -> None:
    """List the models on the cluster's disks. Without a running node: this machine's models."""
    if known:
        _list_known(data_dir_of(data_dir), as_json=as_json)
        return
    from edgepipe.cli.views.copies_view import copies_text, members_of
    from edgepipe.cli.views.model_rows import model_rows
    from edgepipe.store.store import ModelStore

    root = models_dir_of(data_dir, models_dir)
    members = members_of(data_dir_of(data_dir))
    store = ModelStore(root)
    store.tidy()
    rows = model_rows(store.list(), members, store.unended())
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"no models in {root}")
        print("fetch one: edgepipe models pull demo")
        return
    from edgepipe.units import format_bytes

    shared = ("WHERE", "COPIES", "FITS") if members else ("STATE",)
    table = make_table("MODEL", "SIZE", "LAYERS", "CONTEXT", *shared, right=("SIZE", "LAYERS", "CONTEXT"))
    for row in rows:
        pull = f"pull {row['pull']}" if row["pull"] else "cannot be used" if row["problem"] else ""
        state = pull or ("whole" if row["whole"] else "in part")
        where = pull or ", ".join(holder["node"] + " (part)" * (not holder["whole"]) for holder in row["nodes"])
        last = (where, copies_text(row["copies"]), row["fits"] or "-") if members else (state,)
        name = f"{row['model']} @{row['content'][:8]}" if row["ambiguous"] else row["model"]
        sizes = (format_bytes(row["size_bytes"]), str(row["layers"] or "-"), str(row["context"] or "-"))
        table.add_row(one_line(name), *sizes, *map(one_line, last))
    make_console().print(table)
    for row in rows:
        if row["problem"]:
            name = one_line(row["model"])
            print(f"{name} cannot be used: {one_line(row['problem'])}; fetch it again: edgepipe models pull {name}")
    if begun := [row["model"] for row in rows if row["pull"] == "interrupted"]:
        name = one_line(begun[0])
        print(f"an interrupted pull goes on with: edgepipe models pull {name}; edgepipe models rm {name} deletes it")


def _list_known(data_dir: Path, *, as_json: bool) -> None:
    """List well-known models with their sizes and predicted speed. Raises NodeUnreachable."""
    from edgepipe.cli.admin import ask_node
    from edgepipe.cli.wizard.fits import HEADING, fitting_models
    from edgepipe.link.admin_client import Admin

    good, bad = fitting_models(ask_node(data_dir, Admin.status))
    if as_json:
        print_json([fit.to_json() for fit in (*good, *bad)])
        return
    print(HEADING)
    for fit in (*good, *bad):
        print(fit.text)


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="A model on this machine's disk.", autocompletion=complete_model)],
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    as_json: Json = False,
) -> None:
    """Show what a model's chat template accepts.

    The rest is repaired, in the way that is shown. Where transformers is installed, its prompts are compared.
    """
    from edgepipe.cli.template_check import check_model

    check_model(models_dir_of(data_dir, models_dir), model, as_json=as_json)


@app.command()
def rm(
    model: Annotated[str, typer.Argument(help="The model to delete.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; stop the model if it is served.")] = False,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    as_json: Json = False,
) -> None:
    """Delete a model from this machine's disk. A served model is stopped first."""
    from edgepipe.cli.views.copies_view import members_of, served_by
    from edgepipe.store.store import ModelStore
    from edgepipe.store.typed_names import meant_names
    from edgepipe.units import format_bytes

    folder, store = data_dir_of(data_dir), ModelStore(models_dir_of(data_dir, models_dir))
    store.tidy()
    meant = meant_names(model, (stored.id for stored in store.list()))
    on_this_disk = len(meant) == 1
    model = meant[0] if on_this_disk else model
    if on_this_disk and (nodes := served_by(folder, model)):
        _stop_first(folder, model, nodes, yes=yes)
    freed = store.rm(model)
    if not as_json:
        print(f"deleted {one_line(model)} from this machine: {format_bytes(freed)} are free again")
    tell_node(folder)
    elsewhere = [
        member.node.name
        for member in members_of(folder)
        if not member.self and any(stored.model == model for stored in member.node.models)
    ]
    if as_json:
        print_json({"model": model, "freed_bytes": freed, "still_on": elsewhere})
    elif elsewhere:
        print(f"it is still on {', '.join(map(one_line, elsewhere))}")


def _stop_first(data_dir: Path, model: str, nodes: Sequence[str], *, yes: bool) -> None:
    """Stop a served model, which would be fetched again at once. Raises ConfigInvalid without a terminal to ask at."""
    from edgepipe.cli.admin import ask_node

    served = f"{one_line(model)} is served by {', '.join(map(one_line, nodes))}"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigInvalid(
                served,
                fact="this machine would fetch it again at once",
                next_step=f"edgepipe models rm {one_line(model)} --yes    (stops and deletes it)",
            )
        typer.confirm(f"{served}. Stop it, and delete it from this machine?", abort=True)

    ask_node(data_dir, lambda admin: admin.stop_model(model))


@app.command()
def replicate(
    model: Annotated[str, typer.Argument(help="A model on any node of the cluster.", autocompletion=complete_model)],
    copies: Annotated[
        int, typer.Option("--copies", metavar="N", min=1, max=16, help="Number of disks for each part.")
    ] = 2,
    data_dir: DataDir = None,
    as_json: Json = False,
    progress: WithProgress = False,
) -> None:
    """Copy a model's parts to other nodes' disks. Then no machine holds the only copy."""
    from edgepipe.cli.admin import run_async
    from edgepipe.cli.views.copies_view import replicate_with_progress

    made = run_async(replicate_with_progress(data_dir_of(data_dir), model, copies=copies, lines=as_json and progress))
    if as_json:
        print_json({"model": model, "copies": copies, "fetched": made})
    elif made:
        from edgepipe.units import format_bytes

        copied = ", ".join(f"{format_bytes(copy['num_bytes'])} to {one_line(copy['node'])}" for copy in made)
        print(f"every part of {one_line(model)} is on {copies} disks now: copied {copied}")
    else:
        print(f"every part of {one_line(model)} is on {copies} disks already")


@app.command()
def quantise(
    model: Annotated[str, typer.Argument(help="A 16-bit model on this machine's disk.", autocompletion=complete_model)],
    to: Annotated[str, typer.Option("--to", metavar="q4|q8", help="About 5 or 8.5 bits for a weight.")],
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    as_json: Json = False,
) -> None:
    """Make a packed copy MODEL-q4 or MODEL-q8. Prints how far its predictions are from the original's."""
    from edgepipe.cli.quantising import quantise_model

    quantise_model(models_dir_of(data_dir, models_dir), model, to, as_json=as_json)
    tell_node(data_dir_of(data_dir))


def tell_node(data_dir: Path) -> None:
    """Make this machine's node, if it runs, report its models to the other nodes at once."""
    from edgepipe.daemon.machine.data_dir import socket_path

    if not socket_path(data_dir).exists():
        return
    from edgepipe.cli.admin import ask_node
    from edgepipe.errors import EdgepipeError
    from edgepipe.link.admin_client import Admin

    with contextlib.suppress(EdgepipeError):  # a node reads its disk again before it serves a model
        ask_node(data_dir, Admin.rescan_models)


def _result_row(result: PullResult) -> dict[str, Any]:
    return {
        "model": result.model_id,
        "path": str(result.path),
        "already_here": result.already_here,
        "dry_run": result.dry_run,
        "size_bytes": result.total_bytes,
        "files": [{"name": file.name, "size_bytes": file.num_bytes} for file in result.files],
    }


def _print_plan(result: PullResult) -> None:
    from edgepipe.units import format_bytes

    table = make_table("FILE", "SIZE", right=("SIZE",))
    for file in result.files:
        table.add_row(one_line(file.name), format_bytes(file.num_bytes))
    table.add_row("in all", format_bytes(result.total_bytes))
    make_console().print(table)
