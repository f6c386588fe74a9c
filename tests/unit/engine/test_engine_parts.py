"""The engine's parts that need neither stages nor gateways."""

from __future__ import annotations

import pytest

from edgepipe.engine.groups import first_error
from edgepipe.engine.meter import StageMeter, WindowSum, smooth
from edgepipe.engine.requests import Choice, GatewayStream, Request
from edgepipe.engine.settings import EngineTimeouts
from edgepipe.engine.watch import Deadlines, StepWatch
from edgepipe.errors import StageLost, StepFailed
from edgepipe.ids import EngineId, Epoch, NodeId, RequestId, RequestKey, SequenceId, StepId
from edgepipe.sampling import SamplingParams
from edgepipe.scheduler import Scheduler, SchedulerLimits, SequenceSpec, ThrottledPolicy
from edgepipe.telemetry import HOP_LATENCY_S
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.common import epoch_to_wire
from edgepipe.wire.engines import StageState
from edgepipe.wire.registrations import Registration, registrations_to_wire
from edgepipe.wire.reports import StepTiming
from edgepipe.wire.requests import Ending, Submission
from edgepipe.wire.steps import step_to_wire
from tests.support.processes.waiting import until

EPOCH = Epoch(1, EngineId("engine-0123456789abcdef"))


def test_a_steady_plan_is_small() -> None:
    scheduler = Scheduler(
        SchedulerLimits(num_blocks=60_000, block_size=16, context_length=32_768, micro_batches=1), ThrottledPolicy()
    )
    prompt = tuple(range(100_000, 100_500))
    scheduler.submit([SequenceSpec(sequence=SequenceId(70_000 + i), prompt=prompt) for i in range(64)])
    sizes: list[int] = []
    for _ in range(150):
        step = scheduler.next_step()
        assert step is not None
        if step.num_rows == 64 and not step.registers:
            message = step_to_wire(
                step,
                epoch=epoch_to_wire(EPOCH),
                last_slice=3,
                with_token_ids=True,
            )
            sizes.append(message.ByteSize())
        scheduler.retire(step.step, [[150_000]] * step.num_samples)
    assert len(sizes) > 32
    assert max(sizes) <= 2048


def test_a_plan_tells_who_is_registered_and_only_the_first_stage_what_tokens() -> None:
    scheduler = Scheduler(
        SchedulerLimits(num_blocks=8, block_size=4, context_length=32, micro_batches=1), ThrottledPolicy()
    )
    scheduler.submit([SequenceSpec(sequence=SequenceId(5), prompt=(7, 8, 9))])
    step = scheduler.next_step()
    assert step is not None
    sampling = SamplingParams(temperature=0.5, seed=11)
    registration = Registration(sequence=SequenceId(5), sampling=sampling, choice=2, prompt_tokens=3, generated=(5,))
    first, second = (
        step_to_wire(step, epoch=epoch_to_wire(EPOCH), last_slice=1, with_token_ids=embeds) for embeds in (True, False)
    )
    told_first, told_second = (
        registrations_to_wire([registration], epoch=epoch_to_wire(EPOCH), with_sampling=samples)[0].register
        for samples in (False, True)
    )
    assert list(first.token_ids) == [7, 8, 9]
    assert not second.token_ids
    assert list(first.registers) == list(second.registers) == [5]
    assert (told_second.sequences[0].sampling.seed, told_second.sequences[0].choice) == (11, 2)
    assert list(told_second.sequences[0].generated) == [5]
    assert not told_first.sequences[0].HasField("sampling")
    assert not told_first.sequences[0].generated
    assert (list(second.block_start), list(second.block_count), list(second.sample)) == ([0], [1], [1])


def test_rates_are_of_the_last_seconds() -> None:
    clock = FakeClock()
    window = WindowSum(clock)
    assert window.per_second() == 0
    window.add(10)
    assert window.per_second() == 10, "a young window counts as one second"
    clock.advance(4)
    window.add(10)
    assert window.per_second() == 5
    clock.advance(3)
    assert window.per_second() == pytest.approx(10 / 3)
    clock.advance(10)
    assert window.per_second() == 0


