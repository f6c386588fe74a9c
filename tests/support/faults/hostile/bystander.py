"""A user beside others: streams short chats all the time, knows the right answers, and measures every wait."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.faults.hostile.cases import CHAT, MODEL
from tests.support.faults.hostile.schemas import answer_form
from tests.support.faults.hostile.user import User

_TOKENS = 48
_RIGHT_S = 30.0  # for an answer without anybody beside
_AGAIN_S = 0.1  # after a refusal
_KINDS = ("chat", "chat with a schema")


@dataclass(slots=True)
class Waits:
    """What a bystander saw in a span of time, seconds."""

    gaps_s: list[float] = field(default_factory=list[float])  # between two tokens of an answer
    longest_s: float = 0.0  # without a new token: the first of an answer, refusals and errors included
    cut_off: bool = False  # whether the longest wait had not ended yet
    num_answers: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])  # keys are statuses, or "broken"
    wrong: list[str] = field(default_factory=list[str])  # answers with other tokens than the right ones


class Bystander:
    """Two streams of one user: plain chats, and chats bound to a small schema whose text is new each time."""

    def __init__(self, *, port: int, key: str) -> None:
        self.waits = Waits()
        self._user = User(port=port, key=key)
        self._right: dict[str, list[int]] = {}
        self._numbers = itertools.count(1)
        self._moved = asyncio.Event()
        self._since_s: dict[str, float] = {}
        self._counts: Counter[str] = Counter()  # counts of whole answers

    async def learn(self) -> None:
        """Ask each question alone: that answer is the right one ever after."""
        for kind in _KINDS:
            async with asyncio.timeout(_RIGHT_S):
                while not (ids := await self._answer(kind, lambda: None)):  # noqa: ASYNC110 - sockets do not notify
                    await asyncio.sleep(_AGAIN_S)
            self._right[kind] = ids

    @asynccontextmanager
    async def asking(self) -> AsyncGenerator[None]:
        """Ask again and again while the block runs."""
        tasks = [asyncio.create_task(self._ask_on(kind), name=kind) for kind in _KINDS]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def span(self) -> Iterator[Waits]:
        """What is seen in the block; waits that its end cuts off count as long as they were."""
        waits = self.waits = Waits()
        yield waits
        now_s = time.monotonic()
        still_s = max(now_s - since_s for since_s in self._since_s.values())
        waits.cut_off = still_s > waits.longest_s
        waits.longest_s = max(waits.longest_s, still_s)
        self.waits = Waits()

    async def answered(self, count: int = 1) -> None:
        """Return once every stream has had so many more whole answers. Bound it by a deadline."""
        wanted = {kind: self._counts[kind] + count for kind in _KINDS}
        while any(self._counts[kind] < number for kind, number in wanted.items()):
            self._moved.clear()
            await self._moved.wait()

    async def _ask_on(self, kind: str) -> None:
        self._since_s[kind] = time.monotonic()
        while True:
            ids = await self._answer(kind, lambda: self._token(kind))
            if ids and ids != self._right[kind]:
                self.waits.wrong.append(f"{kind}: {ids}, not {self._right[kind]}")
            if ids:
                self.waits.num_answers += 1
                self._counts[kind] += 1
                self._moved.set()
            else:
                await asyncio.sleep(_AGAIN_S)

    def _token(self, kind: str) -> None:
        now_s = time.monotonic()
        self.waits.longest_s = max(self.waits.longest_s, now_s - self._since_s[kind])
        self._since_s[kind] = now_s

    async def _answer(self, kind: str, token: Callable[[], None]) -> list[int]:
        """The token ids of one streamed answer; empty if it was refused or broke."""
        ids: list[int] = []
        last_s = 0.0
        payload = json.dumps(self._body(kind)).encode()
        try:
            async with self._user.connection() as (reader, writer):
                writer.write(self._user.head(CHAT, len(payload)) + payload)
                status = (await reader.readline()).split(b" ")[1:2]
                if status != [b"200"]:
                    self.waits.refused[b"".join(status).decode() or "broken"] += 1
                    return []
                async for new in _token_ids(reader.readline):
                    if new is None:
                        return ids
                    now_s = time.monotonic()
                    if ids:
                        self.waits.gaps_s.append(now_s - last_s)
                    last_s = now_s
                    ids += new
                    token()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        self.waits.refused["broken"] += 1
        return []

    def _body(self, kind: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"a {kind} of a bystander"}],
            "max_tokens": _TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if kind == _KINDS[1]:
            number = {"type": "integer", "description": f"number {next(self._numbers)}"}
            body["response_format"] = answer_form({"type": "array", "items": number, "minItems": 30})
        return body


async def _token_ids(read_line: Callable[[], Awaitable[bytes]]) -> AsyncGenerator[list[int] | None]:
    """The ids of each event, then None if the stream ended as it should."""
    while line := await read_line():
        if line.startswith(b"data: [DONE]"):
            yield None
            return
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                return
            ids = event["choices"][0].get("token_ids") if event["choices"] else None
            if ids:
                yield ids
