"""Client of a gateway's files and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import httpx

from edgepipe.cli.sse import error_from_body
from edgepipe.errors import NodeUnreachable, RemoteProtocolError
from edgepipe.plain_words import plain

_TIMEOUT = httpx.Timeout(60.0, connect=5.0)  # 60 s for each part of a file, and for an answer
_PAGE = 100  # batches
_FINAL = ("failed", "completed", "expired", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """A batch as the gateway shows it."""

    batch_id: str
    status: str
    endpoint: str
    num_lines: int
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    created_s: int
    expires_s: int
    output_file: str  # id; empty: none
    error_file: str
    errors: tuple[str, ...]
    note: str  # why it does not advance
    copies: int
    copy: str  # node that has the copy; empty: the batch wants none

    @property
    def is_final(self) -> bool:
        """Whether the batch has ended."""
        return self.status in _FINAL

    @property
    def num_done(self) -> int:
        """Number of lines with a result."""
        return self.completed + self.failed

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> BatchView:
        """Read the gateway's JSON. Raises RemoteProtocolError."""
        try:
            counts, usage = body["request_counts"], body["usage"]
            errors: Sequence[Mapping[str, Any]] = body["errors"]["data"] if body["errors"] else ()
            return cls(
                batch_id=str(body["id"]),
                status=str(body["status"]),
                endpoint=str(body["endpoint"]),
                num_lines=int(counts["total"]),
                completed=int(counts["completed"]),
                failed=int(counts["failed"]),
                input_tokens=int(usage["input_tokens"]),
                output_tokens=int(usage["output_tokens"]),
                created_s=int(body["created_at"]),
                expires_s=int(body["expires_at"]),
                output_file=str(body["output_file_id"] or ""),
                error_file=str(body["error_file_id"] or ""),
                errors=tuple(_error_text(error) for error in errors),
                note=str(body["edgepipe"]["note"]),
                copies=int(body["edgepipe"]["copies"]),
                copy=str(body["edgepipe"]["copy"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise RemoteProtocolError("the gateway sent no valid batch", next_step="edgepipe logs") from exc


class BatchClient:
    """Client of one gateway. Use as an asynchronous context manager. Its methods raise the gateway's errors."""

    def __init__(self, base_url: str, *, api_key: str = "") -> None:
        self._base_url = base_url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=base_url, timeout=_TIMEOUT, headers=headers, trust_env=False, verify=base_url.startswith("https:")
        )  # authorities that HTTP does not need take 20 ms to read

    async def __aenter__(self) -> BatchClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def upload(self, path: Path) -> str:
        """Upload a file of requests. Return its id. Raises OSError if it cannot be read."""
        with path.open("rb") as source:
            body = await self._ask("POST", "/v1/files", data={"purpose": "batch"}, files={"file": (path.name, source)})
        return str(body.get("id", ""))

    async def create(self, *, file_id: str, endpoint: str, window: str, copies: int = 1) -> BatchView:
        """Begin a batch."""
        wanted: dict[str, Any] = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        if copies > 1:
            wanted["edgepipe"] = {"copies": copies}
        return BatchView.of(await self._ask("POST", "/v1/batches", json=wanted))

    async def show(self, batch_id: str) -> BatchView:
        """Return a batch."""
        return BatchView.of(await self._ask("GET", f"/v1/batches/{quote(batch_id, safe='')}"))

    async def show_all(self) -> list[BatchView]:
        """Return the newest batches, the newest first."""
        body = await self._ask("GET", "/v1/batches", params={"limit": str(_PAGE)})
        return [BatchView.of(entry) for entry in body.get("data", ())]

    async def cancel(self, batch_id: str) -> BatchView:
        """Cancel a batch."""
        return BatchView.of(await self._ask("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel"))

    async def take_over(self, batch_id: str) -> BatchView:
        """Go on with a batch of a lost machine, from the copy on the gateway's machine."""
        return BatchView.of(await self._ask("POST", f"/v1/batches/{quote(batch_id, safe='')}/take_over"))

    async def download(self, file_id: str, target: Path) -> None:
        """Write a file's bytes to ``target``, which exists only once it is complete. Raises OSError."""
        part = target.with_name(f"{target.name}.part")
        try:
            async with self._http.stream("GET", f"/v1/files/{quote(file_id, safe='')}/content") as response:
                if response.status_code != 200:
                    raise error_from_body(await response.aread(), status=response.status_code)
                with part.open("wb") as out:
                    async for data in response.aiter_bytes():
                        out.write(data)
            part.replace(target)
        except httpx.HTTPError as exc:
            raise self._unreachable(exc) from exc
        finally:
            part.unlink(missing_ok=True)

    async def _ask(self, method: str, path: str, **parts: Any) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, **parts)
        except httpx.HTTPError as exc:
            raise self._unreachable(exc) from exc
        if response.status_code != 200:
            raise error_from_body(response.content, status=response.status_code)
        try:
            return cast("dict[str, Any]", response.json())
        except ValueError as exc:
            raise RemoteProtocolError(f"{self._base_url} is no edgepipe gateway", next_step="edgepipe status") from exc

    def _unreachable(self, exc: Exception) -> NodeUnreachable:
        return NodeUnreachable(
            "the gateway does not answer",
            fact=f"{self._base_url}: {plain(exc)}",
            next_step="edgepipe status    (or: edgepipe logs)",
        )


def _error_text(error: Mapping[str, Any]) -> str:
    place = f"line {error['line']}: " if error.get("line") else ""
    return f"{place}{error['message']}"
