"""The slots that hold recurrent layers' states: one of each running sequence, and snapshots behind full blocks.

A state covers all tokens before it, so nothing shortens it: going back means to the last snapshot. A row reads a slot,
and writes the state behind its last token to the sequence's own slot. Where a snapshot is wanted, it writes that state
to a further slot. If a row ends there, it writes that slot only, which the next row reads. So nothing is copied::

    tokens of a row    0-511    512-999          1000   ...   1007    1008
    reads              nothing  own              own          own     s2
    writes             own      s1 (992), own    own          s2      own

Snapshots are taken every ``gap`` tokens of a prompt, behind its last full block, where another cached prompt parted
from it, and behind the newest full block of its output. The last kind replaces the one before. Snapshots enter the
cache when their step retires. Unused ones go when a slot is wanted, the longest idle first.

If stages lost their states, all snapshots become *stale*: slices up to the last lost one must compute them again. A
sequence that begins behind a stale snapshot replays its tokens up to there through these slices only, from the last
current snapshot on. The replay writes to the slots of the stale snapshots that it passes. Slices behind keep theirs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from edgepipe.backend.types import RowState, StateWrite, TierMove
from edgepipe.ids import SequenceId
from edgepipe.scheduler.host_tier import HostTier, Tier
from edgepipe.scheduler.kv import Key, KeyWatch
from edgepipe.scheduler.place_keys import NewKeys
from edgepipe.spec.memory_classes import StateSlots

if TYPE_CHECKING:
    from edgepipe.scheduler.sequence import Sequence


_UNKNOWN = 1 << 60  # more blocks than any sequence has


class _Snapshot(NamedTuple):
    key: Key  # key of the last block before it
    place: int  # number of blocks before it; _UNKNOWN: an earlier engine knew it


class _Pending(NamedTuple):
    position: int  # tokens before it
    slot: int
    output: bool = False  # it replaces the sequence's trail
    stale: bool = False  # it is in the cache, and becomes current


class _Window(NamedTuple):
    start: int  # tokens before it
    slots: list[int]  # for the state behind each of its tokens; the first is the sequence's own


@dataclass(slots=True)
class StateTable:
    """A running sequence's slots."""

    own: int
    read: int | None  # slot with the state behind its scheduled tokens; None: none is scheduled
    held: int | None  # a snapshot that its next row reads
    goal: int | None  # the stale snapshot at the end of its replay, until a row writes it
    wanted: list[int]  # ascending: tokens of its prompt behind which to take a snapshot
    pending: list[_Pending] = field(default_factory=list[_Pending])  # snapshots that steps in flight take
    # Key of the newest full block of its output behind which the cache has a snapshot.
    trail: Key | None = None
    window: _Window | None = None  # set while a row with several tokens of output is in flight


