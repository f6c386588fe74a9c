"""Block tables of all sequences, one per memory class: allocate, share, copy and free blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from edgepipe.backend.types import BlockCopy, TierMove
from edgepipe.ids import SequenceId
from edgepipe.scheduler.disk_places import DiskPlaces
from edgepipe.scheduler.disk_works import DiskWorks
from edgepipe.scheduler.held_places import Takeover
from edgepipe.scheduler.host_tier import GivenBack, HostTier, Tier
from edgepipe.scheduler.kept_pools import KeptPools
from edgepipe.scheduler.kv import Key, KeyWatch, KVPool, as_runs
from edgepipe.scheduler.limits import SchedulerLimits
from edgepipe.scheduler.place_keys import NewKeys, PlaceKey
from edgepipe.scheduler.sequence import NEVER, Sequence
from edgepipe.scheduler.states import StateClass
from edgepipe.scheduler.windows import WindowClass

_MOST_GIVEN_BACK = 32  # places at once: 70 MB of a 32B on two stages, a few milliseconds
_SPARE_SHARE = 20  # a twentieth of the blocks, like the throttled policy's reserve for decodes


class BlockTables:
    """Keeps each block while a running sequence, a step in flight or the prefix cache may use it."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._moves: list[TierMove] = []  # between the device and host memory, for the next step
        disks = [DiskPlaces(count) for count in limits.disk_places] or [None] * len(limits.host_places)
        places = enumerate(zip(limits.host_places, disks, strict=True))
        tiers = [HostTier(number, count, self._moves, disk=disk) for number, (count, disk) in places]
        hosts = tiers or [None] * len(limits.pool_sizes)
        self.disk: DiskWorks | None = None  # copies between host memory and the disk
        if limits.disk_places:
            rates = limits.host_rates
            self.disk = DiskWorks(tiers, block_s=rates.token_s * limits.block_size if rates is not None else None)
        self._hosts = tiers
        self._new_keys: list[PlaceKey] = []  # keys of blocks and snapshots that the stages do not know
        new_keys = self._key_lists()
        self._kv = KVPool(limits.num_blocks, contiguous=limits.contiguous_kv, host=hosts[0], new_keys=new_keys[0])
        self._windows = [
            WindowClass(pool, KVPool(pool.num_blocks, contiguous=False, host=host, new_keys=keys))
            for pool, host, keys in zip(limits.windows, hosts[1:], new_keys[1:], strict=False)
        ]
        self._states = None
        if limits.states is not None:
            size = limits.block_size
            self._states = StateClass(limits.states, block_size=size, host=hosts[-1], new_keys=new_keys[-1])
        self._frees: list[SequenceId] = []
        self._short_of: tuple[int, int] | None = None  # what it lacked: a place in ``_free_counts``, and the count then
        # Whether the last ``admit`` refused a sequence until steps have carried moves between the device and host
        # memory: of what it begins with, or of blocks that it pushes out.
        self.awaits_moves = False
        self._carried = True  # whether the next step has rows beside which it may carry such moves
        self._ahead = False  # whether the next step carries such moves
        self.lacked_room = False  # whether the last ``admit`` refused a sequence for lack of blocks, slots or places
        self.draining_blocks = 0  # blocks that steps in flight use: of sequences that left, or sources of copies
        self.admitted_tokens = 0  # known tokens of sequences when they were admitted, since the start
        self.cached_tokens = 0  # admitted tokens found in the prefix cache
        self.restored_tokens = 0  # tokens of the context that came back from host memory
        self.kept_tokens = 0  # tokens of sequences from the previous epoch that were found still computed
        self.replayed_tokens = 0  # tokens of the same sequences, recomputed up to the last slice that lost them

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self._kv.num_blocks

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return self._kv.free_blocks

    @property
    def blocks_to_come(self) -> int:
        """Free and draining blocks of the class that has the fewest."""
        blocks = self._kv.free_blocks + self.draining_blocks
        if not self._windows:
            return blocks
        return min([blocks, *[each.kv.free_blocks + each.draining_blocks for each in self._windows]])

    @property
    def cached_blocks(self) -> int:
        """Number of blocks in the prefix cache."""
        return self._kv.cached_blocks

    @property
    def states(self) -> StateClass | None:
        """The slots of states, if the model has recurrent layers."""
        return self._states

    @property
    def stale_to(self) -> int | None:
        """Last slice that must recompute stale blocks; None if nothing was lost."""
        return self._kv.stale_to

    def carry_over(self, in_flight: Seq[TierMove]) -> KeptPools:
        """Return pools with the same prefix cache for the next epoch. ``in_flight``: moves that have not retired."""
        unsettled, moves = [*in_flight, *self._moves], list[TierMove]()
        self._new_keys = []  # a stage may lack what a move should have brought
        context, *others = self._key_lists()

        def below(host: HostTier | None) -> HostTier | None:
            return host.carry_over(moves, unsettled) if host is not None else None

        kv, states = self._kv, self._states
        pools = KeptPools(
            context=kv.carry_over(below(kv.host), unsettled, context),
            windows=tuple(
                each.kv.carry_over(below(each.kv.host), unsettled, keys)
                for each, keys in zip(self._windows, others, strict=False)
            ),
            states=states.carry_over(below(states.host), unsettled, others[-1]) if states is not None else None,
            moves=moves,
            new_keys=self._new_keys,
        )
        return replace(pools, disk=self.disk.carry_over(pools.hosts)) if self.disk is not None else pools

    def take_over(self, pools: KeptPools) -> None:
        """Start with the previous epoch's pools. Raises ValueError if a number of blocks or slots differs."""
        if pools.sizes != self._limits.pool_sizes:
            raise ValueError(f"pools of {pools.sizes} blocks cannot be those of {self._limits.pool_sizes}")
        self._kv = pools.context
        self._windows = [WindowClass(*each) for each in zip(self._limits.windows, pools.windows, strict=True)]
        self._states = pools.states
        self._moves, self.disk, self._hosts = pools.moves, pools.disk, pools.hosts
        self._new_keys = pools.new_keys

    def adopt(self, found: Takeover) -> None:
        """Start with what the stages hold, of an engine whose tables are lost."""
        classes = (*self._pools(), *(() if self._states is None else (self._states,)))
        for each, own in zip(classes, found.held.device, strict=True):
            each.adopt(own)
        disks = found.held.disk or [dict[Key, int]()] * len(self._hosts)
        for host, here, on_disk in zip(self._hosts, found.held.host, disks, strict=True):
            host.adopt(here, on_disk)
        if found.stale_to is not None:
            for pool in self._pools():
                pool.lose(found.stale_to)
            if self._states is not None:
                self._states.lose()

    def take_moves(self) -> tuple[TierMove, ...]:
        """Remove and return the moves that the next step performs, in order."""
        if not self._moves:
            return ()
        moves = tuple(self._moves)
        self._moves.clear()
        self._ahead = False
        return moves

    def take_keys(self) -> tuple[PlaceKey, ...]:
        """Remove and return the keys that the stages do not know."""
        if not self._new_keys:
            return ()
        keys = tuple(self._new_keys)
        self._new_keys.clear()
        return keys

    @property
    def waiting_moves(self) -> Seq[TierMove]:
        """Moves that the next step will carry."""
        return self._moves

    @property
    def host(self) -> HostTier | None:
        """Blocks of the context in host memory; None without such memory."""
        return self._kv.host

    def bound_host(self, permille: int) -> None:
        """Use only this share of host memory's places, in every class."""
        for host in self._hosts:
            host.set_bound(host.num_places * permille // 1000)

    @property
    def any_over(self) -> bool:
        """Whether host memory has places beyond its bound."""
        return any(host.num_over > 0 for host in self._hosts)

    def give_back(self, unsettled: Seq[TierMove]) -> GivenBack | None:
        """Return the next places beyond the bound, which nothing uses. ``unsettled``: see ``DiskWorks.next``."""
        for host in self._hosts:
            own = {move.kept for move in unsettled if move.number == host.number}
            if places := host.give_back(own, most=_MOST_GIVEN_BACK):
                return GivenBack(host.number, tuple(places))
        return None

    def awaited(self, sequence: Sequence) -> Key | None:
        """Return the key of the last of the prompt's next blocks that other sequences are computing; None if none.

        Waiting for that block is quicker than computing it twice.
        """
        keys = self._reusable_keys(sequence)
        found = self._kv.num_current(self._kv.find(keys))
        begin = self._supported(keys, found, current=True)
        end = begin if self._states is None else found
        owner = None
        while end < len(keys) and (coming := self._kv.coming_from(keys[end])) is not None:
            end, owner = end + 1, coming
        if self._states is not None:
            return self._states.awaited(keys, begin, end, owner)
        return keys[end - 1] if end > begin else None

    def await_key(self, key: Key) -> SequenceId | None:
        """Let ``take_settled`` return the key once no sequence is computing its block. Return the one that is now."""
        self._kv.await_key(key)
        return self._kv.coming_from(key)

    def take_settled(self) -> list[Key]:
        """See ``KVPool.take_settled``, and ``fetch`` for tickets."""
        tickets = self.disk.take_settled() if self.disk is not None else []
        return [*self._kv.take_settled(), *tickets]

    def fetch(self, sequence: Sequence, *, running: int) -> Key | None:
        """Begin to bring to host memory what only the disk has of the prompt, once before each admission.

        Return a ticket that ``take_settled`` returns once it is there, or lost. Returns None if nothing comes: nothing
        is there, computing it is faster, or the device has no room for the prompt now.
        """
        if self.disk is None or sequence.fetched:
            return None
        keys = self._reusable_keys(sequence)
        here = self._supported(keys, self._num_known(keys, Tier.HOST), down_to=Tier.HOST)
        hits = self._supported(keys, self._num_known(keys, Tier.DISK), down_to=Tier.DISK)
        hits = self._fetchable(keys, hits)
        if hits <= here:
            return None
        held = self._kv.held([block for key in keys[:hits] if (block := self._kv.block_of(key)) is not None])
        if self.needs(sequence) - len(held) > self._kv.free_blocks - running - 1:
            return None
        sequence.fetched = True
        needed = self._needed(keys, hits)
        missing = [(tier, [key for key in own if key not in tier]) for tier, own in needed]
        rates, saved = self._limits.host_rates, (hits - here) * self._limits.block_size
        slots = 0 if self._states is None else 1
        disk_s = self.disk.seconds(missing)
        if rates is not None and not rates.pays(len(needed[0][1]), slots, saved_tokens=saved, disk_s=disk_s):
            return None
        return self.disk.fetch(needed)

    def _needed(self, keys: Seq[Key], hits: int) -> list[tuple[HostTier, list[Key]]]:
        """Return what a sequence behind ``hits`` blocks needs from below the device, by memory class."""
        assert self._kv.host is not None
        context = self._kv.host, [key for key in keys[:hits] if self._kv.block_of(key) is None]
        classes = (*self._windows, *(() if self._states is None else (self._states,)))
        return [context, *[found for each in classes if (found := each.needed(keys, hits)) is not None]]

    def _fetchable(self, keys: Seq[Key], hits: int) -> int:
        """Return the most leading blocks, at most ``hits``, of which host memory can hold what the device lacks."""
        while hits:
            (tier, context), *others = self._needed(keys, hits)
            if any(len(own) > each.most_needed for each, own in others):
                return 0
            if len(context) <= tier.most_needed:
                break
            hits = self._supported(keys, keys.index(context[tier.most_needed]), down_to=Tier.DISK)
        return hits

    def admit(self, sequence: Sequence, *, running: int, beside_prompts: bool, carried: bool = True) -> bool:
        """Build tables for all known tokens: share or copy computed blocks, allocate the rest.

        Keeps one free block per running sequence, and beside other prompts as many more as the sequence takes, up to a
        share of all. Returns False and takes nothing if fewer would remain, if too many sequences run, or while another
        sequence holds stale blocks of the prompt. Or if steps must carry moves before it begins, see ``awaits_moves``.

        ``carried``: the next step has rows of others, so that it carries moves beside them.
        """
        self.awaits_moves, self._carried = False, carried
        count = self.needs(sequence)
        left = self._kv.free_blocks - running
        if beside_prompts:
            left -= min(count, self.num_blocks // _SPARE_SHARE)
        if left < 1 or running >= self._limits.max_running:
            return self._refuse([])
        if self._kv.host is not None and not self._restore(sequence, count, left, beside=running > 0):
            self.awaits_moves = True
            return self._refuse([], lacks_room=False)
        prefix = self._known_prefix(sequence)
        if prefix is None:
            return self._refuse(self._reusable_keys(sequence), lacks_room=False)
        known, begin = prefix
        copied = False
        if self._limits.contiguous_kv and known and not self._kv.can_adopt(known, more=count - len(known)):
            known = self._affordable(known[:begin], max(left - count, 0))
            begin = self._supported(sequence.keys, len(known), current=True)
            known = known[:begin]
            copied = bool(known)
        else:
            left += len(known) - self._kv.num_idle(known)
        hits = (begin, len(known))
        if count > left:
            return self._refuse(self._reusable_keys(sequence))
        place = self._first_without_room(sequence, hits, running, beside_prompts=beside_prompts)
        if place is not None:
            return self._refuse(self._reusable_keys(sequence), short_of=place)
        if running and not self._copy_out_ahead(count - len(known), known):
            self.awaits_moves = True
            return self._refuse([], lacks_room=False)
        self._take(sequence, known, begin, count, copied=copied)
        return True

    def would_fit(self, sequence: Sequence, *, without: Seq[Sequence], running: int) -> bool:
        """Whether the sequence would have blocks if the sequences ``without`` left and ``running`` others stayed."""
        needs = self.needs(sequence)
        rooms = [(self._kv.free_blocks + sum([each.num_blocks for each in without]), needs)]
        for place, (each, pool) in enumerate(zip(self._windows, self._limits.windows, strict=True)):
            held = sum([len(other.windows[place].blocks) for other in without])
            rooms.append((each.kv.free_blocks + held, min(needs, pool.most_blocks)))
        return all(room - running >= wanted for room, wanted in rooms)

    @property
    def may_fit_now(self) -> bool:
        """Whether the sequence that the last ``admit`` refused may fit now, although no sequence has left since.

        The pool that was too small has more room, or the caches changed: they may hold more blocks of its prompt.
        """
        if self._short_of is not None and self._free_counts()[self._short_of[0]] > self._short_of[1]:
            return True
        return any(watch.changed for watch in self._watches())

    def grow(self, sequence: Sequence) -> bool:
        """Add one block to each table if all classes have one. Return whether they had."""
        if not self._kv.free_blocks or not all(each.kv.free_blocks for each in self._windows):
            return False
        for each, table in zip(self._windows, sequence.windows, strict=True):
            each.grow(table)
        runs = self._kv.extend(sequence.table, room=self._room(sequence) - sequence.num_blocks)
        sequence.grow(runs, block_size=self._limits.block_size)
        return True

    def grow_ahead(self, sequence: Sequence, *, kept_blocks: int) -> bool:
        """Grow for tokens that may come, if more than ``kept_blocks`` are left. Return whether the tables grew."""
        tables = zip(self._limits.windows, sequence.windows, strict=True)
        if self.blocks_to_come <= kept_blocks or any(len(each.blocks) >= pool.most_blocks for pool, each in tables):
            return False
        return self.grow(sequence)

    def note_computed(self, sequence: Sequence, end: int) -> None:
        """Enter the full blocks of the computed tokens ``[0, end)`` in the prefix cache, and move the windows on."""
        if end < sequence.next_full:
            return
        full = end // self._limits.block_size
        if self._limits.prefix_cache:
            keys = sequence.keys_of(full, block_size=self._limits.block_size)
            replayed = sequence.replay_end // self._limits.block_size
            for index in range(sequence.known_blocks, full):
                self._kv.enter(keys[index], sequence.blocks[index])
                for each, table in zip(self._windows, sequence.windows, strict=True):
                    note = each.kv.refresh if index < replayed else each.kv.enter
                    note(keys[index], table.blocks[index - table.first])
        if self._states is not None and self._limits.prefix_cache:
            self._states.note_computed(sequence, end, sequence.keys)
        sequence.known_blocks = full
        sequence.next_full = (full + 1) * self._limits.block_size
        if self._windows and not sequence.draining:
            for each, table in zip(self._windows, sequence.windows, strict=True):
                each.give_back(table, end)
            self.fill_windows(sequence)

    def fill_windows(self, sequence: Sequence) -> None:
        """Allocate blocks for the next tokens of a prompt as far as the windows' slack goes and blocks are free."""
        needs = min(self.needs(sequence), sequence.num_blocks)  # an answer's tables grow together, one block at a time
        for each, table in zip(self._windows, sequence.windows, strict=True):
            each.fill(table, sequence.keys, needs=needs)
        sequence.note_room(self._limits.block_size)

    def note_sent(self, copies: Seq[BlockCopy]) -> None:
        """Count the sources of copies in a step that is now in flight."""
        self.draining_blocks += len(copies)
        if self._states is not None:
            self._states.note_sent()

    def note_copied(self, copies: Seq[BlockCopy]) -> None:
        """Release the sources of copies in a step that retired."""
        self.draining_blocks -= len(copies)
        self._kv.release_references([copy.source for copy in copies])

    def leave(self, sequence: Sequence) -> None:
        """Cancel the computations and copies that a sequence still owed, because it stopped running."""
        self._kv.expect_no_more(sequence.keys[sequence.known_blocks :], sequence.sequence)
        self._kv.release_references([copy.source for copy in sequence.new_copies])
        sequence.new_copies = ()

    def release(self, sequence: Sequence) -> None:
        """Free the blocks. While steps in flight use them, only count them; call again when none does."""
        if sequence.in_flight:
            self._note_draining(sequence, 0 if sequence.draining else 1)
            sequence.draining = True
            return
        self._note_draining(sequence, -1 if sequence.draining else 0)
        sequence.draining = False
        if sequence.registered:
            self._frees.append(sequence.sequence)
        for each, table in zip(self._windows, sequence.windows, strict=False):  # none before its admission
            each.release(table)
        if self._states is not None:
            self._states.release(sequence)
        self._kv.release(sequence.forget_blocks())

    def _note_draining(self, sequence: Sequence, sign: int) -> None:
        self.draining_blocks += sign * sequence.num_blocks
        for each, table in zip(self._windows, sequence.windows, strict=False):
            each.draining_blocks += sign * (len(table.blocks) + len(table.kept))

    def pop_frees(self) -> list[SequenceId]:
        """Remove and return the sequences that stages may forget, for the next step."""
        frees, self._frees = self._frees, []
        return frees

    def needs(self, sequence: Sequence) -> int:
        """Return the number of blocks for all known tokens."""
        return self._blocks_for(len(sequence.tokens))

    def _room(self, sequence: Sequence) -> int:
        """Return the number of blocks for the sequence at its limit."""
        return self._blocks_for(sequence.limit)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-(num_tokens + self._limits.rest_tokens) // self._limits.block_size)

    def _reusable_keys(self, sequence: Sequence) -> list[Key]:
        """Return the keys of blocks that the cache may provide: all full ones except the last token's (its logits are
        needed)."""
        if not self._limits.prefix_cache or not sequence.reuse_prefix:
            return []
        size = self._limits.block_size
        return sequence.keys_of((len(sequence.tokens) - 1) // size, block_size=size)

    def _known_prefix(self, sequence: Sequence) -> tuple[list[int], int] | None:
        """Return the cached blocks of its first tokens, and how many of them it need not replay.

        None while another sequence rewrites stale ones among those that it would replay.
        """
        keys = self._reusable_keys(sequence)
        known = self._kv.find(keys)
        known = known[: self._supported(keys, len(known))]
        begin = self._supported(keys, self._kv.num_current(known), current=True)
        held = self._kv.held(known[begin:])
        if self._kv.num_current(held) < len(held):
            return None
        classes = (*self._windows, *(() if self._states is None else (self._states,)))
        if held or not all(each.may_replay(keys, begin, len(known)) for each in classes):
            known = known[:begin]
        return known, begin

    def _supported(self, keys: Seq[Key], hits: int, *, current: bool = False, down_to: Tier = Tier.DEVICE) -> int:
        """Return the most leading blocks, at most ``hits``, behind which every class has its window or state.

        current  leave out stale blocks of windows and stale states
        down_to  count what tiers below the device have, down to this
        """
        before = -1
        while hits != before:
            before = hits
            for each in self._windows:
                hits = each.supported(keys, hits, current=current, down_to=down_to)
            if self._states is not None:
                hits = self._states.supported(keys, hits, current=current, down_to=down_to)
        return hits

    def _restore(self, sequence: Sequence, count: int, left: int, *, beside: bool) -> bool:
        """Bring the blocks and the snapshot back from host memory behind which the sequence can begin.

        They become idle ones of the cache, which ``admit`` then finds like others. Restores nothing if ``count`` blocks
        do not fit into the ``left`` ones beside those of other sequences, or if computing them is faster.

        ``beside``: other sequences run, so that a step may bring only some of them. Returns False if more follow.
        """
        keys, rates = self._reusable_keys(sequence), self._limits.host_rates
        hits = self._supported(keys, self._num_known(keys, Tier.HOST), down_to=Tier.HOST)
        here = self._supported(keys, len(self._kv.find(keys)))
        if hits <= here:
            return True
        found = [self._kv.block_of(key) for key in keys[:hits]]
        saved = (hits - here) * self._limits.block_size
        slots = 0 if self._states is None else 1
        if rates is not None and not rates.pays(found.count(None), slots, saved_tokens=saved):
            return True
        if count - len(self._kv.held([block for block in found if block is not None])) > left:
            return True
        if self._limits.contiguous_kv:  # the blocks must be in one piece; the sequence takes it over
            self._kv.gather(keys[:hits])
            hits = self._supported(keys, min(hits, self._num_known(keys, Tier.HOST)), down_to=Tier.HOST)
        elif beside and rates is not None and rates.most_blocks is not None:
            return self._restore_beside(sequence, keys, hits, most=rates.most_blocks)
        if hits and self._restore_context(sequence, keys[:hits], count=count):
            if all(each.restore(keys, hits) for each in self._windows) and self._states is not None:
                self._states.restore(keys, hits)
        return True

    def _restore_beside(self, sequence: Sequence, keys: Seq[Key], hits: int, *, most: int) -> bool:
        """Bring the next ``most`` blocks back in a step before the sequence begins: copies run beside a step that does
        not use them. Return whether nothing is left to bring back, or to wait for."""
        if self._ahead or not self._carried:
            return False
        before = len(self._moves)
        missing = sum(self._kv.block_of(key) is None for key in keys[:hits])
        if missing and not self._restore_context(sequence, keys[:hits], most=most):
            return True
        self._ahead = missing > 0
        if missing > most:
            return False
        if all(each.restore(keys, hits) for each in self._windows) and self._states is not None:
            self._states.restore(keys, hits)
        self._ahead = len(self._moves) > before
        return not self._ahead

    def _copy_out_ahead(self, count: int, known: Seq[int]) -> bool:
        """Copy blocks to host memory that ``count`` new ones will push out, as many as a step carries beside others.

        Return whether nothing is left to copy. ``known``: blocks of the sequence that the device has.
        """
        rates = self._limits.host_rates
        if self._limits.contiguous_kv or rates is None or rates.most_blocks is None:
            return True
        if self._ahead:
            return count <= self._kv.empty_blocks
        due = self._kv.next_evicted(count, spared=known)
        if due and not self._carried:
            return False
        self._ahead = bool(due) and self._kv.copy_out(due[: 2 * rates.most_blocks], pinned=due)
        return not self._ahead

    def _restore_context(self, sequence: Sequence, keys: Seq[Key], *, count: int = 0, most: int | None = None) -> bool:
        """Bring the context's blocks with these keys back, at most the first ``most``. Return whether they are there.

        ``count``: blocks of the sequence, which begin with them if tables are runs.
        """
        here = [block for key in keys if (block := self._kv.block_of(key)) is not None]
        missing = [key for key in keys if self._kv.block_of(key) is None][:most]
        whole = self._limits.contiguous_kv and not here
        self._kv.hold(here)
        found = not missing or self._kv.restore(missing, count=count if whole else 0, room=self._room(sequence))
        self._kv.release_references(here)
        self.restored_tokens += len(missing) * self._limits.block_size * found
        return found

    def _num_known(self, keys: Seq[Key], down_to: Tier) -> int:
        """Count the leading keys that the cache has, or a tier below it down to this."""
        return next((place for place, key in enumerate(keys) if not self._kv.is_known(key, down_to)), len(keys))

    def _first_without_room(
        self, sequence: Sequence, hits: tuple[int, int], running: int, *, beside_prompts: bool
    ) -> int | None:
        """Return the first windowed class, or the slots, without room for the sequence; None if all have room.

        The number is its place in ``_free_counts``.
        """
        needs, share, keys = self.needs(sequence), _SPARE_SHARE if beside_prompts else 0, sequence.keys
        for place, each in enumerate(self._windows):
            if not each.has_room(keys, *hits, needs=needs, kept_blocks=running, share=share):
                return place
        return None if self._states is None or self._states.has_room(keys, *hits) else len(self._windows)

    def _refuse(self, keys: list[Key], *, short_of: int | None = None, lacks_room: bool = True) -> bool:
        """Remember why a sequence was refused, and watch the ``keys`` that would make it need fewer blocks."""
        self.lacked_room = lacks_room
        self._short_of = None if short_of is None else (short_of, self._free_counts()[short_of])
        watched = frozenset(keys)
        for watch in self._watches():
            watch.begin(watched)
        return False

    def _key_lists(self) -> list[NewKeys]:
        """Return what takes the new keys of each memory class."""
        return [NewKeys(number, self._new_keys) for number in range(len(self._limits.device_places))]

    def _pools(self) -> list[KVPool]:
        return [self._kv, *[each.kv for each in self._windows]]

    def _watches(self) -> list[KeyWatch]:
        states = [] if self._states is None else [self._states.watch]
        return [*[pool.watch for pool in self._pools()], *states]

    def _free_counts(self) -> tuple[int, ...]:
        """Return the free blocks of each windowed class, and the free slots."""
        slots = () if self._states is None else (self._states.free_slots,)
        return (*[each.kv.free_blocks for each in self._windows], *slots)

    def _affordable(self, known: list[int], spare_blocks: int) -> list[int]:
        """Return the leading blocks that the pool can keep while they are copied."""
        while (excess := self._kv.num_idle(known) - spare_blocks) > 0:
            known = known[:-excess]
        return known

    def _take(self, sequence: Sequence, known: list[int], begin: int, count: int, *, copied: bool) -> None:
        size, room = self._limits.block_size, self._room(sequence)
        self._kv.hold(known)
        self._kv.spoil(known[begin:])
        if copied:
            sequence.grow(self._kv.allocate(count, room=room), block_size=size)
            sequence.new_copies = tuple(map(BlockCopy, known, sequence.blocks))
        else:
            sequence.grow(as_runs(known), block_size=size)
            self._take_more(sequence, count - len(known), room=room - len(known))
        if self._windows:
            sequence.windows = [each.admit(sequence.keys, begin, len(known), needs=count) for each in self._windows]
            sequence.note_room(size)
        if self._states is not None:
            shared = self._kv.num_current(self._kv.find(self._reusable_keys(sequence)))
            self._states.admit(sequence, begin, len(known), shared=shared, snapshots=self._limits.prefix_cache)
        sequence.fetched = False
        sequence.scheduled = begin * size
        sequence.replay_end = len(known) * size
        sequence.known_blocks = begin
        if not sequence.preemptions and not sequence.carried:
            sequence.cached_prompt_tokens = min(sequence.scheduled, sequence.prompt_tokens)
        sequence.next_full = (begin + 1) * size if self._limits.prefix_cache or self._windows else NEVER
        if self._limits.prefix_cache:
            keys = sequence.keys_of(len(sequence.tokens) // size, block_size=size)
            self._kv.expect(keys[begin:], sequence.sequence)
        self._count(sequence)

    def _take_more(self, sequence: Sequence, count: int, *, room: int) -> None:
        """Allocate blocks behind the known ones; adjoining them if the pool is contiguous."""
        if self._limits.contiguous_kv and sequence.table and count:
            sequence.grow(self._kv.extend(sequence.table, count, room=room), block_size=self._limits.block_size)
        elif count:
            sequence.grow(self._kv.allocate(count, room=room), block_size=self._limits.block_size)

    def _count(self, sequence: Sequence) -> None:
        self.admitted_tokens += len(sequence.tokens)
        self.cached_tokens += sequence.scheduled
        if sequence.carried:
            sequence.carried = False
            self.kept_tokens += sequence.scheduled
            self.replayed_tokens += max(0, sequence.replay_end - sequence.scheduled)
