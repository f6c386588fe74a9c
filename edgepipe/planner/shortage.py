"""A model that fits nowhere: the sum, machine by machine, and what would help. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edgepipe.errors import NoFeasiblePlacement
from edgepipe.model.facts import LayerRange, Slice
from edgepipe.planner.demand import Demand
from edgepipe.planner.placement import Need, stage_bytes
from edgepipe.planner.profiles import Machine
from edgepipe.units import format_bytes

_SIZES_GB = (8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 512)  # in which memory is sold
_HEADROOM = 1.06  # of a machine's memory that is not for us
_SHORT_CONTEXT = 4096  # tokens: a long chat
_WORTH_CLOSING_BYTES = 500_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """Something that would free or add memory."""

    what: str
    gain_bytes: int
    enough: bool  # alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What is needed, what there is."""

    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    rooms: tuple[tuple[str, int], ...]  # by machine, the roomiest first
    helps: tuple[Help, ...]

    @property
    def needed_bytes(self) -> int:
        """In all, if cuts between layers cost nothing."""
        return self.weight_bytes + self.kv_bytes

    @property
    def free_bytes(self) -> int:
        """In all."""
        return sum(size for _, size in self.rooms)

    @property
    def missing_bytes(self) -> int:
        """0 where only the cuts between layers do not come out."""
        return max(0, self.needed_bytes - self.free_bytes)


def shortage_of(demand: Demand, machines: Sequence[Machine], *, num_nodes: int = 0) -> Shortage:
    """The sum for the context that must fit, over the ``num_nodes`` roomiest machines (0: all)."""
    able = sorted(machines, key=lambda one: -one.room.free_bytes)[: num_nodes or None]
    weight_bytes, kv_bytes = _whole(demand, able, demand.least_kv_tokens)
    found = Shortage(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        kv_tokens=demand.least_kv_tokens,
        rooms=tuple((one.name, max(0, one.room.free_bytes)) for one in able),
        helps=(),
    )
    return replace(found, helps=tuple(_helps(demand, able, found)))


def too_small(demand: Demand, machines: Sequence[Machine], *, num_nodes: int = 0) -> NoFeasiblePlacement:
    """The error that says it."""
    short = shortage_of(demand, machines, num_nodes=num_nodes)
    rooms = ", ".join(f"{name} {format_bytes(size)}" for name, size in short.rooms)
    missing = f"{format_bytes(short.missing_bytes)} missing" if short.missing_bytes else "no cut between layers fits"
    enough = next((f"{one.what}, or " for one in short.helps if one.enough), "")
    return NoFeasiblePlacement(
        f"the model needs about {format_bytes(short.needed_bytes)}, {format_bytes(short.free_bytes)} are free",
        fact=f"{missing}; free: {rooms}",
        next_step=f"{enough}serve a smaller model",
    )


def _whole(demand: Demand, machines: Sequence[Machine], kv_tokens: int) -> tuple[int, int]:
    """Bytes of weights and of KV, in the types of the machine that takes the most for them."""
    room = max(machines, key=lambda one: one.room.bytes_per_weight).room
    whole = Slice(index=0, layers=LayerRange(0, demand.config.num_layers), embedding=True, head=True)
    weight_bytes = stage_bytes(Need(config=demand.config, kv_tokens=0), room, whole)
    return weight_bytes, stage_bytes(Need(config=demand.config, kv_tokens=kv_tokens), room, whole) - weight_bytes


def _helps(demand: Demand, machines: Sequence[Machine], short: Shortage) -> Iterator[Help]:
    """What frees memory first, then what adds some; the last always does."""
    missing = short.missing_bytes or demand.config.layer_parameters() * 2  # one layer more would make a cut come out
    for machine in machines:
        if machine.taken_bytes > _WORTH_CLOSING_BYTES:
            what = f"close other programs on {machine.name}"
            yield Help(what=what, gain_bytes=machine.taken_bytes, enough=machine.taken_bytes >= missing)
    wide = [one for one in machines if one.room.bytes_per_weight > 2]
    if wide:
        saved = sum(max(0, one.room.free_bytes) for one in wide)  # the same room then holds twice the layers
        yield Help(what="--dtype bfloat16 (slower on CPUs)", gain_bytes=saved, enough=saved >= missing)
    if demand.least_kv_tokens > _SHORT_CONTEXT:
        saved = short.kv_bytes - _whole(demand, machines, _SHORT_CONTEXT)[1]
        yield Help(what=f"--context {_SHORT_CONTEXT}", gain_bytes=saved, enough=saved >= missing)
    size = next((one for one in _SIZES_GB if one * 1e9 / _HEADROOM >= missing), 0)
    if size:
        what = f"add a machine with {size} GB"
        yield Help(what=what, gain_bytes=int(size * 1e9 / _HEADROOM), enough=True)
