"""Choose the size of prompt chunks and how many are in flight, from the expected times of a ring's servers. PURE.

Devices and links are servers. A chunk of c tokens takes the slowest of them ``T(c)`` seconds, and the whole ring
``turn(c)``: all devices and links one after another, and the latency. P chunks in flight keep the slowest server busy
if ``P * T >= turn``.

While no sequence decodes, the prompts that wait are cut into n chunks. They take ``(n - 1) * T + turn``: more chunks
fill and drain the ring faster, fewer repeat the fixed work of a chunk less often. With W seconds of work on each of N
equal servers and fixed work f, the best n is ``sqrt(W * (N - 1) / f)``. The pacer compares the forecasts of some n
instead, since fixed work differs between servers and grows with the tokens where experts are read. The chunks of a
prompt take the slowest server equally long: attention grows with the position, so their tokens fall.

While sequences decode, decodes ride in the chunks' steps. A late turn, as steps vary, may then exceed a decode's turn
without prompts by the goal. Of the sizes that keep this for all positions of the choice, the pacer takes the one with
the most prompt tokens per second, and the smallest of about equal ones. Short prompts end soon, so they may take a
quarter longer, long ones a tenth, and no more than a third of a second in all. Short ones also ride only: a step of
their own would read the weights between two steps of decodes, and make the second one late.

Batches are not worth that much: beside chats, their prompts and decodes together may lengthen a chat's turn by a
quarter. As long as the weights bound a step, many decodes of batches fit into that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from edgepipe.backend.cost import StepWork
from edgepipe.errors import ConfigInvalid
from edgepipe.scheduler.chat_turns import ChatTurns
from edgepipe.scheduler.chunk_sizes import (
    MIN_CHUNK_TOKENS,
    PRECISION,
    chunk_counts,
    chunk_work,
    largest_chunk,
    leading_bits,
    next_leading_bits,
    step_sizes,
)
from edgepipe.scheduler.sizing import most_micro_batches
from edgepipe.units import parse_duration_s

DEFAULT_ITL_GOAL = "100ms"
"""Goal if the user gives none. Readers notice pauses of a quarter of a second; prompts lose a few per cent."""

HOST_S = 0.0008
"""Estimate of a step's fixed work on the host of each slice: plans, messages, waking threads."""

_LONGEST_GOAL_S = 60.0
_ALONE_S = 4.0  # limit for a step of prompts while no sequence decodes: cancelled requests hold the ring so long
_ALONE = 4.0  # lower bound of that limit in decode steps: else slow memory is read for few tokens
_BESIDE_BATCH = 1.25  # turn of chats beside a batch by forecast, as a multiple of their turn alone
_BESIDE_MEASURED = 1.4  # the same as measured: hosts work on each step of a batch, too
_BATCH_CHUNKS = (8, 16)  # tokens of steps beside chats: sizes below ``MIN_CHUNK_TOKENS`` for prompts of batches
_MOST_BATCH_ROWS = 1024
_ONE_STEP = 0.6  # below this share of the forecast, batches decode in the chats' step only
_POSITIONS_ALIKE = 8192  # a choice beside decodes holds for a fifth of these tokens, and of a later position
_LATE = 0.15  # share by which a late turn is longer than forecast, over the root of its steps, which vary by 5 %
_EQUAL_ENDS = 0.02  # the same of a prompt's last moment, if no sequence decodes: each step costs the hosts work
_LAST_CHUNKS, _LARGER = 8, 0.25  # the last few chunks of a prompt share up to a quarter of one
_ROUNDS = 8  # sizes that the search for one of equal time tries
_CHANGED = 0.1  # share by which a chosen step's time may change until it is chosen again
_EQUAL = 0.1  # forecasts beside decodes within this share are equal: the smaller step is kinder to chats
_EQUAL_S = 0.35  # but it may cost the oldest prompt no more than so many seconds
_VARIED = 10  # exponent: where a turn and the slowest server's steps take equally long, jitter costs 7 %
_EQUAL_SHORT = 0.25  # the same of short prompts: they end soon anyway
_SHORT_TOKENS = 1024  # if all waiting prompts together have no more, they are short


