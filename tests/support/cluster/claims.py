"""Receivers of messages with a state that claims can be near to, one for each process that others tell numbers.

``take`` handles a message as the process does; ``check`` says what must hold after each: the state is bounded, and a
bystander's request goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any, Protocol

from edgepipe_emulated import emulated_model_config
from google.protobuf.message import Message

from edgepipe.backend.types import ActivationType, TierMove
from edgepipe.clock import Clock
from edgepipe.engine.held_reports import HeldReport
from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.engine.pump import Pump, StepNews
from edgepipe.engine.requests import GatewayStream
from edgepipe.engine.service import RequestIntake
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.sites import StageSite
from edgepipe.engine.table import RequestTable
from edgepipe.errors import EdgepipeError, RemoteProtocolError
from edgepipe.gateway.generation import Generation
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId, RequestId, SequenceId, StepId
from edgepipe.link.outbox import Outbox
from edgepipe.sampling import SamplingParams
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.scheduler import DiskWork, Scheduler, SchedulerLimits, SequenceSpec, ThrottledPolicy, Tier, TokenSampled
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.stage.disk_tier import check_copies
from edgepipe.stage.held_keys import HeldKeys
from edgepipe.stage.host_bound import check_places
from edgepipe.stage.sequences import SequenceTable
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.codec import from_wire
from edgepipe.wire.common import epoch_to_wire
from edgepipe.wire.pipelines import PipelineSpec
from edgepipe.wire.plans import StepPlan, commands_from_wire, plan_from_wire
from edgepipe.wire.registrations import Registration
from edgepipe.wire.reports import LinkSample, StageTimings, done_from_wire
from edgepipe.wire.requests import Submission, reports_from_wire
from edgepipe.wire.tiers import DiskCopied, DiskCopies, HeldPlaces, HostRoom, NewKeys, PlacesBack, place_keys
from edgepipe.wire.v1 import common_pb2, engine_pb2, stage_pb2

CONFIG = emulated_model_config(num_layers=2)
EPOCH = Epoch(3, EngineId("engine"))
GREEDY = SamplingParams(temperature=0.0)
MOST_CALLS = 200_000  # bound on calls of Python functions for one message; a large valid one takes some thousands
_LOG = 5  # output tokens of the attacker's request
_PROMPT = (1, 2, 3)


class TooMuchWork(AssertionError):
    """A message made its receiver work on and on."""


@contextmanager
def bounded_work(most_calls: int = MOST_CALLS) -> Generator[None]:
    """Count calls of functions inside the block, generators' steps included. Raises TooMuchWork beyond the limit."""
    left = most_calls

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        left -= event in ("call", "c_call")
        if left < 0:
            sys.setprofile(None)
            raise TooMuchWork(f"more than {most_calls} calls, now in {frame.f_code.co_qualname}")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


class Receiver(Protocol):
    """A process, as far as one kind of message concerns it."""

    @property
    def samples(self) -> Sequence[Message]:
        """Return messages that it accepts."""
        ...

    def near(self, field: str) -> Sequence[int]:
        """Return numbers of the state that a field is compared with."""
        ...

    async def take(self, message: Any) -> None:
        """Handle a message. Raises EdgepipeError to refuse it."""
        ...

    async def check(self) -> None:
        """Raise AssertionError if the state has grown too large, or a bystander's request stands."""
        ...


class Queued:
    """A queue that takes everything and computes nothing."""

    def submit(self, specs: Any, *, accepted: bool = False) -> list[Any]:
        return []

    def cancel(self, sequence: Any, *, at_position: int) -> list[Any]:
        return []


