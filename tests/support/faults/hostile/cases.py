"""Hostile but valid requests of one user, as cases; each has a small form for tests that measure no time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.faults.hostile import schemas
from tests.support.faults.hostile.user import User

MODEL = "tiny"
CONTEXT = 204_800  # tokens of the model that the cases are made for
CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
_BODY_BYTES = 8 << 20  # the largest body
_BOUND = "200 or 400 response_format"
_SLOW_S = 1.0  # between two bytes of a slow client


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileCase:
    """``strike`` asks as one user does who means harm; its second argument: in the small form."""

    name: str
    what: str  # for people
    strike: Callable[[User, bool], Awaitable[None]]
    answers: str = "2xx"  # what the user should get, as a prediction
    seconds: float = 6.0  # after which the user's connections end, whatever was answered
    times: int = 1  # measurements of this case: quick ones twice


def _ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 32, "temperature": 0, **fields}


def _chat(**fields: Any) -> dict[str, Any]:
    return _ask(messages=[{"role": "user", "content": "x"}], **fields)


async def _all(asked: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Ask everything at once. Requests that are left when the case ends count as left."""
    async with asyncio.TaskGroup() as tasks:
        for request in asked:
            tasks.create_task(request)


async def _integers(user: User, small: bool) -> None:
    form = schemas.answer_form(schemas.costly_integers(20))
    await _all([user.post(CHAT, _chat(response_format=form, user=str(n))) for n in range(1 if small else 3)])


async def _products(user: User, small: bool) -> None:
    forms = [schemas.crossing_patterns(8), schemas.chained_references(50 if small else 200)]
    bodies = [_chat(response_format=schemas.answer_form(form), max_tokens=40 if small else 400) for form in forms]
    await _all([user.post(CHAT, {**body, "n": 2 if small else 8}) for body in bodies])


async def _many_schemas(user: User, small: bool) -> None:
    count, chars = (3, 6000) if small else (15, 60_000)
    forms = [schemas.answer_form(schemas.wide_schema(chars, number=number)) for number in range(count)]
    await _all([user.post(CHAT, _chat(response_format=form)) for form in forms])


async def _regexes(user: User, small: bool) -> None:
    size = (40, 2) if small else (400, 8)
    bodies = [_chat(guided_regex=regex, max_tokens=size[0], n=size[1]) for regex in schemas.REGEXES]
    await _all([user.post(CHAT, body) for body in bodies])


async def _scores(user: User, small: bool) -> None:
    count, tokens = (2, 300) if small else (6, 8000)
    prompts = [[5 + (index * 7 + number) % 190 for index in range(tokens)] for number in range(count)]
    await user.post(TEXT, _ask(prompt=prompts, max_tokens=1, echo=True, logprobs=20, n=4))


async def _long_echo(user: User, small: bool) -> None:
    prompt = [5 + index % 190 for index in range(4000 if small else 200_000)]
    await user.post(TEXT, _ask(prompt=prompt, max_tokens=1, echo=True, logprobs=4))


async def _stops(user: User, small: bool) -> None:
    many = [f"stop {number}" for number in range(4096)]
    long = [chr(97 + number % 26) * (190 + number) for number in range(64)]
    most = {"max_tokens": 40 if small else 400, "n": 8, "ignore_eos": True}
    asked = [user.post(TEXT, _ask(prompt="x", stop=many)) for _ in range(4)]
    asked += [user.post(TEXT, _ask(prompt="x", stop=long, **most)) for _ in range(1 if small else 8)]
    await _all(asked)


async def _tools(user: User, small: bool) -> None:
    chars = 12_000 if small else 250_000
    hundreds = _chat(tools=schemas.tools(600, chars=chars))
    most = _chat(tools=schemas.tools(128, chars=chars), tool_choice="required")
    long_text = schemas.long_string_tool(60 if small else 30_000)
    call = _chat(tools=[long_text], tool_choice="required") | {"max_tokens": 100 if small else 32_000}
    asked = [user.post(CHAT, body) for body in (hundreds, most)]
    asked += [user.post(CHAT, {**call, "stream": stream}) for stream in (False, True)]
    await _all(asked if small else [*asked, *(user.post(CHAT, most) for _ in range(3))])


async def _held_bodies(user: User, small: bool) -> None:
    count, size = (6, 1 << 20) if small else (150, _BODY_BYTES)
    body = b'{"max_tokens": 1, "prompt": "x"}'.ljust(size)
    await _all([_hold_back(user, body, hold_s=0.5 if small else 4.0) for _ in range(count)])


async def _hold_back(user: User, body: bytes, *, hold_s: float) -> None:
    """Send all but the last byte, wait, send it."""
    async with user.connection() as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(user.head(TEXT, len(body)))
            for start in range(0, len(body) - 1, 1 << 18):
                writer.write(body[start : min(start + (1 << 18), len(body) - 1)])
                await writer.drain()
            await asyncio.sleep(hold_s)
            writer.write(body[-1:])
        await user.read(reader, what=f"a body of {len(body) >> 20} MiB")


async def _slow_reads(user: User, small: bool) -> None:
    await _all([_read_slowly(user, small) for _ in range(8 if small else 60)])


