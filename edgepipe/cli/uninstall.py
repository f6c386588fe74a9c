"""``edgepipe uninstall``: lists, then removes, the files that edgepipe made on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli.confirming import confirm
from edgepipe.cli.options import DataDir, ModelsDir
from edgepipe.errors import ConfigInvalid
from edgepipe.plain_words import plain
from edgepipe.safe_text import one_line
from edgepipe.units import format_bytes

if TYPE_CHECKING:
    from edgepipe.cli.leftovers import FoundFiles, Leftover
    from edgepipe.cli.service_plan import ServiceSetup

_MOST_SHOWN = 10  # foreign files that are listed; edgepipe did not make them, so they stay


def uninstall(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files; remove nothing.")] = False,
    purge_models: Annotated[bool, typer.Option("--purge-models", help="Also delete downloaded models.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
) -> None:
    """Remove edgepipe's service, identity, settings and logs. Models stay by default; files of others always do."""
    from edgepipe.cli.service import uninstall_service
    from edgepipe.config import load_config
    from edgepipe.daemon.machine.data_dir import socket_path

    config = load_config({"data_dir": data_dir, "models_dir": models_dir}).values
    main = load_config({}).values
    services = _services(config.data_dir)
    found = find_leftovers(
        services=services,
        data_dir=config.data_dir,
        models_dir=config.models_dir,
        main=config.data_dir == main.data_dir,
        shared_models=models_dir is None and not config.models_dir.is_relative_to(config.data_dir),
        purge_models=purge_models,
    )
    _print(found, dry_run=dry_run)
    to_remove = [leftover for leftover in found.leftovers if not leftover.stays]
    if dry_run or not to_remove:
        return
    confirm("Remove all of it?", yes=yes, command="edgepipe uninstall --yes")
    for plan, mine in services:
        if mine:
            uninstall_service(plan)
    if socket_path(config.data_dir).exists():
        _stop_node(config.data_dir)
    for leftover in reversed(to_remove):  # models may lie in the data directory, which goes when it is empty
        _remove(leftover, data_dir=config.data_dir)
    print(f"\nremoved. The program itself: {_remove_program()}")
    print("Other machines still trust this one's key: on one of them run 'edgepipe peers remove NAME'.")


def find_leftovers(
    *,
    services: Sequence[tuple[ServiceSetup, bool]],
    data_dir: Path,
    models_dir: Path,
    main: bool,
    shared_models: bool,
    purge_models: bool,
) -> FoundFiles:
    """Find edgepipe's files and folders.

    ``services``: the installed ones, and whether each starts the node of ``data_dir``. ``main``: it is the node that
    commands without ``--data-dir`` mean, which alone has settings and kernels. ``shared_models``: the settings name one
    folder of models for all nodes, so it goes only with the main one.
    """
    from edgepipe.cli.leftovers import FoundFiles, data_leftovers, file_leftover, model_leftovers
    from edgepipe.config import default_config_file, kernel_dir

    leftovers: list[Leftover] = []
    for plan, mine in services:
        leftovers += file_leftover(plan.path, "service", stays="" if mine else "it starts another node")
    inside = [models_dir, default_config_file(), kernel_dir()]
    data = data_leftovers(data_dir, others=inside)
    leftovers += data.leftovers
    if main:
        leftovers += file_leftover(default_config_file(), "settings")
        leftovers += file_leftover(kernel_dir(), "compiled kernels")
    if shared_models and not main:
        return FoundFiles(leftovers=tuple(leftovers), foreign=data.foreign)
    models = model_leftovers(models_dir, purge=purge_models, stays="--purge-models removes them")
    return FoundFiles(leftovers=(*leftovers, *models.leftovers), foreign=(*data.foreign, *models.foreign))


def _services(data_dir: Path) -> list[tuple[ServiceSetup, bool]]:
    """Return the installed services, and whether each starts the node of ``data_dir``."""
    from edgepipe.cli.service import service_plan
    from edgepipe.cli.service_plan import starts_node_of

    plans = [plan for system in (False, True) if (plan := service_plan(data_dir, system=system)).path.exists()]
    return [(plan, starts_node_of(data_dir, plan.manager, _text(plan.path))) for plan in plans]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _print(found: FoundFiles, *, dry_run: bool) -> None:
    if not found.leftovers:
        print("edgepipe keeps nothing on this machine")
    else:
        print("would remove:" if dry_run else "to be removed:")
    for leftover in found.leftovers:
        why = f"    stays: {leftover.stays}" if leftover.stays else ""
        print(one_line(f"  {format_bytes(leftover.num_bytes):>9}  {leftover.what}: {leftover.place}{why}"))
    if found.foreign:
        print("not made by edgepipe, stays:")
        for path in found.foreign[:_MOST_SHOWN]:
            print(one_line(f"             {path}"))
        if len(found.foreign) > _MOST_SHOWN:
            print(f"             and {len(found.foreign) - _MOST_SHOWN} more")


def _remove_program() -> str:
    """Return the command that removes the program, as it was installed."""
    from edgepipe.cli.installation import find_installation, remove_command
    from edgepipe.errors import FeatureMissing

    try:
        return remove_command(find_installation())
    except FeatureMissing as error:
        return error.fact


def _stop_node(data_dir: Path) -> None:
    from edgepipe.cli.node import stop
    from edgepipe.errors import NodeUnreachable

    try:
        stop(data_dir)
    except NodeUnreachable:
        return  # a killed node leaves its socket behind


def _remove(leftover: Leftover, *, data_dir: Path) -> None:
    """Remove files and folders, and the folders around them that are empty now. Raises ConfigInvalid."""
    from edgepipe.cli.leftovers import emptied_folders

    path = leftover.place
    inside = path.parent if path.parent.name == "edgepipe" else path  # the folder of the settings, or of the kernels
    top = data_dir if path.is_relative_to(data_dir) else inside
    try:
        for path in leftover.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in emptied_folders(leftover.paths, up_to=top):
            if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
                path.rmdir()
    except OSError as exc:
        raise ConfigInvalid(
            f"{path} cannot be removed",
            fact=plain(exc),
            next_step="check its permissions, then: edgepipe uninstall",
        ) from exc