class EngineOfRogueGateway:
    """An engine with requests of a gateway that has turned, and of another gateway."""

    def __init__(self) -> None:
        self.table = RequestTable(config=CONFIG, limits=EngineLimits(), timeouts=EngineTimeouts())
        self.table.attach(Queued())
        self._other = GatewayStream(NodeId("innocent"))
        self._ask(self._other, "r", 1)
        self._other_news = self._other.events()
        self._other_tokens = 0
        self._begin()
        self.samples = _gateway_messages()

    def near(self, field: str) -> Sequence[int]:
        """See ``Receiver.near``."""
        return {
            "have": (_LOG, 2),
            "ids": (_LOG, CONFIG.vocab_size),
            "at_position": (_LOG,),
            "choice": (2, 128),
            "attempt": (1,),
            "num_choices": (2, 128),
            "prompt": (CONFIG.vocab_size,),
            "max_tokens": (_LOG, CONFIG.context_length),
        }.get(field, ())

    async def take(self, message: engine_pb2.GatewayMessage) -> None:
        """Handle it, then send all that there is to send, as the gateway's stream does."""
        self._intake._take(self.stream, message)
        self.stream.close()
        async for _ in self.stream.events():
            pass

    async def check(self) -> None:
        """See ``Receiver.check``. A fresh request of the attacker's is there again."""
        assert self.table._held_bytes <= EngineLimits().max_held_bytes
        innocent = next(iter(self.table._choices))
        self._sample(innocent)
        self._other_tokens += 1
        news = await anext(self._other_news)
        assert [len(tokens.ids) for tokens in news.message.tokens] == [1]
        for request in list(self.table._requests.values()):
            if request.key.node_id != "innocent":
                self.table._drop(request)
        self._begin()

    def _begin(self) -> None:
        """Two choices of the attacker's, with some tokens that were sent."""
        self.stream = GatewayStream(NodeId("rogue"))
        tasks: Any = SimpleNamespace()
        self._intake = RequestIntake(self.table, tasks, pipeline_id=PipelineId("p"), epoch=lambda: EPOCH)
        before = set(self.table._choices)
        self._ask(self.stream, "r", 2)
        for sequence in set(self.table._choices) - before:
            for _ in range(_LOG):
                self._sample(sequence)

    def _ask(self, stream: GatewayStream, name: str, num_choices: int) -> None:
        wanted = Submission(request_id=RequestId(name), prompt=_PROMPT, num_choices=num_choices, sampling=GREEDY)
        self.table.submit(stream, wanted)

    def _sample(self, sequence: SequenceId) -> None:
        self.table.note([TokenSampled(sequence, len(self.table._choices[sequence].log), 7)])


def _gateway_messages() -> list[engine_pb2.GatewayMessage]:
    again = engine_pb2.Submit(request_id="r", attempt=1, prompt=_PROMPT, num_choices=2)
    again.sampling.SetInParent()
    again.generated.add(ids=[7] * _LOG)
    again.generated.add(ids=[7] * _LOG)
    return [
        engine_pb2.GatewayMessage(submit=again),
        engine_pb2.GatewayMessage(cancel=engine_pb2.Cancel(request_id="r", attempt=1, at_position=_LOG)),
        engine_pb2.GatewayMessage(resume=engine_pb2.Resume(request_id="r", attempt=1, have=[_LOG, _LOG])),
    ]


