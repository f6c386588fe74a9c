"""How long a stage may be silent about what its device does."""

from __future__ import annotations

import pytest

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import named_device
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.stage.step_times import StepTimes


def decodes(rows: int) -> StepWork:
    return StepWork.of_rows((100,) * rows, (1,) * rows, logit_rows=rows)


def chunk(tokens: int) -> StepWork:
    return StepWork.of_rows((0,), (tokens,), logit_rows=1)


def run(times: StepTimes, work: StepWork, seconds: float, *, slice_index: int = 0) -> float:
    """One step alone; gives its limit."""
    times.starts(slice_index, work)
    times.submitted()
    limit_s = times.limit_s
    times.ended(seconds)
    return limit_s


def test_a_step_gets_eight_times_what_its_size_took_and_a_minute_the_first_time() -> None:
    times = StepTimes()
    assert run(times, decodes(16), 2.0) == 60.0
    assert run(times, decodes(16), 2.0) == 16.0
    assert run(times, decodes(17), 2.0) == 17.0
    assert run(times, chunk(16), 0.001) == 60.0, "chunks of prompts have kernels of their own"
    assert run(times, chunk(16), 0.001) == 5.0


def test_slices_of_one_stage_have_times_of_their_own() -> None:
    times = StepTimes()
    run(times, decodes(1), 2.0, slice_index=0)
    assert run(times, decodes(1), 0.1, slice_index=3) == 60.0
    assert run(times, decodes(1), 0.1, slice_index=3) == 5.0
    assert run(times, decodes(1), 2.0, slice_index=0) == 16.0


def test_between_steps_and_for_other_calls_the_limits_are_fixed() -> None:
    times = StepTimes()
    assert times.limit_s == 5.0
    times.calls(calling=True)
    assert times.limit_s == 60.0
    times.calls(calling=False)
    assert times.limit_s == 5.0
    run(times, decodes(1), 100.0)
    assert times.limit_s == 5.0


def test_a_step_that_compiles_while_it_is_submitted_has_its_own_limit_meanwhile() -> None:
    times = StepTimes()
    run(times, decodes(1), 0.01)
    times.starts(0, decodes(1))
    times.submitted()
    times.starts(0, chunk(500))
    assert times.limit_s >= 60.0
    times.submitted()
    assert times.limit_s == 5.0, "the decode is collected first"
    times.ended(None)
    assert times.limit_s >= 60.0


def test_a_first_long_chunk_gets_the_time_that_the_device_needs() -> None:
    """2,048 tokens of an 8B model take an M1 about 16 s."""
    config, times = named_shape("llama-3.1-8b"), StepTimes()
    device = named_device("m1")
    part = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    cost = CostModel(config, device).slice_cost(part)
    slow = cost.step_s(chunk(2048))
    times.expect({0: cost})
    run(times, chunk(10), cost.step_s(chunk(10)))
    assert run(times, chunk(2048), slow) > 8 * slow > 60.0


@pytest.mark.parametrize("seconds", [0.02, 0.05])
def test_a_first_long_chunk_of_a_fast_device_is_found_after_a_minute(seconds: float) -> None:
    config, times = named_shape("llama-3.1-8b"), StepTimes()
    part = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    times.expect({0: CostModel(config, named_device("rtx4090")).slice_cost(part)})
    run(times, chunk(10), seconds)
    run(times, decodes(1), seconds)
    assert run(times, chunk(2048), 0.3) == 60.0
