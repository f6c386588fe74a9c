"""Client side of a streamed chat: turns server-sent events into pieces of the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from edgepipe.errors import (
    EdgepipeError,
    NodeUnreachable,
    PeerClosed,
    RemoteProtocolError,
    RequestInvalid,
    error_class,
)
from edgepipe.plain_words import plain

_CONNECT_S = 5.0
_SILENCE_S = 600.0  # the first word of a long prompt on a slow machine
_LOOK_S = 10.0  # longest wait for an answer that needs no model


@dataclass(frozen=True, slots=True, kw_only=True)
class EventContent:
    """Content of one event."""

    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None  # tokens so far
    prompt_tokens: int | None = None
    note: str = ""  # a comment in the stream: progress of the request
    reasoning: str = ""


class ChatClient:
    """Client of one gateway. Use as an asynchronous context manager."""

    def __init__(self, base_url: str, *, api_key: str = "") -> None:
        self._base_url = base_url
        timeout = httpx.Timeout(_CONNECT_S, read=_SILENCE_S)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=base_url, timeout=timeout, headers=headers, trust_env=False, verify=base_url.startswith("https:")
        )  # authorities that HTTP does not need take 20 ms to read

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Return the names of the served models. Raises NodeUnreachable, RemoteProtocolError."""
        try:
            response = await self._http.get("/v1/models", timeout=_LOOK_S)
            return [str(card["id"]) for card in response.json()["data"]]
        except httpx.HTTPError as exc:
            raise self._unreachable(exc) from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise RemoteProtocolError(f"{self._base_url} is no edgepipe gateway", next_step="edgepipe status") from exc

    async def sampling(self, model: str) -> dict[str, float]:
        """Return the sampling parameters that the model's makers advise; empty without advice."""
        try:
            response = await self._http.get(f"/v1/models/{quote(model)}", timeout=_LOOK_S)
            advice = response.json().get("sampling", {})
            return {
                str(name): int(value) if float(value).is_integer() else float(value) for name, value in advice.items()
            }
        except (httpx.HTTPError, AttributeError, TypeError, ValueError):
            return {}  # the next request raises the error

    async def stream(
        self, messages: Sequence[Mapping[str, str]], *, model: str, options: Mapping[str, Any]
    ) -> AsyncIterator[EventContent]:
        """Yield pieces of the answer. Closing the iterator cancels the request. Raises the gateway's error."""
        usage = {"include_usage": True, "continuous_usage_stats": True}  # a cancelled answer has token counts, too
        body = {"model": model, "messages": list(messages), "stream": True, "stream_options": usage}
        body |= {name: value for name, value in options.items() if value is not None}
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise error_from_body(await response.aread(), status=response.status_code)
                async for line in event_lines(response):
                    if line == "data: [DONE]":
                        return
                    if line.startswith(": "):
                        yield EventContent(note=line.removeprefix(": "))
                    if line.startswith("data: "):
                        yield piece_from_event(line.removeprefix("data: "))
        except httpx.TransportError as exc:
            raise self._unreachable(exc) from exc
        raise PeerClosed("the answer broke off", next_step="ask again; see 'edgepipe status'")

    def _unreachable(self, exc: Exception) -> NodeUnreachable:
        if isinstance(exc, (httpx.ReadError, httpx.RemoteProtocolError)):
            return NodeUnreachable(
                "the answer broke off",
                fact=f"the gateway at {self._base_url} closed the connection",
                next_step="ask again: its node restarts the gateway    (see 'edgepipe logs')",
            )
        return NodeUnreachable(
            "the gateway does not answer",
            fact=f"{self._base_url}: {plain(exc)}",
            next_step="edgepipe status    (or: edgepipe logs)",
        )


async def event_lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of an event stream, split at ``LF`` only: text may hold U+0085 or U+2028, where httpx splits."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def piece_from_event(data: str) -> EventContent:
    """Parse one event of a chat stream. Raises the error in the event, RemoteProtocolError for an invalid event."""
    try:
        body: Any = json.loads(data)
        if "error" in body:
            raise error_from_body(data.encode(), status=200)
        usage: dict[str, Any] = body.get("usage") or {}
        choice: dict[str, Any] = body["choices"][0] if body["choices"] else {}
        return EventContent(
            text=choice.get("delta", {}).get("content") or "",
            reasoning=choice.get("delta", {}).get("reasoning_content") or "",
            finish_reason=choice.get("finish_reason"),
            completion_tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RemoteProtocolError(
            "the gateway sent an invalid chat stream", fact=data[:100], next_step="edgepipe logs"
        ) from exc


def error_from_body(data: bytes, *, status: int) -> EdgepipeError:
    """Convert the gateway's error to the class of its code."""
    try:
        error = json.loads(data)["error"]
        kind = error_class(str(error["code"]))
        if kind is EdgepipeError and 400 <= status < 500:
            kind = RequestInvalid  # a field's invalid value: the gateway uses OpenAI's codes for it
        parts = error.get("edgepipe")
        return kind(**{name: str(text) for name, text in parts.items()}) if parts else kind(str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return RemoteProtocolError(
            "the gateway answered with an error", fact=f"HTTP status {status}", next_step="edgepipe logs"
        )