class GatewayOfRogueEngine:
    """A gateway whose engine has turned, with a plain request and one that asked for log-probabilities."""

    def __init__(self) -> None:
        self._begin()
        self.samples = [_engine_event("plain", 0), _engine_event("scored", 2)]

    def near(self, field: str) -> Sequence[int]:
        """See ``Receiver.near``."""
        return {
            "position": (0, _LOG, len(_PROMPT)),
            "ids": (_LOG,),
            "choice": (2,),
            "attempt": (1,),
            "num_tokens": (_LOG, len(_PROMPT)),
            "cached_prompt_tokens": (len(_PROMPT),),
            "top_ids": (2,),
            "top_logprobs": (2,),
        }.get(field, ())

    async def take(self, message: engine_pb2.EngineEvent) -> None:
        """As ``EngineLink`` takes it."""
        for report in reports_from_wire(message):
            if (generation := self._active.get(report.request_id)) is not None:
                generation.apply(report)

    async def check(self) -> None:
        """See ``Receiver.check``."""
        for generation in self._active.values():
            request, log = generation.request, generation.log
            scores = len(request.prompt) - 1 if request.sampling.prompt_logprobs else 0
            assert len(log.prompt_logprobs) <= scores, "log-probabilities beyond the request"
            assert all(have <= request.max_tokens for have in log.have())
            assert set(generation._endings) <= set(range(request.num_choices))
            assert generation.num_read <= len(request.prompt)
            for choice in range(request.num_choices):
                scored = log.logprobs(choice, start=0, count=100)
                assert len(scored) == (log.have()[choice] if request.sampling.logprobs else 0)
                assert all(len(each.top) <= request.sampling.top_logprobs for each in scored)
        self._begin()

    def _begin(self) -> None:
        scored = SamplingParams(logprobs=True, top_logprobs=2, prompt_logprobs=True)
        self._active = {name: _generation(name, params) for name, params in (("plain", GREEDY), ("scored", scored))}


def _generation(name: str, sampling: SamplingParams) -> Generation:
    wanted = Submission(
        request_id=RequestId(name), prompt=_PROMPT, num_choices=2, max_tokens=_LOG + 1, sampling=sampling
    )
    changed: Any = SimpleNamespace(set=lambda: None)
    return Generation(wanted, changed=changed, send_cancel=lambda *_: None)


def _engine_event(name: str, num_top: int) -> engine_pb2.EngineEvent:
    event = engine_pb2.EngineEvent()
    score = common_pb2.TokenLogprobs(logprob=-1.0, top_ids=range(num_top), top_logprobs=[-1.0] * num_top)
    event.prompt_reads.add(request_id=name, attempt=1, num_tokens=2)
    if num_top:
        event.prompt_scores.add(request_id=name, attempt=1, position=1, logprobs=[score] * (len(_PROMPT) - 1))
    event.tokens.add(request_id=name, attempt=1, ids=[7] * _LOG, logprobs=[score] * _LOG if num_top else ())
    event.ended.add(request_id=name, attempt=1, reason="stop", num_tokens=_LOG)
    return event