def test_a_stage_is_measured_by_what_it_tells() -> None:
    clock = FakeClock()
    meter = StageMeter(clock)
    for step in range(1, 41):
        timing = StepTiming(
            step=StepId(step),
            slice_index=0,
            num_tokens=1,
            num_rows=1,
            started_us=0,
            wait_us=2_000_000 if step == 1 else 50_000,
            compute_us=50_000,
            upload_us=2000,
        )
        meter.note_timing(timing, working_s=1.0)
        meter.note_hop(num_bytes=100, one_way_s=0.003)
        clock.advance(0.1)
    measured = meter.measured(StageState(node_id=NodeId("n"), weight_bytes=7))
    assert measured.weight_bytes == 7
    assert measured.step_ms == pytest.approx(50)
    assert measured.upload_ms == pytest.approx(2)
    assert measured.one_way_ms == pytest.approx(3)
    assert measured.busy == pytest.approx(0.5, abs=0.02)
    assert measured.computed_s == pytest.approx(2)
    assert measured.bubble_s == pytest.approx(1.0 + 39 * 0.05), "before the first step nothing was in flight"
    assert measured.hop_bytes == 4000
    assert measured.hop_latency_s == pytest.approx(0.12)
    assert measured.hop_latency_counts[HOP_LATENCY_S.index(0.005)] == sum(measured.hop_latency_counts) == 40
    assert (meter.newest_step(bulk=False), meter.newest_step(bulk=True)) == (40, 0)


def test_smoothing_begins_with_the_first_value() -> None:
    assert smooth(0.0, 8.0) == 8.0
    assert smooth(10.0, 20.0) == pytest.approx(11.0)


def test_known_sizes_get_less_time_than_new_ones() -> None:
    deadlines = Deadlines(EngineTimeouts())
    assert deadlines.limit_s(1, 0.0) == 60.0
    assert deadlines.limit_s(1, 20.0) == 160.0
    deadlines.note(1, 0.1)
    assert deadlines.limit_s(1, 0.0) == 5.0
    assert deadlines.limit_s(1, 3.0) == 24.0, "the ring may have been idle: a whole turn lies before the step"
    deadlines.note(100, 9.0)
    assert deadlines.limit_s(100, 3.0) == 72.0, "something besides devices and links takes its time"


async def test_the_watch_finds_the_late_step_and_forgets_those_that_came_back() -> None:
    late: list[int] = []
    timeouts = EngineTimeouts(step_min_s=0.05, step_first_s=60.0)
    checks = 0

    def turn_s() -> float:
        nonlocal checks
        checks += 1
        return 0.0

    watch = StepWatch(timeouts=timeouts, turn_s=turn_s, on_late=lambda step, _: late.append(step))
    watch.oldest_is(StepId(1), 1)
    watch.retired()
    watch.oldest_is(StepId(2), 700)
    await until(lambda: checks >= 2)
    assert not late, "its size is new"
    watch.retired()
    watch.close()
    watch.oldest_is(StepId(3), 1)
    await until(lambda: late)
    assert late == [3]
    watch.close()


def _choice(log: list[int], stream: GatewayStream) -> Choice:
    submission = Submission(request_id=RequestId("a"), prompt=(1,), sampling=SamplingParams())
    request = Request(RequestKey(NodeId("n"), RequestId("a")), submission, stream=stream)
    return Choice(request, 0, SequenceId(1), log, sent=0)


async def test_a_stream_tells_what_is_new_in_one_message() -> None:
    stream = GatewayStream(NodeId("n"))
    choice = _choice([5], stream)
    events = stream.events()
    stream.mark(choice)
    assert [list(tokens.ids) for tokens in (await anext(events)).message.tokens] == [[5]]
    for token in (6, 7, 8):
        choice.log.append(token)
        stream.mark(choice)
    choice.ending = Ending(reason="length", num_tokens=4)
    stream.mark(choice)
    stream.close()
    (message,) = [news.message async for news in events]
    assert [(tokens.position, list(tokens.ids)) for tokens in message.tokens] == [(1, [6, 7, 8])]
    assert [ended.reason for ended in message.ended] == ["length"]
    await stream.flush()


async def test_a_stream_that_was_left_for_another_tells_nothing_more() -> None:
    old, new = GatewayStream(NodeId("n")), GatewayStream(NodeId("n"))
    choice = _choice([5, 6], old)
    old.mark(choice)
    choice.request.attach(new)
    new.mark(choice)
    old.close()
    new.close()
    assert [event async for event in old.events()] == []
    assert [list(tokens.ids) async for news in new.events() for tokens in news.message.tokens] == [[5, 6]]


async def test_what_is_new_of_several_requests_is_one_message() -> None:
    stream = GatewayStream(NodeId("n"))
    for token in (5, 6, 7):
        stream.mark(_choice([token], stream))
    stream.close()
    (event,) = [news.message async for news in stream.events()]
    assert [list(tokens.ids) for tokens in event.tokens] == [[5], [6], [7]]


def test_the_first_of_our_errors_is_the_one_to_read() -> None:
    group = BaseExceptionGroup("", [BaseExceptionGroup("", [StageLost("one")]), StepFailed("two")])
    assert str(first_error(group)) == "one"
    bug = BaseExceptionGroup("", [StageLost("one"), KeyError("bug")])
    assert first_error(bug) is bug
