"""The scheduler's limits and counters."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.spec.memory_classes import StateSlots, WindowPool


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """Predicted times of copies between the device and host memory, and of what they save, on the slowest stage."""

    block_s: float  # time to copy one block of the context
    slot_s: float  # time to copy one sequence's state
    token_s: float  # time to compute one token of a prompt
    # Seconds of copies that one step may carry beside other sequences: they run while it computes. None: no bound.
    beside_s: float | None = None

    def pays(self, num_blocks: int, num_slots: int, *, saved_tokens: int, disk_s: float = 0.0) -> bool:
        """Return whether bringing blocks and states back is faster than computing ``saved_tokens`` again.

        Each may push out another one. ``disk_s``: time until all of them are in host memory.
        """
        copies_s = 2 * (num_blocks * self.block_s + num_slots * self.slot_s)
        return disk_s + copies_s < saved_tokens * self.token_s

    @property
    def most_blocks(self) -> int | None:
        """Blocks that may come back in one step beside others: each may push out another one. None: no bound."""
        return None if self.beside_s is None or not self.block_s else max(1, int(self.beside_s / (2 * self.block_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Capacity of the pipeline."""

    num_blocks: int  # blocks of the layers that keep the context
    block_size: int  # tokens
    context_length: int  # tokens of one sequence, prompt and output
    micro_batches: int  # M: maximum number of steps in flight
    max_running: int = 256  # sequences: bounds the rows of a step
    max_waiting: int = 1024  # sequences not yet admitted: a few minutes of work for the fastest cluster
    contiguous_kv: bool = False  # a stage attends over runs as views: a cached prefix is copied, not shared
    prefix_cache: bool = True  # sequences with the same first tokens reuse computed blocks
    windows: tuple[WindowPool, ...] = ()  # pools of the layers that keep a window; empty: all keep the context
    states: StateSlots | None = None  # pool of recurrent layers' states; None: no layer is recurrent
    # Host memory below the device: blocks of each memory class, and slots of states if there are any; empty: none.
    host_places: tuple[int, ...] = ()
    disk_places: tuple[int, ...] = ()  # on disk below host memory, of the same classes; empty: none
    host_rates: HostRates | None = None  # None: not known; then everything comes back, at once
    rest_tokens: int = 0  # slots that a sequence needs behind its last token's, see ``kv_forms.rest_tokens``

    @property
    def device_places(self) -> tuple[int, ...]:
        """Blocks of each memory class, and slots of states if there are any."""
        slots = () if self.states is None else (self.states.num_slots,)
        return (self.num_blocks, *(pool.num_blocks for pool in self.windows), *slots)

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Places on the device, and behind them those below it."""
        return (*self.device_places, *self.host_places, *self.disk_places)

    @property
    def slack_tokens(self) -> int:
        """Tokens of one sequence in all steps in flight, so that they fit into the windows' slack."""
        return min([pool.most_slack for pool in self.windows], default=self.context_length)

    @property
    def max_tokens(self) -> int:
        """Maximum length of one sequence, prompt and output."""
        return min(self.context_length, self.num_blocks * self.block_size - self.rest_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Snapshot of the scheduler's counters."""

    micro_batches: int  # M
    in_flight: int  # steps
    running: int  # sequences admitted
    waiting: int  # sequences to be admitted, including preempted ones
    num_blocks: int
    free_blocks: int  # blocks that no sequence holds, including idle blocks of the prefix cache
    state_slots: int  # slots of recurrent layers' states
    free_slots: int  # slots that no sequence holds, including idle snapshots
    missed_snapshots: int  # snapshots not taken, as sequences held all slots
    cached_blocks: int  # blocks in the prefix cache, held by sequences or not
    preemptions: int  # count since the start
    admitted_tokens: int  # count since the start: known tokens of sequences when they were admitted
    cached_tokens: int  # admitted tokens found in the prefix cache
    kept_tokens: int = 0  # tokens of sequences from the previous epoch that were found still computed
    host_blocks: int = 0  # blocks of the context that host memory has room for
    host_bound: int = 0  # how many of them may be used now: other programs may need the memory
    used_host_blocks: int = 0  # blocks of the context in host memory
    restored_tokens: int = 0  # count since the start: tokens of the prefix cache that came back from host memory
    disk_blocks: int = 0  # blocks of the context that the disk has room for
    used_disk_blocks: int = 0  # blocks of the context on disk
    fetched_tokens: int = 0  # count since the start: tokens whose KV came from disk to host memory
    disk_problem: str = ""  # why the disk rests
    disk_again_s: float | None = None  # when it is tried again, on the clock of ``disk_done``; None: it is used
    # Tokens of the same sequences that the first stages recomputed, up to the last one that lost them.
    replayed_tokens: int = 0