def parse_itl_goal(text: str) -> float | None:
    """Return the seconds of ``"100ms"``, None for ``"off"``, the default's for an empty text. Raises ConfigInvalid."""
    if text == "off":
        return None
    try:
        goal_s = parse_duration_s(text or DEFAULT_ITL_GOAL)
    except ConfigInvalid:
        goal_s = 0.0
    if not 0 < goal_s <= _LONGEST_GOAL_S:
        raise ConfigInvalid(
            f"--itl-goal cannot be '{text}'",
            fact="it is the time that prompts may add to each token of a chat, above 0 and up to a minute",
            next_step="give a time such as 100ms or 0.3s, or off",
        )
    return goal_s


def most_prompt_steps(num_stages: int) -> int:
    """Return the most steps in flight with prompt tokens: P, and one for decodes that ride in time."""
    return most_micro_batches(num_stages) + 1


@dataclass(frozen=True, slots=True)
class RingTimes:
    """Expected times of steps on the servers of a ring."""

    stages: Sequence[Sequence[Callable[[StepWork], float]]]  # seconds on each slice of each device; 0: not known
    uploads: Sequence[Callable[[int], float]]  # seconds of each link for a step of so many tokens; 0: not known
    latency_s: Callable[[], float]  # part of a turn in which a step occupies no server


class Passage(NamedTuple):
    """Expected times of one step around the ring."""

    server_s: float  # T: on the slowest server
    turn_s: float
    slowest: str  # "stage 1" or "link 0-1"


class Waiting(NamedTuple):
    """Prompts that wait for the next chunk, and the decodes beside it."""

    prompt: int  # identity of the oldest prompt: forecasts hold for it
    position: int  # tokens of the prompt that is furthest on: its next chunk attends to all of them
    left: int  # tokens of the oldest prompt without a step
    others: int  # tokens of the other prompts without a step
    decodes: int = 0  # sequences that decode
    context: int = 1  # tokens that each of them attends to, in the mean
    micro_batches: int = 1  # M
    protected: bool = False  # whether one of the decoding sequences is interactive
    chats: int = 0  # interactive sequences among ``decodes``
    batch: bool = False  # whether all prompts that wait belong to batches
    begun: int = 0  # tokens of the oldest prompt that steps hold or held, without those from the cache


class Chunk(NamedTuple):
    """How the next prompt tokens go into steps."""

    step_tokens: int  # tokens of a step with prompt tokens, decodes included
    in_flight: int  # P: steps with prompt tokens in flight
    seconds: float  # expected on the slowest server
    bound: str  # what bounds it: "stage 1", "link 0-1", or "goal"
    over_goal_s: float = 0.0  # time by which even the smallest chunk misses the goal
    rides: bool = False  # whether prompts go with decodes only, as long as steps with decodes are in flight
    spaced: bool = False  # whether steps without decodes join one by one, so that no decode waits for several


class BesideChats(NamedTuple):
    """What batches may decode beside chats."""

    rows: int  # rows in each step
    in_flight: int  # steps with decodes in flight, of chats and batches


class PromptsAlone(NamedTuple):
    """The chunks of prompts beside which nothing decodes."""

    chunk_s: float  # expected for each on the slowest server
    turn_s: float  # the same around the ring
    number: int
    in_flight: int  # P


class _Target(NamedTuple):
    """How long the chunks of a prompt take, and an example of what this was chosen for."""

    prompt: int  # identity of the oldest prompt
    chunk_s: float  # on the slowest server
    most_tokens: int  # longest chunk: windows then have room for as many chunks in flight as were chosen
    example: StepWork  # a chunk of that length
    seconds: float  # expected for it at the time of the choice


class _Load(NamedTuple):
    """What a choice beside decodes holds for."""

    until: int  # position of the prompt that is furthest on, about: no step of the choice goes further
    decodes: int  # about
    micro_batches: int  # M
    batch: bool  # whether all prompts that wait belong to batches
    short: bool  # whether the prompts that wait are short


