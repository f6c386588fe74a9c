"""``edgepipe open``"""

from __future__ import annotations

import html
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli.options import DataDir, data_dir_of

if TYPE_CHECKING:
    from edgepipe.link.admin_client import Admin

_FILE = "open.html"


def open(
    show: Annotated[bool, typer.Option("--show", help="Print the address; open no browser.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Open this node's page in the browser, with the right to manage. It lasts 12 hours."""
    from edgepipe.cli.admin import ask_node

    folder = data_dir_of(data_dir)
    address = ask_node(folder, _address)
    if show or not _open_in_browser(folder, address):
        print(f"{address}\nvalid once, for a minute, on this machine")


async def _address(admin: Admin) -> str:
    """Return the address of the page with a ticket. The fragment of an address is never sent to a server."""
    status = await admin.status()
    own = next(member.node for member in status.members if member.self)
    return f"http://127.0.0.1:{own.http_port}/#ticket={await admin.issue_ticket()}"


def _open_in_browser(data_dir: Path, address: str) -> bool:
    """Open the address by a file that only this user may read: every user can read the arguments of processes.

    Return whether a browser was found.
    """
    from edgepipe.cluster.private_files import write_private

    file = data_dir / _FILE
    text = f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(address)}"><title>edgepipe</title>'
    write_private(file, text.encode())
    return webbrowser.open(file.as_uri())