class StateClass:
    """The slots, their users, and the snapshots in the prefix cache."""

    def __init__(
        self,
        limits: StateSlots,
        *,
        block_size: int,
        host: HostTier | None = None,
        new_keys: NewKeys | None = None,
    ) -> None:
        """
        host      takes current snapshots whose slots are wanted
        new_keys  takes the keys of snapshots whose steps retired
        """
        self.num_slots = limits.num_slots
        self.host = host
        self._new_keys = new_keys
        self._gap = limits.gap
        self._block_size = block_size
        self._free = list(range(limits.num_slots - 1, -1, -1))
        self._snapshots: dict[int, _Snapshot] = {}  # the prefix cache's snapshots, each under its slot
        self._unplaced: set[Key] = set()  # keys of snapshots whose place is not known
        self._by_key: dict[Key, int] = {}
        self._uses: dict[int, int] = {}  # rows to come that read each slot of the cache
        self._idle: OrderedDict[int, None] = OrderedDict()  # unused slots of the cache, longest idle first
        self._stale: set[int] = set()  # slots of the cache whose states the first slices lost, see ``KVPool.stale_to``
        self._read: list[int] = []  # snapshots that rows of the step to come read
        self._running: dict[SequenceId, Sequence] = {}
        self.watch = KeyWatch()  # keys of snapshots that enter the cache or leave it, become current or are used
        self.missed = 0  # snapshots that were wanted while sequences held all slots

    @property
    def free_slots(self) -> int:
        """Slots that a sequence can get: free ones, and idle snapshots."""
        return len(self._free) + len(self._idle)

    @property
    def any_stale(self) -> bool:
        """Whether the cache or host memory has a stale snapshot."""
        return bool(self._stale) or (self.host is not None and self.host.any_stale)

    def lose(self) -> None:
        """Mark all snapshots stale."""
        self._stale = set(self._snapshots)
        if self.host is not None:
            self.host.lose()

    def adopt(self, held: Mapping[Key, int]) -> None:
        """Begin with the snapshots of an earlier engine as idle ones: slots by key, longest unused first.

        A key does not say how many blocks are before its snapshot. The first prompt with these blocks does.
        """
        taken = set(held.values())
        self._free = [slot for slot in self._free if slot not in taken]
        for key, slot in held.items():
            self._enter(slot, _Snapshot(key, _UNKNOWN))
        self._unplaced = set(held)

    def _place(self, keys: Seq[Key]) -> None:
        """Note how many blocks are before the snapshots with these keys, of an earlier engine."""
        for place, key in enumerate(keys, 1) if self._unplaced else ():
            if key in self._unplaced:
                self._unplaced.discard(key)
                slot = self._by_key[key]
                self._snapshots[slot] = _Snapshot(key, place)

    def carry_over(
        self, host: HostTier | None = None, unsettled: Seq[TierMove] = (), new_keys: NewKeys | None = None
    ) -> StateClass:
        """Return slots for the next epoch with the same snapshots and without sequences. See ``KVPool.carry_over``."""
        limits = StateSlots(num_slots=self.num_slots, gap=self._gap)
        after = StateClass(limits, block_size=self._block_size, host=host, new_keys=new_keys)
        order = [*self._idle, *[slot for slot in self._snapshots if slot not in self._idle]]
        after._free = [slot for slot in after._free if slot not in self._snapshots]
        after._snapshots, after._by_key = dict(self._snapshots), dict(self._by_key)
        after._unplaced = set(self._unplaced)
        after._idle, after._uses = OrderedDict.fromkeys(order), dict.fromkeys(order, 0)
        after._stale = set(self._stale)
        moved = {move.place for move in unsettled if host is not None and move.number == host.number and not move.out}
        for slot in moved & after._idle.keys():
            after._forget(slot)
        return after

    def restore(self, keys: Seq[Key], hits: int) -> bool:
        """Bring the snapshot behind ``hits`` blocks back from host memory if the cache lacks it. Return whether it has
        it, and a slot for its sequence."""
        key = keys[hits - 1]
        if key in self._by_key:
            return True
        if self.host is None or key not in self.host or self.free_slots < 2:  # one is for the sequence's own state
            return False
        with self.host.pinned([key]):
            slot = self._take()
        assert slot is not None
        self._enter(slot, _Snapshot(key, hits))
        if self.host.restore(key, slot):
            self._stale.add(slot)
        self.watch.note(key)
        return True

    def needed(self, keys: Seq[Key], hits: int) -> tuple[HostTier, list[Key]] | None:
        """Return the key of the snapshot behind ``hits`` blocks if it is not on the device; None without tiers."""
        if self.host is None:
            return None
        return self.host, [key for key in keys[hits - 1 : hits] if key not in self._by_key]

    def supported(self, keys: Seq[Key], hits: int, *, current: bool, down_to: Tier = Tier.DEVICE) -> int:
        """Return the most leading blocks, at most ``hits``, behind which the cache has a snapshot.

        ``current``: one that is not stale. ``down_to``: or a tier below the device has one,
        down to this.
        """
        self._place(keys)
        best = 0
        if down_to and self.host is not None:
            best = next((place for place in range(hits, 0, -1) if self.host.has(keys[place - 1], down_to)), 0)
        for slot, (key, place) in self._snapshots.items():
            if best < place <= hits and keys[place - 1] == key and self._by_key.get(key) == slot:
                best = best if current and slot in self._stale else place
        return best

    def may_replay(self, keys: Seq[Key], begin: int, hits: int) -> bool:
        """Return whether a sequence may write the stale snapshot behind ``hits`` blocks if it begins at ``begin``.

        A snapshot may be current behind stale blocks: older copies of these, out of a tier below. Nothing writes it.
        """
        slot = self._by_key[keys[hits - 1]] if hits > begin else None
        return slot is None or (slot in self._idle and slot in self._stale)

    def awaited(self, keys: Seq[Key], begin: int, end: int, owner: SequenceId | None) -> Key | None:
        """Return the key of the last block, of those in ``[begin, end)``, behind which a sequence takes a snapshot.

        ``owner``: computes the block before ``end``. If it has not scheduled that yet, it takes a snapshot behind it.
        """
        sequence = self._running.get(owner) if owner is not None else None
        if sequence is None or sequence.state is None:
            return None
        table, last = sequence.state, end * self._block_size
        if max(sequence.scheduled, sequence.replay_end) < last and last not in table.wanted:
            insort(table.wanted, last)
        coming = [*[each.position for each in table.pending], *table.wanted]
        coming += [each.position for each in self._refreshed(sequence, sequence.scheduled, sequence.replay_end)]
        places = [position // self._block_size for position in coming if position <= last]
        place = max(places, default=0)
        return keys[place - 1] if place > begin else None

    def has_room(self, keys: Seq[Key], begin: int, hits: int) -> bool:
        """Return whether a sequence with ``hits`` cached blocks can have a slot of its own. See ``admit``."""
        found = {self._by_key[keys[place - 1]] for place in (begin, hits) if place}
        return self.free_slots > len(found & self._idle.keys())

    def admit(self, sequence: Sequence, begin: int, hits: int, *, shared: int, snapshots: bool) -> None:
        """Give a sequence for which ``has_room`` and ``may_replay`` are true its slot.

        begin      cached blocks behind which it begins
        hits       cached blocks; it replays the tokens of those behind ``begin``
        shared     cached blocks that it could begin behind if there were a snapshot
        snapshots  whether to take any
        """
        held = self._by_key[sequence.keys[begin - 1]] if begin else None
        goal = self._by_key[sequence.keys[hits - 1]] if hits > begin else None
        for slot in (held, goal):
            if slot is not None:
                self._use(slot)
        own = self._take()
        assert own is not None
        first, last = hits * self._block_size, (len(sequence.tokens) - 1) // self._block_size * self._block_size
        wanted = {*range(first // self._gap * self._gap, last, self._gap), shared * self._block_size, last}
        places = sorted(place for place in wanted if first < place <= last) if snapshots else []
        sequence.state = StateTable(own, held, held, goal, places)
        self._running[sequence.sequence] = sequence

    def plan(self, sequence: Sequence, start: int, end: int, *, output: bool) -> RowState:
        """Return the slots of the row with the tokens ``[start, end)``, which follow those scheduled before.

        ``output``: a token of output, so that a full block leaves a snapshot that replaces the one before.
        """
        table = sequence.state
        assert table is not None
        if start < sequence.replay_end:
            taken = self._refreshed(sequence, start, end)
            self._use_all(table, taken)
        else:
            taken = self._taken(sequence, end, output=output)
        table.pending += taken
        read, writes = table.read, [StateWrite(each.position - start, each.slot) for each in taken]
        if table.held is not None:
            self._read.append(table.held)
            table.held = None
        if not writes or writes[-1].after < end - start:
            writes.append(StateWrite(end - start, table.own))
        table.read = writes[-1].slot
        return RowState(read, tuple(writes))

    @property
    def most_window_tokens(self) -> int:
        """Tokens of a window for which there are free slots. Snapshots stay for it."""
        return 1 + len(self._free)

    def plan_window(self, sequence: Sequence, start: int, num_tokens: int) -> RowState:
        """Return the slots of a row with ``num_tokens`` tokens of output, at most ``most_window_tokens``.

        The state behind every token is kept until ``settle_window``, since each may be the last right one.
        """
        table = sequence.state
        assert table is not None
        slots = [table.own, *[self._free.pop() for _ in range(num_tokens - 1)]]
        table.window = _Window(start, slots)
        if table.held is not None:
            self._read.append(table.held)
            table.held = None
        return RowState(table.read, tuple([StateWrite(after, slot) for after, slot in enumerate(slots, 1)]))

    def settle_window(self, sequence: Sequence, accepted: int) -> None:
        """Keep the state behind the first ``accepted`` tokens of a window, and that behind a full block of them.

        Call before ``note_computed``. Frees the other slots.
        """
        table = sequence.state
        if table is None or table.window is None:
            return
        (start, slots), table.window = table.window, None
        end = start + accepted
        place = end // self._block_size * self._block_size
        table.read, spare = slots[accepted - 1], [*slots[: accepted - 1], *slots[accepted:]]
        if place > start and sequence.next_full <= place:
            taken = slots[place - start - 1]
            table.pending.append(_Pending(place, taken, output=True))
            if taken in spare:
                spare.remove(taken)
        ends_at_block = bool(table.pending) and table.pending[-1].slot == table.read
        table.own = spare.pop() if ends_at_block else table.read
        self._free += spare

    def note_sent(self) -> None:
        """Note that the planned rows are in a step: later steps may write to the snapshots that they read."""
        for slot in self._read:
            self._release(slot)
        self._read.clear()

    def note_computed(self, sequence: Sequence, end: int, keys: Seq[Key]) -> None:
        """Enter the snapshots up to ``end`` in the cache, whose step retired."""
        table = sequence.state
        while table is not None and table.pending and table.pending[0].position <= end:
            position, slot, output, stale = table.pending.pop(0)
            place = position // self._block_size
            key = keys[place - 1]
            if self._new_keys is not None:
                self._new_keys.note(key, slot)
            if stale:
                self._stale.discard(slot)
                self.watch.note(key)
            else:
                self._enter(slot, _Snapshot(key, place))
                self._use(slot)
            if slot == table.read:
                table.held = slot
            else:
                self._release(slot)
            if output:
                before = self._by_key.get(table.trail) if table.trail is not None else None
                if before in self._idle:
                    self._forget(before)
                table.trail = key

    def release(self, sequence: Sequence) -> None:
        """Free the slots of a sequence that no step in flight uses."""
        table, sequence.state = sequence.state, None
        if table is None:
            return
        del self._running[sequence.sequence]
        self._free += [table.own, *[each.slot for each in table.pending if not each.stale]]
        if table.window is not None:
            self._free += table.window.slots[1:]
        used = [table.held, table.goal, *[each.slot for each in table.pending if each.stale]]
        for slot in used:
            if slot is not None:
                self._release(slot)

    def _refreshed(self, sequence: Sequence, start: int, end: int) -> list[_Pending]:
        """Return the stale snapshots of its tokens that a replay of the tokens ``[start, end)`` can compute again."""
        table, size, keys = sequence.state, self._block_size, sequence.keys
        assert table is not None
        return sorted(
            _Pending(place * size, slot, stale=True)
            for slot, (key, place) in [(slot, self._snapshots[slot]) for slot in self._stale]
            if start < place * size <= end and keys[place - 1] == key and (slot == table.goal or self._is_found(slot))
        )

    def _is_found(self, slot: int) -> bool:
        """Return whether the slot holds an idle snapshot that a prompt would find."""
        return slot in self._idle and self._by_key.get(self._snapshots[slot].key) == slot

    def _use_all(self, table: StateTable, taken: Seq[_Pending]) -> None:
        for each in taken:
            if each.slot == table.goal:
                table.goal = None  # used since its admission
            else:
                self._use(each.slot)

    def _taken(self, sequence: Sequence, end: int, *, output: bool) -> list[_Pending]:
        """Return the snapshots to take up to ``end``, as far as there are slots."""
        table = sequence.state
        assert table is not None
        places = self._due(table, end)
        if output and not end % self._block_size and sequence.next_full <= end:
            places = [end]
        taken: list[_Pending] = []
        for place in places:
            if (slot := self._take()) is None:
                self.missed += len(places) - len(taken)
                break
            taken.append(_Pending(place, slot, output))
        return taken

    def _due(self, table: StateTable, end: int) -> list[int]:
        """Remove and return the wanted places up to ``end``."""
        count = bisect_left(table.wanted, end + 1)
        places, table.wanted = table.wanted[:count], table.wanted[count:]
        return places

    def _take(self) -> int | None:
        """Return a free slot, else that of the longest idle snapshot, else None."""
        if not self._free and self._idle:
            slot = next(iter(self._idle))
            if self.host is not None and slot not in self._stale:
                self.host.store(self._snapshots[slot].key, slot)
            self._forget(slot)
        return self._free.pop() if self._free else None

    def _enter(self, slot: int, snapshot: _Snapshot) -> None:
        """Cache a snapshot. One that is cached behind the same block goes when it is idle."""
        known = self._by_key.get(snapshot.key)
        if known in self._idle:
            self._forget(known)
        self._snapshots[slot], self._by_key[snapshot.key] = snapshot, slot
        self._uses[slot], self._idle[slot] = 0, None

    def _use(self, slot: int) -> None:
        self.watch.note(self._snapshots[slot].key)
        self._uses[slot] += 1
        self._idle.pop(slot, None)

    def _release(self, slot: int) -> None:
        """Drop one use. Unused snapshots become idle."""
        self._uses[slot] -= 1
        if not self._uses[slot]:
            self._idle[slot] = None

    def _forget(self, slot: int) -> None:
        """Remove an idle snapshot from the cache and free its slot."""
        snapshot = self._snapshots.pop(slot)
        self.watch.note(snapshot.key)
        if snapshot.place == _UNKNOWN:
            self._unplaced.discard(snapshot.key)
        self._stale.discard(slot)
        del self._idle[slot], self._uses[slot]
        if self._by_key.get(snapshot.key) == slot:
            del self._by_key[snapshot.key]
        self._free.append(slot)
