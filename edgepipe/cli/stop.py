"""``edgepipe stop``"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli.options import DataDir, Json, data_dir_of
from edgepipe.cli.output import print_json
from edgepipe.errors import ConfigInvalid

if TYPE_CHECKING:
    from edgepipe.link.admin_client import Admin


def stop(
    model: Annotated[
        str, typer.Argument(help="The model to stop; required if several are served.", show_default=False)
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Stop every model.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Stop serving a model. Without a name, stop the only served model."""
    from edgepipe.cli.admin import ask_node

    if model and everything:
        raise ConfigInvalid("a name and --all contradict each other", next_step="edgepipe stop MODEL")

    async def work(admin: Admin) -> list[str]:
        served = sorted({engine.model for engine in (await admin.status()).engines})
        if len(served) > 1 and not (model or everything):
            raise ConfigInvalid(
                f"{len(served)} models are served",
                fact=", ".join(served),
                next_step="name one: edgepipe stop MODEL    (or: edgepipe stop --all)",
            )
        if not (served or model):
            return []
        return await admin.stop_model("" if everything else model or served[0])

    stopped = ask_node(data_dir_of(data_dir), work)
    if as_json:
        print_json({"stopped": stopped})
        return
    print(f"stopped {', '.join(stopped)}" if stopped else "nothing was served")
