"""What cannot work in pairing is said with the next step."""

from __future__ import annotations

import pytest

from tests.support.processes.command_line import Run


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (("node", "invite"), 2, ("a person must confirm", "--yes")),
        (("node", "join", "12345"), 2, ("no pairing code", "4821-9037")),
        (
            ("node", "join", "--host", "127.0.0.1:1", "1234-5678"),
            3,
            ("no machine invites at 127.0.0.1:1", "node invite"),
        ),
        (("node", "join", "--host", "a:b", "1234-5678"), 2, ("the host cannot be",)),
        (("peers",), 3, ("no edgepipe node runs",)),
    ],
)
def test_what_cannot_work_is_said_with_the_next_step(
    run: Run, words: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    done = run(*words)
    assert done.code == code, done.err
    assert [line[:3] for line in done.err.splitlines()] == ["err", "   ", "   "]
    for part in parts:
        assert part in done.err