async def _read_slowly(user: User, small: bool) -> None:
    body = _ask(prompt="x", stream=True, ignore_eos=True, logprobs=5) | {"max_tokens": 50 if small else 2000}
    async with user.connection(receive_bytes=4096) as (reader, writer):
        payload = _encoded(body)
        writer.write(user.head(TEXT, len(payload)) + payload)
        for _ in range(1 if small else 8):
            await reader.read(1)
            await asyncio.sleep(0.1 if small else _SLOW_S)


async def _slow_bodies(user: User, small: bool) -> None:
    await _all([_send_slowly(user, small) for _ in range(120 if small else 520)])


async def _send_slowly(user: User, small: bool) -> None:
    with contextlib.suppress(ConnectionError):
        async with user.connection() as (reader, writer):
            writer.write(user.head(TEXT, 100_000) + b"{")
            answered = asyncio.ensure_future(user.read(reader, what="a slow body"))
            try:
                for _ in range(2 if small else 7):
                    await asyncio.wait((answered,), timeout=0.2 if small else _SLOW_S)
                    if answered.done():
                        return
                    writer.write(b" ")
            finally:
                answered.cancel()
                await asyncio.wait((answered,))


_MOMENTS = ("connected", "in the header", "in the body", "queued", "in the prompt", "in the answer")


async def _leavers(user: User, small: bool) -> None:
    """Users who come and leave, each at another moment, some at once."""
    rounds = 2 if small else 40
    for _ in range(rounds):
        await _all([_leave(user, moment) for moment in _MOMENTS for _ in range(4)])


async def _leave(user: User, moment: str) -> None:
    long = [5 + index % 190 for index in range(8000)]
    stays = {"stream": True, "max_tokens": 400, "ignore_eos": True}
    payload = _encoded(_ask(prompt=long if moment == "in the prompt" else "x") | stays)
    whole = user.head(TEXT, len(payload)) + payload
    sent = {"connected": 0, "in the header": 60, "in the body": len(whole) - len(payload) // 2}.get(moment, len(whole))
    async with user.connection() as (reader, writer):
        writer.write(whole[:sent])
        await writer.drain()
        if moment == "in the prompt":
            await asyncio.sleep(0.05)
        if moment == "in the answer":
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"data: ")


async def _conversations(user: User, small: bool) -> None:
    turns, chars = (200, 40_000) if small else (2048, 4_000_000)
    text = "x" * (chars // turns)
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn in range(turns - 1)]
    body = _ask(messages=[*messages, {"role": "user", "content": text}])
    await _all([user.post(CHAT, body) for _ in range(2 if small else 6)])


async def _long_texts(user: User, small: bool) -> None:
    text = "the quick brown fox " * (500 if small else 12_500)
    await _all([user.post(TOKENIZE, {"model": MODEL, "prompt": text}) for _ in range(2 if small else 8)])


async def _choices(user: User, small: bool) -> None:
    """As many answers as one request may have."""
    prompts = [[5 + number, 6] for number in range(8 if small else 64)]
    await user.post(TEXT, _ask(prompt=prompts, n=8, ignore_eos=True) | {"max_tokens": 20 if small else 200})


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


HOSTILE_CASES = (
    HostileCase(
        name="integers",
        what="3 schemas of 20 integers with multipleOf and range",
        strike=_integers,
        answers=_BOUND,
    ),
    HostileCase(
        name="products", what="allOf of patterns, 200 chained $ref, n 8", strike=_products, answers=_BOUND, times=2
    ),
    HostileCase(name="schemas", what="15 schemas of 60 KB", strike=_many_schemas, answers=_BOUND),
    HostileCase(name="regexes", what="4 costly patterns, n 8", strike=_regexes),
    HostileCase(
        name="scores",
        what="echo, logprobs 20, n 4, 6 prompts of 8,000 tokens",
        strike=_scores,
        answers="200 or 400 logprobs",
        seconds=20.0,
    ),
    HostileCase(name="echo", what="echo of 200,000 tokens, logprobs 4", strike=_long_echo, seconds=15.0),
    HostileCase(name="stops", what="4,096 stop strings; 64 long ones, n 8", strike=_stops, answers="200, 400 stop"),
    HostileCase(name="tools", what="600 and 128 tools of 250 KB, long text", strike=_tools, answers="200, 400 tools"),
    HostileCase(
        name="bodies",
        what="150 bodies of 8 MiB, the last byte held back",
        strike=_held_bodies,
        answers="200, 429",
        seconds=10.0,
    ),
    HostileCase(name="reads", what="60 streams read at 1 byte/s", strike=_slow_reads, answers="none", seconds=8.0),
    HostileCase(name="connections", what="520 connections, slow bodies", strike=_slow_bodies, answers="503, none"),
    HostileCase(name="leavers", what="cancels in six states", strike=_leavers, answers="none", seconds=6.0),
    HostileCase(
        name="conversations",
        what="6 of 2,047 turns, 4 M characters",
        strike=_conversations,
        answers="400 messages",
        seconds=8.0,
        times=2,
    ),
    HostileCase(name="texts", what="8 texts of 250,000 tokens", strike=_long_texts, answers="200", times=2),
    HostileCase(name="choices", what="64 prompts, n 8, 200 tokens each", strike=_choices),
)