class EngineOfRogueStage:
    """An engine's epoch of two stages, the last of which has turned, with a step in flight."""

    def __init__(self) -> None:
        self._begin()
        done = stage_pb2.StepDone(epoch=epoch_to_wire(EPOCH), step=1, ids=[3, 3], num_ids=[1, 1])
        done.timings.add(step=1, slice_index=1, num_tokens=6, num_rows=2, compute_us=1000)
        done.logprobs.add(index=1).token.logprob = -1.0
        done.prompt_logprobs.add(sequence=1, position=1).tokens.add(logprob=-1.0)
        done.failures.add(index=0)
        times = stage_pb2.StageTimings()
        times.timings.add(step=1, slice_index=1, num_tokens=6, num_rows=2, compute_us=1000)
        times.links.add(step=1, num_bytes=1000, first_sent_us=1, acknowledged_us=9)
        copied = stage_pb2.DiskCopied(epoch=epoch_to_wire(EPOCH), number=1, failed=[0, 2], took_us=1000)
        self.samples = [
            stage_pb2.StageReport(step_done=done),
            stage_pb2.StageReport(timings=times),
            stage_pb2.StageReport(disk=copied),
            stage_pb2.StageReport(host_room=stage_pb2.HostRoom(epoch=epoch_to_wire(EPOCH), permille=500)),
        ]

    def near(self, field: str) -> Sequence[int]:
        """See ``Receiver.near``."""
        return {
            "step": (1, self._pump._newest),
            "number": (1, 2),
            "failed": (0, 2, 3),
            "counter": (EPOCH.counter,),
            "ids": (2, CONFIG.vocab_size),
            "index": (2,),
            "slice_index": (1, 2),
            "sequence": (1, 2),
            "position": (len(_PROMPT),),
        }.get(field, ())

    async def take(self, message: stage_pb2.StageReport) -> None:
        """As ``StageControl`` takes it. A refusal ends the epoch."""
        try:
            if message.HasField("step_done"):
                done = done_from_wire(message.step_done)
                retired = self._pump.num_retired
                self._pump.on_report(self._site, done)
                if self._pump.num_retired > retired:  # the loop does so a little later
                    self._pump._look_back(self._site, done, 0.0)
            elif message.HasField("timings"):
                self._pump.on_report(self._site, from_wire(message.timings, StageTimings))
            elif message.HasField("disk"):
                self._pump.on_report(self._site, from_wire(message.disk, DiskCopied))
            elif message.HasField("host_room"):
                self._pump.on_report(self._site, from_wire(message.host_room, HostRoom))
        except EdgepipeError:
            self._begin()
            raise

    async def check(self) -> None:
        """See ``Receiver.check``: what the engine keeps and predicts stays small."""
        assert self._pump._turn_s() <= 2 * 60.0 + 1.0, "the deadline of a late step follows it"
        assert all(
            meter.newest_step(bulk=bulk) <= self._pump._newest for meter in self._pump.meters for bulk in (False, True)
        )
        assert self.tokens <= self._pump._newest * 2
        assert all(each.failed <= {0, 1, 2} for each in self._pump._disk._open.values())
        if not self._pump._in_flight:
            self._begin()

    def _begin(self) -> None:
        slices = make_slices([LayerRange(0, 1), LayerRange(1, 2)], 2)
        limits = SchedulerLimits(num_blocks=64, block_size=16, context_length=CONFIG.context_length, micro_batches=2)
        clock: Clock = FakeClock()
        pump = Pump(
            scheduler=Scheduler(limits, ThrottledPolicy()),
            micro_batches=MicroBatches(slices=[[0], [1]], row_bytes=1, fixed=0),
            epoch=EPOCH,
            num_slices=2,
            vocab_size=CONFIG.vocab_size,
            clock=clock,
            timeouts=EngineTimeouts(),
        )
        sites = [_site(index, part) for index, part in enumerate(slices)]
        stages: Any = [SimpleNamespace(site=site, send=lambda _: None) for site in sites]
        self.tokens = 0
        pump.connect(stages, registration=_registration, on_news=self._news, on_over=lambda: None)
        pump.submit([SequenceSpec(sequence=SequenceId(n), prompt=_PROMPT, max_tokens=9) for n in (1, 2)])
        pump._fill()
        pump._watch.close()
        pump._disk.sent(DiskWork(1, (TierMove(0, 0, 0, out=True),) * 3))
        self._pump, self._site = pump, sites[1]

    def _news(self, news: StepNews) -> None:
        self.tokens += len(news.events)
        self._pump._watch.close()


