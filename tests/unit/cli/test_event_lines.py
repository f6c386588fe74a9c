"""Lines of event streams."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from edgepipe.cli.sse import event_lines


async def test_only_newlines_end_lines_wherever_the_bytes_are_cut() -> None:
    text = 'data: {"text": "one\u0085two\u2028three\u2029"}\n\n: a note\r\ndata: [DONE]'
    data = text.encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 7):
            yield data[start : start + 7]

    found = [line async for line in event_lines(httpx.Response(200, content=pieces()))]
    assert found == ['data: {"text": "one\u0085two\u2028three\u2029"}', "", ": a note", "data: [DONE]"]
