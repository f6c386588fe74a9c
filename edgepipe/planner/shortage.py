"""Explain why a model does not fit: the sum, machine by machine, and what would help. PURE."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edgepipe.errors import NoFeasiblePlacement
from edgepipe.planner.demand import Demand
from edgepipe.planner.placement import Need, NodeRoom, ram_stage_bytes, stage_bytes, stage_weight_bytes
from edgepipe.planner.profiles import Machine
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.kv_forms import KV_FORMS
from edgepipe.spec.memory_classes import most_within
from edgepipe.units import format_bytes
from edgepipe.weights.mixes import mix_table

_SIZES_GB = (8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 512)  # common memory sizes
_HEADROOM = 1.06  # total memory over usable memory
_SHORT_CONTEXT = 4096  # tokens: a long chat
_CONTEXT = "--context"
_WORTH_CLOSING_BYTES = 500_000_000
IN_RAM = "--experts-in-ram auto (slower)"
_SMALL_MIXES = ("q4_k_m", "q4_0", "q3_k_m")  # the best first (docs/which-file.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """A measure that would free or add memory."""

    what: str
    gain_bytes: int
    enough: bool  # sufficient alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Needed and available memory."""

    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    rooms: tuple[tuple[str, int], ...]  # free bytes by machine, the roomiest first
    helps: tuple[Help, ...]

    @property
    def needed_bytes(self) -> int:
        """Total need, without losses by cuts between layers."""
        return self.weight_bytes + self.kv_bytes

    @property
    def free_bytes(self) -> int:
        """Total free memory."""
        return sum(size for _, size in self.rooms)

    @property
    def missing_bytes(self) -> int:
        """Missing memory; 0 if only no cut between layers fits."""
        return max(0, self.needed_bytes - self.free_bytes)


def shortage_of(demand: Demand, machines: Sequence[Machine], *, num_nodes: int = 0) -> Shortage:
    """Return the shortage for the required context, over the ``num_nodes`` roomiest machines (0: all).

    Machines whose slots of states are not bounded keep the fewest that the planner allows.
    """
    if not any(machine.room.most_slots for machine in machines):
        machines = [machine.with_most_slots(demand.slot_choices()[-1]) for machine in machines]
    able = sorted(machines, key=lambda machine: -machine.room.free_bytes)[: num_nodes or None]
    weight_bytes, kv_bytes = _whole_bytes(demand, able, demand.least_kv_tokens)
    found = Shortage(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        kv_tokens=demand.least_kv_tokens,
        rooms=tuple((machine.name, max(0, machine.room.free_bytes)) for machine in able),
        helps=(),
    )
    return replace(found, helps=tuple(_helps(demand, able, found)))


def too_small(demand: Demand, machines: Sequence[Machine], *, num_nodes: int = 0) -> NoFeasiblePlacement:
    """Return the error for a model that does not fit."""
    short = shortage_of(demand, machines, num_nodes=num_nodes)
    rooms = ", ".join(f"{name} {format_bytes(size)}" for name, size in short.rooms)
    missing = f"{format_bytes(short.missing_bytes)} missing" if short.missing_bytes else "no cut between layers fits"
    named = demand.must_keep_tokens > 0  # the search names the largest context more precisely
    helps = [help_.what for help_ in short.helps if help_.enough and not (named and help_.what.startswith(_CONTEXT))]
    enough = "".join(f"{what}, or " for what in helps)
    return NoFeasiblePlacement(
        f"the model needs about {format_bytes(short.needed_bytes)}, {format_bytes(short.free_bytes)} are free",
        fact=f"{missing}; free: {rooms}",
        next_step=f"{enough}serve a smaller model",
    )


def least_share(demand: Demand, machines: Sequence[Machine]) -> int | None:
    """Return the smallest percentage of the experts that must be in host memory; None if no percentage suffices.

    By sums over all machines, without losses by cuts between layers.
    """
    rooms = [machine.room for machine in machines]
    able = [room for room in rooms if room.ram_bytes and not room.ram_percent]
    if not able or all(spec.experts is None for spec in demand.config.layers):
        return None
    need, whole = Need(config=demand.config, kv_tokens=demand.least_kv_tokens, weights=demand.weights), _whole(demand)
    free = sum(max(0, room.free_bytes) for room in rooms)

    def on_device(percent: int) -> int:
        return min(stage_bytes(need, room.with_ram_percent(percent), whole) for room in able)

    percents = range(1, 101)
    index = bisect_left(percents, True, key=lambda percent: on_device(percent) <= free)
    if index == len(percents):
        return None
    if len(able) == len(rooms) and share_bytes(demand, able, percents[index]) > sum(room.ram_bytes for room in able):
        return None
    return percents[index]


def share_bytes(demand: Demand, rooms: Sequence[NodeRoom], percent: int) -> int:
    """Return the host memory of ``percent`` of all experts, on the node where they take least."""
    need = Need(config=demand.config, kv_tokens=0, weights=demand.weights)
    return min(ram_stage_bytes(need, room.with_ram_percent(percent), _whole(demand).layers) for room in rooms)


def narrower_kv(demand: Demand, machines: Sequence[Machine]) -> list[str]:
    """Return the forms of KV that the model can have and that take less memory than the machines', the widest first."""
    own = {machine.room.kv for machine in machines}
    first = 1 + max((KV_FORMS.index(form) for form in own if form in KV_FORMS), default=-1)
    return [form for form in KV_FORMS[first:] if demand.config.keeps_kv_as(form)]


