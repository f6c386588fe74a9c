"""``/v1/files``: upload, list, read and delete files. A client sees the files of its own key only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from edgepipe.errors import QueueFull
from edgepipe.gateway.access import owner_of
from edgepipe.gateway.batches.multipart import MultipartInvalid, MultipartReader, PartBegins, boundary_of
from edgepipe.gateway.batches.records import StoredFile
from edgepipe.gateway.batches.service import BatchService
from edgepipe.gateway.batches.store import Upload
from edgepipe.gateway.pieced import PiecedAnswers
from edgepipe.gateway.problems import HttpProblem, bad_request, from_error
from edgepipe.gateway.request_share import memory_of
from edgepipe.gateway.shares import Holding
from edgepipe.gateway.streams import StreamTimeouts, send_part, send_to_client
from edgepipe.safe_text import one_line

MAX_FILE_BYTES = 4 << 30
_MAX_FIELD_BYTES = 1 << 10  # bound on a field without a file
_WRITE_BYTES = 1 << 20  # written at once
_BUFFER_BYTES = 2 * _WRITE_BYTES  # memory of one upload
_READ_BYTES = 256 << 10
_SILENCE_S = 30.0  # an upload without a byte for so long ends
_CLOSE = {"Connection": "close"}  # the gateway reads no more of the body
_MAX_NAME_CHARS = 255
_LISTED, _MAX_LISTED = 100, 1000  # files of one page
_LEAST_KEPT_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHandlers:
    """Handlers of files."""

    batches: BatchService
    answers: PiecedAnswers

    async def create(self, request: Request) -> Response:
        """``POST /v1/files``: a form with ``purpose`` and ``file``."""
        file = await _Arrival(self.batches, owner_of(request)).receive(request)
        return JSONResponse(file.to_json())

    async def list_all(self, request: Request) -> Response:
        """``GET /v1/files``."""
        query, owner = request.query_params, owner_of(request)
        count = page_size(query.get("limit"), usual=_LISTED, most=_MAX_LISTED)
        order, after, purpose = query.get("order", "desc"), query.get("after", ""), query.get("purpose", "")
        if order not in ("asc", "desc"):
            raise bad_request("order must be asc or desc", param="order")
        found = await self.batches.store.do(
            lambda store: store.list_files(
                owner, purpose=purpose, after=after, newest_first=order == "desc", count=count + 1
            )
        )
        if found is None:
            raise bad_request("after must be the id of a file", param="after")
        return self.answers.json(page([file.to_json() for file in found], count))

    async def retrieve(self, request: Request) -> Response:
        """``GET /v1/files/{id}``."""
        return JSONResponse((await self.file(request)).to_json())

    async def content(self, request: Request) -> Response:
        """``GET /v1/files/{id}/content``."""
        file = await self.file(request)
        path = await self.batches.store.do(lambda store: store.path_of(file.file_id))
        return FileContent(path, num_bytes=file.num_bytes, timeouts=self.answers.timeouts)

    async def delete(self, request: Request) -> Response:
        """``DELETE /v1/files/{id}``."""
        file = await self.file(request)
        if used_by := await self.batches.delete(file):
            text = f"the batch {used_by} reads this file: cancel the batch first"
            raise HttpProblem(status=409, message=text, code="file_in_use")
        return JSONResponse({"id": file.file_id, "object": "file", "deleted": True})

    async def file(self, request: Request) -> StoredFile:
        """Return the file that a path names. Raises HttpProblem 404."""
        owner, file_id = owner_of(request), request.path_params["id"]
        found = await self.batches.store.do(lambda store: store.file(owner, file_id))
        if found is None:
            raise unknown("file", file_id)
        return found


class _Arrival:
    """An upload from its first byte to its record."""

    def __init__(self, batches: BatchService, owner: str) -> None:
        self._batches = batches
        self._owner = owner
        self._upload: Upload | None = None
        self._filename = ""
        self._fields: dict[str, bytes] = {}
        self._field = ""  # being read; empty: the file
        self._held = bytearray()  # bytes of the file that are not written

    async def receive(self, request: Request) -> StoredFile:
        """Read the body. Raises HttpProblem, EdgepipeError; then nothing of it stays."""
        file_id = self._batches.new_id("file")
        disk = self._batches.disk.holding(self._owner)
        try:
            reader = MultipartReader(boundary_of(request.headers.get("content-type", "")))
            _check_declared(request)
            memory_of(request).take(_BUFFER_BYTES)
            async for chunk in _chunks(request):
                for event in reader.push(chunk):
                    if isinstance(event, PartBegins):
                        await self._begin(event, file_id)
                    else:
                        await self._take(event.data, disk)
            if not reader.is_complete:
                raise MultipartInvalid("the form ends before its last boundary")
            await self._write()
            return await self._keep(file_id)
        except MultipartInvalid as exc:
            await self._abandon(disk)
            raise HttpProblem(status=400, message=str(exc), code="invalid_form", headers=_CLOSE) from exc
        except ClientDisconnect as exc:
            await self._abandon(disk)
            raise bad_request("the body is incomplete", code="body_incomplete") from exc
        except HttpProblem as problem:
            await self._abandon(disk)
            problem.headers = {**problem.headers, **_CLOSE}
            raise
        except BaseException:
            await self._abandon(disk)
            raise

    async def _begin(self, part: PartBegins, file_id: str) -> None:
        self._field = part.name
        if part.name != "file":
            self._fields[part.name] = b""
            return
        if self._upload is not None:
            raise MultipartInvalid("the form has two files")
        self._field = ""
        self._filename = one_line(part.filename or "upload.jsonl")[:_MAX_NAME_CHARS]
        self._upload = await self._batches.store.do(lambda store: store.new_upload(file_id))

    async def _take(self, data: bytes, disk: Holding) -> None:
        if self._field:
            self._fields[self._field] += data
            if len(self._fields[self._field]) > _MAX_FIELD_BYTES:
                raise MultipartInvalid(f"the field '{self._field[:64]}' has more than {_MAX_FIELD_BYTES} bytes")
            return
        if disk.amount + len(data) > MAX_FILE_BYTES:
            raise _too_large()
        try:
            disk.take(len(data))
        except QueueFull as exc:
            problem = from_error(exc)
            text = f"{exc.what}. {exc.fact}. Delete files, or raise the setting files_limit_bytes"
            raise HttpProblem(status=413, message=text, code="disk_quota", error=problem.error) from exc
        self._held += data
        if len(self._held) >= _WRITE_BYTES:
            await self._write()

    async def _write(self) -> None:
        if self._held and self._upload is not None:
            data, self._held = bytes(self._held), bytearray()
            await asyncio.to_thread(self._upload.write, data)

    async def _keep(self, file_id: str) -> StoredFile:
        upload = self._upload
        if upload is None:
            raise bad_request("the form has no file", param="file", code="missing_required_parameter")
        purpose = self._fields.get("purpose", b"").decode(errors="replace").strip()
        if purpose != "batch":
            raise bad_request("purpose must be batch", param="purpose")
        if not upload.num_bytes:
            raise bad_request("the file is empty", param="file")
        now_s = self._batches.now_s()
        file = StoredFile(
            file_id=file_id,
            owner=self._owner,
            num_bytes=upload.num_bytes,
            created_s=now_s,
            expires_s=now_s + min(self._kept_s(), self._batches.store.settings.kept_s),
            filename=self._filename,
            purpose="batch",
        )
        await self._batches.store.do(lambda store: store.keep(upload, file))
        return file

    def _kept_s(self) -> int:
        """Return the seconds until the file expires, as the client wants. Raises HttpProblem."""
        most_s = self._batches.store.settings.kept_s
        text = self._fields.get("expires_after[seconds]", b"").decode(errors="replace")
        if not text:
            return most_s
        if not (text.isascii() and text.isdigit() and int(text[:9]) >= _LEAST_KEPT_S):
            raise bad_request(f"expires_after[seconds] must be at least {_LEAST_KEPT_S}", param="expires_after")
        return int(text[:9])

    async def _abandon(self, disk: Holding) -> None:
        disk.release()
        if self._upload is not None:
            await asyncio.to_thread(self._upload.abandon)


class FileContent(Response):
    """The bytes of a file, read as the client takes them. Ends early if the client leaves or stalls."""

    media_type = "application/octet-stream"

    def __init__(self, path: Path, *, num_bytes: int, timeouts: StreamTimeouts) -> None:
        super().__init__()
        self.headers["content-length"] = str(num_bytes)
        self._path = path
        self._timeouts = timeouts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file."""
        file = await asyncio.to_thread(_open, self._path)
        try:
            await send_to_client(self._send_all(file, send), scope, receive, timeouts=self._timeouts)
        finally:
            await asyncio.to_thread(file.close)

    async def _send_all(self, file: BinaryIO, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while data := await asyncio.to_thread(file.read, _READ_BYTES):
            await send_part(send, data, timeouts=self._timeouts)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _open(path: Path) -> BinaryIO:
    """Open a file for reading. Raises HttpProblem 404 if it was deleted meanwhile."""
    try:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0)
    except FileNotFoundError as exc:
        raise unknown("file", path.name) from exc


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body. Raises HttpProblem 408 if it pauses for too long."""
    chunks = request.stream()
    while True:
        try:
            async with asyncio.timeout(_SILENCE_S):
                chunk = await anext(chunks, None)
        except TimeoutError as exc:
            raise HttpProblem(status=408, message="the body did not arrive in time", code="request_timeout") from exc
        if chunk is None:
            return
        yield chunk


def _check_declared(request: Request) -> None:
    text = request.headers.get("content-length", "0")
    if text.isdigit() and int(text) > MAX_FILE_BYTES + _WRITE_BYTES:
        raise _too_large()


def _too_large() -> HttpProblem:
    text = f"the file is larger than {MAX_FILE_BYTES >> 30} GiB: split it into several batches"
    return HttpProblem(status=413, message=text, code="file_too_large")


def unknown(kind: str, item_id: str) -> HttpProblem:
    """Build the problem of an id that this key has not made here."""
    text = f"no {kind} '{item_id[:64]}' is stored here for this key; other nodes do not have it"
    return HttpProblem(status=404, message=text, code=f"{kind}_not_found")


def page_size(text: str | None, *, usual: int, most: int) -> int:
    """Return the number of items of a page. Raises HttpProblem."""
    if text is None:
        return usual
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise bad_request(f"limit must be 1 to {most}", param="limit")
    return int(text)


def page(items: list[dict[str, object]], count: int) -> dict[str, object]:
    """Build a page of at most ``count`` of the items, which may be one more."""
    shown = items[:count]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > count,
    }
