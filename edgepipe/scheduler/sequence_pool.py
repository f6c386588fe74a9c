"""Sequences that have not ended, from their arrival to their end.

A sequence waits in the queue, is a prompt once it is admitted, and then a decode. A preempted one waits again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from edgepipe.backend.drafting import NO_DRAFTS
from edgepipe.errors import PromptTooLong, QueueFull
from edgepipe.ids import SequenceId
from edgepipe.scheduler.lengths import AnswerLengths, Lengths
from edgepipe.scheduler.limits import SchedulerLimits
from edgepipe.scheduler.prompts import Prompts
from edgepipe.scheduler.queue import WaitingQueue
from edgepipe.scheduler.sequence import Phase, Sequence
from edgepipe.scheduler.tables import BlockTables
from edgepipe.scheduler.types import EndReason, Event, Priority, SequenceEnded, SequenceSpec, TokenSampled

MAX_PREEMPTED = 2
"""After so many preemptions a batch sequence counts as interactive."""

_CHATS_RETURN_S = 10.0  # batches stay as small as beside a chat for so long after the last one: its reader may go on
_DECODE = Phase.DECODE  # looked up for each token


class SequencePool:
    """Holds the sequences by phase, moves them from one to the next, and frees the blocks of those that leave."""

    def __init__(self, limits: SchedulerLimits, tables: BlockTables) -> None:
        self._limits = limits
        self._tables = tables
        self.sequences: dict[SequenceId, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: dict[SequenceId, Sequence] = {}  # admitted
        self.prompts = Prompts()  # admitted with unscheduled tokens
        self.ready: deque[Sequence] = deque()  # decodes without a step in flight, in the order of becoming ready
        self.num_decodes = 0  # suspected sequences are not counted
        self.num_chats = 0  # sequences that were submitted as interactive
        self.unscheduled_prefill = 0  # tokens, of waiting and prefilling sequences
        self.head_does_not_fit = False  # the first in the queue was not admitted, and nothing changed since
        self.preemptions = 0  # count since the start
        self.answer_lengths = AnswerLengths()  # how long answers of batch sequences became
        self.now_s: float | None = None  # when the newest step retired; None: turns are not measured
        self._chats_until_s = 0.0  # until then a chat may come back
        self._arrivals = 0

    # What the pool holds

    @property
    def expected_chats(self) -> int:
        """Chats that have not ended; one if the last one has just left."""
        if self.num_chats or self.now_s is None:
            return self.num_chats
        return int(self.now_s < self._chats_until_s)

    @property
    def chats_beside_batches(self) -> bool:
        """Whether batches have sequences that have not ended, and chats, too, or one may come back soon."""
        return self.num_chats < len(self.sequences) and self.expected_chats > 0

    @property
    def mean_context(self) -> int:
        """Tokens that a running sequence attends to, in the mean, without prompts that are computed."""
        held = (self._tables.num_blocks - self._tables.free_blocks) * self._limits.block_size
        others = len(self.running)
        for prompt in self.prompts:
            held, others = held - len(prompt.tokens), others - 1
        return max(1, held) // max(1, others)

    @property
    def any_protected(self) -> bool:
        """Whether a decode is interactive: a person waits for its tokens."""
        return self.num_decodes > 0 and any(map(_is_protected, self.running.values()))

    @property
    def protected_chats(self) -> int:
        """Number of interactive decodes that were submitted as such."""
        return sum([_is_protected(each) and not each.is_batch for each in self.running.values()])

    def batch_lengths(self) -> list[Lengths]:
        """Return the lengths of the newest ended batch sequences, and expected ones of those that run.

        Short answers end first: without those that run, the lengths would be too short.
        """
        known = self.answer_lengths
        running = [each for each in self.running.values() if each.is_batch]
        return [*known.newest, *[known.expected(Lengths(each.prompt_tokens, each.num_output)) for each in running]]

    # Arrival

    def submit(self, specs: Seq[SequenceSpec], *, accepted: bool, carried: bool) -> list[Event]:
        """See ``Scheduler.submit``. ``carried``: the sequences come from the previous epoch."""
        for spec in specs:
            self._check_length(len(spec.prompt))
        if not accepted and len(self.waiting) + len(specs) > self._limits.max_waiting:
            raise QueueFull(
                fact=f"{len(self.waiting)} sequences wait, at most {self._limits.max_waiting} may",
                next_step="try again in some seconds",
            )
        events: list[Event] = []
        for spec in specs:
            sequence = self._make(spec)
            sequence.carried = carried
            reason = _end_reason(sequence) if spec.generated else None
            if reason is None:
                self.sequences[spec.sequence] = sequence
                self.num_chats += not sequence.is_batch
                self.unscheduled_prefill += sequence.unscheduled
                self._wait(sequence)
            else:
                events.append(SequenceEnded(spec.sequence, reason, sequence.num_output))
        return events

    def _check_length(self, prompt_tokens: int) -> None:
        if prompt_tokens < self._limits.max_tokens:
            return
        short_of_memory = self._limits.max_tokens < self._limits.context_length
        raise PromptTooLong(
            f"This model's maximum context length is {self._limits.max_tokens} tokens"
            + (" in the memory of the cluster" if short_of_memory else ""),
            fact=f"the prompt has {prompt_tokens}, and the answer needs at least one",
            next_step="shorten the prompt" + (" or add a node with memory" if short_of_memory else ""),
        )

    def _make(self, spec: SequenceSpec) -> Sequence:
        limit = self._limits.max_tokens
        if spec.max_tokens is not None:
            limit = min(limit, len(spec.prompt) + spec.max_tokens)
        self._arrivals += 1
        return Sequence(
            sequence=spec.sequence,
            arrival=self._arrivals,
            tokens=[*spec.prompt, *spec.generated],
            prompt_tokens=len(spec.prompt),
            stop_ids=spec.stop_ids,
            limit=limit,
            priority=Priority(spec.priority),
            is_batch=spec.priority == Priority.BATCH,
            reuse_prefix=spec.reuse_prefix,
            alone=spec.alone,
            may_fly=spec.may_fly,
            registration_base_bytes=spec.registration_base_bytes,
            registration_token_bytes=spec.registration_token_bytes,
            rest_tokens=self._limits.rest_tokens,
        )

    def _wait(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)
        self.head_does_not_fit = False

    # From the queue to decodes, and back

    def note_admitted(self, sequence: Sequence) -> None:
        """Make the first sequence in the queue a prompt. Its blocks are allocated."""
        self.waiting.pop()
        self.unscheduled_prefill -= sequence.scheduled
        sequence.phase = Phase.PREFILL
        self.running[sequence.sequence] = sequence
        self.prompts.add(sequence)

    def note_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Count prompt tokens that a step holds. Behind its last ones, the sequence is a decode."""
        self.unscheduled_prefill -= num_tokens
        if not sequence.unscheduled:
            self.prompts.remove(sequence)
            self.head_does_not_fit = False
            sequence.phase = Phase.DECODE
            self.num_decodes += not sequence.alone

    def clear(self, sequence: Sequence) -> None:
        """Lift the mark of a suspected sequence: an isolated step has sampled a token."""
        if sequence.alone:
            sequence.alone = False
            self.num_decodes += sequence.phase is Phase.DECODE

    def preempt(self, sequence: Sequence) -> None:
        """Requeue a sequence and free its blocks. It later recomputes the tokens that the cache has lost."""
        self.preemptions += 1
        sequence.preemptions += 1
        if sequence.preemptions >= MAX_PREEMPTED:
            sequence.priority = Priority.INTERACTIVE
        self._leave_running(sequence)
        sequence.scheduled, sequence.drafts.next, sequence.drafts.flight = 0, NO_DRAFTS, None
        self.unscheduled_prefill += len(sequence.tokens)
        self._wait(sequence)
        self._tables.release(sequence)

    def _leave_running(self, sequence: Sequence) -> None:
        self.head_does_not_fit = False
        del self.running[sequence.sequence]
        self._tables.leave(sequence)
        if sequence.phase is Phase.PREFILL:
            self.prompts.remove(sequence)
            self.unscheduled_prefill -= sequence.unscheduled
        elif not sequence.alone:
            self.num_decodes -= 1
            if sequence in self.ready:
                self.ready.remove(sequence)

    # Tokens, and the end

    def append(self, sequence: Sequence, token_ids: Seq[int], events: list[Event]) -> None:
        """Append a row's sampled tokens up to the sequence's end. Its step has computed all but the last of them."""
        if sequence.phase is Phase.ENDED:
            return  # cancelled meanwhile: drop the tokens
        tokens, reason = sequence.tokens, None
        before = count = len(tokens)
        for token_id in token_ids:
            events.append(TokenSampled(sequence.sequence, count - sequence.prompt_tokens, token_id))
            tokens.append(token_id)
            count += 1
            if token_id in sequence.stop_ids:
                reason = EndReason.STOP
                break
            if count >= sequence.limit:
                reason = sequence.limit_reason
                break
        if count > before + 1 and count > sequence.next_full:
            self._tables.note_computed(sequence, count - 1)
        if sequence.phase is _DECODE:
            if reason is None and sequence.scheduled < count:
                self.ready.append(sequence)  # no step that was planned ahead holds the newest token
        elif sequence.phase is Phase.WAITING:
            # Preempted meanwhile: the tokens count and are computed again with the rest.
            self.unscheduled_prefill += count - before
        if reason is not None:
            self._end(sequence, reason, events)

    def cancel(self, sequence_id: SequenceId, *, at_position: int) -> list[Event]:
        """See ``Scheduler.cancel``."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return []
        limit = sequence.prompt_tokens + at_position
        if limit < sequence.limit:
            sequence.limit, sequence.limit_reason = limit, EndReason.CANCELLED
        events: list[Event] = []
        if len(sequence.tokens) >= sequence.limit:
            self._end(sequence, EndReason.CANCELLED, events)
        return events

    def release_if_idle(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that has left, once no step uses them."""
        if not sequence.in_flight and sequence.phase in (Phase.WAITING, Phase.ENDED):
            self._tables.release(sequence)
            self.head_does_not_fit = False

    def _end(self, sequence: Sequence, reason: EndReason, events: list[Event]) -> None:
        waits = sequence.phase is Phase.WAITING
        if waits:
            self.unscheduled_prefill -= sequence.unscheduled
        else:
            self._leave_running(sequence)
        sequence.phase = Phase.ENDED
        if waits:
            self.waiting.note_ended()
            self.head_does_not_fit = False
        del self.sequences[sequence.sequence]
        self.num_chats -= not sequence.is_batch
        if not sequence.is_batch and self.now_s is not None:
            self._chats_until_s = self.now_s + _CHATS_RETURN_S
        if sequence.is_batch and reason is not EndReason.CANCELLED:
            self.answer_lengths.note(Lengths(sequence.prompt_tokens, sequence.num_output))
        cached = sequence.cached_prompt_tokens
        events.append(SequenceEnded(sequence.sequence, reason, sequence.num_output, cached_prompt_tokens=cached))
        self._tables.release(sequence)


def _end_reason(sequence: Sequence) -> EndReason | None:
    tokens = sequence.tokens
    if tokens[-1] in sequence.stop_ids and len(tokens) > sequence.prompt_tokens:
        return EndReason.STOP
    return sequence.limit_reason if len(tokens) >= sequence.limit else None


def _is_protected(sequence: Sequence) -> bool:
    return sequence.phase is Phase.DECODE and sequence.priority is Priority.INTERACTIVE
