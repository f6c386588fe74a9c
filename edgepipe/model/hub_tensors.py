"""Fetch the bytes of single tensors from the Hugging Face Hub, at the commit from which the model was pulled.

The manifest and the repository's index give a tensor's file; the file's header gives its position. The manifest limits
the trust in both: sizes are compared before any read, headers go through the parsers for files on disk, and the writer
of the bytes checks their hash. Connections, redirects, token, endpoint and offline mode are those of
``huggingface_hub``, which is imported for the first tensor.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

import numpy as np

from edgepipe.errors import ModelInvalid, ModelUnknown, RemoteProtocolError, SendTimeout
from edgepipe.model.gguf_file import tensor_places, unpermute_rows
from edgepipe.model.gguf_header import MAX_HEADER_BYTES as MAX_GGUF_HEADER_BYTES
from edgepipe.model.gguf_header import parse_gguf_header
from edgepipe.model.hub import CONTACT_TIMEOUT_S, HubSource, hub_errors, list_hub, parse_pinned
from edgepipe.model.manifest import FileEntry, Manifest
from edgepipe.model.safetensors_file import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    SINGLE_FILE,
    parse_safetensors,
    parse_weight_map,
)
from edgepipe.model.strict_json import parse_json_object
from edgepipe.model.tensors import TensorPlace
from edgepipe.model.weights import GGUF_FILE

_FIRST_BYTES = 64 << 10  # holds most safetensors headers; a GGUF header with a vocabulary takes some megabytes
_METADATA_WAITS = 6  # time limit for an index or a header, in multiples of ``idle_s``
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19}-\d{1,19}|\*)/(\d{1,19})")


class HubTensors:
    """Tensors of one model. Connections stay open between reads; call ``aclose`` at the end."""

    def __init__(self, manifest: Manifest, source: HubSource, *, endpoint: str | None, idle_s: float) -> None:
        self._manifest = manifest
        self._source = source
        self._endpoint = endpoint
        self._idle_s = idle_s
        self._files = {entry.name: entry for entry in manifest.files}
        self._session: _Session | None = None
        self._gguf_name = ""
        self._shards: Mapping[str, str] = {}  # tensor to file, once the index is read
        self._places: dict[str, Mapping[str, TensorPlace]] = {}  # by file name, once its header is read

    async def read(self, name: str, *, offset: int) -> AsyncGenerator[bytes]:
        """Yield a tensor's bytes from ``offset`` on, in the form that the manifest hashes.

        Raises ModelInvalid (the hub's files differ from the manifest), ModelUnknown (they no longer exist),
        ModelDownloadFailed (refused, unreachable, offline mode), RemoteProtocolError, SendTimeout.
        """
        async with self._patience(_METADATA_WAITS * self._idle_s):
            file, place = await self._find(name)
        heads = _Heads(place, offset) if place.permuted_heads else None
        start = heads.start if heads else offset
        if start == place.info.num_bytes:
            return
        async with aclosing(self._range(file, place.offset + start, place.offset + place.info.num_bytes)) as chunks:
            async for chunk in chunks:
                if data := heads.push(chunk) if heads else chunk:
                    yield data

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.client.aclose()

    async def _find(self, name: str) -> tuple[FileEntry, TensorPlace]:
        file = await self._file_of(name)
        if file.name not in self._places:
            self._places[file.name] = await self._header(file)
        place, promised = self._places[file.name].get(name), self._manifest.by_name.get(name)
        if place is None or promised is None or place.info != promised.info:
            raise self._another(f"'{file.name}' has no tensor '{name[:80]}' as the manifest describes it")
        return file, place

    async def _file_of(self, name: str) -> FileEntry:
        """Return the file that holds a tensor, under its name on the hub."""
        if gguf := self._files.get(GGUF_FILE):
            self._gguf_name = self._gguf_name or await self._find_gguf(gguf)
            return replace(gguf, name=self._gguf_name)
        if index := self._files.get(INDEX_FILE):
            self._shards = self._shards or await self._index(index)
            shard = self._shards.get(name, "")
        else:
            shard = SINGLE_FILE
        if shard not in self._files:
            raise ModelInvalid(f"no file of the model holds tensor '{name[:80]}'", fact="the manifest lists none")
        return self._files[shard]

    async def _find_gguf(self, gguf: FileEntry) -> str:
        """Find the GGUF file by its hash, because the store uses another name."""
        _, files = await asyncio.to_thread(list_hub, self._source, endpoint=self._endpoint)
        for file in files:
            if file.name.endswith(".gguf") and (file.sha256, file.num_bytes) == (gguf.sha256, gguf.num_bytes):
                return file.name
        raise ModelUnknown(f"the hub has no GGUF file of '{self._source.repo}' with the model's SHA-256")

    async def _index(self, entry: FileEntry) -> Mapping[str, str]:
        if entry.num_bytes > MAX_INDEX_BYTES:
            raise self._another(f"'{entry.name}' has {entry.num_bytes} bytes, at most {MAX_INDEX_BYTES} are read")
        data = bytearray()
        async with aclosing(self._range(entry, 0, entry.num_bytes)) as chunks:
            async for chunk in chunks:
                data += chunk
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise self._another(f"'{entry.name}' has another SHA-256 than the manifest promises")
        return await asyncio.to_thread(lambda: parse_weight_map(parse_json_object(bytes(data), what=f"'{entry.name}'")))

    async def _header(self, file: FileEntry) -> Mapping[str, TensorPlace]:
        """Return the tensor places of a file's header, as soon as enough bytes have arrived."""
        gguf = file.name == self._gguf_name
        parse, most = (_parse_gguf, MAX_GGUF_HEADER_BYTES) if gguf else (parse_safetensors, 8 + MAX_HEADER_BYTES)
        data, needed = bytearray(), _FIRST_BYTES
        async with aclosing(self._range(file, 0, min(file.num_bytes, most))) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) < min(needed, file.num_bytes):
                    continue
                try:
                    return await asyncio.to_thread(parse, _Prefix(data), size=file.num_bytes, name=file.name)
                except _TooShort as short:
                    needed = max(short.needed, 2 * len(data))
        raise self._another(f"the header of '{file.name}' does not end within {len(data)} bytes")

    async def _range(self, file: FileEntry, begin: int, end: int) -> AsyncGenerator[bytes]:
        """Yield the bytes ``[begin, end)`` of a file, all of them or an error."""
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

    @asynccontextmanager
    async def _opened(self, file: str, headers: Mapping[str, str]) -> AsyncGenerator[Any]:
        """Open a response after its head. Leaving closes the connection unless everything was read."""
        assert self._session is not None
        session, source = self._session, self._source
        url = session.url(source.repo, file, revision=source.revision, endpoint=self._endpoint)
        async with AsyncExitStack() as stack:
            stream = session.client.stream("GET", url, headers={**session.headers, **headers})
            async with self._patience(min(CONTACT_TIMEOUT_S, self._idle_s)):
                response = await stack.enter_async_context(stream)
            yield response

    def _check_answer(self, response: Any, file: FileEntry, begin: int, end: int, *, whole: bool) -> None:
        """Check that the response has exactly the requested bytes of a file of the expected size."""
        from huggingface_hub.utils import hf_raise_for_status

        status, headers = response.status_code, response.headers
        plain = headers.get("Content-Encoding", "identity") == "identity"
        content_range = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        size = (
            content_range[2] if content_range else headers.get("Content-Length", "") if status == 200 and plain else ""
        )
        if size and size != str(file.num_bytes):
            raise self._another(f"'{file.name}' has {size[:20]} bytes, the manifest promises {file.num_bytes}")
        hf_raise_for_status(response)
        right = status == 200 if whole else status == 206 and content_range and content_range[1] == f"{begin}-{end - 1}"
        if not right or not plain:
            raise RemoteProtocolError(
                f"the hub does not send the requested part of '{file.name}'",
                fact=f"it answered with status {status}" + ("" if plain else " and compressed bytes"),
            )

    async def _next(self, chunks: AsyncGenerator[bytes]) -> bytes | None:
        async with self._patience(self._idle_s):
            return await anext(chunks, None)

    @asynccontextmanager
    async def _patience(self, seconds: float) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as exc:
            raise SendTimeout(
                "the hub does not answer",
                fact=f"silent for {seconds:.0f} s",
                next_step="check this machine's internet connection and try again: the download resumes",
            ) from exc

    def _another(self, fact: str) -> ModelInvalid:
        return ModelInvalid(
            f"the hub's files of '{self._source.repo}' differ from the model's",
            fact=fact,
            next_step=f"edgepipe models pull {self._source.repo}",
        )


