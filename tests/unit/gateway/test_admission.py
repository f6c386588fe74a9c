"""Places: so many run per key, so many wait in order, the rest is told when to come back; none is lost."""

from __future__ import annotations

import asyncio

import pytest

from edgepipe.errors import QueueFull
from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.admission import Admission, AdmissionLimits, Line, Part
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import events_of, serving

ONE, TWO = Line(owner="one"), Line(owner="two")


def _admission() -> Admission:
    return Admission(AdmissionLimits(max_running=2, max_waiting=2))


def test_requests_run_in_the_order_in_which_they_came() -> None:
    admission = _admission()
    tickets = [admission.enter(ONE) for _ in range(4)]
    assert [ticket.admitted.is_set() for ticket in tickets] == [True, True, False, False]
    with pytest.raises(QueueFull):
        admission.enter(ONE)
    admission.leave(tickets[1])
    assert [ticket.admitted.is_set() for ticket in tickets] == [True, True, True, False]
    admission.leave(tickets[3])  # gave up waiting
    for ticket in (tickets[0], tickets[2]):
        admission.leave(ticket)
    assert (admission.num_running, admission.num_waiting) == (0, 0)


def test_a_key_takes_no_place_of_another() -> None:
    admission = _admission()
    for _ in range(4):
        admission.enter(ONE)
    assert admission.enter(TWO).admitted.is_set()


def test_a_prompt_waits_for_room_for_all_its_choices_and_nobody_overtakes_it() -> None:
    admission = _admission()
    first = admission.enter(ONE)
    large = admission.enter(ONE, parts=[Part(num_choices=64)])  # counts as all there is
    later = admission.enter(ONE)
    assert not large.admitted.is_set()
    assert not later.admitted.is_set()
    admission.leave(first)
    assert large.admitted.is_set()
    assert not later.admitted.is_set()


async def test_of_a_hundred_streams_those_beyond_the_queue_get_429_and_none_is_lost() -> None:
    engine = FakeEngine(hold_after=3)
    async with serving(engine, admission=AdmissionLimits(max_running=8, max_waiting=16)) as served:
        requests = [asyncio.create_task(served.chat(stream=True)) for _ in range(100)]
        async with asyncio.timeout(15):
            while sum(task.done() for task in requests) < 76:
                await asyncio.wait([task for task in requests if not task.done()], return_when=asyncio.FIRST_COMPLETED)
            refused = [task.result() for task in requests if task.done()]
            assert {response.status_code for response in refused} == {429}
            assert {response.headers["retry-after"] for response in refused} == {"1"}
            while len(engine.submits) < 8:
                await served.http.get("/health")
            assert len(engine.submits) == 8
            held = [task for task in requests if not task.done()]
            engine.release.set()
            answered = [await task for task in held]
        assert len(answered) == 24
        for response in answered:
            assert events_of(response.text)[-1] == "[DONE]"
        assert len(engine.submits) == 24


async def test_a_client_that_leaves_while_it_waits_gives_its_place_up() -> None:
    engine = FakeEngine(hold_after=1)
    async with serving(engine, admission=AdmissionLimits(max_running=1, max_waiting=1)) as served:
        first = asyncio.create_task(served.chat())
        async with asyncio.timeout(10):
            await engine.submitted.wait()
            waiting = asyncio.create_task(served.chat())
            while b"requests_waiting 1.0" not in (await served.http.get("/metrics")).content:
                pass
            assert (await served.chat()).status_code == 429
            waiting.cancel()
            while b"requests_waiting 1.0" in (await served.http.get("/metrics")).content:
                pass
            engine.release.set()
            assert (await first).status_code == 200
            assert (await served.chat()).status_code == 200
        assert len(engine.submits) == 2


async def test_keys_have_queues_of_their_own() -> None:
    engine = FakeEngine(hold_after=1)
    rules = AccessRules.of(keys=("first-key", "second-key"), key_on_loopback=True)
    limits = AdmissionLimits(max_running=1, max_waiting=0)
    async with serving(engine, admission=limits, rules=rules) as served:
        served.http.headers["authorization"] = "Bearer first-key"
        running = asyncio.create_task(served.chat())
        async with asyncio.timeout(10):
            await engine.submitted.wait()
            assert (await served.chat()).status_code == 429
            engine.release.set()
            served.http.headers["authorization"] = "Bearer second-key"
            assert (await served.chat()).status_code == 200
            assert (await running).status_code == 200