class Pacer:
    """Chooses chunks for one ring and keeps the forecast of the prompt that is computed now."""

    def __init__(
        self,
        ring: RingTimes,
        *,
        most_tokens: int,
        goal_s: float | None = None,
        most_in_flight_tokens: int | None = None,
    ) -> None:
        """
        most_tokens            prompt tokens of a step
        goal_s                 seconds that prompts may add to a decode's turn; None: no bound
        most_in_flight_tokens  tokens of one prompt in all steps in flight; None: no bound
        """
        self._ring = ring
        self._goal_s = goal_s
        self._most = most_tokens
        self._most_in_flight = most_prompt_steps(len(ring.stages)) - 1
        self._room = most_in_flight_tokens or inf
        self._target: _Target | None = None
        self._tokens = 0  # size of the newest chunk: where the search for the next one begins
        # Newest choice beside decodes, and its load.
        self._beside: tuple[_Load, Chunk] | None = None
        self._checked = False  # the last use of that choice predicted its time again: every second one does
        # Newest choice of batches' decodes beside chats, its load, and the time of a step when it was chosen.
        self._batch: tuple[tuple[int, int, int], BesideChats, float] | None = None
        self._batch_alone = 0  # the most rows of batches if one step is in flight
        self._chat_turns = ChatTurns(_BESIDE_MEASURED)
        # Chats in a step, their context and their steps in flight when a turn without batches was last measured.
        self._alone_load: tuple[int, int, int] | None = None

    def passage(self, work: StepWork) -> Passage | None:
        """Return a step's expected times; None while a stage's are not known."""
        slowest, longest_s, sum_s = "", 0.0, 0.0
        for index, slices in enumerate(self._ring.stages):
            seconds = 0.0
            for step_s in slices:
                if not (slice_s := step_s(work)):
                    return None
                seconds += slice_s + HOST_S
            sum_s += seconds
            if seconds > longest_s:
                slowest, longest_s = f"stage {index}", seconds
        for index, upload_s in enumerate(self._ring.uploads):
            seconds = upload_s(work.tokens)
            sum_s += seconds
            if seconds > longest_s:
                slowest, longest_s = f"link {index}-{index + 1}", seconds
        return Passage(longest_s, sum_s + self._ring.latency_s(), slowest)

    @property
    def times(self) -> RingTimes:
        """Expected times of steps."""
        return self._ring

    @property
    def num_stages(self) -> int:
        """Number of devices."""
        return len(self._ring.stages)

    def decode_passage(self, rows: int, *, context: int) -> Passage | None:
        """Return the expected times of a step of decodes that attend to ``context`` tokens each; None while unknown."""
        return self.passage(_decodes(Waiting(prompt=0, position=0, left=0, others=0, context=context), rows))

    def beside_chats(self, chats: int, *, context: int, micro_batches: int) -> BesideChats | None:
        """Return what batches may decode beside ``chats`` decodes of chats, so that these hardly notice them.

        More steps in flight than the chats need keep a ring busy, but lengthen a chat's turn. One is left where turns
        prove longer than forecast: each step costs the hosts more than its rows do. None while a stage's times are not
        known, and where no goal protects chats.
        """
        if self._goal_s is None:
            return None
        load = (leading_bits(chats), leading_bits(context), micro_batches)
        if self._batch is None or self._batch[0] != load or not self._still_takes(*self._batch[1:], chats, context):
            own = self.decode_passage(-(-chats // micro_batches), context=context)
            if own is None:
                return None
            limit_s = _BESIDE_BATCH * _turn_s(own, min(chats, micro_batches))
            choices = [
                self._most_beside(chats, in_flight, context=context, limit_s=limit_s)
                for in_flight in range(1, micro_batches + 1)
            ]
            best = max(choices, key=lambda choice: choice.rows * choice.in_flight)
            passage = self.decode_passage(-(-chats // best.in_flight) + best.rows, context=context)
            self._batch = (load, best, passage.server_s if passage is not None else 0.0)
            self._batch_alone = choices[0].rows
        rows, in_flight = self._batch[1]
        if self._chat_turns.share < _ONE_STEP:
            rows, in_flight = min(rows * in_flight, self._batch_alone), 1
        return BesideChats(max(1, int(rows * self._chat_turns.share)), in_flight)

    def _still_takes(self, choice: BesideChats, chosen_s: float, chats: int, context: int) -> bool:
        """Whether such a step takes about as long as when it was chosen."""
        passage = self.decode_passage(-(-chats // choice.in_flight) + choice.rows, context=context)
        return passage is not None and abs(passage.server_s - chosen_s) <= _CHANGED * chosen_s

    def _most_beside(self, chats: int, in_flight: int, *, context: int, limit_s: float) -> BesideChats:
        """Return the most rows of so many steps in flight; one where even that takes too long, in one step."""
        own = -(-chats // in_flight)
        low, high = 0, _MOST_BATCH_ROWS + 1
        while high - low > max(1, low // PRECISION):
            middle = (low + high) // 2
            passage = self.decode_passage(own + middle, context=context)
            if passage is not None and _turn_s(passage, in_flight) <= limit_s:
                low = middle
            else:
                high = middle
        return BesideChats(max(low, 1 if in_flight == 1 else 0), in_flight)

    def note_turn(self, seconds: float, chats: int, *, beside: bool, context: int, micro_batches: int) -> None:
        """Record the time between two tokens of a chat, ``beside`` sequences of batches or without them."""
        load = (-(-chats // micro_batches), context, min(chats, micro_batches))
        # Both forecasts are of now: what a batch's steps teach about the devices must not change what was measured.
        before_s, now_s = (self._decode_turn_s(*each) for each in (self._alone_load or load, load))
        if before_s is None or now_s is None:
            return
        if not beside:
            self._alone_load = load
            self._chat_turns.alone(seconds, now_s - before_s)
        elif self._chat_turns.beside(seconds, now_s - before_s):
            self._beside = None

    def _decode_turn_s(self, rows: int, context: int, in_flight: int) -> float | None:
        """Return the expected time between two steps of a sequence with so many rows each; None while unknown."""
        passage = self.decode_passage(rows, context=context)
        return None if passage is None else _turn_s(passage, in_flight)

    def most_tokens(self, position: int, *, waiting: int) -> int:
        """Return the most prompt tokens of a step that begins at ``position``, however long they take others.

        They take the slowest stage at most ``_ALONE_S``, or some decode steps; at least one token.
        """
        most = min(waiting, self._most)
        limit_s = 0.0
        for slices in self._ring.stages:
            limit_s = max(limit_s, sum([step_s(chunk_work(position, 1)) for step_s in slices]))
        limit_s = max(_ALONE_S, _ALONE * limit_s)
        for slices in self._ring.stages:
            most = largest_chunk(slices, position, most=most, limit_s=limit_s)
        return most

    def chunk(self, waiting: Waiting) -> Chunk | None:
        """Return the size and number of the next steps with prompt tokens; None while a stage's times are not known."""
        if waiting.protected and self._goal_s is not None:
            return self._chunk_beside(waiting, self._goal_s)
        return self._chunk_alone(waiting)

    # While no decode is protected

    def _chunk_alone(self, waiting: Waiting) -> Chunk | None:
        target = self._target
        if target is None or target.prompt != waiting.prompt or self._changed(target):
            if (best := self._best(waiting)) is None:
                return None
            most = int(min(self._most, max(1, self._room / best.in_flight)))
            self._tokens = most
            example = chunk_work(waiting.position, self._equal(waiting, best.chunk_s, most=most))
            if (passage := self.passage(example)) is None:
                return None
            self._target = target = _Target(waiting.prompt, best.chunk_s, most, example, passage.server_s)
        tokens = self._tokens = self._equal(waiting, target.chunk_s, most=target.most_tokens)
        passage = self.passage(chunk_work(waiting.position, tokens))
        if passage is None:
            return None
        in_flight = self._in_flight(passage, tokens)
        tokens += _rows(waiting, in_flight)
        return Chunk(tokens, in_flight, passage.server_s, passage.slowest)

    def prompts_alone(self, num_tokens: int) -> PromptsAlone | None:
        """Return how prompts of so many tokens would be computed while nothing decodes; None while not known."""
        return self._best(Waiting(prompt=0, position=0, left=num_tokens, others=0))

    def _best(self, waiting: Waiting) -> PromptsAlone | None:
        """Return the chunks that end the waiting prompts first.

        Among numbers of chunks that end them equally soon, it is the smallest: each step costs the hosts work.
        """
        total = waiting.left + waiting.others
        middle = waiting.position + waiting.left // 2
        most = self.most_tokens(middle, waiting=total)
        ends: list[tuple[float, PromptsAlone]] = []  # with the seconds until the end
        for number in chunk_counts(total, most):
            tokens = -(-total // number)
            passage = self.passage(chunk_work(middle, tokens))
            if passage is None:
                return None
            in_flight = self._in_flight(passage, tokens)
            period_s = max(passage.server_s, passage.turn_s / in_flight)
            chunks = PromptsAlone(passage.server_s, passage.turn_s, number, in_flight)
            ends.append(((number - 1) * period_s + passage.turn_s, chunks))
        soonest_s = min(ends)[0]
        return next(chunks for ends_s, chunks in ends if ends_s <= soonest_s * (1 + _EQUAL_ENDS))

    def _equal(self, waiting: Waiting, target_s: float, *, most: int) -> int:
        """Return the tokens that take the slowest server ``target_s``, so that whole chunks of that size remain."""
        most = min(most, waiting.left + waiting.others)
        tokens = self._largest_within(waiting.position, target_s, most=most)
        if waiting.others:
            return tokens
        chunks = waiting.left / tokens
        number = ceil(chunks - _LARGER if chunks < _LAST_CHUNKS else chunks)
        return min(most, -(-waiting.left // max(1, number)))

    def _largest_within(self, position: int, target_s: float, *, most: int) -> int:
        """Return about the largest chunk that takes the slowest server ``target_s``, near the one before."""
        low, high = min(MIN_CHUNK_TOKENS, most), most + 1  # the least that a chunk has; too many
        tokens = min(max(self._tokens, low), most)
        for _ in range(_ROUNDS):
            passage = self.passage(chunk_work(position, tokens))
            if passage is None:
                break
            if passage.server_s <= target_s * (1 + 1 / PRECISION):
                low = tokens
                if passage.server_s >= target_s * (1 - 1 / PRECISION):
                    break
            else:
                high = tokens
            if high - low <= max(1, low // PRECISION):
                break
            guess = round(tokens * target_s / passage.server_s)  # time is nearly linear in tokens
            tokens = guess if low < guess < high else (low + high) // 2
        return low

    def _changed(self, target: _Target) -> bool:
        """Whether the example takes another time than when the target was chosen.

        A link that has carried only the small steps of chats seems slow until larger ones are measured, and kernels of
        one size may prove slower than the device's data sheet lets expect.
        """
        passage = self.passage(target.example)
        return passage is not None and abs(passage.server_s - target.seconds) > _CHANGED * target.seconds

    def _in_flight(self, passage: Passage, tokens: int, *, spare: int = 1) -> int:
        """Return P: enough to keep the slowest server busy, and no more than windows have room for.

        A ``spare`` step waits at that server, since steps vary.
        """
        if len(self._ring.stages) == 1:
            return 1
        wanted = min(ceil(passage.turn_s / passage.server_s) + spare, self._most_in_flight)
        return max(1, min(wanted, int(self._room // tokens)) if self._room < inf else wanted)

    # While interactive sequences decode

    def _chunk_beside(self, waiting: Waiting, goal_s: float) -> Chunk | None:
        self._target = None
        short = waiting.begun + waiting.left + waiting.others <= _SHORT_TOKENS
        until = next_leading_bits(waiting.position + _POSITIONS_ALIKE)
        load = _Load(
            until - _POSITIONS_ALIKE,
            leading_bits(waiting.decodes),
            waiting.micro_batches,
            waiting.batch,
            short,
        )
        if self._beside is not None and self._beside[0] == load:
            self._checked = not self._checked
            if not self._checked or self._holds(waiting, self._beside[1]):
                return self._beside[1]
        decodes = waiting.chats if waiting.batch else waiting.decodes
        rows = -(-decodes // waiting.micro_batches)
        # This step is of the same kind as those that are compared with it: steps of many decodes may have made the
        # forecasts of decodes longer, which says nothing of a chat alone.
        alone = self.passage(_riding(waiting, 1, rows) if waiting.batch else _decodes(waiting, rows))
        if alone is None:
            return None
        limit_s = _turn_s(alone, min(decodes, waiting.micro_batches))
        if waiting.batch:
            limit_s *= 1 + (_BESIDE_BATCH - 1) * self._chat_turns.share
        else:
            limit_s += goal_s
        last = min(load.until, waiting.position + waiting.left + waiting.others)
        waiting = waiting._replace(position=max(waiting.position, last))
        best: tuple[float, Chunk] | None = None  # seconds until the prompts end
        smaller = [tokens for tokens in _BATCH_CHUNKS if tokens < self._most] if waiting.batch else []
        for tokens in (*smaller, *step_sizes(self._most)):
            found = self._best_beside(waiting, tokens, limit_s, short=short)
            if found is None:
                return None
            if best is not None and found[1].over_goal_s > 0:
                best = (best[0], best[1]._replace(bound="goal"))
                break
            if best is None or found[0] < best[0] * (1 - _equal_share(waiting, best[0], short=short)):
                best = found
        assert best is not None  # there is always a smallest size
        self._beside = (load, best[1])
        return best[1]

    def _holds(self, waiting: Waiting, chunk: Chunk) -> bool:
        """Whether a step of this size still takes about as long as when it was chosen."""
        rows = _rows(waiting, chunk.in_flight)
        passage = self.passage(_riding(waiting, max(1, chunk.step_tokens - rows), rows))
        return passage is not None and abs(passage.server_s - chunk.seconds) <= _CHANGED * chunk.seconds

    def _best_beside(self, waiting: Waiting, tokens: int, limit_s: float, *, short: bool) -> tuple[float, Chunk] | None:
        """Return the best P for steps of this size, and the seconds until the prompts end.

        The smaller P leaves the slowest server idle for a part of each turn, the larger one lets steps queue there.
        One step more lengthens a chat's turn, but steps vary, and then that server waits less often: long prompts may
        take it.
        """
        before = self._beside[1].in_flight if self._beside is not None else waiting.micro_batches
        rows = _rows(waiting, before)
        prompt_tokens = max(1, tokens - rows)
        passage = self.passage(_riding(waiting, prompt_tokens, rows))
        if passage is None:
            return None
        filled = self._in_flight(passage, tokens, spare=0)
        choices: list[tuple[float, float, Chunk]] = []
        for in_flight in range(max(1, filled - 1), self._in_flight(passage, tokens, spare=int(not short)) + 1):
            turn_s = max(passage.turn_s, in_flight * passage.server_s)
            mean_s = (passage.turn_s**_VARIED + (in_flight * passage.server_s) ** _VARIED) ** (1 / _VARIED)
            ends_s = (waiting.left + waiting.others) / prompt_tokens * mean_s / in_flight + turn_s
            late = 0.0 if waiting.batch else _LATE / in_flight**0.5  # beside batches, turns are measured
            over_s = max(0.0, turn_s * (1 + late) - limit_s)
            bound = "goal" if over_s else passage.slowest
            chunk = Chunk(tokens, in_flight, passage.server_s, bound, over_s, rides=short, spaced=True)
            choices.append((over_s, ends_s, chunk))
        over_s, ends_s, chunk = min(choices[:2] if filled > 1 else choices[:1])
        more_over_s, sooner_s, more = choices[-1]
        if more_over_s <= over_s and sooner_s < ends_s * (1 - _equal_share(waiting, ends_s, short=short)):
            return sooner_s, more
        return ends_s, chunk


def _equal_share(waiting: Waiting, ends_s: float, *, short: bool) -> float:
    """Return the share of ``ends_s``, the time until the prompts that wait end, that a smaller step may cost them."""
    if short:
        return _EQUAL_SHORT
    oldest_s = ends_s * (waiting.begun + waiting.left) / (waiting.left + waiting.others)
    return min(_EQUAL, _EQUAL_S / oldest_s) if oldest_s else _EQUAL


def _turn_s(passage: Passage, in_flight: int) -> float:
    """Return the time between two steps of a sequence while so many such steps are in flight."""
    return max(passage.turn_s, in_flight * passage.server_s)


def _rows(waiting: Waiting, in_flight: int) -> int:
    """Return the decodes that ride in each of so many steps."""
    return -(-waiting.decodes // max(1, min(waiting.micro_batches, in_flight)))


def _decodes(waiting: Waiting, rows: int) -> StepWork:
    rows = max(1, rows)
    kv_tokens = rows * max(1, waiting.context)
    return StepWork(tokens=rows, rows=rows, kv_tokens=kv_tokens, attention_pairs=float(kv_tokens), logit_rows=rows)


def _riding(waiting: Waiting, tokens: int, rows: int) -> StepWork:
    """Return the work of a step in which decodes ride with a chunk."""
    kv_tokens = rows * max(1, waiting.context)
    pairs = tokens * (waiting.position + (tokens + 1) / 2) + kv_tokens
    return StepWork(tokens + rows, 1 + rows, waiting.position + tokens + kv_tokens, pairs, 1 + rows)
