"""Read parts of files on the Hugging Face Hub at one commit: ranges of bytes, and headers of unknown length.

Connections, redirects, token, endpoint and offline mode are those of ``huggingface_hub``, which is imported for the
first read.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from edgepipe.errors import ModelInvalid, RemoteProtocolError, SendTimeout
from edgepipe.store.hub import CONTACT_TIMEOUT_S, HubSource, hub_errors, no_hub_answer

METADATA_WAITS = 6  # time limit for an index or a header, in multiples of ``idle_s``
_FIRST_BYTES = 64 << 10  # holds most safetensors headers; a GGUF header with a vocabulary takes some megabytes
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19}-\d{1,19}|\*)/(\d{1,19})")

_T = TypeVar("_T")
_Parsed = TypeVar("_Parsed", covariant=True)


class SizedFile(Protocol):
    """A file on the hub."""

    @property
    def name(self) -> str:
        """Path within the repository."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size that the hub or the manifest promises."""
        ...


class HeaderParser(Protocol[_Parsed]):
    """Parses a file's header from its first bytes, and reads only as much as it needs."""

    def __call__(self, file: io.BytesIO, /, *, size: int, name: str) -> _Parsed:
        """``size``: of the whole file."""
        ...


class HubFiles:
    """Files of one repository. Connections stay open between reads; call ``aclose`` at the end."""

    def __init__(self, source: HubSource, *, endpoint: str | None, idle_s: float) -> None:
        """``endpoint``: None for the library's own; ``idle_s``: limit for silence of the hub, in seconds."""
        self._source = source
        self._endpoint = endpoint
        self._idle_s = idle_s
        self._session: _Session | None = None

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.client.aclose()

    async def header(self, file: SizedFile, parse: HeaderParser[_T], *, most_bytes: int) -> _T:
        """Parse a file's header as soon as enough bytes have arrived. Raises as ``chunks``, and the parser's errors."""
        data, needed = bytearray(), _FIRST_BYTES
        async with aclosing(self.chunks(file, 0, min(file.num_bytes, most_bytes))) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) < min(needed, file.num_bytes):
                    continue
                try:
                    return await asyncio.to_thread(parse, _Prefix(data), size=file.num_bytes, name=file.name)
                except _TooShort as short:
                    needed = max(short.needed, 2 * len(data))
        raise self.changed(f"the header of '{file.name}' does not end within {len(data)} bytes")

    async def chunks(self, file: SizedFile, begin: int, end: int) -> AsyncGenerator[bytes]:
        """Yield the bytes ``[begin, end)`` of a file, all of them or an error.

        Raises ModelInvalid (the file has another size), ModelUnknown (it no longer exists), ModelDownloadFailed
        (refused, unreachable, offline mode), RemoteProtocolError, SendTimeout.
        """
        whole = (begin, end) == (0, file.num_bytes)  # small files may be served without ranges
        left = end - begin
        if self._session is None:
            self._session = await asyncio.to_thread(_open_session)
        with hub_errors(self._source):
            async with self._opened(file.name, {} if whole else {"Range": f"bytes={begin}-{end - 1}"}) as response:
                self._check_answer(response, file, begin, end, whole=whole)
                async with aclosing(response.aiter_raw()) as chunks:
                    while (chunk := await self._next(chunks)) is not None:
                        left -= len(chunk)
                        if left < 0:
                            raise RemoteProtocolError(f"the hub sent more of '{file.name}' than requested")
                        yield chunk
        if left:
            raise RemoteProtocolError(f"the hub sent too little of '{file.name}'", fact=f"{left} bytes are missing")

    async def rest(self, file: SizedFile, begin: int) -> AsyncGenerator[HubPiece]:
        """Yield the bytes of a file from ``begin`` to its end, all of them or an error.

        A hub without ranges answers from byte 0.
        Raises as ``chunks``; a connection that ends early is a ModelDownloadFailed, too.
        """
        if self._session is None:
            self._session = await asyncio.to_thread(_open_session)
        with hub_errors(self._source):
            async with self._opened(file.name, {"Range": f"bytes={begin}-"} if begin else {}) as response:
                whole = response.status_code == 200
                begin = 0 if whole else begin
                self._check_answer(response, file, begin, file.num_bytes, whole=whole)
                etag = _etag_of(response)
                async with aclosing(response.aiter_raw()) as chunks:
                    while (chunk := await self._next(chunks)) is not None:
                        if begin + len(chunk) > file.num_bytes:
                            raise RemoteProtocolError(f"the hub sent more of '{file.name}' than requested")
                        yield HubPiece(offset=begin, etag=etag, data=chunk)
                        begin += len(chunk)
                if begin < file.num_bytes:
                    raise ConnectionError(f"the hub sent {begin} of {file.num_bytes} bytes of '{file.name}'")

    @asynccontextmanager
    async def patience(self, *, waits: float = 1.0) -> AsyncGenerator[None]:
        """Limit the time of the body to ``waits`` times ``idle_s``. Raises SendTimeout."""
        async with self._limit(waits * self._idle_s):
            yield

    def changed(self, fact: str) -> ModelInvalid:
        """Return the error for files that differ from the expected ones."""
        return ModelInvalid(
            f"the hub's files of '{self._source.repo}' differ from the model's",
            fact=fact,
            next_step=f"edgepipe models pull {self._source.repo}",
        )

    @asynccontextmanager
    async def _opened(self, file: str, headers: Mapping[str, str]) -> AsyncGenerator[Any]:
        """Open a response after its head. Leaving closes the connection unless everything was read."""
        assert self._session is not None
        session, source = self._session, self._source
        url = session.url(source.repo, file, revision=source.revision, endpoint=self._endpoint)
        async with AsyncExitStack() as stack:
            stream = session.client.stream("GET", url, headers={**session.headers, **headers})
            async with self._limit(min(CONTACT_TIMEOUT_S, self._idle_s)):
                response = await stack.enter_async_context(stream)
            yield response

    def _check_answer(self, response: Any, file: SizedFile, begin: int, end: int, *, whole: bool) -> None:
        """Check that the response has exactly the requested bytes of a file of the expected size."""
        from huggingface_hub.utils import hf_raise_for_status

        status, headers = response.status_code, response.headers
        plain = headers.get("Content-Encoding", "identity") == "identity"
        content_range = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        size = (
            content_range[2] if content_range else headers.get("Content-Length", "") if status == 200 and plain else ""
        )
        if status in (200, 206) and headers.get("Content-Type", "").startswith("text/html"):
            raise no_hub_answer(self._source, "a web page")
        if size and size != str(file.num_bytes):
            raise self.changed(f"'{file.name}' has {size[:20]} bytes, {file.num_bytes} were promised")
        hf_raise_for_status(response)
        right = status == 200 if whole else status == 206 and content_range and content_range[1] == f"{begin}-{end - 1}"
        if not right or not plain:
            raise RemoteProtocolError(
                f"the hub does not send the requested part of '{file.name}'",
                fact=f"it answered with status {status}" + ("" if plain else " and compressed bytes"),
            )

    async def _next(self, chunks: AsyncGenerator[bytes]) -> bytes | None:
        async with self._limit(self._idle_s):
            return await anext(chunks, None)

    @asynccontextmanager
    async def _limit(self, seconds: float) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as exc:
            raise SendTimeout(
                "the hub does not answer",
                fact=f"silent for {seconds:.0f} s",
                next_step="check this machine's internet connection and try again: the download resumes",
            ) from exc


