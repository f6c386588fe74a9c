"""What the engine remembers of steps."""

from __future__ import annotations

from edgepipe.engine.recorder import StepRecorder
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler import Scheduler, SchedulerLimits, SequenceSpec, ThrottledPolicy
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.engines import DeviceSpan, EngineTrace
from edgepipe.wire.reports import StepTiming
from edgepipe.wire.v1 import engine_pb2


def timing(step: int, *, started_us: int, compute_us: int) -> StepTiming:
    return StepTiming(
        step=StepId(step), slice_index=0, num_tokens=1, num_rows=1, started_us=started_us, compute_us=compute_us
    )


def recorded(*prompt_tokens: int, kept: int = 16) -> StepRecorder:
    """Steps 1, 2, ..., the prefill of one prompt each, over two stages."""
    scheduler = Scheduler(
        SchedulerLimits(num_blocks=64, block_size=16, context_length=256, micro_batches=len(prompt_tokens)),
        ThrottledPolicy(max_prefill_tokens=64),
    )
    recorder = StepRecorder(FakeClock(monotonic_s=7.0), kept=kept)
    for number, count in enumerate(prompt_tokens, start=1):
        scheduler.submit([SequenceSpec(sequence=SequenceId(number), prompt=(1,) * count, max_tokens=4)])
        step = scheduler.next_step()
        assert step is not None
        recorder.planned(step, micro_batches=scheduler.micro_batches, used_blocks=scheduler.used_blocks)
    return recorder


def test_a_step_is_remembered_with_what_its_stages_told() -> None:
    recorder = recorded(20)
    recorder.timed(1, timing(1, started_us=5_000, compute_us=1_000))
    recorder.timed(0, timing(1, started_us=3_000, compute_us=1_500))
    (step,) = recorder.steps(after=0)
    assert (step.prefill_tokens, step.decode_rows, step.planned_us) == (20, 0, 7_000_000)
    assert step.used_blocks == 2
    assert step.spans == (DeviceSpan(3_000, 4_500), DeviceSpan(5_000, 6_000))
    assert recorder.steps(after=1) == []


def test_the_oldest_steps_are_forgotten() -> None:
    recorder = recorded(4, 4, 4, kept=2)
    recorder.timed(0, timing(1, started_us=1, compute_us=1))
    assert [step.step for step in recorder.steps(after=0)] == [2, 3]


def test_a_trace_is_the_same_after_the_wire() -> None:
    recorder = recorded(20, 3)
    recorder.timed(0, timing(1, started_us=3_000, compute_us=1_500))
    trace = EngineTrace(steps=tuple(recorder.steps(after=0)), now_us=recorder.now_us(), preemptions=3)
    assert from_wire(to_wire(trace, engine_pb2.EngineTrace), EngineTrace) == trace
