"""The process of a draft model, from the stage's side: started, asked, and started again if it ends.

The stage's sampler threads ask. They wait a bounded time, so a draft model that is slow, hangs or has ended delays an
answer's token by that time at most, and drafts come from a lookup. While a question is open, no other is sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO, NamedTuple, Protocol

import numpy as np

from edgepipe.children.frames import HEAD, write_frame
from edgepipe.stage.draft_child import MODULE, READY, DraftLaunch, pack_question, read_answer

logger = logging.getLogger(__name__)

_WRITE_S = 0.1  # for a question; a process that does not read it in that time is ended
_HANG_S = 120.0  # for an answer: the tokens of the longest prompt on a slow CPU
_MOST_CRASHES = 5  # after so many in a row the process is not started again
_FORGIVEN_S = 60.0  # seconds without a crash after which all crashes are forgiven


class Reply(NamedTuple):
    """What a question brought."""

    sent: bool  # the draft model has the tokens, or will have them
    ids: tuple[int, ...] = ()
    late_us: int = 0  # time for tokens that it had missed: not a cost of these guesses


class Guesser(Protocol):
    """Guesses the tokens behind a sequence's known ones."""

    def ask(self, tokens: Sequence[int], count: int, *, within_s: float) -> Reply:
        """Return up to ``count`` guesses if they come in time."""
        ...


@dataclass(slots=True, eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    writing: threading.Lock = field(default_factory=threading.Lock)  # guards the pipe against a write after its end
    ended: bool = False
    answer: Future[bytes] | None = None  # answer to the open question
    asked_s: float = 0.0

    @property
    def source(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def sink(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin


class DraftProcess:
    """Runs ``edgepipe.stage.draft_child`` until ``close``. See ``Guesser``; any thread may ask."""

    def __init__(self, launch: DraftLaunch, *, pause_s: float = 1.0) -> None:
        """``pause_s``: before the second restart in a row; the first comes at once, each later one after twice that."""
        self._launch = launch
        self._pause_s = pause_s
        self._lock = threading.Lock()  # guards the fields below
        self._child: _Child | None = None  # loaded and not ended
        self._starting: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft-model", daemon=True)

    def start(self) -> None:
        """Start the process. Returns at once; questions before it has loaded bring nothing."""
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process that answers; None while none does."""
        with self._lock:
            return self._child.process.pid if self._child is not None else None

    def ask(self, tokens: Sequence[int], count: int, *, within_s: float) -> Reply:
        """See ``Guesser.ask``."""
        with self._lock:
            child = self._child
            if child is None:
                return Reply(sent=False)
            if child.answer is not None:
                if time.monotonic() - child.asked_s > _HANG_S:
                    child.process.kill()
                return Reply(sent=False)
            answer = child.answer = Future[bytes]()
            child.asked_s = time.monotonic()
        question = pack_question(np.array(tokens, np.int32), count)
        try:
            self._send(child, HEAD.pack(len(question)) + question)
            late_us, ids = read_answer(answer.result(timeout=within_s))
        except TimeoutError:
            return Reply(sent=True)
        except (OSError, _Ended):
            return Reply(sent=False)
        except _Stuck:
            child.process.kill()
            return Reply(sent=False)
        return Reply(True, ids, late_us)

    def close(self) -> None:
        """End the process and the thread. May be called twice."""
        self._closed.set()
        with self._lock:
            for process in filter(None, [self._child and self._child.process, self._starting]):
                process.kill()
        if self._thread.is_alive():
            self._thread.join()

    @staticmethod
    def _send(child: _Child, data: bytes) -> None:
        with child.writing:
            if child.ended:
                raise _Ended
            _write(child.sink.fileno(), data, within_s=_WRITE_S)

    def _run(self) -> None:
        crashes = 0
        while not self._closed.is_set():
            began_s = time.monotonic()
            reason = self._serve()
            if self._closed.is_set():
                return
            crashes = 1 if time.monotonic() - began_s > _FORGIVEN_S else crashes + 1
            if crashes > _MOST_CRASHES:
                logger.error("the draft model does not start again after %d crashes: %s", crashes, reason)
                return
            pause_s = self._pause_s * 2 ** (crashes - 2) if crashes > 1 else 0.0
            logger.warning(
                "the draft model's process has ended: %s. Drafts come from a lookup; it starts again in %g s",
                reason,
                pause_s,
            )
            self._closed.wait(pause_s)

    def _serve(self) -> str:
        """Run one process until it ends. Return why it ended."""
        command = [sys.executable, "-P", "-m", MODULE]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as exc:
            return f"it cannot be started: {exc.strerror}"
        child = _Child(process)
        with self._lock:
            self._starting = process
            if self._closed.is_set():
                process.kill()
        try:
            return self._follow(child)
        finally:
            with self._lock:
                self._child = self._starting = None
                answer, child.answer = child.answer, None
            if answer is not None:
                answer.set_exception(_Ended())
            process.kill()
            process.wait()
            child.source.close()
            with child.writing, contextlib.suppress(OSError):  # a part of a question may be left
                child.ended = True
                child.sink.close()

    def _follow(self, child: _Child) -> str:
        """Load, then pass answers on. Return why the process ended."""
        try:
            write_frame(child.sink, self._launch.to_json())
            first = _frame(child.source)
            if first != READY:
                return first[1:].decode(errors="replace") if first else _end_of(child.process)
            os.set_blocking(child.sink.fileno(), False)
            with self._lock:
                self._child = child
            logger.info("the draft model is loaded in process %d", child.process.pid)
            while data := _frame(child.source):
                with self._lock:
                    answer, child.answer = child.answer, None
                if answer is not None:
                    answer.set_result(data)
        except OSError:
            pass  # its end is the reason
        return _end_of(child.process)


class _Ended(Exception):
    """The process ended before it answered."""


class _Stuck(Exception):
    """The process did not read a question in time."""


def _frame(stream: IO[bytes]) -> bytes:
    """Return the next frame; empty at the end, also amid a frame."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return b""
    (length,) = HEAD.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else b""


def _end_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        return "it closed its pipe"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _write(descriptor: int, data: bytes, *, within_s: float) -> None:
    """Write to a pipe that does not block. Raises OSError at its end, ``_Stuck`` if it stays full."""
    ends_s = time.monotonic() + within_s
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            rest_s = ends_s - time.monotonic()
            if rest_s <= 0 or not waiting.poll(rest_s * 1e3):
                raise _Stuck from None
