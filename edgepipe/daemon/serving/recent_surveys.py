"""PURE: surveys of the last minutes, so that a plan that was shown and the one that is served agree, or say why not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from edgepipe.backend.types import StageSettings
from edgepipe.planner.plan import Plan
from edgepipe.planner.profiles import LayerProfile
from edgepipe.units import format_bytes
from edgepipe.wire.serving import SurveyedMachine, SurveyReply

_RECENT_S = 600.0  # measured links are kept as long
_MOST = 8  # models; a home serves a few
_NOISE = 0.05  # share of a plan's speed below which a difference decides nothing
_MUCH = 1.25  # factor by which a figure must differ to be a reason

Key = tuple[str, StageSettings]  # a model's content, and the settings of its layers


class RecentSurveys:
    """The newest survey of each model."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, tuple[float, SurveyReply]] = OrderedDict()

    def keep(self, key: Key, survey: SurveyReply, *, now_s: float) -> None:
        """Replace the model's survey; drop the oldest beyond ``_MOST``."""
        self._kept[key] = now_s, survey
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)

    def get(self, key: Key, *, now_s: float) -> tuple[float, SurveyReply] | None:
        """Return the age in seconds and the model's survey; None without a recent one."""
        at_s, survey = self._kept.get(key, (float("-inf"), SurveyReply()))
        return (now_s - at_s, survey) if now_s - at_s <= _RECENT_S else None


def is_worse(found: Plan, earlier: Plan) -> bool:
    """Return whether a plan has another placement than an earlier one, and is slower than that one was."""
    return found.placed != earlier.placed and found.tokens_per_s < (1 - _NOISE) * earlier.tokens_per_s


def change_note(earlier: Plan, *, age_s: float, before: SurveyReply, now: SurveyReply) -> str:
    """Return a sentence on why an earlier plan no longer holds."""
    parts = ", ".join(f"{stage.part.layers} on {stage.machine.name}" for stage in earlier.stages)
    reasons = list(_changes(before, now)) or ["other figures were measured"]
    return (
        f"the plan of {max(1, round(age_s))} s ago (layers {parts}, "
        f"{earlier.tokens_per_s:.1f} tok/s) no longer holds: {'; '.join(reasons[:3])}"
    )


def _changes(before: SurveyReply, now: SurveyReply) -> Iterator[str]:
    """Yield what has become worse since an earlier survey."""
    present = {machine.node_id: machine for machine in now.machines}
    for machine in before.machines:
        other = present.get(machine.node_id)
        if other is None or (other.obstacle is not None and machine.obstacle is None):
            yield f"{machine.name} cannot be used now"
        else:
            yield from _machine_changes(machine, other)
    rates = {(link.sender, link.receiver): link.bytes_per_s for link in now.links}
    names: dict[str, str] = {machine.node_id: machine.name for machine in now.machines}
    for link in before.links:
        rate = rates.get((link.sender, link.receiver), 0.0)
        if rate and link.bytes_per_s > _MUCH * rate and link.sender in names and link.receiver in names:
            slower = link.bytes_per_s / rate
            yield f"the link from {names[link.sender]} to {names[link.receiver]} is {slower:.1f} times as slow"


def _machine_changes(before: SurveyedMachine, now: SurveyedMachine) -> Iterator[str]:
    if before.free_bytes > _MUCH * now.free_bytes:
        yield f"{now.name} has {format_bytes(now.free_bytes)} free, it had {format_bytes(before.free_bytes)}"
    took, takes = _layer_s(before.layer), _layer_s(now.layer)
    if took and not takes:
        yield f"{now.name} could not be measured now"
    elif took and takes > _MUCH * took:
        yield f"a layer takes {takes / took:.1f} times as long on {now.name}"


def _layer_s(profile: LayerProfile | None) -> float:
    """Return the seconds of one layer for one chat; 0: not measured."""
    return min(profile.decode, key=lambda point: point.size).seconds if profile is not None and profile.decode else 0.0
