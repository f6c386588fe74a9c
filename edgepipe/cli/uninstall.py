"""``edgepipe uninstall``: lists, then removes, all files that edgepipe keeps on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edgepipe.cli.confirming import confirm
from edgepipe.cli.options import DataDir, ModelsDir
from edgepipe.errors import ConfigInvalid
from edgepipe.plain_words import plain
from edgepipe.safe_text import one_line
from edgepipe.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A file or folder that edgepipe made."""

    path: Path
    what: str
    num_bytes: int
    kept: bool = False  # the user did not ask to remove it


def uninstall(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files; remove nothing.")] = False,
    purge_models: Annotated[bool, typer.Option("--purge-models", help="Also delete downloaded models.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
) -> None:
    """Remove edgepipe's service, identity, settings and logs. Models stay by default."""
    from edgepipe.cli.service import service_plan, uninstall_service
    from edgepipe.config import default_config_file, kernel_dir, load_config
    from edgepipe.daemon.machine.data_dir import socket_path

    config = load_config({"data_dir": data_dir, "models_dir": models_dir}).values
    plans = [plan for system in (False, True) if (plan := service_plan(config.data_dir, system=system)).path.exists()]
    leftovers = find_leftovers(
        services=[plan.path for plan in plans],
        data_dir=config.data_dir,
        models_dir=config.models_dir,
        config_file=default_config_file(),
        kernels=kernel_dir(),
        purge_models=purge_models,
    )
    _print(leftovers, dry_run=dry_run)
    if dry_run:
        return
    if not any(not leftover.kept for leftover in leftovers):
        return
    confirm("Remove all of it?", yes=yes, command="edgepipe uninstall --yes")
    for plan in plans:
        uninstall_service(plan)
    if socket_path(config.data_dir).exists():
        _stop_node(config.data_dir)
    for leftover in leftovers:
        if not leftover.kept:
            _remove(leftover.path, spare=config.models_dir if not purge_models else None)
    print("\nremoved. The program itself: pip uninstall edgepipe")
    print("Other machines still trust this one's key: on one of them run 'edgepipe peers remove NAME'.")


def find_leftovers(
    *,
    services: Sequence[Path],
    data_dir: Path,
    models_dir: Path,
    config_file: Path,
    kernels: Path,
    purge_models: bool,
) -> list[Leftover]:
    """Find edgepipe's files and folders, with their sizes."""
    found = [Leftover(path=path, what="service", num_bytes=_size(path)) for path in services]
    if data_dir.exists():
        inside = _size(models_dir) if models_dir.is_relative_to(data_dir) else 0
        size = _size(data_dir) - inside
        found.append(Leftover(path=data_dir, what="identity, trust, logs, conversations", num_bytes=size))
    if config_file.exists():
        found.append(Leftover(path=config_file, what="settings", num_bytes=_size(config_file)))
    if kernels.exists():
        found.append(Leftover(path=kernels, what="compiled kernels", num_bytes=_size(kernels)))
    if models_dir.exists():
        repacked = [] if purge_models else _repacked(models_dir)
        size = _size(models_dir) - sum(each.num_bytes for each in repacked)
        found += [*repacked, Leftover(path=models_dir, what="models", num_bytes=size, kept=not purge_models)]
    return found


def _repacked(models_dir: Path) -> list[Leftover]:
    """Find the copies of weights in a CPU's layout beside the models."""
    from edgepipe.model.repacked import REPACKED_FOLDER

    folders = sorted(
        path for path in models_dir.glob(f"*/{REPACKED_FOLDER}") if path.is_dir() and not path.is_symlink()
    )
    return [Leftover(path=path, what="weights in this CPU's layout", num_bytes=_size(path)) for path in folders]


def _print(leftovers: Sequence[Leftover], *, dry_run: bool) -> None:
    if not leftovers:
        print("edgepipe keeps nothing on this machine")
        return
    print("would remove:" if dry_run else "to be removed:")
    for leftover in leftovers:
        kept = "    stays; --purge-models removes it" if leftover.kept else ""
        print(one_line(f"  {format_bytes(leftover.num_bytes):>9}  {leftover.what}: {leftover.path}{kept}"))


def _stop_node(data_dir: Path) -> None:
    from edgepipe.cli.node import stop
    from edgepipe.errors import NodeUnreachable

    try:
        stop(data_dir)
    except NodeUnreachable:
        return  # a killed node leaves its socket behind


def _remove(path: Path, *, spare: Path | None) -> None:
    """Remove a file, or a folder except ``spare`` below it. Raises ConfigInvalid."""
    try:
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif spare is None or not spare.is_relative_to(path) or not spare.exists():
            shutil.rmtree(path)
        else:
            for child in path.iterdir():
                if not spare.is_relative_to(child):
                    _remove(child, spare=None)
    except OSError as exc:
        raise ConfigInvalid(
            f"{path} cannot be removed",
            fact=plain(exc),
            next_step="check its permissions, then: edgepipe uninstall",
        ) from exc


def _size(path: Path) -> int:
    """Return the bytes of a file or of all readable files below a folder."""
    if not path.is_dir():
        return path.lstat().st_size if path.exists() else 0
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
