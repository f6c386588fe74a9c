"""``edgepipe setup``"""

from __future__ import annotations

from typing import Annotated

import typer

from edgepipe.cli.options import DataDir, ModelsDir


def setup(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; use flags, else defaults.")] = False,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of this machine.", show_default=False)] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="NAME", help="Create a cluster of this name.", show_default=False)
    ] = "",
    join: Annotated[
        str, typer.Option("--join", metavar="CODE", help="Join a cluster with this pairing code.", show_default=False)
    ] = "",
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Machine to join, if mDNS finds none.", show_default=False)
    ] = "",
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Pull this model; none: no model.", show_default=False)
    ] = "",
    service: Annotated[
        bool | None, typer.Option("--service/--no-service", help="Start the node at boot.", show_default=False)
    ] = None,
    invite: Annotated[
        bool | None, typer.Option("--invite/--no-invite", help="Let another machine in.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
) -> None:
    """Make this machine a node of your cluster. Six steps, each with a default; may be repeated."""
    from edgepipe.cli.wizard.asking import Defaults, Terminal
    from edgepipe.cli.wizard.run import run_setup
    from edgepipe.cli.wizard.state import Given, Setup
    from edgepipe.config import config_file, load_config
    from edgepipe.errors import ConfigInvalid

    if cluster and join:
        raise ConfigInvalid("--cluster and --join contradict each other", next_step="give one of them")
    if host and not join:
        raise ConfigInvalid("--host goes with --join", next_step="edgepipe setup --host HOST --join CODE")
    given = Given(
        name=name,
        models_dir=models_dir is not None,
        cluster=cluster,
        join=join,
        host=host,
        model="" if model == "none" else model,
        skip_model=model == "none" or (yes and not model),
        service=False if yes and service is None else service,
        invite=False if yes and invite is None else invite,
    )
    loaded = load_config({"data_dir": data_dir, "models_dir": models_dir, "name": name or None})
    run_setup(
        Setup(
            asking=Defaults() if yes else Terminal(),
            given=given,
            config=loaded.values,
            settings_file=config_file(),
        )
    )
