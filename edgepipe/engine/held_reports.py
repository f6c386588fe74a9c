"""PURE: what one stage says that its places below the device hold, as it opens."""

from __future__ import annotations

from edgepipe.ids import Epoch
from edgepipe.scheduler.held_places import HeldBelow
from edgepipe.scheduler.kv import Key
from edgepipe.wire.plans import HeldPlaces, PipelineSpec, keys_of
from edgepipe.wire.sizes import KEY_BYTES, MAX_HELD


class HeldReport:
    """Collects a stage's messages. A report with a fault counts as one of a stage that holds nothing."""

    def __init__(self, spec: PipelineSpec) -> None:
        """``spec``: what the stage was opened with."""
        self._epoch: Epoch = spec.epoch
        self._is_asked = spec.asks_held
        self._num_places = {False: spec.host_places, True: spec.disk_places}
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

    def held(self) -> HeldBelow:
        """Return what the stage holds."""
        return HeldBelow(host=tuple(self._held[False]), disk=tuple(self._held[True]))

    def _fault(self, page: HeldPlaces) -> str:
        """Take a message over. Return what is wrong with it; empty: nothing."""
        number, counts, places = page.memory_class, self._num_places[page.on_disk], page.places
        where = "on disk" if page.on_disk else "in host memory"
        if not self._is_asked or page.epoch != self._epoch:
            return "it tells an epoch that has not asked"
        if number >= len(counts):
            return f"it names places of memory class {number} {where}, {len(counts)} classes are there"
        if not 0 < len(places) <= MAX_HELD or len(page.keys) != KEY_BYTES * len(places):
            return f"it names {len(places)} places with {len(page.keys)} bytes of keys"
        if max(places) >= counts[number]:
            return f"it names place {max(places)} of {counts[number]} {where}"
        held, taken = self._held[page.on_disk][number], self._taken[page.on_disk][number]
        before = len(held)
        held.update(zip(keys_of(page.keys), places, strict=True))
        taken.update(places)
        if not before + len(places) == len(held) == len(taken):
            return f"it names a place or a key {where} twice"
        return ""
