"""A request of many prompts runs in parts: its choices leave places at the engine, and all of them are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.engine.settings import EngineLimits
from edgepipe.errors import StageLost
from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.admission import Admission, AdmissionLimits, Line, Part, Ticket
from edgepipe.wire.intake import MAX_CHOICES
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, events_of, serving

MANY, OTHER = "the-key-of-many-prompts", "the-key-of-another"
RULES = AccessRules.of(keys=(MANY, OTHER), key_on_loopback=True)
PROMPTS = [f"{number:02}" for number in range(64)]
MOST = AdmissionLimits().max_running


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _many(served: Served, **fields: Any) -> asyncio.Task[httpx.Response]:
    """Send a request of 512 choices."""
    body = {"prompt": PROMPTS, "n": 8, "max_tokens": 3, "echo": True} | fields
    return asyncio.create_task(served.http.post("/v1/completions", json=body, headers=_bearer(MANY)))


async def _gauge(served: Served, name: str) -> float:
    text = (await served.http.get("/metrics", headers=_bearer(OTHER))).text
    (line,) = [line for line in text.splitlines() if line.startswith(f"edgepipe_gateway_{name} ")]
    return float(line.split()[1])


async def _until(served: Served, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await served.http.get("/health")


async def _all_places_free(served: Served) -> None:
    async with asyncio.timeout(10):
        while any([await _gauge(served, each) for each in ("prompts_running", "requests_waiting", "request_bytes")]):
            pass


def _texts(response: httpx.Response, *, stream: bool) -> dict[int, str]:
    """Return the texts by choice."""
    texts: dict[int, str] = {}
    bodies = events_of(response.text)[:-1] if stream else [response.json()]
    for choice in (choice for body in bodies for choice in body["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_a_user_s_choices_leave_a_quarter_of_an_engine_and_every_prompt_fits() -> None:
    assert 4 * MOST == 3 * EngineLimits().max_running
    assert MAX_CHOICES <= MOST


@pytest.mark.parametrize("stream", [False, True])
async def test_512_choices_run_in_parts_and_are_answered_in_order(stream: bool) -> None:
    engine = FakeEngine(answer=b"abcdef", hold_after=1)
    async with serving(engine, rules=RULES) as served:
        request = _many(served, stream=stream, stream_options={"include_usage": True} if stream else None)
        await _until(served, lambda: engine.num_running >= MOST)
        for _ in range(5):
            await served.http.get("/health")
        assert (len(engine.submits), await _gauge(served, "prompts_running")) == (MOST // 8, MOST // 8)
        engine.release.set()
        response = await request
        assert response.status_code == 200
        assert _texts(response, stream=stream) == {index: PROMPTS[index // 8] + "abc" for index in range(512)}
        assert engine.most_running == MOST
        assert [bytes(submit.prompt).decode() for submit in engine.submits] == PROMPTS
        usage = (events_of(response.text)[-2] if stream else response.json())["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 * 64, 3 * 512)
        if not stream:
            assert [choice["index"] for choice in response.json()["choices"]] == list(range(512))
        await _all_places_free(served)


async def test_another_user_s_chat_runs_beside_a_request_of_512_choices() -> None:
    engine = FakeEngine(hold_after=1, max_running=EngineLimits().max_running)
    async with serving(engine, rules=RULES) as served:
        request = _many(served)
        await _until(served, lambda: engine.num_running >= MOST)
        async with asyncio.timeout(5):
            served.http.headers.update(_bearer(OTHER))
            chat = await served.chat(max_tokens=1)
        assert chat.json()["usage"]["completion_tokens"] == 1
        assert not request.done()
        engine.release.set()
        assert (await request).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_places_of_all_parts(stream: bool) -> None:
    engine = FakeEngine(hold_after=1)
    async with serving(engine, rules=RULES) as served:
        request = _many(served, stream=stream)
        await _until(served, lambda: engine.num_running >= MOST)
        later = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "x"}, headers=_bearer(MANY)))
        async with asyncio.timeout(10):
            while not await _gauge(served, "requests_waiting"):
                pass
        request.cancel()
        await _until(served, lambda: len(engine.cancels) == MOST)
        engine.release.set()
        assert (await later).status_code == 200
        await _all_places_free(served)
        assert len(engine.submits) == MOST // 8 + 1
        assert len(_texts(await _many(served), stream=False)) == 512


class _FailsAt(FakeEngine):
    """Answers until a prompt that it cannot compute."""

    async def _answer(self, submit: Any, have: Any, outbox: Any) -> None:
        if bytes(submit.prompt) == b"30":
            self.error = StageLost("a stage was lost")
        await super()._answer(submit, have, outbox)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_s_error_in_one_part_ends_the_request(stream: bool) -> None:
    engine = _FailsAt()
    async with serving(engine, rules=RULES) as served:
        response = await _many(served, stream=stream)
        if stream:
            error = events_of(response.text)[-1]["error"]
        else:
            assert response.status_code == 503
            error = response.json()["error"]
        assert error["code"] == "stage_lost"
        assert 30 < len(engine.submits) < 64
        await _all_places_free(served)
        engine.error = None
        assert (await served.http.post("/v1/completions", json={"prompt": "x"}, headers=_bearer(MANY))).is_success


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"n": 2, "stop": ["c"], "logprobs": 2},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"n": 3, "echo": True, "logprobs": 1},
    ],
)
async def test_parts_do_not_change_an_answer(fields: dict[str, Any]) -> None:
    answers: list[Any] = []
    for limits in (AdmissionLimits(), AdmissionLimits(max_running=3), AdmissionLimits(max_running=1)):
        async with serving(FakeEngine(answer=b"abcdef"), admission=limits) as served:
            response = await served.complete(PROMPTS[:5], **fields)
            assert response.status_code == 200
            answers.append(response.json())
    assert answers[0] == answers[1] == answers[2]


LINES = (Line(owner="one"), Line(owner="two"))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from(LINES), st.lists(st.integers(1, 6), min_size=1, max_size=5)),
        st.tuples(st.sampled_from(["began", "ended", "leave"]), st.integers(0, 99), st.integers(0, 99)),
    ),
    max_size=60,
)


class _History:
    """Random requests, first tokens, ends and departures, checked after each."""

    def __init__(self) -> None:
        self.limits = AdmissionLimits(max_running=5, max_beginning=2, max_beginning_tokens=200, max_waiting=100)
        self.admission = Admission(self.limits)
        self.tickets: list[Ticket] = []  # in order of arrival

    def step(self, kind: str, first: Any, second: Any) -> None:
        if kind == "enter":
            self.tickets.append(self.admission.enter(first, parts=[Part(num_choices=count) for count in second]))
        elif self.tickets:
            ticket = self.tickets[first % len(self.tickets)]
            running = sorted(ticket.running)
            if kind == "leave":
                self.leave(ticket)
            elif running and kind == "began":
                ticket.began(running[second % len(running)])
            elif running:
                ticket.choice_ended(running[second % len(running)])
        self.check()

    def leave(self, ticket: Ticket) -> None:
        self.tickets.remove(ticket)
        self.admission.leave(ticket)

    def check(self) -> None:
        for line in LINES:
            tickets = [ticket for ticket in self.tickets if ticket.line == line]
            running = sum(min(count, 5) for ticket in tickets for count in ticket.running.values())
            beginning = [ticket.parts[part] for ticket in tickets for part in ticket.beginning]
            tokens = sum(part.beginning_tokens for part in beginning)
            assert running <= 5
            waiting = [ticket for ticket in tickets if ticket.num_started < len(ticket.parts)]
            assert not any(ticket.num_started for ticket in waiting[1:])  # in order of arrival
            if waiting:  # no place is lost
                part = waiting[0].next_part
                begins = len(beginning) < 2 or tokens + part.beginning_tokens <= 200
                assert running + min(part.num_choices, 5) > 5 or not begins
        assert self.admission.num_running == sum(len(ticket.running) for ticket in self.tickets)
        assert self.admission.num_waiting == sum(not ticket.num_started for ticket in self.tickets)

    def finish(self) -> None:
        """Let the started choices end, which must start all others. The last request is served first where it may."""
        while self.tickets:
            ticket = next(ticket for ticket in reversed(self.tickets) if ticket.running or self._is_done(ticket))
            if self._is_done(ticket):
                self.leave(ticket)
            else:
                ticket.choice_ended(max(ticket.running))
            self.check()

    @staticmethod
    def _is_done(ticket: Ticket) -> bool:
        return ticket.num_started == len(ticket.parts) and not ticket.running


@given(steps=STEPS)
def test_no_place_is_lost_and_every_part_starts_in_its_turn(steps: list[tuple[str, Any, Any]]) -> None:
    history = _History()
    for kind, first, second in steps:
        history.step(kind, first, second)
    history.finish()
    assert (history.admission.num_running, history.admission.num_waiting) == (0, 0)
    assert history.admission.memory.held == 0
