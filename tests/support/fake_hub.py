"""A model hub on loopback: enough of the API for listing a repository and fetching files, with faults to order."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What the hub has and does. Files above ``lfs_from`` bytes are told with SHA-256, others with git's hash."""

    repo: str
    files: dict[str, bytes]
    lfs_from: int = 10_000
    endpoint: str = ""
    cut_after: dict[str, int] = field(default_factory=dict[str, int])  # bytes sent before the connection breaks, once
    damaged: set[str] = field(default_factory=set[str])  # sent with another end than announced
    refused: dict[str, int] = field(default_factory=dict[str, int])  # answered with 403 after so many GETs
    failing: dict[str, list[int]] = field(
        default_factory=dict[str, list[int]]
    )  # statuses of the next requests; "": API
    refusal: dict[str, str] = field(default_factory=dict[str, str])  # headers of these answers
    silent: set[str] = field(default_factory=set[str])  # half of what was asked for is sent, then nothing more
    cdn: bool = False  # files are told to be at another origin
    tokens: dict[str, set[str]] = field(default_factory=dict[str, set[str]])  # Authorization headers by Host header
    ranges: bool = True  # else every GET is answered with the whole file
    held: threading.Event = field(default_factory=threading.Event)  # somebody waits for the rest of a silent one
    ended: threading.Event = field(default_factory=threading.Event)
    tags: list[str] = field(default_factory=list[str])
    asked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # (file, Range header) of every GET

    def listing(self) -> dict[str, Any]:
        """The answer of the model's API."""
        siblings = [self._sibling(name, data) for name, data in self.files.items()]
        return {
            "id": self.repo,
            "modelId": self.repo,
            "sha": COMMIT,
            "siblings": siblings,
            "tags": self.tags,
            "private": False,
        }

    def _sibling(self, name: str, data: bytes) -> dict[str, Any]:
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        value: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git}
        if len(data) >= self.lfs_from:
            value["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
        return value


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: whoever asks may hang up."""


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve a hub on a free port of 127.0.0.1."""
    server = _Server(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = urlsplit(self.path).path
            resolve = f"/{hub.repo}/resolve/{COMMIT}/"
            hub.tokens.setdefault(self.headers["Host"], set()).add(self.headers.get("Authorization", ""))
            if path.startswith("/api/") and hub.failing.get(""):
                self._send(b"{}", hub.refusal, status=hub.failing[""].pop(0), body=body)
            elif path.startswith(f"/api/models/{hub.repo}"):
                self._send(json.dumps(hub.listing()).encode(), {"Content-Type": "application/json"}, body=body)
            elif path.startswith("/cdn/"):
                self._file(path.removeprefix("/cdn/"), body=body)
            elif path.startswith(resolve) and hub.cdn:
                there = hub.endpoint.replace("127.0.0.1", "localhost")
                self._send(b"", {"Location": f"{there}/cdn/{path.removeprefix(resolve)}"}, status=302, body=body)
            elif path.startswith(resolve) and path.removeprefix(resolve) in hub.files:
                self._file(path.removeprefix(resolve), body=body)
            else:
                code = "RepoNotFound" if path.startswith("/api/") else "EntryNotFound"
                self._send(b"{}", {"X-Error-Code": code}, status=404, body=body)

        def _file(self, name: str, *, body: bool) -> None:
            data = hub.files[name]
            if hub.refused.get(name, 1 << 30) <= [asked for asked, _ in hub.asked].count(name):
                self._send(b"{}", {}, status=403, body=body)
                return
            if hub.failing.get(name) and any(asked == name for asked, _ in hub.asked):  # once its header was read
                self._send(b"{}", hub.refusal, status=hub.failing[name].pop(0), body=body)
                return
            asked = self.headers.get("Range", "")
            if body:
                hub.asked.append((name, asked))
            if name in hub.damaged:
                data = data[:-8] + bytes(8)
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            part = data
            if asked and hub.ranges:
                first, last = asked.removeprefix("bytes=").split("-")
                part = data[int(first) : int(last) + 1 if last else None]
                headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            cut = hub.cut_after.pop(name, None) if body else None
            silent = body and name in hub.silent
            if silent:
                cut = len(part) // 2
            self._send(part, headers, status=206 if "Content-Range" in headers else 200, body=body, cut=cut)
            if silent:
                self.wfile.flush()
                hub.held.set()
                hub.ended.wait()

        def _send(
            self, data: bytes, headers: dict[str, str], *, status: int = 200, body: bool, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data if cut is None else data[:cut])
            if cut is not None:
                self.close_connection = True

    return Handler
