"""Fetches models for a person who wants to chat: one of those that fit, or the one that the person has named."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgepipe.cli.admin import run_async, status_if_running
from edgepipe.cli.models import pull_model, tell_node, with_type
from edgepipe.cli.wizard.asking import Asking, Back, Quit, Terminal, say
from edgepipe.cli.wizard.model_choice import SKIP, choose_model
from edgepipe.safe_text import one_line
from edgepipe.store.typed_names import meant_names, understood

if TYPE_CHECKING:
    from edgepipe.errors import ModelUnknown
    from edgepipe.store.pull import PullResult
    from edgepipe.wire.nodes import ClusterStatus

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
    if not _at_terminal():
        return ""
    status = run_async(status_if_running(data_dir))
    if (
        status is None
        or status.engines
        or any(model.complete for member in status.members for model in member.node.models)
    ):
        return ""
    return fetch_chosen(asking or Terminal(), data_dir, models_dir, pull=pull)


def offer_named(
    model: str,
    data_dir: Path,
    models_dir: Path,
    *,
    asking: Asking | None = None,
    pull: Callable[[Path, str], PullResult] = pull_model,
) -> str:
    """Fetch the model that a person at a terminal has named if no machine of the cluster has it. Return its name.

    Ask one question, with the size and whether it fits. Return ``model`` itself without a node or a terminal, or if the
    cluster has it. Raises ModelUnknown for a text that means no model, typer.Exit if the person does not want to fetch
    it, and the errors of ``ModelStore.pull``.
    """
    status = run_async(status_if_running(data_dir)) if _at_terminal() else None
    if status is None or meant_names(model, _names_there(status)):
        return model
    return fetch_named(asking or Terminal(), model, data_dir, models_dir, pull=pull)


def fetch_unserved(
    model: str,
    data_dir: Path,
    models_dir: Path,
    refused: ModelUnknown,
    *,
    yes: bool,
    as_json: bool,
    pull: Callable[[Path, str], PullResult] = pull_model,
) -> str:
    """Fetch a model that ``serve`` did not find in the cluster: ask at a terminal, not with ``yes``. Return its name.

    Raises ``refused``, the node's error, if the name means several models of the cluster or none at all, and where no
    person can be asked: without a terminal and for ``as_json``. Else raises as ``offer_named``.
    """
    status = run_async(status_if_running(data_dir))
    if status is None or understood(model) is None or meant_names(model, _names_there(status)):
        raise refused
    if yes:
        fetched = pull(models_dir, with_type(models_dir, data_dir, model, as_json=as_json)).model_id
        tell_node(data_dir)
        return fetched
    if _at_terminal() and not as_json:
        return fetch_named(Terminal(), model, data_dir, models_dir, pull=pull)
    refused.next_step = f"edgepipe serve {shlex.quote(model)} --yes    (fetches it first)"
    raise refused


def fetch_named(
    asking: Asking,
    model: str,
    data_dir: Path,
    models_dir: Path,
    *,
    pull: Callable[[Path, str], PullResult] = pull_model,
) -> str:
    """Ask whether to fetch a model and which type of it, and fetch it. Return its name. Raises as ``offer_named``."""
    from edgepipe.cli.wizard.type_choice import ask_to_fetch

    say(f"No machine of this cluster has {one_line(model)} yet.")
    try:
        chosen = ask_to_fetch(asking, model, data_dir)
    except Back:
        chosen = ""
    except Quit:
        raise typer.Exit(_INTERRUPTED) from None
    if not chosen:
        raise typer.Exit
    result = pull(models_dir, chosen)
    tell_node(data_dir)
    return result.model_id


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _names_there(status: ClusterStatus) -> set[str]:
    """Return the names of the models that are served or on a disk, and the further names of served ones."""
    served = {name for engine in status.engines for name in (engine.model, *engine.names)}
    return served | {stored.model for member in status.members for stored in member.node.models}


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