def test_one_user_s_memory_leaves_room_for_another_s_and_is_given_back() -> None:
    admission = Admission(AdmissionLimits(max_bytes=100))
    first = admission.enter(ONE, num_bytes=60)
    with pytest.raises(QueueFull, match="too much memory"):
        admission.enter(ONE, num_bytes=20)
    second = admission.enter(TWO, num_bytes=20)
    first.grow(30)  # its answer
    with pytest.raises(QueueFull):
        admission.enter(TWO, num_bytes=1)
    admission.leave(first)
    admission.leave(second)
    assert admission.enter(TWO, num_bytes=75).admitted.is_set()


def test_requests_without_a_first_token_are_few_per_line_and_others_go_beside_them() -> None:
    admission = Admission(AdmissionLimits(max_beginning=2, max_beginning_tokens=1000))
    first, second, third = (admission.enter(ONE, parts=[Part(num_tokens=5000)]) for _ in range(3))
    assert [each.admitted.is_set() for each in (first, second, third)] == [True, True, False]
    for line in (TWO, Line(owner="one", model="other"), Line(owner="one", priority=1)):
        assert admission.enter(line, parts=[Part(num_tokens=5000)]).admitted.is_set()
    first.began(0)
    first.began(0)
    assert third.admitted.is_set()
    short = admission.enter(ONE, parts=[Part(num_tokens=100)])
    admission.leave(second)
    assert short.admitted.is_set()
    admission.leave(third)
    assert not admission.num_waiting


def test_short_prompts_without_a_first_token_are_as_many_as_two_steps_take() -> None:
    admission = Admission(AdmissionLimits(max_beginning=2, max_beginning_tokens=1000))
    tickets = [admission.enter(ONE, parts=[Part(num_tokens=36)]) for _ in range(20)]
    assert sum(each.admitted.is_set() for each in tickets) == 10
    tickets[0].began(0)
    assert sum(each.admitted.is_set() for each in tickets) == 11
    for each in tickets:
        admission.leave(each)
    assert (admission.num_running, admission.num_waiting) == (0, 0)


def test_as_many_requests_as_may_run_are_taken_though_few_begin_at_a_time() -> None:
    admission = Admission(AdmissionLimits(max_running=256, max_waiting=64))
    tickets = [admission.enter(ONE, parts=[Part(num_tokens=1000)]) for _ in range(256 + 64)]
    assert sum(each.admitted.is_set() for each in tickets) == 4
    with pytest.raises(QueueFull, match="316 requests wait"):
        admission.enter(ONE)
    for each in tickets:
        admission.leave(each)


def test_as_many_choices_run_as_a_model_has_pipelines_for() -> None:
    admission = Admission(AdmissionLimits(max_running=2, max_waiting=2))
    tickets = [admission.enter(ONE, num_engines=3) for _ in range(8)]
    assert sum(each.admitted.is_set() for each in tickets) == 6
    with pytest.raises(QueueFull, match="too many") as caught:
        admission.enter(ONE, num_engines=3)
    assert "at most 6 choices may run" in caught.value.fact


def test_more_prompts_begin_where_a_ring_computes_more_steps_at_a_time() -> None:
    admission = Admission(AdmissionLimits(max_beginning=2, max_beginning_tokens=1000))
    tickets = [admission.enter(ONE, parts=[Part(num_tokens=436)], num_steps=4) for _ in range(20)]
    assert sum(each.admitted.is_set() for each in tickets) == 8


async def test_prompts_that_are_too_large_together_get_429_and_come_again_later() -> None:
    engine = FakeEngine(hold_after=1)
    async with serving(engine, admission=AdmissionLimits(max_bytes=100_000)) as served:
        first = asyncio.create_task(served.complete("x" * 900))
        await engine.submitted.wait()
        refused = await served.complete("x" * 900)
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "queue_full"
        engine.release.set()
        assert (await first).status_code == 200
        assert (await served.complete("x" * 900)).status_code == 200
