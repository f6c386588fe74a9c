"""Files of the page, read once, with the headers that bind the browser to them."""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

import edgepipe
from edgepipe.gateway.ui.paths import FILES

FOLDER = Path(edgepipe.__file__).parent / "page"
INDEX = "index.html"
_MODULES = b"<!-- modules -->"  # links to all modules replace this line of the index
_IMPORT = re.compile(r'^(?:im|ex)port .* from "(\.[^"]+)";$', re.MULTILINE)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts and styles come from this server only, no text becomes code or markup, and no other site may frame the page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """One file, as it is sent."""

    media_type: str
    tag: str  # ETag: a digest of the content
    data: bytes
    packed: bytes  # gzip


class PageFiles:
    """The files of the page by path below ``FILES``. They are read when the first browser asks."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder

    @cached_property
    def files(self) -> Mapping[str, PageFile]:
        """Return every file of a known type."""
        found = sorted(path for path in self._folder.rglob("*") if path.suffix in _TYPES)
        data = {path.relative_to(self._folder).as_posix(): path.read_bytes() for path in found}
        data[INDEX] = data[INDEX].replace(_MODULES, _preloads(data))
        return {name: _packed(name, content) for name, content in data.items()}

    def answer(self, request: Request, name: str) -> Response | None:
        """Return the answer with a file; None for an unknown name."""
        file = self.files.get(name)
        if file is None:
            return None
        headers = {**HEADERS, "ETag": file.tag, "Cache-Control": "no-cache", "Vary": "Accept, Accept-Encoding"}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=file.media_type)
        return Response(file.data, headers=headers, media_type=file.media_type)


def _preloads(data: Mapping[str, bytes]) -> bytes:
    """Return the links by which a browser loads what Home needs at once, and not each module after its importer."""
    names, waiting = set[str](), ["app.js"]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            found = _IMPORT.findall(data[name].decode())
            waiting += [posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) for path in found]
    links = [f'<link rel="modulepreload" href="{FILES}{name}" />' for name in sorted(names)]
    return "\n    ".join(links).encode()


def _packed(name: str, data: bytes) -> PageFile:
    digest = hashlib.sha256(data).hexdigest()[:16]
    packed = gzip.compress(data, mtime=0)
    return PageFile(media_type=_TYPES[Path(name).suffix], tag=f'"{digest}"', data=data, packed=packed)