class EngineOpeningRogueStage:
    """An engine without tables that asks a stage what it holds, below the device in eight places of each tier."""

    _SPEC = PipelineSpec(
        pipeline_id=PipelineId("p"),
        epoch=EPOCH,
        slices=make_slices([LayerRange(0, 1), LayerRange(1, 2)], 2)[1:],
        num_slices=2,
        hidden_size=8,
        activation_type=ActivationType.BF16,
        num_blocks=64,
        block_size=16,
        host_places=(8,),
        disk_places=(8,),
        asks_held=True,
        next_address="",
        max_in_flight=1,
        step_deadline_ms=1000,
    )

    def __init__(self) -> None:
        self._report = HeldReport(self._SPEC)
        epoch = epoch_to_wire(EPOCH)
        self.samples = [
            stage_pb2.HeldPlaces(epoch=epoch, places=[2, 7], keys=bytes(range(32)), tier=Tier.HOST),
            stage_pb2.HeldPlaces(epoch=epoch, places=[3], keys=bytes(range(100, 116)), tier=Tier.DISK),
            stage_pb2.HeldPlaces(epoch=epoch, places=[63], keys=bytes(range(50, 66)), tier=Tier.DEVICE),
        ]

    def near(self, field: str) -> Sequence[int]:
        """See ``Receiver.near``."""
        return {"memory_class": (0, 1), "tier": (2, 3), "places": (7, 8, 64), "counter": (EPOCH.counter,)}.get(
            field, ()
        )

    async def take(self, message: stage_pb2.HeldPlaces) -> None:
        """As ``StageControl`` takes it. A message with a fault spoils the whole report."""
        self._report.note(from_wire(message, HeldPlaces))
        if self._report.problem:
            assert not self._report.held()
            problem, self._report = self._report.problem, HeldReport(self._SPEC)
            raise RemoteProtocolError(problem)

    async def check(self) -> None:
        """See ``Receiver.check``: each place is there, and named once."""
        found = self._report.held()
        for held, count in ((*found.device, 64), (*found.host, 8), (*found.disk, 8)):
            assert {len(key) for key in held} <= {16}
            assert len({*held.values()}) == len(held)
            assert all(0 <= place < count for place in held.values())


def _registration(sequence: SequenceId, tokens: Sequence[int]) -> Registration:
    return Registration(sequence=sequence, sampling=GREEDY, prompt_tokens=len(_PROMPT))


def _site(index: int, part: Any) -> StageSite:
    return StageSite(
        index=index,
        node_id=NodeId("n"),
        node_name="n",
        address="",
        slices=(part,),
        backend="emulated",
        device="",
        weight_bytes=0,
        kv_block_bytes=1,
        max_blocks=64,
    )