def _etag_of(response: Any) -> str:
    """Return the entity tag of a file; empty without one. The hub's own counts more than that of a server of files."""
    linked = [str(answer.headers.get("X-Linked-Etag", "")) for answer in (*response.history, response)]
    etag = next(filter(None, linked), "") or str(response.headers.get("ETag", ""))
    return etag.removeprefix("W/")[:200]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPiece:
    """Bytes of a file."""

    offset: int  # place of the first byte within the file
    etag: str  # the file's ETag; empty if the hub gives none
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """The library's connection to the hub."""

    client: Any  # an httpx.AsyncClient
    headers: dict[str, str]  # HTTP headers, with the token if the user has one
    url: Callable[..., str]


def _open_session() -> _Session:
    """Open a session. Blocks: imports the library, reads certificates and the token."""
    import huggingface_hub
    from huggingface_hub import utils

    # Compression would change the positions of bytes.
    headers = cast("Any", utils).build_hf_headers(library_name="edgepipe") | {"Accept-Encoding": "identity"}
    return _Session(client=huggingface_hub.get_async_session(), headers=headers, url=huggingface_hub.hf_hub_url)


class _TooShort(Exception):
    """A parser needs more bytes than have arrived."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed  # bytes from the file's start


class _Prefix(io.BytesIO):
    """A file's first bytes. Reading beyond them raises ``_TooShort`` instead of returning less."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read exactly ``size`` bytes."""
        begin = self.tell()
        data = super().read(size)
        if size is not None and len(data) < size:
            raise _TooShort(begin + size)
        return data
