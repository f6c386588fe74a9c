"""Bounds of the next step: how many steps in flight may hold decodes and prompt tokens, and how many of each. PURE.

At most M steps in flight hold decodes, and at most P hold prompt tokens. The pacer plans P, the tokens of a step with
prompt tokens, and what batches may decode beside chats.
"""

from __future__ import annotations

from edgepipe.scheduler.batch_mode import BatchMode
from edgepipe.scheduler.in_flight import InFlight, StepsInFlight
from edgepipe.scheduler.limits import SchedulerLimits
from edgepipe.scheduler.pacing import BesideChats, Chunk, Pacer, Waiting
from edgepipe.scheduler.phases import TokenKinds
from edgepipe.scheduler.policy import Load
from edgepipe.scheduler.sequence import Sequence
from edgepipe.scheduler.sequence_pool import SequencePool
from edgepipe.scheduler.tables import BlockTables

_TURNS_ALONE = 8  # without batches, one of so many turns of chats is measured: a forecast takes time


class StepBounds:
    """Says what the next step may hold beside the steps in flight."""

    def __init__(
        self, limits: SchedulerLimits, mode: BatchMode, pool: SequencePool, tables: BlockTables, steps: StepsInFlight
    ) -> None:
        self._limits = limits
        self._mode = mode
        self._pool = pool
        self._prompts = pool.prompts
        self._ready = pool.ready
        self._tables = tables
        self._steps = steps
        self.micro_batches = limits.micro_batches  # M
        self.pacer: Pacer | None = None
        self.chunk: Chunk | None = None  # newest choice of the pacer
        self.beside_chats: BesideChats | None = None  # newest choice of what batches may decode; None without a bound
        self._decode_steps = limits.micro_batches  # most steps in flight with decodes
        self._prompt_slot = False  # whether fewer than P steps in flight hold prompt tokens
        self._may_add_chunk = True  # whether a step of prompts alone may join those in flight while sequences decode

    # Choices before each step

    def choose_beside_chats(self) -> None:
        """Choose what batches may decode, so that chats hardly notice them."""
        self.beside_chats = None
        if self._pool.chats_beside_batches and self.pacer is not None:
            context = self._pool.mean_context
            chats = self._pool.expected_chats
            self.beside_chats = self.pacer.beside_chats(chats, context=context, micro_batches=self.micro_batches)

    def choose(self) -> None:
        """Choose P, the size of the next step with prompt tokens, and how many steps may hold decodes."""
        self._prompt_slot = self._choose_chunk()
        self._decode_steps = self._most_decode_steps()

    def note_sent(self, *, decodes: bool) -> None:
        """Let no further step of prompts alone join those in flight, if this one is without ``decodes``."""
        if not decodes:
            self._may_add_chunk = False

    def note_retired(self) -> None:
        """Let one step of prompts alone join those in flight."""
        self._may_add_chunk = True

    def _choose_chunk(self) -> bool:
        """Choose P and the size of the next step with prompt tokens. Return whether fewer than P are in flight."""
        if not self._pool.unscheduled_prefill:
            return False
        if not self.prompts_go:
            return True
        # Decodes that come back may ride in one step more, for one without decodes that will not be followed.
        more = bool(self._ready) and self._steps.only_chunks > 0
        if self._steps.chunks < self.prompt_steps + more and self.pacer is not None:
            self.chunk = self.pacer.chunk(self._waiting_prompts())
        return self._steps.chunks < self.prompt_steps + more

    def _most_decode_steps(self) -> int:
        """Return M, or P if that is less while prompts wait: decodes that ride with chunks save a read of weights."""
        most = self.micro_batches if self.beside_chats is None else self.beside_chats.in_flight
        if not self._pool.unscheduled_prefill or not self.prompts_go:
            return most
        return min(most, self.prompt_steps) if self.prompt_steps > 1 else most

    def _waiting_prompts(self) -> Waiting:
        pool = self._pool
        first = self._prompts.oldest or pool.waiting.first()
        left = first.unscheduled if first is not None else 0
        chats, decodes = 0, pool.num_decodes
        if pool.chats_beside_batches:
            chats = pool.protected_chats or pool.expected_chats - pool.num_chats
            if (beside := self.beside_chats) is not None:
                decodes = min(decodes, chats + beside.rows * beside.in_flight)
        return Waiting(
            prompt=first.sequence if first is not None else 0,
            position=self._prompts.furthest_position,
            left=left,
            others=max(0, pool.unscheduled_prefill - left),
            decodes=decodes,
            context=pool.mean_context,
            micro_batches=self.micro_batches,
            protected=chats > 0 or pool.any_protected,
            chats=chats,
            batch=chats > 0 and self._only_batches_wait(first),
            begun=max(0, first.scheduled - first.cached_prompt_tokens) if first is not None else 0,
        )

    # What the next step may hold

    @property
    def prompt_steps(self) -> int:
        """P: the maximum number of steps in flight with prompt tokens."""
        return self.micro_batches if self.chunk is None else self.chunk.in_flight

    @property
    def prompts_go(self) -> bool:
        """Whether prompts are computed, or the first in the queue may be admitted."""
        if self._mode.kinds is TokenKinds.DECODES:
            return False
        return bool(self._prompts) or (len(self._pool.waiting) > 0 and not self._pool.head_does_not_fit)

    @property
    def full(self) -> bool:
        """Whether no row can join those in flight. Most calls of ``Scheduler.next_step`` end here."""
        if self._prompts.any_suspected or (self._ready and self.may_decode):
            return False
        return not self.may_prefill(beside_decodes=False)

    @property
    def may_decode(self) -> bool:
        """Whether fewer steps in flight hold decodes than may."""
        return self._mode.kinds is not TokenKinds.PROMPTS and self._steps.decodes < self._decode_steps

    def may_prefill(self, *, beside_decodes: bool) -> bool:
        """Whether the step may hold prompt tokens.

        Beside protected decodes, one step without decodes may follow each step that retires: more at once would delay
        the decodes that come back next by more than one chunk.
        """
        spaced = self.chunk is not None and self.chunk.spaced
        if self._mode.kinds is TokenKinds.DECODES or (not beside_decodes and self._only_ride):
            return False
        return self._prompt_slot and (beside_decodes or self._may_add_chunk or not spaced)

    @property
    def most_chunk_tokens(self) -> int:
        """Tokens of one sequence in a step, so that its chunks in all steps in flight fit into the windows' slack."""
        return max(1, self._limits.slack_tokens // self.prompt_steps)

    @property
    def only_decodes_go(self) -> bool:
        """Whether nothing but the rows in flight can be computed: all are shared decodes, and none is ready."""
        if self.prompts_go or self._ready:
            return False
        return not self._prompts.any_suspected and self._tables.stale_to is None

    @property
    def _only_ride(self) -> bool:
        """Whether prompts go with decodes only: a step of their own would lengthen the turn of chats.

        That holds for prompts of batches, and for short ones while a step with decodes is in flight. Replays cannot
        ride.
        """
        if self.chunk is not None and self.chunk.rides and self._steps.decodes and self._tables.stale_to is None:
            return True
        if self.beside_chats is None or not self._pool.num_decodes:
            return False
        return self._only_batches_wait(self._prompts.oldest or self._pool.waiting.first())

    def _only_batches_wait(self, first: Sequence | None) -> bool:
        """Whether all prompts with tokens to compute, and the ``first`` to do so, belong to batches."""
        return first is not None and first.is_batch and all(prompt.is_batch for prompt in self._prompts)

    # For the policy and the pacer

    def load(self) -> Load:
        """Return what the policy decides on."""
        pool = self._pool
        running, ready = pool.num_decodes, len(self._ready)
        if (beside := self.beside_chats) is not None:
            chats = pool.expected_chats
            running = min(running, chats + beside.rows * beside.in_flight)
            ready = min(ready, chats + beside.rows)
        return Load(
            self._most_decode_steps(),
            tuple([0 if step.isolated else step.num_sampling for step in self._steps.records if step.after is None]),
            running,
            ready,
            pool.unscheduled_prefill,
            self._tables.num_blocks,
            self._tables.free_blocks,
            self._limits.block_size,
            self._prompts.unscheduled_tokens if self._prompts else 0,
            None if self.chunk is None else self.chunk.step_tokens,
            self._most_prefill_tokens() if pool.unscheduled_prefill else None,
        )

    def _most_prefill_tokens(self) -> int | None:
        """Return the bound on a step's prompt tokens, for the prompt that is furthest on; None if not known."""
        if self.pacer is None or self._mode.policy.paced or not self._prompt_slot:
            return None
        return self.pacer.most_tokens(self._prompts.furthest_position, waiting=self._pool.unscheduled_prefill)

    def note_turn(self, record: InFlight, now_s: float) -> None:
        """Tell the pacer how long a turn of a chat took, unless prompts of chats have lengthened it."""
        chat = record.decodes[0]
        if chat.is_batch:
            chat = next((each for each in record.decodes if not each.is_batch), None)
        if chat is None or self.pacer is None:
            return
        before_s, chat.decoded_s = chat.decoded_s, now_s
        beside = self._pool.chats_beside_batches
        if not before_s or (not beside and record.step % _TURNS_ALONE):
            return
        if all(prompt.is_batch for prompt in self._prompts):
            self.pacer.note_turn(
                now_s - before_s,
                self._pool.num_chats,
                beside=beside,
                context=self._pool.mean_context,
                micro_batches=self.micro_batches,
            )