class StageOfRogueEngine:
    """A stage whose engine has turned, with a sequence that has begun."""

    _BLOCKS, _BLOCK = 64, 16

    def __init__(self) -> None:
        self._begin()
        plan = stage_pb2.Plan(
            epoch=epoch_to_wire(EPOCH),
            step=2,
            sequence=[1],
            position=[3],
            num_tokens=[1],
            sample=[1],
            block_row=[0],
            block_start=[1],
            block_count=[1],
        )
        registrations = stage_pb2.Registrations(epoch=epoch_to_wire(EPOCH))
        registrations.sequences.add(sequence=1, prompt_tokens=3).sampling.SetInParent()
        copies = stage_pb2.DiskCopies(epoch=epoch_to_wire(EPOCH), number=1, host_places=[2], disk_places=[15])
        back = stage_pb2.PlacesBack(epoch=epoch_to_wire(EPOCH), places=[2, 3])
        keys = stage_pb2.NewKeys(epoch=epoch_to_wire(EPOCH), key_class=[0, 0], key_place=[2, 63], keys=bytes(32))
        self.samples = [
            stage_pb2.ControlMessage(plan=plan),
            stage_pb2.ControlMessage(register=registrations),
            stage_pb2.ControlMessage(disk=copies),
            stage_pb2.ControlMessage(back=back),
            stage_pb2.ControlMessage(keys=keys),
        ]

    def near(self, field: str) -> Sequence[int]:
        """See ``Receiver.near``."""
        return {
            "position": (3, 16, 32),
            "num_tokens": (1, 13, 16),
            "block_start": (self._BLOCKS,),
            "block_count": (self._BLOCKS, 1),
            "block_row": (1,),
            "sequence": (1, 2),
            "prompt_tokens": (3, 4),
            "host_places": (7, 8),
            "places": (7, 8),
            "disk_places": (15, 16),
            "memory_class": (0, 1),
            "key_class": (0, 1),
            "key_place": (self._BLOCKS - 1, self._BLOCKS),
            "source": (self._BLOCKS,),
            "target": (self._BLOCKS,),
        }.get(field, ())

    async def take(self, message: stage_pb2.ControlMessage) -> None:
        """As a stage's epoch takes it. A refusal ends the epoch."""
        try:
            for command in commands_from_wire(message):
                if isinstance(command, StepPlan):
                    self._held.name(command.keys)
                    self._table.apply(command)
                elif isinstance(command, DiskCopies):
                    check_copies(command, (8,), (16,), num_queued=0)
                    assert max(command.host_places) < 8
                    assert max(command.disk_places) < 16
                elif isinstance(command, PlacesBack):
                    check_places(command.memory_class, command.places, (8,))
                    assert max(command.places) < 8
                elif isinstance(command, NewKeys):
                    self._held.name(place_keys(command.key_class, command.key_place, command.keys))
                else:
                    for registration in command.sequences:
                        self._table.tell(registration)
        except EdgepipeError:
            self._begin()
            raise

    async def check(self) -> None:
        """See ``Receiver.check``: tables name blocks that are there, and not more than a plan may add."""
        for state in self._table._sequences.values():
            assert all(0 <= run.start < run.start + run.count <= self._BLOCKS for run in state.runs)
            assert state.end is None or state.end <= state.num_blocks * self._BLOCK
        assert all(max(page.places) < self._BLOCKS for page in self._held.pages(EPOCH))
        self._begin()

    def _begin(self) -> None:
        self._held = HeldKeys((self._BLOCKS,))
        self._table = SequenceTable(
            num_blocks=self._BLOCKS,
            block_size=self._BLOCK,
            model=ModelBounds(vocab_size=CONFIG.vocab_size, context_length=CONFIG.context_length),
            new_sampler=None,
            held=self._held,
        )
        self._table.tell(_registration(SequenceId(1), _PROMPT))
        first = stage_pb2.Plan(
            epoch=epoch_to_wire(EPOCH),
            step=1,
            sequence=[1],
            position=[0],
            num_tokens=[3],
            sample=[1],
            block_row=[0],
            block_start=[0],
            block_count=[1],
            registers=[1],
        )
        self._table.apply(plan_from_wire(first))


class SenderToRogueStage:
    """The sending end of a link whose receiver has turned, with three steps that wait."""

    def __init__(self) -> None:
        self._begin()
        credit = stage_pb2.Credit(epoch=epoch_to_wire(EPOCH), step=1, credits=2)
        credit.sample.CopyFrom(stage_pb2.LinkSample(step=1, num_bytes=10, first_sent_us=1, told_us=2))
        self.samples = [credit]

    def near(self, field: str) -> Sequence[int]:
        """See ``Receiver.near``."""
        return {"step": (1, 3), "credits": (1, 3)}.get(field, ())

    async def take(self, message: stage_pb2.Credit) -> None:
        """As ``RingSender`` takes it."""
        self._outbox.grant(StepId(message.step), message.credits)
        if message.HasField("sample"):
            from_wire(message.sample, LinkSample)
        while (parcel := self._outbox.next()) is not None:
            self._written += 1
            self._outbox.written(parcel)

    async def check(self) -> None:
        """See ``Receiver.check``: no step is written twice."""
        assert self._written <= 3
        self._begin()

    def _begin(self) -> None:
        self._written = 0
        self._outbox = Outbox(max_queued=4)
        for step in (1, 2, 3):
            data: Any = SimpleNamespace(data=memoryview(bytes(10)))
            self._outbox.put(StepId(step), data, 0.0)


RECEIVERS: Mapping[str, Callable[[], Receiver]] = {
    kind.__name__: kind
    for kind in (
        EngineOfRogueGateway,
        GatewayOfRogueEngine,
        EngineOfRogueStage,
        EngineOpeningRogueStage,
        StageOfRogueEngine,
        SenderToRogueStage,
    )
}
"""Makes receivers, by name. On an event loop."""
