"""``edgepipe stop``"""

from __future__ import annotations

from typing import Annotated

import typer

from edgepipe.cli.options import DataDir, data_dir_of
from edgepipe.errors import ConfigInvalid


def stop(
    model: Annotated[str, typer.Argument(help="The model to stop serving.", show_default=False)] = "",
    everything: Annotated[bool, typer.Option("--all", help="Stop every model.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Stop serving a model."""
    from edgepipe.cli.admin import connect, run_async

    if bool(model) == everything:
        raise ConfigInvalid("name one model, or say --all", next_step="edgepipe stop MODEL    (see 'edgepipe ps')")

    async def work() -> list[str]:
        async with connect(data_dir_of(data_dir)) as admin:
            return await admin.stop_model(model)

    stopped = run_async(work())
    print(f"stopped {', '.join(stopped)}" if stopped else "nothing was served")
