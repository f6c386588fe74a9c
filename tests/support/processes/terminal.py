"""A program on a real terminal: keys in, and the screen as a person sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import pexpect
import pyte


class _Screen(pyte.HistoryScreen):
    """Answers what programs ask a terminal, such as where the cursor is."""

    def __init__(self, columns: int, lines: int, answer: Callable[[str], object]) -> None:
        super().__init__(columns, lines, history=5000, ratio=0.5)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        """Called by the emulator."""
        self._answer(data)


class Terminal:
    """Runs ``command`` until it ends or the block does. Waiting is for what stands on the screen, with a deadline."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        columns: int = 80,
        lines: int = 40,
        timeout_s: float = 60.0,
    ) -> None:
        self._columns = columns
        self._timeout_s = timeout_s
        self._process: Any = pexpect.spawn(
            command[0],
            list(command[1:]),
            env={**environment, "TERM": "xterm-256color"},
            dimensions=(lines, columns),
            encoding="utf-8",
            timeout=timeout_s,
        )
        self._screen = _Screen(columns, lines, self._process.send)
        self._stream = pyte.Stream(self._screen)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.close(force=True)

    def text(self) -> str:
        """What has been shown so far, as lines without trailing blanks; what scrolled away included."""
        above = ["".join(line[column].data for column in range(self._columns)) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self._screen.display]).rstrip()

    def until(self, wanted: str, *, count: int = 1) -> str:
        """Wait until the text stands there, ``count`` times. Fails with the screen when it does not come."""
        return self._wait(lambda text: text.count(wanted) >= count, repr(wanted))

    def until_prompt(self, prompt: str) -> str:
        """Wait until the last line is an empty prompt."""
        return self._wait(lambda text: text.endswith("\n" + prompt) or text == prompt, f"the prompt {prompt!r}")

    def send(self, keys: str) -> None:
        """Type."""
        self._process.send(keys)

    def exit_code(self) -> int:
        """Wait for the end of the program."""
        self._wait(lambda _: False, "", until_end=True)
        self._process.close()
        return self._process.exitstatus

    def _wait(self, reached: Callable[[str], bool], what: str, *, until_end: bool = False) -> str:
        deadline = time.monotonic() + self._timeout_s
        while not reached(text := self.text()):
            assert time.monotonic() < deadline, f"waited for {what}; the screen:\n{text}"
            try:
                self._stream.feed(self._process.read_nonblocking(4096, timeout=0.2))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                if until_end:
                    return text
                raise AssertionError(f"it ended before {what}; the screen:\n{text}") from None
        return text
