"""A pipeline in virtual time: the real scheduler, request table and request log, between stages and wires that are not.

One seed is one schedule: which message arrives next, which process dies when, what a client asks and when it leaves. A
schedule takes milliseconds, so tens of thousands are tried where real processes try hundreds. After TigerBeetle's
simulator and FoundationDB's. Everything that is wrong raises AssertionError with the seed and the newest happenings.

What is modelled: stages that keep what earlier epochs left in their KV and replays up to the one that lost it, messages
of replaced epochs that arrive late, stage and engine processes that die with what they hold, also while an epoch is
being opened, gateways' streams that break and resume, clients that leave.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from edgepipe.engine.kept import KeptKV, KVSince
from edgepipe.engine.requests import Choice, GatewayStream
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.table import RequestTable
from edgepipe.errors import StaleEpoch
from edgepipe.gateway.log import RequestLog
from edgepipe.ids import EngineId, Epoch, NodeId, RequestId, SequenceId
from edgepipe.model.facts import LayerRange, ModelConfig, Rope, make_slices
from edgepipe.sampling import SamplingParams
from edgepipe.scheduler import Event, ScheduledStep, Scheduler, SchedulerLimits, SequenceSpec, ThrottledPolicy
from edgepipe.wire.requests import Cancellation, Resumption, Submission

VOCAB = 97
_PRIME = (1 << 61) - 1
_BLOCK = 4
_CONTEXT = 64
_MOST_TURNS = 6000
_STORY = 40
_STALE_CHANCE = 0.2  # that a message of a replaced epoch is kept, to arrive late


def mix(stage: int, chain: int, position: int, value: int, looked_at: int) -> int:
    """What a stage makes of one token, from the token before it and one further back."""
    return (chain * 31 + value * (2 * stage + 3) + looked_at + position) % _PRIME


def look_back(position: int) -> int:
    """Which earlier position a token also depends on: any of them, so that every slot counts in the end."""
    return position * 7 % (position + 1)


def next_token(tokens: Sequence[int], num_stages: int) -> int:
    """The oracle: the token after ``tokens``."""
    values = [token + 1 for token in tokens]
    for stage in range(num_stages):
        chain, made = 0, list[int]()
        for position, value in enumerate(values):
            looked_at = values[look_back(position)]
            chain = mix(stage, chain, position, value, looked_at)
            made.append(chain)
        values = made
    return values[-1] % VOCAB


@dataclass(slots=True)
class SimulatedStage:
    """One stage process: KV slots hold (chain, value) and are kept until the process dies."""

    index: int
    num_blocks: int
    epoch: Epoch
    kv_since: Epoch  # as its ``Opened`` says
    slots: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    tables: dict[SequenceId, list[int]] = field(default_factory=dict[SequenceId, list[int]])
    plans: deque[ScheduledStep] = field(default_factory=deque[ScheduledStep])
    inputs: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # by step
    fenced: int = 0
    dead: bool = False

    def ready(self) -> bool:
        """Whether the next planned step can be computed; those that end before this stage are noted only."""
        while self.plans and self.plans[0].last_slice is not None and self.plans[0].last_slice < self.index:
            passed = self.plans.popleft()
            assert not passed.copies, "copies are made by all stages"
            self._prepare(passed)
        return not self.dead and bool(self.plans) and self.plans[0].step in self.inputs

    def compute(self) -> tuple[ScheduledStep, list[int]]:
        """The next planned step and what the stage makes of its tokens."""
        step = self.plans.popleft()
        values = self.inputs.pop(step.step)
        self._prepare(step)
        made: list[int] = []
        for row, sequence in enumerate(step.sequences):
            table, first = self.tables[sequence], step.positions[row]
            for position in range(first, first + step.num_tokens[row]):
                made.append(self._one(table, position, values[len(made)]))
        return step, made

    def _prepare(self, step: ScheduledStep) -> None:
        for sequence in step.frees:
            self.tables.pop(sequence, None)
        for sequence in step.registers:
            self.tables[sequence] = []
        for row, start, count in zip(step.block_rows, step.block_starts, step.block_counts, strict=True):
            self.tables[step.sequences[row]] += range(start, start + count)
        for copy in step.copies:
            for offset in range(_BLOCK):
                self.slots[copy.target * _BLOCK + offset] = self.slots.get(copy.source * _BLOCK + offset, (-1, -1))

    def _one(self, table: list[int], position: int, value: int) -> int:
        chain = self.slots.get(_slot(table, position - 1), (-1, -1))[0] if position else 0
        self.slots[_slot(table, position)] = (0, value)
        looked_at = self.slots.get(_slot(table, look_back(position)), (-1, -1))[1]
        made = mix(self.index, chain, position, value, looked_at)
        self.slots[_slot(table, position)] = (made, value)
        return made


def _slot(table: list[int], position: int) -> int:
    return table[position // _BLOCK] * _BLOCK + position % _BLOCK


class _Stream(GatewayStream):
    """What the engine marks for a gateway; told when the simulation lets a message through."""

    def __init__(self, node_id: NodeId) -> None:
        super().__init__(node_id)
        self.marked: dict[Choice, None] = {}

    def mark(self, choice: Choice) -> None:
        self.marked[choice] = None


@dataclass(slots=True)
class _Client:
    """A request with its gateway's log: the only truth."""

    submission: Submission
    log: RequestLog
    wanted: list[int]  # per choice: tokens, fewer once the client has left
    reasons: dict[int, str] = field(default_factory=dict[int, str])
    attempt: int = 1
    left: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """Activations on their way, or a StepDone (``stage`` behind the last)."""

    epoch: Epoch
    sender: int
    stage: int
    step: int
    values: tuple[int, ...]


