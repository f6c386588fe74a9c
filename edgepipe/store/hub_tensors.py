"""Fetch the bytes of single tensors from the Hugging Face Hub, at the commit from which the model was pulled.

The manifest and the repository's index give a tensor's file; the file's header gives its position. The manifest limits
the trust in both: sizes are compared before any read, headers go through the parsers for files on disk, and the writer
of the bytes checks their hash.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from edgepipe.errors import ModelInvalid, ModelUnknown
from edgepipe.files.strict_json import parse_json_object
from edgepipe.spec.tensors import TensorPlace
from edgepipe.store.hub import HubSource, list_hub, parse_pinned
from edgepipe.store.hub_files import METADATA_WAITS, HubFiles
from edgepipe.weights.gguf_file import GgufNames, gguf_names, tensor_places
from edgepipe.weights.gguf_header import MAX_HEADER_BYTES as MAX_GGUF_HEADER_BYTES
from edgepipe.weights.gguf_header import parse_gguf_header
from edgepipe.weights.gguf_split import stored_gguf
from edgepipe.weights.manifest import FileEntry, Manifest
from edgepipe.weights.permuted_rows import unpermute_rows
from edgepipe.weights.safetensors_file import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    SINGLE_FILE,
    parse_safetensors,
    parse_weight_map,
)


class HubTensors:
    """Tensors of one model. Connections stay open between reads; call ``aclose`` at the end."""

    def __init__(self, manifest: Manifest, source: HubSource, *, endpoint: str | None, idle_s: float) -> None:
        self._manifest = manifest
        self._source = source
        self._endpoint = endpoint
        self._hub = HubFiles(source, endpoint=endpoint, idle_s=idle_s)
        self._files = {entry.name: entry for entry in manifest.files}
        self._gguf: Sequence[FileEntry] = ()  # the model's GGUF files under their names on the hub, once they are found
        self._names: GgufNames | None = None  # set for a GGUF model once its first header is read
        self._shards: Mapping[str, str] = {}  # file of each tensor, once the index is read
        self._places: dict[str, Mapping[str, TensorPlace]] = {}  # places of a file's tensors, once its header is read

    async def read(self, name: str, *, offset: int) -> AsyncGenerator[bytes]:
        """Yield a tensor's bytes from ``offset`` on, in the form that the manifest hashes.

        Raises ModelInvalid (the hub's files differ from the manifest), ModelUnknown (they no longer exist),
        ModelDownloadFailed (refused, unreachable, offline mode), RemoteProtocolError, SendTimeout.
        """
        async with self._hub.patience(waits=METADATA_WAITS):
            file, place = await self._find(name)
        heads = _Heads(place, offset) if place.permuted_heads else None
        start = heads.start if heads else offset
        if start == place.info.num_bytes:
            return
        begin, end = place.offset + start, place.offset + place.info.num_bytes
        async with aclosing(self._hub.chunks(file, begin, end)) as chunks:
            async for chunk in chunks:
                if data := heads.push(chunk) if heads else chunk:
                    yield data

    async def aclose(self) -> None:
        """Close the connections."""
        await self._hub.aclose()

    async def _find(self, name: str) -> tuple[FileEntry, TensorPlace]:
        stored = stored_gguf(self._files)
        file = await self._gguf_with(name, stored) if stored else await self._shard_of(name)
        place, promised = (await self._places_in(file)).get(name), self._manifest.by_name.get(name)
        if place is None or promised is None or place.info != promised.info:
            raise self._hub.changed(f"'{file.name}' has no tensor '{name[:80]}' as the manifest describes it")
        return file, place

    async def _shard_of(self, name: str) -> FileEntry:
        """Return the safetensors file that holds a tensor."""
        if index := self._files.get(INDEX_FILE):
            self._shards = self._shards or await self._index(index)
            shard = self._shards.get(name, "")
        else:
            shard = SINGLE_FILE
        if shard not in self._files:
            raise ModelInvalid(f"no file of the model holds tensor '{name[:80]}'", fact="the manifest lists none")
        return self._files[shard]

    async def _gguf_with(self, name: str, stored: Sequence[str]) -> FileEntry:
        """Return the GGUF file that holds a tensor, under its name on the hub. Read headers until it is found.

        ``stored``: the files' names in the store.
        """
        if not self._gguf:
            self._gguf = await self._find_gguf([self._files[part] for part in stored])
        for file in self._gguf:
            if name in await self._places_in(file):
                return file
        return self._gguf[0]

    async def _find_gguf(self, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """Find GGUF files by their hashes, because the store uses other names."""
        listing = await asyncio.to_thread(list_hub, self._source, endpoint=self._endpoint)
        names = {
            (file.sha256, file.num_bytes): file.name for file in listing.files if file.name.lower().endswith(".gguf")
        }
        found = [names.get((entry.sha256, entry.num_bytes), "") for entry in entries]
        if not all(found):
            raise ModelUnknown(f"the hub has no GGUF file of '{self._source.repo}' with the model's SHA-256")
        return [replace(entry, name=name) for entry, name in zip(entries, found, strict=True)]

    async def _index(self, entry: FileEntry) -> Mapping[str, str]:
        if entry.num_bytes > MAX_INDEX_BYTES:
            raise self._hub.changed(f"'{entry.name}' has {entry.num_bytes} bytes, at most {MAX_INDEX_BYTES} are read")
        data = bytearray()
        async with aclosing(self._hub.chunks(entry, 0, entry.num_bytes)) as chunks:
            async for chunk in chunks:
                data += chunk
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise self._hub.changed(f"'{entry.name}' has another SHA-256 than the manifest promises")
        return await asyncio.to_thread(lambda: parse_weight_map(parse_json_object(bytes(data), what=f"'{entry.name}'")))

    async def _places_in(self, file: FileEntry) -> Mapping[str, TensorPlace]:
        """Return the tensor places of a file's header, which is read once."""
        if file.name not in self._places:
            if file in self._gguf:
                places = await self._hub.header(file, self._parse_gguf, most_bytes=MAX_GGUF_HEADER_BYTES)
            else:
                places = await self._hub.header(file, parse_safetensors, most_bytes=8 + MAX_HEADER_BYTES)
            self._places[file.name] = places
        return self._places[file.name]

    def _parse_gguf(self, file: BinaryIO, /, *, size: int, name: str) -> dict[str, TensorPlace]:
        header = parse_gguf_header(file, size=size, name=name)
        if name == self._gguf[0].name:  # the only part with the model's metadata; it is read first
            self._names = gguf_names(header.metadata, file=name)
        assert self._names is not None  # the first part's header is read first
        return tensor_places(header, self._names, file=name)


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


class _Heads:
    """Converts arriving q and k rows of a llama GGUF file to Hugging Face's order, head by head."""

    def __init__(self, place: TensorPlace, offset: int) -> None:
        """``offset``: first byte of the result to return."""
        num_heads = place.permuted_heads or 1
        self._num_rows = place.info.shape[0] // num_heads  # rows of a head
        self._num_bytes = place.info.num_bytes // num_heads  # bytes of a head
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
