"""A pipeline in virtual time: the real scheduler, request table and request log, between stages and wires that are not.

One seed is one schedule: which message arrives next, which process dies when, what a client asks and when it leaves. A
schedule takes milliseconds, so tens of thousands are tried where real processes try hundreds. After TigerBeetle's
simulator and FoundationDB's. Everything that is wrong raises AssertionError with the seed and the newest happenings.

What is modelled: stages that keep KV and states of earlier epochs, replays up to the one that lost it, messages
of replaced epochs that arrive late, stage and engine processes that die with what they hold, also while an epoch is
being opened, gateways' streams that break and resume, clients that leave.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from edgepipe.engine.kv_carryover import KeptKV, KVSince
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.table import RequestTable
from edgepipe.errors import StaleEpoch
from edgepipe.ids import EngineId, Epoch, SequenceId
from edgepipe.scheduler import Event, ScheduledStep, Scheduler, SchedulerLimits, SequenceSpec, ThrottledPolicy
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices
from edgepipe.spec.memory_classes import StateSlots
from edgepipe.testing.tiny_model import tiny_config
from tests.support.engine.simulated_gateway import SimulatedGateway
from tests.support.engine.simulated_stage import BLOCK, VOCAB, SimulatedStage
from tests.support.engine.simulated_wires import Message, SimulatedWires

_CONTEXT = 64
_MOST_TURNS = 6000
_STORY = 40
_STATEFUL = 3  # one of so many schedules is of a model with recurrent layers


class Simulation:
    """One schedule. ``run`` asserts; the seed says everything."""

    def __init__(self, seed: int, *, stage: type[SimulatedStage] = SimulatedStage) -> None:
        """``stage``: what stages do; another one to prove that the simulation sees what is broken."""
        draw = self._random = random.Random(seed)
        self.seed = seed
        self.story: deque[str] = deque(maxlen=_STORY)
        self.recoveries = self.fenced = self.engines = self.kept = self.replayed = 0
        self._num_stages = draw.randint(1, 4)
        self._limits = SchedulerLimits(
            num_blocks=draw.choice((18, 24, 64)),
            block_size=BLOCK,
            context_length=_CONTEXT,
            micro_batches=draw.randint(1, 4),
            contiguous_kv=draw.random() < 0.3,
            states=StateSlots(num_slots=6 + seed % 9, gap=4 * BLOCK) if seed % _STATEFUL == 0 else None,
        )
        self._faults_left = draw.randint(0, 4)
        self._gateway = SimulatedGateway(draw, note=self._note)
        self._wires = SimulatedWires(draw)
        self._config = _config(self._num_stages)
        self._counter = 0
        self._engine_id = EngineId("engine-1")
        self._table = self._new_table()
        self._ahead: dict[int, Message] = {}  # answers that came back before those of an earlier step, by step
        self._in_flight: deque[ScheduledStep] = deque()
        self._scheduler = Scheduler(self._limits, ThrottledPolicy())
        self._kept: KeptKV | None = None
        self._since: KVSince = {}
        self._slices = make_slices([LayerRange(i, i + 1) for i in range(self._num_stages)], self._num_stages)
        self._make_stage = stage
        nothing = Epoch(0, self._engine_id)
        self._stages = [stage(i, nothing, nothing) for i in range(self._num_stages)]
        self._new_epoch()

    @property
    def resumed(self) -> int:
        """How often the gateway's stream broke."""
        return self._gateway.resumed

    def run(self) -> None:
        """Until every request has ended. Raises AssertionError with the seed and the newest happenings."""
        try:
            self._gateway.ask(self._table)
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
        acts += [partial(self._arrive, place) for place in self._wires.deliverable()]
        if self._wires.haunted and self._random.random() < 0.1:
            acts.append(self._haunt)
        if self._gateway.to_ask and self._random.random() < 0.05:
            acts.append(partial(self._gateway.ask, self._table))
        if self._random.random() < 0.002:
            acts.append(partial(self._gateway.leave, self._table))
        if self._faults_left and self._random.random() < 0.03:
            acts = [self._strike]
        self._random.choice(acts)()

    # What the engine does.

    def _plan(self) -> None:
        while (step := self._scheduler.next_step()) is not None:
            self._in_flight.append(step)
            for stage in self._stages:
                if not stage.dead and stage.epoch == self._epoch:
                    stage.plans.append(step)
            self._wires.send(Message(self._epoch, -1, 0, step.step, tuple(token + 1 for token in step.token_ids)))

    def _retire(self, message: Message) -> None:
        if message.epoch != self._epoch:
            self.fenced += 1
            return
        self._ahead[message.step] = message  # replayed tokens come back from another stage than sampled ones
        while self._in_flight and self._in_flight[0].step in self._ahead:
            due = self._in_flight.popleft()
            values = self._ahead.pop(due.step).values
            assert len(values) == due.num_samples, f"{message} came back, {due} is due"
            self._table.note(self._scheduler.retire(due.step, [(value % VOCAB,) for value in values]))

    def _tell_gateway(self) -> None:
        if not self._gateway.take_news(self._table, may_break=self._faults_left > 0):
            self._faults_left -= 1

    # What stages and wires do.

    def _compute(self, stage: SimulatedStage) -> None:
        step, made = stage.compute()
        last = self._num_stages - 1 if step.last_slice is None else step.last_slice
        if stage.index < last:
            self._wires.send(Message(stage.epoch, stage.index, stage.index + 1, step.step, tuple(made)))
            return
        ends, at = list[int](), 0
        for count, samples in zip(step.num_tokens, step.samples, strict=True):
            at += count
            ends += [made[at - 1]] if samples else []
        self._wires.send(Message(stage.epoch, stage.index, self._num_stages, step.step, tuple(ends)))

    def _arrive(self, place: int) -> None:
        self._take(self._wires.take(place))

    def _haunt(self) -> None:
        self._note("a message of a replaced epoch arrives")
        self._take(self._wires.take_ghost())

    def _take(self, message: Message) -> None:
        if message.stage == self._num_stages:
            self._retire(message)
            return
        stage = self._stages[message.stage]
        if stage.dead:
            return
        if message.epoch != stage.epoch:
            self.fenced += 1
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
        self._table = self._new_table()
        asked_first = self._random.random() < 0.5  # the gateway may be there before the first epoch stands
        if not asked_first:
            self._new_epoch()
        self._gateway.ask_again(self._table)
        if asked_first:
            self._new_epoch()

    def _new_epoch(self) -> None:
        """A greater epoch at every stage: the dead ones are others now, the living keep what their KV holds."""
        self.recoveries += self._counter > 0
        while self._random.random() < 0.15:
            self._fail_to_open()
        self._counter += 1
        epoch = self._epoch = Epoch(self._counter, self._engine_id)
        self._wires.replace_epoch()
        self._ahead = {}
        self._in_flight.clear()
        for stage in self._stages:
            self._open(stage, epoch)
        since = {(part,): stage.kv_since for part, stage in zip(self._slices, self._stages, strict=True)}
        self._scheduler = Scheduler(self._limits, ThrottledPolicy())
        pool = self._kept.usable(self._limits, since) if self._kept is not None else None
        if pool is not None:
            self._scheduler.take_over(pool)
        self._since = since
        self._table.attach(_Queue(self._scheduler))
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
        slots, states = ({}, {}) if stage.dead else (stage.slots, stage.states)
        self._stages[stage.index] = self._make_stage(stage.index, epoch, since, slots, states)

    def _close_epoch(self) -> None:
        """What it computed is kept for the next one of the same engine."""
        stats = self._scheduler.stats()
        self.kept += stats.kept_tokens
        self.replayed += stats.replayed_tokens
        self._kept = KeptKV(pools=self._scheduler.hand_over(), contiguous=self._limits.contiguous_kv, since=self._since)

    def _new_table(self) -> RequestTable:
        return RequestTable(config=self._config, limits=EngineLimits(), timeouts=EngineTimeouts())

    # What must hold.

    def _done(self) -> bool:
        stats = self._scheduler.stats()
        return self._gateway.done and not self._wires and not (stats.in_flight or stats.running or stats.waiting)

    def _check(self) -> None:
        self._gateway.check(num_stages=self._num_stages, max_tokens=self._limits.max_tokens)
        stats = self._scheduler.stats()
        assert (stats.in_flight, stats.running, stats.waiting) == (0, 0, 0)
        assert stats.free_blocks == stats.num_blocks, f"{stats.num_blocks - stats.free_blocks} blocks are not free"
        assert stats.free_slots == stats.state_slots, f"{stats.state_slots - stats.free_slots} slots are not free"

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
    engines: int = 0  # engines that died
    resumed: int = 0
    fenced: int = 0  # messages of replaced epochs, dropped
    kept: int = 0  # positions that an epoch found computed by the one before
    replayed: int = 0  # positions that stages up to one that had lost them computed again
    replayed_states: int = 0  # replayed states among these, in schedules of models with recurrent layers


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
        totals.replayed_states += simulation.replayed if seed % _STATEFUL == 0 else 0
    return totals


def _config(num_layers: int) -> ModelConfig:
    """A shape with the simulation's vocabulary and context; nothing else of it is read."""
    return replace(tiny_config(num_layers=num_layers, vocab_size=VOCAB, context_length=_CONTEXT), eos_token_ids=())