class Simulation:
    """One schedule. ``run`` asserts; the seed says everything."""

    def __init__(self, seed: int) -> None:
        draw = self._random = random.Random(seed)
        self.seed = seed
        self.story: deque[str] = deque(maxlen=_STORY)
        self.recoveries = self.resumed = self.fenced = self.engines = self.kept = self.replayed = 0
        self._num_stages = draw.randint(1, 4)
        self._limits = SchedulerLimits(
            num_blocks=draw.choice((18, 24, 64)),
            block_size=_BLOCK,
            context_length=_CONTEXT,
            micro_batches=draw.randint(1, 4),
            contiguous_kv=draw.random() < 0.3,
        )
        self._config = _config(self._num_stages)
        self._counter = 0
        self._engine_id = EngineId("engine-1")
        self._wire: list[Message] = []
        self._ghosts: list[Message] = []  # of replaced epochs, not dropped yet
        self._clients: dict[RequestId, _Client] = {}
        self._stream = _Stream(NodeId("gateway"))
        self._faults_left = draw.randint(0, 4)
        self._to_ask = draw.randint(1, 4)
        self._table = self._new_table()
        self._ahead: dict[int, Message] = {}
        self._scheduler = Scheduler(self._limits, ThrottledPolicy())
        self._kept: KeptKV | None = None
        nothing = Epoch(0, self._engine_id)
        self._slices = make_slices([LayerRange(i, i + 1) for i in range(self._num_stages)], self._num_stages)
        self._since: KVSince = {}
        self._stages = [SimulatedStage(i, self._limits.num_blocks, nothing, nothing) for i in range(self._num_stages)]
        self._new_epoch()

    def run(self) -> None:
        """Until every request has ended. Raises AssertionError with the seed and the newest happenings."""
        try:
            self._ask()
            for _ in range(_MOST_TURNS):
                if self._done():
                    break
                self._turn()
            else:
                raise AssertionError("the requests do not end")
            self._check()
            self._close_epoch()
        except (AssertionError, RuntimeError, KeyError, IndexError) as error:
            story = "\n  ".join(self.story)
            raise AssertionError(f"seed {self.seed}: {type(error).__name__} {error}\n  {story}") from error
        finally:
            self._table.close()

    def _turn(self) -> None:
        """One thing that can happen, drawn among all that can."""
        acts: list[Callable[[], None]] = [self._plan, self._tell_gateway]
        acts += [partial(self._compute, stage) for stage in self._stages if stage.ready()]
        acts += [partial(self._arrive, place) for place in self._deliverable()]
        if self._ghosts and self._random.random() < 0.1:
            acts.append(self._haunt)
        if self._to_ask and self._random.random() < 0.05:
            acts.append(self._ask)
        if self._random.random() < 0.002:
            acts.append(self._leave)
        if self._faults_left and self._random.random() < 0.03:
            acts = [self._strike]
        self._random.choice(acts)()

    # What the gateway does.

    def _ask(self) -> None:
        draw = self._random
        self._to_ask -= 1
        shared = [7] * 9 if draw.random() < 0.5 else []
        submission = Submission(
            request_id=RequestId(f"request-{len(self._clients)}"),
            prompt=(*shared, *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 12)))),
            num_choices=draw.choice((1, 1, 2)),
            max_tokens=draw.randint(1, 14),
            ignore_eos=True,
            stop_token_ids=frozenset(draw.sample(range(VOCAB), draw.choice((0, 0, 6)))),
            sampling=SamplingParams(temperature=0.0),
        )
        self._note(f"asked {submission.request_id}: {submission.max_tokens} tokens x {submission.num_choices}")
        self._clients[submission.request_id] = _Client(
            submission,
            RequestLog(num_choices=submission.num_choices, max_tokens=submission.max_tokens),
            [submission.max_tokens] * submission.num_choices,
        )
        self._table.submit(self._stream, submission)

    def _leave(self) -> None:
        """A client goes away: every choice of it is cancelled where it stands."""
        client = self._random.choice(list(self._clients.values()))
        if client.left:
            return
        client.left = True
        self._note(f"left {client.submission.request_id}")
        for choice, have in enumerate(client.log.have()):
            if choice not in client.reasons:
                client.reasons[choice] = "left"
                request_id = client.submission.request_id
                cancellation = Cancellation(
                    request_id=request_id, attempt=client.attempt, choice=choice, at_position=have
                )
                self._table.cancel(self._stream, cancellation)

    def _tell_gateway(self) -> None:
        """The engine's news reach the gateway, or are lost with the stream, which is resumed then."""
        marked, self._stream.marked = list(self._stream.marked), {}
        if marked and self._random.random() < 0.04 and self._faults_left:
            self._faults_left -= 1
            self._resume()
            return
        for choice in marked:
            if choice.request.stream is self._stream:
                self._tell(choice)

    def _tell(self, choice: Choice) -> None:
        client = self._clients[choice.request.key.request_id]
        if choice.request.attempt != client.attempt:
            return
        ids, position = choice.log[choice.sent :], choice.sent
        choice.sent = len(choice.log)
        if choice.index in client.reasons:
            return
        client.log.append(choice=choice.index, position=position, ids=ids)
        if choice.ending is not None and not choice.told:
            choice.told = True
            assert choice.ending.error is None, f"{choice.request.key.request_id} failed: {choice.ending.error}"
            assert len(client.log.tokens(choice.index)) == choice.ending.num_tokens
            client.reasons[choice.index] = choice.ending.reason

    def _resume(self) -> None:
        """The stream to the engine breaks; what was on it is lost."""
        self._note("the gateway's stream breaks and is resumed")
        self.resumed += 1
        self._table.detach(self._stream)
        self._stream = _Stream(NodeId("gateway"))
        for client in self._clients.values():
            if len(client.reasons) < client.log.num_choices:
                resumption = Resumption(
                    request_id=client.submission.request_id, attempt=client.attempt, have=tuple(client.log.have())
                )
                self._table.resume(self._stream, resumption)

    # What the engine does.

    def _plan(self) -> None:
        while not self._down and (step := self._scheduler.next_step()) is not None:
            for stage in self._stages:
                if not stage.dead and stage.epoch == self._epoch:
                    stage.plans.append(step)
            self._wire.append(Message(self._epoch, -1, 0, step.step, tuple(token + 1 for token in step.token_ids)))

    def _retire(self, message: Message) -> None:
        if message.epoch != self._epoch:
            self.fenced += 1
            return
        self._ahead[message.step] = message  # replayed tokens come back from another stage than sampled ones
        while (due := self._scheduler.next_to_retire()) is not None and due[0] in self._ahead:
            values = self._ahead.pop(due[0]).values
            assert len(values) == due[1], f"{message} came back, {due} is due"
            self._table.note(self._scheduler.retire(due[0], [value % VOCAB for value in values]))

    # What stages and wires do.

    def _compute(self, stage: SimulatedStage) -> None:
        step, made = stage.compute()
        last = self._num_stages - 1 if step.last_slice is None else step.last_slice
        if stage.index < last:
            self._wire.append(Message(stage.epoch, stage.index, stage.index + 1, step.step, tuple(made)))
            return
        ends, at = list[int](), 0
        for count, samples in zip(step.num_tokens, step.samples, strict=True):
            at += count
            ends += [made[at - 1]] if samples else []
        self._wire.append(Message(stage.epoch, stage.index, self._num_stages, step.step, tuple(ends)))

    def _deliverable(self) -> list[int]:
        """Links are first in, first out: of each, the oldest message may arrive."""
        first: dict[tuple[Epoch, int, int], int] = {}
        for place, message in enumerate(self._wire):
            first.setdefault((message.epoch, message.sender, message.stage), place)
        return list(first.values())

    def _arrive(self, place: int) -> None:
        self._take(self._wire.pop(place))

    def _haunt(self) -> None:
        self._note("a message of a replaced epoch arrives")
        self._take(self._ghosts.pop(self._random.randrange(len(self._ghosts))))

    def _take(self, message: Message) -> None:
        if message.stage == self._num_stages:
            self._retire(message)
            return
        stage = self._stages[message.stage]
        if stage.dead:
            return
        if message.epoch != stage.epoch:
            self.fenced += 1
            stage.fenced += 1
            return
        stage.inputs[message.step] = list(message.values)

    # What goes wrong.

    def _strike(self) -> None:
        self._faults_left -= 1
        draw = self._random.random()
        if draw < 0.25:
            self._kill_engine()
            return
        if draw < 0.75:
            count = 1 if draw < 0.65 else 2
            for stage in self._random.sample(self._stages, min(count, self._num_stages)):
                self._note(f"stage {stage.index} dies")
                stage.dead = True
        else:
            self._note("a stream to a stage breaks")
        self._table.pause()
        self._close_epoch()
        self._new_epoch()

    def _kill_engine(self) -> None:
        """All that it knew is gone; the gateway asks the next one, with what its log holds."""
        self._note("the engine dies")
        self.engines += 1
        self._kept = None
        self._table.close()
        self._engine_id = EngineId(f"engine-{self.engines + 1}")
        self._stream = _Stream(NodeId("gateway"))
        self._table = self._new_table()
        asked_first = self._random.random() < 0.5  # the gateway may be there before the first epoch stands
        if not asked_first:
            self._new_epoch()
        for client in self._clients.values():
            if len(client.reasons) < client.log.num_choices:
                self._submit_again(client)
        if asked_first:
            self._new_epoch()

    def _submit_again(self, client: _Client) -> None:
        client.attempt += 1
        first = client.submission
        submission = Submission(
            request_id=first.request_id,
            attempt=client.attempt,
            prompt=first.prompt,
            num_choices=first.num_choices,
            generated=tuple(tuple(client.log.tokens(choice)) for choice in range(first.num_choices)),
            max_tokens=first.max_tokens,
            ignore_eos=first.ignore_eos,
            stop_token_ids=first.stop_token_ids,
            sampling=first.sampling,
        )
        self._table.submit(self._stream, submission)
        for choice, reason in client.reasons.items():  # those that ended before are wanted no further
            have = len(client.log.tokens(choice))
            if reason == "left":
                cancellation = Cancellation(
                    request_id=first.request_id, attempt=client.attempt, choice=choice, at_position=have
                )
                self._table.cancel(self._stream, cancellation)

    def _new_epoch(self) -> None:
        """A greater epoch at every stage: the dead ones are others now, the living keep what their KV holds."""
        self.recoveries += self._counter > 0
        while self._random.random() < 0.15:
            self._fail_to_open()
        self._counter += 1
        epoch = self._epoch = Epoch(self._counter, self._engine_id)
        self._ghosts += [message for message in self._wire if self._random.random() < _STALE_CHANCE]
        self._wire, self._ahead = [], {}
        for stage in self._stages:
            self._open(stage, epoch)
        since = {(part,): stage.kv_since for part, stage in zip(self._slices, self._stages, strict=True)}
        self._scheduler = Scheduler(self._limits, ThrottledPolicy())
        pool = self._kept.usable(self._limits, since) if self._kept is not None else None
        if pool is not None:
            self._scheduler.take_over(pool)
        self._since = since
        self._down = False
        self._table.go_on(_Queue(self._scheduler))
        self._note(f"epoch {epoch} stands, {pool.cached_blocks if pool is not None else 0} blocks are known")

    def _fail_to_open(self) -> None:
        """Some stages open an epoch that never stands, and others may die meanwhile."""
        self._counter += 1
        epoch = Epoch(self._counter, self._engine_id)
        for stage in self._random.sample(self._stages, self._random.randrange(self._num_stages + 1)):
            self._open(stage, epoch)
        if self._random.random() < 0.5:
            self._random.choice(self._stages).dead = True
        self._note(f"epoch {epoch} cannot be opened")

    def _open(self, stage: SimulatedStage, epoch: Epoch) -> None:
        assert stage.epoch < epoch, StaleEpoch(f"{epoch} does not replace {stage.epoch}")
        new = stage.dead or stage.kv_since.engine_id != epoch.engine_id or not stage.kv_since.counter
        since = epoch if new else stage.kv_since
        slots = {} if stage.dead else stage.slots
        self._stages[stage.index] = SimulatedStage(stage.index, self._limits.num_blocks, epoch, since, slots)

    def _close_epoch(self) -> None:
        """What it computed is kept for the next one of the same engine."""
        stats = self._scheduler.stats()
        self.kept += stats.kept_tokens
        self.replayed += stats.replayed_tokens
        self._kept = KeptKV(pool=self._scheduler.hand_over(), contiguous=self._limits.contiguous_kv, since=self._since)

    def _new_table(self) -> RequestTable:
        return RequestTable(config=self._config, limits=EngineLimits(block_size=_BLOCK), timeouts=EngineTimeouts())

    # What must hold.

    def _done(self) -> bool:
        told = all(len(client.reasons) == client.log.num_choices for client in self._clients.values())
        stats = self._scheduler.stats()
        return told and not self._to_ask and not self._wire and not (stats.in_flight or stats.running or stats.waiting)

    def _check(self) -> None:
        for client in self._clients.values():
            for choice in range(client.log.num_choices):
                self._check_choice(client, choice)
        stats = self._scheduler.stats()
        assert (stats.in_flight, stats.running, stats.waiting) == (0, 0, 0)
        assert stats.free_blocks == stats.num_blocks, f"{stats.num_blocks - stats.free_blocks} blocks are not free"

    def _check_choice(self, client: _Client, choice: int) -> None:
        name, first = client.submission.request_id, client.submission
        ids = list(client.log.tokens(choice))
        for count in range(len(ids)):
            right = next_token([*first.prompt, *ids[:count]], self._num_stages)
            assert ids[count] == right, f"{name}, choice {choice}, position {count}: {ids[count]} instead of {right}"
        reason = client.reasons[choice]
        if reason == "stop":
            assert ids[-1] in first.stop_token_ids, f"{name} stopped for nothing"
        elif reason == "length":
            assert len(ids) == min(first.max_tokens, self._limits.max_tokens - len(first.prompt)), f"{name} is short"
        else:
            assert client.left, f"{name} ended with {reason}"
        assert not first.stop_token_ids & set(ids[:-1]), f"{name} went on behind a stop id"

    def _note(self, what: str) -> None:
        self.story.append(what)


