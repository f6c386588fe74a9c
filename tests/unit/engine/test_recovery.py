"""What the recovery core decides, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.engine.progress import EpochProgress
from edgepipe.engine.quarantine import Missed
from edgepipe.engine.recovery_types import (
    Abandon,
    Acquit,
    AskPlacement,
    ClusterChanged,
    EndEpoch,
    EpochEnded,
    Fail,
    MoveProposed,
    NotReleased,
    Open,
    OpeningFailed,
    PlanningFailed,
    PreparationFailed,
    Prepare,
    Refuse,
    RefuseOne,
    Release,
    Serve,
    State,
    Suspect,
    Tick,
)
from edgepipe.engine.settings import MOST_STALLS
from edgepipe.errors import (
    EdgepipeError,
    NodeUnreachable,
    NoFeasiblePlacement,
    PeerClosed,
    PipelineBroken,
    RemoteProtocolError,
    StageLost,
    StagesMove,
    StaleEpoch,
    StepFailed,
)
from edgepipe.ids import NodeId, RequestId, RequestKey
from tests.support.worlds.recovery_steps import Steps, crash, placed, reachable, site


def key(name: str) -> RequestKey:
    return RequestKey(NodeId("g"), RequestId(name))


HERE, THERE, ELSEWHERE = placed("ab"), placed("cb"), placed("ac")


def test_a_move_that_was_refused_is_tried_again_when_it_is_proposed_again() -> None:
    steps = Steps(HERE).serve()
    for _ in range(2):
        [prepare] = steps.handle(MoveProposed(plan=THERE))
        assert isinstance(prepare, Prepare)
        assert steps.core.state is State.PREPARING_BESIDE
        failed = PreparationFailed(attempt=prepare.attempt, error=StepFailed("not now"), node_id=NodeId("c"))
        [release] = steps.handle(failed)
        assert release == Release(node_ids=frozenset({NodeId("c")})), "what was prepared in vain is given back"
        assert steps.core.state is State.SERVING
    [prepare] = steps.handle(MoveProposed(plan=THERE))
    assert steps.prepared(prepare) == [EndEpoch(error=steps.commands[-1].error)]  # type: ignore[union-attr]
    [opening] = steps.ended(StagesMove())
    assert isinstance(opening, Open)
    serve, release = steps.opened(opening)
    assert serve == Serve(placement=opening.placement)
    assert release == Release(node_ids=frozenset({NodeId("a")}))


def test_a_machine_that_holds_nothing_leaves_and_the_epoch_goes_on_after_a_refused_move() -> None:
    steps = Steps(HERE).serve()
    [prepare] = steps.handle(MoveProposed(plan=THERE))
    steps.handle(PreparationFailed(attempt=prepare.attempt, error=StepFailed("not now")))  # type: ignore[union-attr]
    assert steps.handle(ClusterChanged(reachable=reachable("ab"))) == []
    assert steps.core.state is State.SERVING


def test_a_drain_that_failed_is_tried_again_by_itself() -> None:
    steps = Steps(HERE).serve()
    [ask] = steps.handle(ClusterChanged(reachable=reachable("abc", leaving="a")))
    for pause_s in (1.0, 2.0, 4.0):
        assert isinstance(ask, AskPlacement)
        [prepare] = steps.planned(ask, THERE)
        steps.handle(PreparationFailed(attempt=prepare.attempt, error=StepFailed("not now")))  # type: ignore[union-attr]
        assert steps.core.wake_at_s == steps.now_s + pause_s
        assert steps.handle(ClusterChanged(reachable=reachable("abc", leaving="a"))) == [], "news alone is no reason"
        steps.now_s += pause_s
        [ask] = steps.handle(Tick())


@pytest.mark.parametrize("again", [False, True])
def test_a_drain_begins_whatever_earlier_moves_failed(again: bool) -> None:
    """An earlier rebalance, or an earlier drain that was undone."""
    steps = Steps(HERE).serve()
    failed = StepFailed("not now")
    if again:
        [ask] = steps.handle(ClusterChanged(reachable=reachable("abc", leaving="b")))
        assert isinstance(ask, AskPlacement)
        steps.handle(PlanningFailed(attempt=ask.attempt, error=failed))
        steps.handle(ClusterChanged(reachable=reachable("abc")))
        assert steps.core.wake_at_s is not None
        steps.now_s = steps.core.wake_at_s
        assert steps.handle(Tick()) == [], "nothing is leaving"
    else:
        [prepare] = steps.handle(MoveProposed(plan=THERE))
        steps.handle(PreparationFailed(attempt=prepare.attempt, error=failed))  # type: ignore[union-attr]
    assert steps.core.wake_at_s is None
    steps.now_s += 1000.0
    [ask] = steps.handle(ClusterChanged(reachable=reachable("abc", leaving="b")))
    assert isinstance(ask, AskPlacement)


def test_a_stage_that_ends_because_its_node_loads_other_layers_is_no_fault() -> None:
    steps = Steps(HERE).serve()
    [prepare] = steps.handle(MoveProposed(plan=placed("ba")))  # both hold other layers then
    assert steps.ended(StageLost("its connection broke", node="a")) == []
    assert steps.core.state is State.RECOVERING
    [opening] = steps.prepared(prepare)
    assert isinstance(opening, Open)


def test_a_first_start_that_misses_a_link_looks_for_another_placement() -> None:
    steps = Steps(HERE)
    [prepare] = steps.core.begin(steps.now_s)
    steps.handle(ClusterChanged(reachable=reachable("abc")))
    [opening] = steps.prepared(prepare)
    missed = Missed(links=((site("a", 0), site("b", 1)),))
    failed = OpeningFailed(attempt=opening.attempt, error=StepFailed("no link"), missed=missed)  # type: ignore[union-attr]
    assert steps.handle(failed) == []
    assert steps.core.state is State.STARTING
    assert steps.core.message == "a does not reach b: looking for another placement"
    assert steps.core.wake_at_s is not None
    assert steps.now_s < steps.core.wake_at_s < steps.now_s + 5.0
    steps.now_s = steps.core.wake_at_s
    [ask] = steps.handle(Tick())
    assert isinstance(ask, AskPlacement)
    [prepare] = steps.planned(ask, ELSEWHERE)
    [opening] = steps.prepared(prepare)
    assert steps.opened(opening)[0] == Serve(placement=opening.placement)  # type: ignore[union-attr]


def test_another_fault_during_a_move_begins_anew() -> None:
    steps = Steps(HERE).serve()
    steps.handle(MoveProposed(plan=THERE))
    assert [type(command) for command in steps.ended(StageLost("its connection broke", node="b"))] == [
        Abandon,
        AskPlacement,
    ]


def test_a_machine_that_is_lost_while_it_prepares_ends_the_attempt_and_not_the_recovery() -> None:
    steps = Steps(HERE).serve()
    [ask] = steps.ended(StageLost("lost", node="a"))
    steps.planned(ask, ELSEWHERE)
    assert steps.handle(ClusterChanged(reachable=reachable("ab"))) == [Abandon()]
    assert steps.core.wake_at_s is not None
    steps.now_s = steps.core.wake_at_s
    [again] = steps.handle(Tick())
    assert isinstance(again, AskPlacement)
    assert steps.planned(ask, ELSEWHERE) == [], "the answer to the older question is late"


def test_what_a_sleeping_machine_holds_is_given_back_when_it_wakes() -> None:
    steps = Steps(HERE).serve()
    steps.handle(ClusterChanged(reachable=reachable("bc")))
    [ask] = steps.ended(StageLost("lost", node="a"))
    [prepare] = steps.planned(ask, THERE)
    [opening] = steps.prepared(prepare)
    [serve] = steps.opened(opening)
    assert isinstance(serve, Serve)
    [release] = steps.handle(ClusterChanged(reachable=reachable("abc")))
    assert release == Release(node_ids=frozenset({NodeId("a")}))
    steps.handle(NotReleased(node_ids=frozenset({NodeId("a")})))
    assert steps.core.wake_at_s is not None
    steps.now_s = steps.core.wake_at_s
    assert steps.handle(Tick()) == [release], "it did not answer, so it is asked again"


def test_an_engine_sleeps_while_a_move_loads_though_a_node_did_not_answer_a_release() -> None:
    """Until the move ends: then it asks the node again."""
    steps = Steps(HERE).serve()
    [prepare] = steps.handle(MoveProposed(plan=THERE))
    steps.prepared(prepare)
    [opening] = steps.ended(StagesMove())
    steps.opened(opening)
    [prepare] = steps.handle(MoveProposed(plan=placed("bc")))
    assert isinstance(prepare, Prepare)
    steps.handle(NotReleased(node_ids=frozenset({NodeId("a")})))
    assert steps.core.wake_at_s is None, "a time that passes while the move loads"
    release, *_ = steps.handle(PreparationFailed(attempt=prepare.attempt, error=StepFailed("not now")))
    assert release == Release(node_ids=frozenset({NodeId("a")}))
    steps.handle(NotReleased(node_ids=frozenset({NodeId("a")})))
    assert steps.core.wake_at_s is not None


def test_a_device_that_fails_test_steps_is_replaced_then_left_out_then_users_are_told() -> None:
    steps = Steps(HERE).serve()
    for round_number in (1, 2, 3):
        broken = crash("b", str(round_number), device_failed=True)
        acquit, following = steps.ended(broken.error, crash=broken)
        assert isinstance(acquit, Acquit)
        assert broken.requests <= acquit.requests
        assert isinstance(following, AskPlacement)
        assert following.quarantined.keys() == ({NodeId("b")} if round_number >= 2 else set())
        if round_number == 3:
            break
        [prepare] = steps.planned_after_pause(following, HERE)
        assert prepare.fresh == {"b"}  # type: ignore[union-attr]
        [opening] = steps.prepared(prepare)
        steps.opened(opening)
    [refuse] = steps.planned(following, HERE)
    assert isinstance(refuse, Refuse)
    assert isinstance(refuse.error, PipelineBroken)
    assert "3 attempts in a row ended without a token" in refuse.error.fact
    assert "a new stage process on b, a placement without b" in refuse.error.fact
    assert steps.core.state is State.WAITING
    [left_out] = steps.core.left_out(steps.now_s)
    assert (left_out.node_id, "could not be computed" in left_out.reason) == ("b", True)


def test_while_nothing_changes_attempts_become_rare_and_a_machine_that_joins_is_used_at_once() -> None:
    """A stage dies whenever it has opened, without any request."""
    steps = Steps(HERE).serve()
    pauses: list[float] = []
    [ask] = steps.ended(StageLost("its connection broke", node="b"), node_id=NodeId("b"))
    for _ in range(12):
        begun_s = steps.now_s
        [prepare] = steps.planned_after_pause(ask, HERE)
        pauses.append(steps.now_s - begun_s)
        [opening] = steps.prepared(prepare)
        steps.opened(opening)
        [ask] = steps.ended(StageLost("its connection broke", node="b"), node_id=NodeId("b"))
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]
    steps.planned(ask, HERE)
    assert steps.core.state is State.WAITING
    assert steps.core.doing(steps.now_s + 1.5) == "its connection broke; the next attempt is in 299 s"
    assert steps.core.doing(steps.core.wake_at_s or 0.0) == "its connection broke; the next attempt is in 1 s", (
        "at once"
    )
    assert steps.handle(ClusterChanged(reachable=reachable("abc"))) == [], "memory that changes is no reason"
    steps.now_s += 1.0
    [ask] = steps.handle(ClusterChanged(reachable=reachable("abcd")))
    [prepare] = steps.planned(ask, placed("ad"))
    assert isinstance(prepare, Prepare), "only b has a pause"


def test_a_stage_that_dies_idle_again_and_again_leaves_its_place_to_a_free_machine() -> None:
    steps = Steps(HERE).serve()
    lost = StageLost("its connection broke", node="b")
    [ask] = steps.ended(lost, node_id=NodeId("b"))
    until_s = steps.now_s + 60.0
    while NodeId("b") not in ask.quarantined:  # type: ignore[union-attr]
        assert steps.now_s < until_s
        [prepare] = steps.planned_after_pause(ask, HERE)
        [opening] = steps.prepared(prepare)
        steps.opened(opening)
        [ask] = steps.ended(lost, node_id=NodeId("b"))
    [prepare] = steps.planned(ask, ELSEWHERE)
    assert isinstance(prepare, Prepare), "the free machine is prepared without a pause"
    [left_out] = steps.core.left_out(steps.now_s)
    assert left_out.reason == "it keeps ending the pipeline: its connection broke"
    [opening] = steps.prepared(prepare)
    steps.opened(opening)
    steps.now_s += 300.0
    [ask] = steps.ended(lost, node_id=NodeId("b"))
    assert steps.core.left_out(steps.now_s)[0].seconds == 60.0, "it comes back once, then it is left out for longer"


def test_no_move_goes_to_a_machine_that_has_just_ended_epochs() -> None:
    steps = Steps(HERE).serve()
    lost = StageLost("its connection broke", node="b")
    [ask] = steps.ended(lost, node_id=NodeId("b"))
    for plan in (HERE, ELSEWHERE):
        [opening] = steps.prepared(steps.planned_after_pause(ask, plan)[0])
        steps.opened(opening)
        if plan is HERE:
            [ask] = steps.ended(lost, node_id=NodeId("b"))
    assert steps.handle(MoveProposed(plan=HERE)) == []
    steps.now_s += 300.0
    assert isinstance(steps.handle(MoveProposed(plan=HERE))[0], Prepare)


@pytest.mark.parametrize("error", [StepFailed("a step is late"), RemoteProtocolError("an unexpected answer")])
def test_a_stage_that_ends_each_epoch_after_a_token_is_left_out(error: EdgepipeError) -> None:
    steps = Steps(HERE).serve()
    for _ in range(3):
        assert not steps.core.left_out(steps.now_s)
        steps.now_s += 70.0
        [ask] = steps.ended(error, node_id=NodeId("b"), progress=EpochProgress(further=True))
        [prepare] = steps.planned(ask, HERE)
        assert isinstance(prepare, Prepare), "tokens came: there is no pause"
        [opening] = steps.prepared(prepare)
        steps.opened(opening)
    assert [entry.node_id for entry in steps.core.left_out(steps.now_s)] == ["b"]
    pauses: list[float] = []
    for _ in range(5):
        steps.now_s += 70.0
        [ask] = steps.ended(error, node_id=NodeId("b"), progress=EpochProgress(further=True))
        begun_s = steps.now_s
        [prepare] = steps.planned_after_pause(ask, HERE)
        pauses.append(steps.now_s - begun_s)
        [opening] = steps.prepared(prepare)
        steps.opened(opening)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0], "requests wait meanwhile"


def test_a_machine_that_restarts_every_half_minute_is_left_out() -> None:
    steps = Steps(HERE).serve()
    for _ in range(3):
        assert not steps.core.left_out(steps.now_s)
        steps.now_s += 30.0
        steps.handle(ClusterChanged(reachable=reachable("ac")))
        [ask] = steps.ended(NodeUnreachable("node b is gone", node="b"), progress=EpochProgress(further=True))
        steps.now_s += 40.0
        steps.handle(ClusterChanged(reachable=reachable("abc")))
        [prepare] = steps.planned(ask, HERE)
        [opening] = steps.prepared(prepare)
        steps.opened(opening)
    steps.now_s -= 40.0
    assert [entry.node_id for entry in steps.core.left_out(steps.now_s)] == ["b"]


def test_a_request_in_all_epochs_without_progress_is_refused_alone_also_after_another_machine_was_tried() -> None:
    steps = Steps(HERE).serve()
    guilty, bystander = key("guilty"), key("bystander")
    plans, refused = [HERE], list[RefuseOne]()
    for _ in range(MOST_STALLS):
        node_id = NodeId("b") if plans[-1] is HERE else NodeId("c")
        progress = EpochProgress(stalled=frozenset({guilty}), waiting=frozenset({bystander}))
        [ask] = steps.ended(StageLost("it died", node=node_id), node_id=node_id, progress=progress)
        plans.append(ELSEWHERE if ask.quarantined else HERE)  # type: ignore[union-attr]
        [prepare] = steps.planned_after_pause(ask, plans[-1])
        *commands, opening = steps.prepared(prepare)
        refused += [command for command in commands if isinstance(command, RefuseOne)]
        steps.opened(opening)
    assert ELSEWHERE in plans
    [refusal] = refused
    assert refusal.request == guilty
    assert "4 attempts in a row" in refusal.error.what
    assert "it died; the attempts ended on b, c" in refusal.error.fact
    begun_s = steps.now_s
    [ask] = steps.ended(StageLost("it died", node="a"), node_id=NodeId("a"))
    [prepare] = steps.planned(ask, ELSEWHERE)
    assert steps.now_s == begun_s
    assert isinstance(prepare, Prepare), "the others go on at once"


def test_with_one_machine_only_the_request_in_all_epochs_without_progress_is_refused() -> None:
    steps = Steps(HERE).serve()
    progress = EpochProgress(stalled=frozenset({key("guilty")}), waiting=frozenset({key("bystander")}))
    for round_number in range(1, MOST_STALLS + 1):
        [ask] = steps.ended(StageLost("it died", node="b"), node_id=NodeId("b"), progress=progress)
        [prepare] = steps.planned_after_pause(ask, HERE)
        assert not isinstance(prepare, Refuse), "the others wait"
        *commands, opening = steps.prepared(prepare)
        assert [type(command) for command in commands] == [[], [Suspect], [Suspect], [Suspect, RefuseOne]][
            round_number - 1
        ]
        steps.opened(opening)


def test_a_request_that_got_further_between_is_not_refused() -> None:
    steps = Steps(HERE).serve()
    stalled = EpochProgress(stalled=frozenset({key("unlucky")}))
    for progress in (*[stalled] * (MOST_STALLS - 1), EpochProgress(further=True), *[stalled] * (MOST_STALLS - 1)):
        [ask] = steps.ended(StageLost("it died", node="b"), node_id=NodeId("b"), progress=progress)
        [prepare] = steps.planned_after_pause(ask, HERE)
        *commands, opening = steps.prepared(prepare)
        assert not any(isinstance(command, RefuseOne) for command in commands)
        steps.opened(opening)


def test_progress_in_an_epoch_that_ended_as_planned_clears_earlier_ends() -> None:
    steps = Steps(HERE).serve()
    for _ in range(2):
        [ask] = steps.ended(StageLost("it died", node="b"), node_id=NodeId("b"))
        [prepare] = steps.planned_after_pause(ask, HERE)
        [opening] = steps.prepared(prepare)
        steps.opened(opening)
    [prepare] = steps.handle(MoveProposed(plan=THERE))
    steps.prepared(prepare)
    [opening] = steps.ended(StagesMove(), progress=EpochProgress(further=True))
    steps.opened(opening)
    [ask] = steps.ended(StageLost("it died", node="c"), node_id=NodeId("c"))
    [prepare] = steps.planned(ask, placed("ca"))
    assert isinstance(prepare, Prepare)


def test_epochs_far_apart_that_ended_without_work_count_for_nothing() -> None:
    steps = Steps(HERE).serve()
    for _ in range(10):
        steps.now_s += 400.0
        [ask] = steps.ended(PeerClosed("a cable was pulled"), node_id=NodeId("b"))
        [prepare] = steps.planned(ask, HERE)
        [opening] = steps.prepared(prepare)
        steps.opened(opening)
    assert steps.core.state is State.SERVING
    assert not steps.core.left_out(steps.now_s)


def test_an_engine_that_has_served_never_gives_up() -> None:
    steps = Steps(HERE).serve()
    [ask] = steps.ended(StageLost("lost", node="a"))
    refused = False
    for _ in range(50):
        commands = steps.planned(ask, HERE)
        [prepare] = commands
        failed = PreparationFailed(attempt=prepare.attempt, error=StepFailed("not now"))  # type: ignore[union-attr]
        refused |= any(isinstance(command, Refuse) for command in steps.handle(failed))
        assert steps.core.wake_at_s is not None
        steps.now_s = steps.core.wake_at_s
        [ask] = steps.handle(Tick())
    assert refused, "but users are told"


def test_no_room_is_told_and_any_news_of_memory_is_a_reason_to_look_again() -> None:
    steps = Steps(HERE).serve()
    [ask] = steps.ended(StageLost("lost", node="a"))
    error = NoFeasiblePlacement("the model does not fit")
    begun_s = steps.now_s
    while not (commands := steps.handle(PlanningFailed(attempt=ask.attempt, error=error))):  # type: ignore[union-attr]
        assert steps.core.wake_at_s is not None
        assert steps.core.wake_at_s - begun_s < 6.0, "then users are told"
        steps.now_s = steps.core.wake_at_s
        [ask] = steps.handle(Tick())
    assert steps.now_s - begun_s == pytest.approx(5.0)
    assert commands == [Refuse(error=error)]
    steps.now_s += 1.0
    [ask] = steps.handle(ClusterChanged(reachable=reachable("abc")))
    assert isinstance(ask, AskPlacement)


def test_requests_outlive_a_device_that_has_no_room_while_it_restarts() -> None:
    steps = Steps(HERE).serve()
    [ask] = steps.ended(StageLost("lost", node="a"))
    error = NoFeasiblePlacement("the model does not fit")
    assert steps.handle(PlanningFailed(attempt=ask.attempt, error=error)) == []  # type: ignore[union-attr]
    assert steps.core.wake_at_s is not None
    steps.now_s = steps.core.wake_at_s
    [ask] = steps.handle(Tick())
    [prepare] = steps.planned(ask, HERE)
    [opening] = steps.prepared(prepare)
    steps.opened(opening)
    assert steps.core.state is State.SERVING
    [ask] = steps.ended(StageLost("lost", node="b"))
    steps.now_s += 60.0
    assert steps.handle(PlanningFailed(attempt=ask.attempt, error=error)) == [], "patience begins anew"  # type: ignore[union-attr]


@pytest.mark.parametrize("when", ["planning", "preparing", "opening"])
def test_another_engine_ends_this_one_at_any_moment(when: str) -> None:
    steps, stale = Steps(HERE).serve(), StaleEpoch("another engine")
    if when == "planning":
        [fail] = steps.ended(stale)
    else:
        [ask] = steps.ended(StageLost("lost", node="a"))
        [prepare] = steps.planned(ask, HERE)
        if when == "preparing":
            [fail] = steps.handle(PreparationFailed(attempt=prepare.attempt, error=stale))  # type: ignore[union-attr]
        else:
            [opening] = steps.prepared(prepare)
            [fail] = steps.handle(OpeningFailed(attempt=opening.attempt, error=stale))  # type: ignore[union-attr]
    assert fail == Fail(error=stale)
    assert steps.core.state is State.STOPPED


def test_an_end_of_an_epoch_that_is_over_already_is_ignored() -> None:
    steps = Steps(HERE).serve()
    old = steps.core.running
    assert old is not None
    steps.ended(StageLost("lost", node="a"))
    late = EpochEnded(epoch=replace(old.epoch), error=StageLost("late", node="b"))
    assert steps.handle(late) == []
