"""``edgepipe connect``"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli.options import DataDir, Json, data_dir_of
from edgepipe.cli.output import print_json
from edgepipe.errors import ConfigInvalid, ModelUnknown

if TYPE_CHECKING:
    from pathlib import Path

    from edgepipe.gateway.programs import Served


def connect(
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="codex, claude, opencode, aider, openai or anthropic.")
    ],
    model: Annotated[str, typer.Argument(help="A served model, if there are several.", show_default=False)] = "",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Print what a coding agent needs to use a model."""
    from edgepipe.cli.admin import run_async
    from edgepipe.gateway.programs import PROGRAMS, SMALL_CONTEXT, small_context

    if program not in PROGRAMS:
        raise ConfigInvalid(
            f"'{program}' is no program that edgepipe knows",
            fact=f"known: {', '.join(PROGRAMS)}",
            next_step="edgepipe connect openai    (for other programs with OpenAI's API)",
        )
    served = run_async(_served_model(data_dir_of(data_dir), model))
    settings = PROGRAMS[program](served)
    warning = small_context(program, served)
    if as_json:
        print_json({"program": program, **settings.to_json(served), "warning": warning})
        return
    if warning:
        more = f"edgepipe stop {served.model}, then edgepipe serve {served.model} --context {2 * SMALL_CONTEXT}"
        print(f"warning: {warning}\n   try: {more}, or a model that supports as much", file=sys.stderr)
    print("\n".join(settings.lines(served)))


async def _served_model(data_dir: Path, model: str) -> Served:
    """Return the served model that is meant. Raises ModelUnknown if none or several are, errors of the node."""
    from edgepipe.cli import admin
    from edgepipe.cli.find import served_engine
    from edgepipe.daemon.machine.http_keys import key_file, read_key
    from edgepipe.gateway.programs import Served

    async with admin.connect(data_dir) as node:
        status = await node.status()
    engine = served_engine(status, model, verb="connect PROGRAM")
    if engine is None:
        raise ModelUnknown(
            f"'{model}' is not served" if model else "no model is served",
            next_step=f"edgepipe serve {model or 'MODEL'}",
        )
    own = next(member.node for member in status.members if member.self)
    return Served(
        base_url=f"http://127.0.0.1:{own.http_port}",
        model=engine.names[0] if engine.names else engine.model,
        context_length=engine.context_length,
        key_file=key_file(data_dir) if read_key(data_dir) else None,
    )
