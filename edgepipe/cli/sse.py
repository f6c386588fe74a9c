"""The client's side of a streamed chat: bytes of server-sent events to pieces of the answer."""

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

_CONNECT_S = 5.0
_SILENCE_S = 600.0  # the first word of a long prompt on a slow machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one event brings."""

    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None  # so far
    prompt_tokens: int | None = None
    note: str = ""  # a comment: what the gateway tells beside the answer


class ChatClient:
    """Asks one gateway. Use as an asynchronous context manager."""

    def __init__(self, base_url: str, *, api_key: str = "") -> None:
        self._base_url = base_url
        timeout = httpx.Timeout(_CONNECT_S, read=_SILENCE_S)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout, headers=headers, trust_env=False)

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Names of the models served. Raises NodeUnreachable, RemoteProtocolError."""
        try:
            response = await self._http.get("/v1/models")
            return [str(card["id"]) for card in response.json()["data"]]
        except httpx.HTTPError as exc:
            raise self._unreachable(exc) from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise RemoteProtocolError(f"{self._base_url} is no edgepipe gateway") from exc

    async def sampling(self, model: str) -> dict[str, float]:
        """How the model's makers want its tokens drawn; empty where nobody tells."""
        try:
            advice = (await self._http.get(f"/v1/models/{quote(model)}")).json().get("sampling", {})
            return {
                str(name): int(value) if float(value).is_integer() else float(value) for name, value in advice.items()
            }
        except (httpx.HTTPError, AttributeError, TypeError, ValueError):
            return {}  # whoever asks for an answer next is told what is wrong

    async def stream(
        self, messages: Sequence[Mapping[str, str]], *, model: str, options: Mapping[str, Any]
    ) -> AsyncIterator[Piece]:
        """The answer as it comes. Leaving the iterator stops the work. Raises the gateway's error as its own class."""
        usage = {"include_usage": True, "continuous_usage_stats": True}  # an answer that is stopped has figures, too
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
                        yield Piece(note=line.removeprefix(": "))
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
                next_step="ask again: its node starts the gateway anew    (see 'edgepipe logs')",
            )
        return NodeUnreachable(
            "the gateway does not answer",
            fact=f"{self._base_url}: {type(exc).__name__}",
            next_step="edgepipe status    (or: edgepipe logs)",
        )


async def event_lines(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream of events, which end with ``LF`` alone: text may hold U+0085 or U+2028, which end lines
    elsewhere, also in httpx."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def piece_from_event(data: str) -> Piece:
    """One event of a chat stream. Raises the error that it carries, RemoteProtocolError if it cannot be read."""
    try:
        body: Any = json.loads(data)
        if "error" in body:
            raise error_from_body(data.encode(), status=200)
        usage: dict[str, Any] = body.get("usage") or {}
        choice: dict[str, Any] = body["choices"][0] if body["choices"] else {}
        return Piece(
            text=choice.get("delta", {}).get("content") or "",
            finish_reason=choice.get("finish_reason"),
            completion_tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RemoteProtocolError("the gateway sent something that is no chat stream", fact=data[:100]) from exc


def error_from_body(data: bytes, *, status: int) -> EdgepipeError:
    """The gateway's error as the class whose code it carries."""
    try:
        error = json.loads(data)["error"]
        kind = error_class(str(error["code"]))
        if kind is EdgepipeError and 400 <= status < 500:
            kind = RequestInvalid  # a field's value: the gateway has codes of OpenAI's for these
        parts = error.get("edgepipe")
        return kind(**{name: str(text) for name, text in parts.items()}) if parts else kind(str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return RemoteProtocolError("the gateway answered with an error", fact=f"HTTP status {status}")
