"""Asks which model to fetch: offers models that fit the cluster, the best one preselected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe.cli.admin import ask_node
from edgepipe.cli.waiting import HUB_IS_SLOW, line_if_slow
from edgepipe.cli.wizard.asking import AskedChoice, Asking, say, warn
from edgepipe.cli.wizard.fits import HEADING, best_fit, fitting_models
from edgepipe.cli.wizard.type_choice import ask_type, memory_at_hand
from edgepipe.errors import EdgepipeError, ModelUnknown
from edgepipe.link.admin_client import Admin
from edgepipe.units import format_bytes

if TYPE_CHECKING:
    from edgepipe.wire.nodes import ClusterStatus

SKIP = "skip"
_OTHER = "other"
_MOST_TOO_LARGE = 3  # models that do not fit and are named
_DEVICE_S, _LOOK_S = 60.0, 0.2  # measuring a device takes 2-10 s; importing torch from a cold disk takes longer


def choose_model(asking: Asking, *, data_dir: Path, models_dir: Path) -> str:
    """Ask which model to fetch. Return its name for ``models pull``, or SKIP. Raises Back and Quit."""
    status = status_with_devices(data_dir)
    good, bad = fitting_models(status) if status is not None else ([], [])
    alive = [member.node for member in status.members if member.state == "alive"] if status is not None else []
    free = sum(device.free_bytes for node in alive for device in node.devices)
    say(f"     usable memory of this cluster: {format_bytes(free)}; speeds are estimates until a model is measured")
    for fit in bad[-_MOST_TOO_LARGE:]:
        say(f"       {fit.text}", style="dim")
    if more := len(bad[:-_MOST_TOO_LARGE]):
        say(f"       nor do {more} larger ones: edgepipe plan MODEL", style="dim")
    whole, begun = on_disk(models_dir, [fit.source for fit in good])
    marks = dict.fromkeys(whole, "  here") | dict.fromkeys(begun, "  begun")
    choices = [AskedChoice(value=fit.source, text=fit.text + marks.get(fit.source, "")) for fit in good]
    choices += [
        AskedChoice(value=_OTHER, text="another model (a name, a page of the Hugging Face Hub, a folder, a GGUF file)"),
        AskedChoice(value=SKIP, text="no model now"),
    ]
    preferred = [fit for fit in good if fit.source in begun] or [fit for fit in good if fit.source in whole] or good
    best = best_fit(preferred)
    if good:
        say(f"   {HEADING}")
    answer = asking.choose("Which model?", choices, default=best.source if best is not None else SKIP)
    return _typed(asking, data_dir) if answer == _OTHER else answer


def _typed(asking: Asking, data_dir: Path) -> str:
    """Ask for a model until there is one, and for its type if its repository has several. Return its name for
    ``models pull``. Raises Back and Quit."""
    from edgepipe.store.hub import hub_types
    from edgepipe.store.pull import hub_source

    while True:
        model = asking.text("Model:", check=check_source)
        try:
            source = hub_source(model)
            if source is None:
                return model
            with line_if_slow(HUB_IS_SLOW):
                types = hub_types(source)
            return ask_type(asking, source, types, memory_at_hand(data_dir)) if types else model
        except ModelUnknown as error:
            warn(f"{error.what}: {error.fact}", remedy=error.next_step)
        except EdgepipeError:
            return model  # the pull reports it


def check_source(text: str) -> str:
    """Describe what is wrong with a model that a person types; a ``check`` for ``Asking.text``."""
    from edgepipe.store.pull import hub_source

    try:
        hub_source(text)
    except ModelUnknown as error:
        return f"{error.what}; {error.fact}"
    return ""


def on_disk(models_dir: Path, sources: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the models on this disk, and the models with a part from an interrupted pull."""
    from edgepipe.store.store import ModelStore
    from edgepipe.store.typed_names import meant_names

    store = ModelStore(models_dir)
    present = {model.id for model in store.list() if model.whole}
    whole = {name for name in sources if meant_names(name, present)}
    return whole, {name for name in sources if name not in whole and store.interrupted_bytes(name)}


def status_with_devices(data_dir: Path) -> ClusterStatus | None:
    """Return the status once all devices of live nodes are measured, or after a while; None without a node."""

    async def ask(admin: Admin) -> ClusterStatus:
        status = await admin.status()
        for _ in range(round(_DEVICE_S / _LOOK_S)):
            if not still_measuring(status):
                break
            await asyncio.sleep(_LOOK_S)  # the daemon's socket has no notifications
            status = await admin.status()
        return status

    say("     measuring devices ...", style="dim")
    with suppress(EdgepipeError):
        return ask_node(data_dir, ask)
    return None


def still_measuring(status: ClusterStatus) -> list[str]:
    """Return the names of live nodes with an unmeasured device."""
    alive = [member.node for member in status.members if member.state == "alive"]
    return [node.name for node in alive if any(device.state == "starting" for device in node.devices)]
