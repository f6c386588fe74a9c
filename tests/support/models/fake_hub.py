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

from edgepipe.store.hub_patience import PullClock

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What the hub has and does. Files above ``lfs_from`` bytes are told with SHA-256, others with git's hash."""

    repo: str
    files: dict[str, bytes]
    lfs_from: int = 10_000
    endpoint: str = ""
    cut_after: dict[str, int] = field(default_factory=dict[str, int])  # bytes sent before the connection breaks, once
    cuts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])  # bytes of the next answers' bodies
    sent_bytes: dict[str, int] = field(default_factory=dict[str, int])  # bytes of each file, in all
    etags: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # etags of the next answers; empty: none
    portal: set[str] = field(default_factory=set[str])  # answered with a login page; "": the API
    page: bytes = b"<html>Log in</html>"
    damaged: set[str] = field(default_factory=set[str])  # sent with another end than announced
    refused: dict[str, int] = field(default_factory=dict[str, int])  # answered with 403 after so many GETs
    failing: dict[str, list[int]] = field(
        default_factory=dict[str, list[int]]
    )  # statuses of the next requests; "": API
    failing_after: int = 1  # GETs of the file, so that its header is read before
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


def virtual_pauses(paused: list[float]) -> PullClock:
    """A clock that a pull's pauses move and nothing else. ``paused`` gets them, in seconds."""

    async def sleep(seconds: float) -> None:
        paused.append(seconds)

    return PullClock(now_s=lambda: sum(paused), sleep=sleep)


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
        disable_nagle_algorithm = True  # headers and body are two writes: the second would wait 40 ms

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
            if "" in hub.portal and path.startswith("/api/"):
                self._send(hub.page, {"Content-Type": "text/html"}, body=body)
            elif path.startswith("/api/") and hub.failing.get(""):
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
            if hub.failing.get(name) and [asked for asked, _ in hub.asked].count(name) >= hub.failing_after:
                self._send(b"{}", hub.refusal, status=hub.failing[name].pop(0), body=body)
                return
            if name in hub.portal and any(asked == name for asked, _ in hub.asked):
                self._send(hub.page, {"Content-Type": "text/html"}, body=body)
                return
            asked = self.headers.get("Range", "")
            if body:
                hub.asked.append((name, asked))
            if name in hub.damaged:
                data = data[:-8] + bytes(8)
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            if hub.etags.get(name):
                headers["ETag"] = hub.etags[name].pop(0)
            headers = {key: value for key, value in headers.items() if value}
            part = data
            if asked and hub.ranges:
                first, last = asked.removeprefix("bytes=").split("-")
                part = data[int(first) : int(last) + 1 if last else None]
                headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            cut = hub.cut_after.pop(name, None) if body else None
            if body and hub.cuts.get(name):
                cut = hub.cuts[name].pop(0)
            silent = body and name in hub.silent
            if silent:
                cut = len(part) // 2
            hub.sent_bytes[name] = hub.sent_bytes.get(name, 0) + (len(part) if cut is None else cut) * body
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
