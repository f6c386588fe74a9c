"""A client that writes down every event of its streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from edgepipe.cli.sse import event_lines
from edgepipe.clock import Clock
from tests.support.faults.history import Asked, Counted, Ended, Given, History, Noted

_CONNECT_S = 10.0
_DONE = "data: [DONE]"


class RecordingClient:
    """Asks one gateway for token ids as a stream. ``reached`` tells when a stream has so many tokens."""

    def __init__(self, history: History, *, http_port: int, clock: Clock) -> None:
        self._history = history
        self._clock = clock
        self._base = f"http://127.0.0.1:{http_port}/v1"
        self._counts: dict[str, int] = {}
        self._moved = asyncio.Event()

    async def ask(self, stream: str, body: Mapping[str, Any], *, answer_s: float) -> None:
        """One request from its sending to its end, whatever that is. Ends as ``left`` when it takes too long."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        self._history.add(Asked(at_s=self._now(), stream=stream, body=body))
        self._counts[stream] = 0
        url = f"{self._base}/chat/completions" if "messages" in body else f"{self._base}/completions"
        timeout = httpx.Timeout(answer_s, connect=_CONNECT_S)
        try:
            # There is no TLS here: reading all authorities' certificates would hold up every stream for 0.1 s.
            client = httpx.AsyncClient(timeout=timeout, trust_env=False, verify=False)
            async with asyncio.timeout(answer_s), client as http:
                async with http.stream("POST", url, json=asked) as response:
                    if response.status_code != 200:
                        self._end(stream, "error", _code(await response.aread()))
                        return
                    await self._read(stream, response)
        except TimeoutError:
            self._end(stream, "broken", f"it did not end within {answer_s:.0f} s")
        except httpx.HTTPError as error:
            self._end(stream, "broken", f"{type(error).__name__} {error}")

    async def reached(self, stream: str, num_tokens: int) -> None:
        """Return once the stream has so many tokens, or has ended."""
        while self._counts.get(stream, 0) < num_tokens and not self._has_ended(stream):
            self._moved.clear()
            await self._moved.wait()

    def left(self, stream: str) -> None:
        """The client went away by its own wish, unless its stream had just ended."""
        if not self._has_ended(stream):
            self._end(stream, "left", "")

    async def _read(self, stream: str, response: httpx.Response) -> None:
        async for line in event_lines(response):
            if line == _DONE:
                self._end(stream, "done", "")
            elif line.startswith("data: "):
                self._take(stream, json.loads(line.removeprefix("data: ")))
            elif line.startswith(":"):
                self._history.add(Noted(at_s=self._now(), stream=stream, text=line.removeprefix(":").strip()))
        if not self._has_ended(stream):
            self._end(stream, "broken", "the stream ended without an ending")

    def _take(self, stream: str, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self._end(stream, "error", str(chunk["error"].get("code")))
            return
        for part in chunk["choices"]:
            ids = tuple(part.get("token_ids") or ())
            event = Given(
                at_s=self._now(),
                stream=stream,
                choice=part["index"],
                ids=ids,
                text=part["text"] if "text" in part else part["delta"].get("content") or "",
                finish_reason=part["finish_reason"],
            )
            if ids or event.text or event.finish_reason:
                self._history.add(event)
            self._counts[stream] += len(ids)
        if usage := chunk.get("usage"):
            counted = Counted(
                at_s=self._now(),
                stream=stream,
                prompt_tokens=usage["prompt_tokens"],
                completion_tokens=usage["completion_tokens"],
            )
            self._history.add(counted)
        self._moved.set()

    def _end(self, stream: str, how: str, what: str) -> None:
        self._history.add(Ended(at_s=self._now(), stream=stream, how=how, what=what))
        self._moved.set()

    def _has_ended(self, stream: str) -> bool:
        return any(isinstance(event, Ended) for event in self._history.of(stream))

    def _now(self) -> float:
        return self._clock.monotonic_s()


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return body[:60].decode(errors="replace")
