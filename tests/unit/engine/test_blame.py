"""Whether a broken step counts against its requests or against the stage."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgepipe.engine.blame import Blame
from edgepipe.testing.clock import START_S
from tests.support.worlds.recovery_steps import crash


def test_the_first_broken_step_counts_against_its_requests() -> None:
    verdict = Blame().judge(crash("a", "x", "y"), START_S)
    assert verdict.accused
    assert not any((verdict.replace, verdict.leave_out, verdict.acquitted))


def test_steps_of_different_requests_that_fail_in_a_row_are_the_stages_fault() -> None:
    blame = Blame()
    blame.judge(crash("a", "x"), START_S)
    second = blame.judge(crash("a", "y"), START_S + 1.0)
    assert not second.accused
    assert {key.request_id for key in second.acquitted} == {"x", "y"}
    assert (second.replace, second.leave_out) == (True, False)
    third = blame.judge(crash("a", "x"), START_S + 2.0)
    assert (third.accused, third.leave_out) == (False, True), "a new process fails, too: it is the device"


def test_a_request_that_breaks_every_step_that_it_is_in_stays_accused_and_gets_a_new_process() -> None:
    blame = Blame()
    verdicts = [
        blame.judge(crash("a", *names), START_S + 10.0 * i) for i, names in enumerate([("x", "y"), ("x", "z"), ("x",)])
    ]
    assert all(verdict.accused for verdict in verdicts)
    assert [verdict.replace for verdict in verdicts] == [False, True, False]


def test_a_step_that_retires_ends_the_row() -> None:
    blame = Blame()
    blame.judge(crash("a", "x"), START_S)
    blame.worked()
    assert blame.judge(crash("a", "y"), START_S + 1.0).accused


def test_a_device_that_fails_now_and_then_is_left_out_though_steps_retire_between() -> None:
    blame = Blame()
    for second, name in enumerate("xy"):
        assert blame.judge(crash("a", name), START_S + second).accused
        blame.worked()
    verdict = blame.judge(crash("a", "z"), START_S + 50.0)
    assert not verdict.accused
    assert verdict.leave_out
    blame = Blame()
    for number, name in enumerate("xyz"):
        assert blame.judge(crash("a", name), START_S + 31.0 * number).accused, (
            "rare faults of different requests prove nothing"
        )
        blame.worked()


def test_a_stage_whose_device_fails_a_test_step_is_at_fault_at_once() -> None:
    verdict = Blame().judge(crash("a", "x", device_failed=True), START_S)
    assert not verdict.accused
    assert verdict.replace


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sets(st.sampled_from("uvwxyz"), min_size=1)), max_size=30))
def test_a_request_in_every_broken_step_is_never_acquitted_and_others_are_not_left_accused_alone(
    crashes: list[tuple[str, set[str]]],
) -> None:
    blame = Blame()
    for number, (node, names) in enumerate(crashes):
        verdict = blame.judge(crash(node, "guilty", *names), START_S + number)
        assert verdict.accused
        assert not verdict.acquitted
        assert not verdict.leave_out
