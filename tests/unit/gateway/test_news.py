"""Comment lines of a stream whose model recovers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from edgepipe.cli.sse import ChatClient
from edgepipe.errors import EdgepipeError
from edgepipe.gateway.models import News
from edgepipe.gateway.streams import EventStream, StreamTimeouts
from edgepipe.gateway.turns import Turns
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import serving

AWAY = "macbook asleep since 21:14"


async def sent_while(news: list[News], *, until: bytes) -> list[bytes]:
    """What a client gets of a stream that is silent until it has read so much; the last of ``news`` holds for ever."""
    bodies: list[bytes] = []
    seen = asyncio.Event()

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        await seen.wait()
        yield b"data: 2\n\n"

    async def send(message: MutableMapping[str, Any]) -> None:
        if body := message.get("body"):
            bodies.append(body)
            if until in body:
                seen.set()

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("the client stays")

    def on_error(error: EdgepipeError) -> bytes:
        raise AssertionError(str(error))

    stream = EventStream(
        events(),
        opening=(),
        on_error=on_error,
        place=nullcontext(),
        timeouts=StreamTimeouts(recovering_s=0.01, heartbeat_s=1.0),
        turns=Turns(),
        news=lambda: news.pop(0) if len(news) > 1 else news[0],
    )
    async with asyncio.timeout(10):
        await stream(
            {"type": "http", "state": {"connection": SimpleNamespace(half_closed=asyncio.Event())}}, receive, send
        )
    return bodies


async def test_a_recovering_model_is_told_again_and_again_and_its_return_once() -> None:
    going_on = News(text=f"{AWAY}; continuing on 2 machines")
    bodies = await sent_while([News(recovering=True, text=AWAY)] * 2 + [going_on], until=b"continuing")
    recovering = f": recovering: {AWAY}\n\n".encode()
    assert bodies == [b"data: 1\n\n", recovering, recovering, f": {going_on.text}\n\n".encode(), b"data: 2\n\n"]


async def test_a_silent_stream_of_a_healthy_model_has_only_its_heartbeat() -> None:
    bodies = await sent_while([News(text=AWAY)], until=b"still working")
    assert bodies == [b"data: 1\n\n", b": still working\n\n", b"data: 2\n\n"]


async def test_the_reading_of_a_prompt_is_told_as_it_moves() -> None:
    bodies = await sent_while([News(reading="20 %")] * 2 + [News(reading="60 %"), News()], until=b"60")
    assert bodies[:3] == [b"data: 1\n\n", b": reading 20 %\n\n", b": reading 60 %\n\n"]


async def test_what_an_engine_tells_of_a_prompt_reaches_the_client() -> None:
    engine = FakeEngine(answer=b"yes", hold_after=0, read_tokens=60)
    timeouts = StreamTimeouts(hold_s=0.01, recovering_s=0.01)
    notes: list[str] = []
    async with asyncio.timeout(20), serving(engine, timeouts=timeouts) as served:
        async with ChatClient(str(served.http.base_url)) as client:
            question = [{"role": "user", "content": "x" * (100 - len("user: \nassistant:"))}]
            async for piece in client.stream(question, model="tiny", options={}):
                notes += [piece.note] if piece.note else []
                if piece.note.startswith("reading"):
                    engine.release.set()
    assert notes == ["reading 60 %"]


async def test_a_name_cannot_make_an_event() -> None:
    news = [News(recovering=True, text="a\n\ndata: [DONE]\n\n gone"), News()]
    assert b": recovering: a\\n\\ndata: [DONE]\\n\\n gone\n\n" in await sent_while(news, until=b"still working")
