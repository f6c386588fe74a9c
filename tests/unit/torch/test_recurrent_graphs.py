"""Graphs of slices with recurrent layers on a CPU: slots that change between replays, sequences that come and go."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402

from edgepipe.backend.types import RowState, StateWrite, StepRow  # noqa: E402
from tests.support.backends.crowd_events import CrowdEvent, crowd_events, play_crowd  # noqa: E402
from tests.support.backends.recorded_steps import recorded_steps  # noqa: E402
from tests.support.backends.steps import step_row  # noqa: E402
from tests.support.backends.torch_twins import Twins, states_of  # noqa: E402
from tests.support.models.recurrent_layers import MODELS  # noqa: E402

if TYPE_CHECKING:
    from edgepipe_torch.cuda.kernels.recurrent_step import StepForm
    from edgepipe_torch.cuda.mixer_steps import StepKernels
    from edgepipe_torch.layers.recurrent import Mixer

    from tests.support.backends.host_kernels import HostModule


@pytest.fixture
def own_kernels(step_modules: dict[StepForm, HostModule]) -> StepKernels:
    """The CUDA source, for rows of float32."""
    return recorded_steps(step_modules)


events = crowd_events(prompt=9, chunk=7)


@settings(max_examples=8, deadline=None)
@given(model=st.sampled_from(sorted(MODELS)), events=events, cut=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_sequences_that_come_and_go(model: str, events: list[CrowdEvent], cut: bool, seed: int) -> None:
    """States stay in place, move to other slots, and begin from a slot that another sequence has, too."""
    play_crowd(Twins(MODELS[model], cuts=[1] if cut else []), events, seed)


@settings(max_examples=6, deadline=None)
@given(events=events, seed=st.integers(0, 2**32 - 1))
def test_by_the_cuda_source(step_modules: dict[StepForm, HostModule], events: list[CrowdEvent], seed: int) -> None:
    play_crowd(Twins(MODELS["all of them"], step_kernels=recorded_steps(step_modules)), events, seed)


def stateful(position: int, count: int, block: int, read: int | None, *writes: tuple[int, int]) -> StepRow:
    """A row of the sequence that has blocks ``block`` and the one behind it; writes are (after, slot)."""
    row = step_row(position, count, (block, 2), sequence=block + 1)
    return replace(row, state=RowState(read, tuple(StateWrite(after, slot) for after, slot in writes)))


def steps_of_three(twins: Twins, slots: Sequence[Sequence[int]]) -> None:
    """Prompts of three tokens, then a token of each sequence in each step; ``slots``: of each step's sequences."""
    twins.step([stateful(0, 3, 2 * at, None, (3, slot)) for at, slot in enumerate(slots[0])], np.arange(9))
    for index, own in enumerate(slots[1:]):
        before = slots[index]
        rows = [stateful(3 + index, 1, 2 * at, before[at], (1, slot)) for at, slot in enumerate(own)]
        twins.step(rows, np.arange(3) + index)


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own kernels"])
@pytest.mark.parametrize("cuts", [[], [2]], ids=["whole", "a slice of recurrent layers alone"])
def test_a_replay_takes_the_slots_of_its_step(own: bool, cuts: list[int], request: pytest.FixtureRequest) -> None:
    """The second step of a size is recorded. Surplus rows write to the spare slot, and to no other."""
    kernels = request.getfixturevalue("own_kernels") if own else None
    twins = Twins(MODELS["all of them"], cuts=cuts, step_kernels=kernels)
    steps_of_three(twins, [(5, 0, 7), (5, 0, 7), (2, 0, 6), (2, 3, 7), (6, 3, 0)])
    twins.finish()
    assert [graph.num_replays for graph in twins.graphs] == [3] * (1 + len(cuts))
    for states in states_of(twins.paged):
        zeros, spare = states[twins.state_slots :]
        assert not zeros.any()
        assert spare.isfinite().all()


def test_prompts_and_states_in_mid_row_take_no_graph() -> None:
    twins = Twins(MODELS["gated DeltaNet"])
    for at, count in ((0, 3), (3, 2), (5, 2)):
        writes = ((1, 4), (count, 1)) if at else ((count, 1),)
        twins.step([stateful(at, count, 0, 1 if at else None, *writes)], np.arange(count))
    twins.step([stateful(7, 1, 0, 1, (1, 1)), stateful(0, 2, 2, None, (2, 3))], np.arange(3))
    twins.finish()
    assert not twins.graphs


def test_a_sequence_may_begin_in_a_graph() -> None:
    """Its first token reads the slot of zeros, whatever is in the slot that it writes."""
    twins = Twins(MODELS["all of them"])
    for at in range(4):
        rows = [stateful(at, 1, 0, 1 if at else None, (1, 1)), stateful(0, 1, 2, None, (1, 2))]
        twins.step(rows, [at, 5])
    twins.finish()
    assert [graph.num_replays for graph in twins.graphs] == [3]


def test_without_kernels_torch_computes_in_graphs(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_mixer: Mixer, _dtype: Any) -> Any:
        raise KernelsUnavailable("NVRTC was not found")

    with caplog.at_level(logging.WARNING):
        twins = Twins(MODELS["Mamba-2"], step_kernels=refuse)
        steps_of_three(twins, [(5, 0, 7)] * 4)
        twins.finish()
    assert [graph.num_replays for graph in twins.graphs] == [2]
    (said,) = [record.getMessage() for record in caplog.records if "torch's operations" in record.getMessage()]
    assert "NVRTC was not found" in said
