"""Offers models that fit to a person whose cluster has no model, and fetches the chosen model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgepipe.cli.admin import run_async, status_if_running
from edgepipe.cli.models import pull_model, tell_node
from edgepipe.cli.wizard.asking import Asking, Back, Quit, Terminal, say
from edgepipe.cli.wizard.model_choice import SKIP, choose_model

if TYPE_CHECKING:
    from edgepipe.model.pull import PullResult

_INTERRUPTED = 130


def offer_model(
    data_dir: Path,
    models_dir: Path,
    *,
    asking: Asking | None = None,
    pull: Callable[[Path, str], PullResult] = pull_model,
) -> str:
    """Fetch a model for a person at a terminal whose cluster has none. Return its name.

    Return an empty name without a node, without a terminal, if the cluster has a model, or if the person wants none.
    Raises typer.Exit(130) if the person stops, and the errors of ``ModelStore.pull``.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return ""
    status = run_async(status_if_running(data_dir))
    if (
        status is None
        or status.engines
        or any(model.complete for member in status.members for model in member.node.models)
    ):
        return ""
    return fetch_chosen(asking or Terminal(), data_dir, models_dir, pull=pull)


def fetch_chosen(
    asking: Asking, data_dir: Path, models_dir: Path, *, pull: Callable[[Path, str], PullResult] = pull_model
) -> str:
    """Ask which model to fetch, and fetch it. Return its name, empty for no model. Raises as ``offer_model``."""
    say("No machine of this cluster has a model yet.")
    try:
        chosen = choose_model(asking, data_dir=data_dir, models_dir=models_dir)
    except Back:
        return ""
    except Quit:
        raise typer.Exit(_INTERRUPTED) from None
    if chosen == SKIP:
        return ""
    result = pull(models_dir, chosen)
    tell_node(data_dir)
    return result.model_id