@dataclass(frozen=True, slots=True)
class _Queue:
    """The scheduler as the table sees it."""

    scheduler: Scheduler

    def submit(self, specs: Sequence[SequenceSpec], *, accepted: bool = False) -> list[Event]:
        return self.scheduler.submit(specs, accepted=accepted)

    def cancel(self, sequence: SequenceId, *, at_position: int) -> list[Event]:
        return self.scheduler.cancel(sequence, at_position=at_position)


@dataclass(slots=True, kw_only=True)
class Totals:
    """What many schedules came to."""

    schedules: int = 0
    recoveries: int = 0
    engines: int = 0  # that died
    resumed: int = 0
    fenced: int = 0  # messages of replaced epochs, dropped
    kept: int = 0  # positions that an epoch found computed by the one before
    replayed: int = 0  # positions that stages up to one that had lost them computed again


async def simulate(seeds: range) -> Totals:
    """Run one schedule per seed; a coroutine because the table wants a running loop. Raises AssertionError."""
    await asyncio.sleep(0)
    totals = Totals()
    for seed in seeds:
        simulation = Simulation(seed)
        simulation.run()
        totals.schedules += 1
        totals.recoveries += simulation.recoveries
        totals.engines += simulation.engines
        totals.resumed += simulation.resumed
        totals.fenced += simulation.fenced
        totals.kept += simulation.kept
        totals.replayed += simulation.replayed
    return totals


def _config(num_layers: int) -> ModelConfig:
    """A shape with the simulation's vocabulary and context; nothing else of it is read."""
    return ModelConfig(
        architecture="llama",
        num_layers=num_layers,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=VOCAB,
        context_length=_CONTEXT,
        rms_norm_eps=1e-5,
        rope=Rope(),
        tied_embeddings=True,
        eos_token_ids=(),
    )
