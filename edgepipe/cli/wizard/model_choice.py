"""Asks which model to fetch: offers models that fit the cluster, the best one preselected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe.cli.admin import connect, run_async
from edgepipe.cli.waiting import HUB_IS_SLOW, line_if_slow
from edgepipe.cli.wizard.asking import Asking, Choice, filled, say
from edgepipe.cli.wizard.fits import best_fit, fitting_models
from edgepipe.cli.wizard.type_choice import ask_type, memory_at_hand
from edgepipe.errors import EdgepipeError
from edgepipe.units import format_bytes

if TYPE_CHECKING:
    from edgepipe.wire.nodes import ClusterStatus

SKIP = "skip"
_OTHER = "other"
_DEVICE_S, _LOOK_S = 60.0, 0.2  # measuring a device takes 2-10 s; importing torch from a cold disk takes longer


def choose_model(asking: Asking, *, data_dir: Path, models_dir: Path) -> str:
    """Ask which model to fetch. Return its name for ``models pull``, or SKIP. Raises Back and Quit."""
    status = status_with_devices(data_dir)
    good, bad = fitting_models(status) if status is not None else ([], [])
    alive = [member.node for member in status.members if member.state == "alive"] if status is not None else []
    free = sum(device.free_bytes for node in alive for device in node.devices)
    say(f"     usable memory of this cluster: {format_bytes(free)}; speeds are estimates until a model is measured")
    for fit in bad:
        say(f"       {fit.text}", style="dim")
    whole, begun = on_disk(models_dir, [fit.source for fit in good])
    marks = dict.fromkeys(whole, "  here") | dict.fromkeys(begun, "  begun")
    choices = [Choice(value=fit.source, text=fit.text + marks.get(fit.source, "")) for fit in good]
    choices += [
        Choice(value=_OTHER, text="another model (ORG/NAME on the Hugging Face Hub, a folder, a GGUF file)"),
        Choice(value=SKIP, text="no model now"),
    ]
    preferred = [fit for fit in good if fit.source in begun] or [fit for fit in good if fit.source in whole] or good
    best = best_fit(preferred)
    answer = asking.choose("Which model?", choices, default=best.source if best is not None else SKIP)
    return _typed(asking, asking.text("Model:", check=filled), data_dir) if answer == _OTHER else answer


def _typed(asking: Asking, model: str, data_dir: Path) -> str:
    """Ask for the type of a model if its repository has several. Return the name for ``models pull``."""
    from edgepipe.model.hub import hub_types
    from edgepipe.model.pull import hub_source

    source = hub_source(model)
    with suppress(EdgepipeError):  # the pull reports it
        if source is not None:
            with line_if_slow(HUB_IS_SLOW):
                types = hub_types(source)
            if types:
                return ask_type(asking, source, types, memory_at_hand(data_dir))
    return model


def on_disk(models_dir: Path, sources: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the models on this disk, and the models with a part from an interrupted pull."""
    from edgepipe.model.names import canonical_name
    from edgepipe.model.store import ModelStore

    store = ModelStore(models_dir)
    present = {model.id for model in store.list() if model.whole}
    whole = {name for name in sources if canonical_name(name) in present}
    return whole, {name for name in sources if name not in whole and store.interrupted_bytes(name)}


def status_with_devices(data_dir: Path) -> ClusterStatus | None:
    """Return the status once all devices of live nodes are measured, or after a while; None without a node."""

    async def ask() -> ClusterStatus:
        async with connect(data_dir) as admin:
            status = await admin.status()
            for _ in range(round(_DEVICE_S / _LOOK_S)):
                if not still_measuring(status):
                    break
                await asyncio.sleep(_LOOK_S)  # the daemon's socket has no notifications
                status = await admin.status()
            return status

    say("     measuring devices ...", style="dim")
    with suppress(EdgepipeError):
        return run_async(ask())
    return None


def still_measuring(status: ClusterStatus) -> list[str]:
    """Return the names of live nodes with an unmeasured device."""
    alive = [member.node for member in status.members if member.state == "alive"]
    return [node.name for node in alive if any(device.state == "starting" for device in node.devices)]
