"""Clients of an emulated cluster whose every token is checked, and the client that knows nothing of a fault."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from edgepipe_emulated.oracle import generate  # pyright: ignore[reportMissingTypeStubs] - typed, but no room

from edgepipe.errors import all_errors
from edgepipe.system import SystemClock
from tests.support.faults.chaos.client import RecordingClient
from tests.support.faults.chaos.cluster import ChaosCluster
from tests.support.faults.history import Ended, Given, History, Struck, assert_holds, check

HEAL_S = 30.0
"""No fault may keep a new client waiting for longer, once it is over or another machine can take over."""
UNTOUCHED_TOKENS = 20
_AGAIN_S = 1.0  # as ``Retry-After`` says
_ANSWER_S = 120.0
_TRY_AGAIN = frozenset(error.code for error in all_errors() if error.http_status in (429, 503))


class Clients:
    """Ask the gateway of a cluster's first node; all that they see is kept in one history."""

    def __init__(self, cluster: ChaosCluster) -> None:
        self.cluster = cluster
        self.history = History()
        self._clock = SystemClock()
        self._recorder = RecordingClient(self.history, http_port=cluster.http_port, clock=self._clock)
        self._numbers = itertools.count(1)
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._bodies: dict[str, dict[str, Any]] = {}

    @classmethod
    async def first(cls, cluster: ChaosCluster) -> Clients:
        """Clients of a cluster that has just been started: one has been served when this returns."""
        clients = cls(cluster)
        await clients.until_served(since_s=clients.now_s())
        return clients

    def now_s(self) -> float:
        """On the clock of the history."""
        return self._clock.monotonic_s()

    def strike(self, what: str) -> float:
        """Write down what is done to the cluster now; the moment."""
        self.history.add(Struck(at_s=self.now_s(), what=what))
        return self.now_s()

    @asynccontextmanager
    async def streams(self, count: int, **fields: Any) -> AsyncGenerator[list[str]]:
        """Requests that run beside the block; their names. Clients hang up at its end. ``fields``: see ``begin``."""
        names = [self.begin(**fields) for _ in range(count)]
        try:
            yield names
        finally:
            for name in names:
                self.hang_up(name)
            await asyncio.gather(*(self._asking.pop(name) for name in names), return_exceptions=True)

    def begin(self, **fields: Any) -> str:
        """Start a request; the name of its stream. ``fields`` change the body of a plain one; None leaves one out."""
        name = self._name()
        asking = self._recorder.ask(name, self._body(name, **fields), answer_s=_ANSWER_S)
        self._asking[name] = asyncio.create_task(asking, name=name)
        return name

    async def reached(self, stream: str, num_tokens: int) -> None:
        """Return once the stream has so many tokens, or has ended."""
        await self._recorder.reached(stream, num_tokens)

    def hang_up(self, stream: str) -> None:
        """The client goes away, unless its stream has just ended."""
        if self._asking[stream].cancel():
            self._recorder.left(stream)

    async def go_on(self, *streams: str, num_tokens: int = UNTOUCHED_TOKENS) -> None:
        """Wait until each stream has so many more tokens. Raises AssertionError if one does not, or has wrong ones."""
        wanted = {stream: self._num_tokens(stream) + num_tokens for stream in streams}
        try:
            async with asyncio.timeout(HEAL_S):
                for stream, count in wanted.items():
                    await self.reached(stream, count)
        except TimeoutError:
            counts = {stream: f"{self._num_tokens(stream)} of {count}" for stream, count in wanted.items()}
            raise AssertionError(f"no {num_tokens} more tokens within {HEAL_S:.0f} s: {counts}") from None
        self.judge(*streams)
        for stream, count in wanted.items():
            assert self._num_tokens(stream) >= count, f"{stream} has ended before the fault was over"

    async def until_served(self, *, since_s: float, **fields: Any) -> float:
        """Ask as a client that knows nothing of the fault; seconds from ``since_s`` to its 20th token.

        An answer that tells it to try again is obeyed. Raises AssertionError if it is told anything else, or is not
        served in time.
        """
        endings: list[str] = []
        while (left_s := since_s + HEAL_S - self.now_s()) > 0:
            name = self._name()
            await self._recorder.ask(name, self._body(name, **fields), answer_s=left_s)
            ending = self._ending(name)
            if ending is not None and ending.how == "done":
                self.judge(name)
                return self._last_token_s(name) - since_s
            endings.append(f"{ending.how} {ending.what}" if ending is not None else "nothing")
            if ending is not None and ending.how == "error" and ending.what not in _TRY_AGAIN:
                break
            await asyncio.sleep(_AGAIN_S)
        raise AssertionError(f"a new client got no {UNTOUCHED_TOKENS} tokens in {HEAL_S:.0f} s: {endings[-5:]}")

    def judge(self, *streams: str) -> None:
        """Raises AssertionError unless the tokens so far are right and nothing but their clients ended the streams."""
        found = check(
            self.history, expected={}, most_pause_s=HEAL_S, ended_at_s=self.now_s(), under_way=self.history.streams()
        )
        assert_holds(self.history, [each for each in found if each.stream in streams])
        for stream in streams:
            self._check_tokens(stream)

    def _check_tokens(self, stream: str) -> None:
        body = self._bodies[stream]
        if body["temperature"] == 0 and "prompt" in body:  # the oracle knows neither draws nor grammars
            for ids in self.history.answer(stream).ids:
                right = generate(body["prompt"], len(ids), self.cluster.config, ignore_eos=True)
                assert list(ids) == right, f"{stream} was given {ids}, not {right}"

    def _body(self, name: str, **fields: Any) -> dict[str, Any]:
        plain = {
            "model": self.cluster.model,
            "prompt": [ord(char) for char in name],
            "max_tokens": UNTOUCHED_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        self._bodies[name] = {key: value for key, value in {**plain, **fields}.items() if value is not None}
        return self._bodies[name]

    def _name(self) -> str:
        return f"stream {next(self._numbers)} of {id(self):x}"

    def _num_tokens(self, stream: str) -> int:
        return self.history.answer(stream).completion_tokens

    def _ending(self, stream: str) -> Ended | None:
        return next((event for event in self.history.of(stream) if isinstance(event, Ended)), None)

    def _last_token_s(self, stream: str) -> float:
        return max(event.at_s for event in self.history.of(stream) if isinstance(event, Given) and event.ids)