def with_kv(machines: Sequence[Machine], form: str) -> list[Machine]:
    """Return the machines with KV in a form."""
    return [replace(machine, room=replace(machine.room, kv=form)) for machine in machines]


def _whole(demand: Demand) -> Slice:
    return Slice(index=0, layers=LayerRange(0, demand.config.num_layers), embedding=True, head=True)


def _whole_bytes(demand: Demand, machines: Sequence[Machine], kv_tokens: int) -> tuple[int, int]:
    """Return the bytes of weights and of KV, on the machine where they take most."""
    whole = _whole(demand)
    need = Need(config=demand.config, kv_tokens=kv_tokens, weights=demand.weights)
    room = max(machines, key=lambda machine: stage_weight_bytes(need, machine.room, whole)).room
    return stage_weight_bytes(need, room, whole), room.kv_bytes(demand.config, whole.layers, kv_tokens)


def _layer_bytes(demand: Demand, machines: Sequence[Machine]) -> int:
    """Return the largest layer's bytes on the machine where it takes least."""
    return min(max(machine.room.sizes(demand.config, demand.weights).layers) for machine in machines)


def _movable_bytes(demand: Demand, machines: Sequence[Machine]) -> int:
    """Return the device memory that experts in host memory would free, as far as that memory holds them."""
    saved = 0
    for room in (machine.room for machine in machines):
        if not room.ram_bytes or room.ram_percent:
            continue
        sizes = room.sizes(demand.config, demand.weights)
        beside = sum(room.with_ram_percent(100).sizes(demand.config, demand.weights).in_ram)
        saved += round(sum(sizes.experts) * min(1.0, room.ram_bytes / beside)) if beside else 0
    return min(saved, max(sum(machine.room.sizes(demand.config, demand.weights).experts) for machine in machines))


def _helps(demand: Demand, machines: Sequence[Machine], short: Shortage) -> Iterator[Help]:
    """Yield measures that free memory, then those that add memory. The last always suffices."""
    missing = short.missing_bytes or _layer_bytes(demand, machines)  # room for one more layer makes a cut fit
    for machine in machines:
        if machine.taken_bytes > _WORTH_CLOSING_BYTES:
            action = f"close other programs on {machine.name}"
            yield Help(what=action, gain_bytes=machine.taken_bytes, enough=machine.taken_bytes >= missing)
    wide = [machine for machine in machines if machine.room.bytes_per_weight > 2 and not demand.weights.packed]
    if wide:
        saved = sum(max(0, machine.room.free_bytes) for machine in wide)  # the same memory then holds twice the layers
        yield Help(what="--dtype bfloat16 (slower on CPUs)", gain_bytes=saved, enough=saved >= missing)
    yield from _smaller_type(demand, machines, short.weight_bytes, missing)
    saved = _movable_bytes(demand, machines)
    if saved > 0:
        yield Help(what=IN_RAM, gain_bytes=saved, enough=least_share(demand, machines) is not None)
    for form in narrower_kv(demand, machines):
        saved = short.kv_bytes - _whole_bytes(demand, with_kv(machines, form), demand.least_kv_tokens)[1]
        if saved >= min(missing, _WORTH_CLOSING_BYTES):
            yield Help(what=f"--kv {form}", gain_bytes=saved, enough=saved >= missing)
        if saved >= missing:
            break  # a form with fewer bits only costs precision
    if demand.least_kv_tokens > _SHORT_CONTEXT:
        context = _largest_context(demand, machines, short.kv_bytes - missing)
        saved = short.kv_bytes - _whole_bytes(demand, machines, context)[1]
        yield Help(what=f"{_CONTEXT} {context}", gain_bytes=saved, enough=saved >= missing)
    size = next((size for size in _SIZES_GB if size * 1e9 / _HEADROOM >= missing), 0)
    if size:
        action = f"add a machine with {size} GB"
        yield Help(what=action, gain_bytes=int(size * 1e9 / _HEADROOM), enough=True)


def _largest_context(demand: Demand, machines: Sequence[Machine], kv_bytes: int) -> int:
    """Return the largest context whose KV takes at most ``kv_bytes``, in whole short ones; a short one if none does."""

    def bytes_of(contexts: int) -> int:
        return _whole_bytes(demand, machines, contexts * _SHORT_CONTEXT)[1]

    return _SHORT_CONTEXT * max(1, most_within(kv_bytes, bytes_of, at_most=demand.least_kv_tokens // _SHORT_CONTEXT))


def _smaller_type(demand: Demand, machines: Sequence[Machine], weight_bytes: int, missing: int) -> Iterator[Help]:
    """Yield the best smaller type of the model that is enough, or else the smallest."""
    saves = {
        mix: weight_bytes - _whole_bytes(replace(demand, weights=mix_table(demand.config, mix)), machines, 0)[0]
        for mix in _SMALL_MIXES
    }
    found = next((mix for mix in _SMALL_MIXES if saves[mix] >= missing), max(saves, key=saves.__getitem__))
    if saves[found] > 0:
        what = f"take a smaller type of it (:{found})"
        yield Help(what=what, gain_bytes=saves[found], enough=saves[found] >= missing)
