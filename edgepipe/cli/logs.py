"""``edgepipe logs``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgepipe.cli.options import DataDir, data_dir_of
from edgepipe.safe_text import visible


def logs(
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=1, max=2000, help="Number of newest lines.")
    ] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Also print new lines, until ^C.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Show the log of this machine's node."""
    from edgepipe.cli.admin import no_node, run_async
    from edgepipe.daemon.machine.data_dir import log_path
    from edgepipe.errors import NodeUnreachable

    folder = data_dir_of(data_dir)
    try:
        run_async(_print_lines(folder, lines=lines, follow=follow))
    except NodeUnreachable as exc:
        if follow or not log_path(folder).is_file():
            raise no_node(folder) from exc
        for line in _tail(log_path(folder), lines):
            print(line)


async def _print_lines(data_dir: Path, *, lines: int, follow: bool) -> None:
    from edgepipe.cli.admin import connect

    async with connect(data_dir) as admin:
        async for line in admin.logs(lines=lines, follow=follow):
            print(line.text, flush=follow)


def _tail(path: Path, lines: int) -> list[str]:
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        return [visible(line.rstrip("\n")) for line in file.readlines()[-lines:]]