@asynccontextmanager
async def hub_tensors(manifest: Manifest, *, endpoint: str | None, idle_s: float) -> AsyncGenerator[HubTensors | None]:
    """Open the tensors of a model pulled from the hub; None for any other model. Sends no request yet.

    ``endpoint``: None for the library's own; ``idle_s``: limit for silence of the hub, in seconds.
    """
    source = parse_pinned(manifest.source)
    if source is None:
        yield None
        return
    tensors = HubTensors(manifest, source, endpoint=endpoint, idle_s=idle_s)
    try:
        yield tensors
    finally:
        await tensors.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """The library's connection to the hub."""

    client: Any  # an httpx.AsyncClient
    headers: dict[str, str]  # with the token, if any
    url: Callable[..., str]


def _open_session() -> _Session:
    """Open a session. Blocks: imports the library, reads certificates and the token."""
    import huggingface_hub
    from huggingface_hub import utils

    # Compression would change the positions of bytes.
    headers = cast("Any", utils).build_hf_headers(library_name="edgepipe") | {"Accept-Encoding": "identity"}
    return _Session(client=huggingface_hub.get_async_session(), headers=headers, url=huggingface_hub.hf_hub_url)


class _Heads:
    """Converts arriving q and k rows of a llama GGUF file to Hugging Face's order, head by head."""

    def __init__(self, place: TensorPlace, offset: int) -> None:
        """``offset``: first byte of the result to return."""
        num_heads = place.permuted_heads or 1
        self._num_rows = place.info.shape[0] // num_heads  # of a head
        self._num_bytes = place.info.num_bytes // num_heads  # of a head
        self._skipped = offset % self._num_bytes
        self._held = bytearray()
        self.start = offset - self._skipped  # first byte to read from the file

    def push(self, chunk: bytes) -> bytes:
        """Add a chunk and return the heads that it completes."""
        self._held += chunk
        num_heads = len(self._held) // self._num_bytes
        if not num_heads:
            return b""
        taken = np.frombuffer(bytes(self._held[: num_heads * self._num_bytes]), np.uint8)
        del self._held[: len(taken)]
        data = unpermute_rows(taken, num_heads * self._num_rows, num_heads).tobytes()[self._skipped :]
        self._skipped = 0
        return data


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


def _parse_gguf(file: BinaryIO, *, size: int, name: str) -> dict[str, TensorPlace]:
    return tensor_places(parse_gguf_header(file, size=size, name=name), file=name)
