"""PURE: what one stage says that its places hold, as it opens."""

from __future__ import annotations

from edgepipe.ids import Epoch
from edgepipe.scheduler.held_places import HeldTiers
from edgepipe.scheduler.host_tier import Tier
from edgepipe.scheduler.kv import Key
from edgepipe.wire.pipelines import PipelineSpec
from edgepipe.wire.sizes import KEY_BYTES, MAX_HELD
from edgepipe.wire.tiers import HeldPlaces, keys_of

_NAMES = {Tier.DEVICE: "on the device", Tier.HOST: "in host memory", Tier.DISK: "on disk"}


class HeldReport:
    """Collects a stage's messages. A report with a fault counts as one of a stage that holds nothing."""

    def __init__(self, spec: PipelineSpec) -> None:
        """``spec``: what the stage was opened with."""
        self._epoch: Epoch = spec.epoch
        self._is_asked = spec.asks_held
        slots = (spec.state_slots,) if spec.state_slots else ()
        device_places = (spec.num_blocks, *spec.window_blocks, *slots)
        self._num_places = {Tier.DEVICE: device_places, Tier.HOST: spec.host_places, Tier.DISK: spec.disk_places}
        self._held = {tier: [dict[Key, int]() for _ in counts] for tier, counts in self._num_places.items()}
        self._taken = {tier: [set[int]() for _ in counts] for tier, counts in self._num_places.items()}
        self.problem = ""  # why the report does not count; empty: it does

    def note(self, page: HeldPlaces) -> None:
        """Add a message."""
        if not self.problem and (problem := self._fault(page)):
            self.problem = problem
            for tiers in (*self._held.values(), *self._taken.values()):
                for own in tiers:
                    own.clear()

    def held(self) -> HeldTiers:
        """Return what the stage holds."""
        device, host, disk = [tuple(self._held[tier]) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)]
        return HeldTiers(device=device, host=host, disk=disk)

    def _fault(self, page: HeldPlaces) -> str:
        """Take a message over. Return what is wrong with it; empty: nothing."""
        tier = Tier(page.tier)
        number, counts, places, where = page.memory_class, self._num_places[tier], page.places, _NAMES[tier]
        if not self._is_asked or page.epoch != self._epoch:
            return "it tells an epoch that has not asked"
        if number >= len(counts):
            return f"it names places of memory class {number} {where}, {len(counts)} classes are there"
        if not 0 < len(places) <= MAX_HELD or len(page.keys) != KEY_BYTES * len(places):
            return f"it names {len(places)} places with {len(page.keys)} bytes of keys"
        if max(places) >= counts[number]:
            return f"it names place {max(places)} of {counts[number]} {where}"
        held, taken = self._held[tier][number], self._taken[tier][number]
        before = len(held)
        held.update(zip(keys_of(page.keys), places, strict=True))
        taken.update(places)
        if not before + len(places) == len(held) == len(taken):
            return f"it names a place or a key {where} twice"
        return ""
