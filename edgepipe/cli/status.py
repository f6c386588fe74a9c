"""``edgepipe status``"""

from __future__ import annotations

import typer

from edgepipe.cli.options import DEGRADED_EXIT, DataDir, Json, data_dir_of
from edgepipe.cli.output import as_dict, make_console, print_json


def status(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show nodes, memory, stages, links, downloads. Exit code 8 if the cluster is degraded."""
    from edgepipe.cli.admin import ask_node
    from edgepipe.cli.views.status_view import is_healthy, render_status
    from edgepipe.link.admin_client import Admin

    found = ask_node(data_dir_of(data_dir), Admin.status)
    if as_json:
        print_json(as_dict(found))
    else:
        console = make_console()
        for part in render_status(found):
            console.print(part)
    if not is_healthy(found):
        raise typer.Exit(DEGRADED_EXIT)
