"""Large answers are made and sent in pieces: others are served in between, and a client that leaves ends the work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.gateway.completion_service import _scored_limit
from edgepipe.gateway.json_pieces import PIECE_CHARS, ArrayParts, TextParts, compact, json_pieces
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.text import MAX_PART_CHARS, Delta, parts_of
from edgepipe.gateway.tool_calls import CallDelta
from edgepipe.sampling import SamplingParams
from edgepipe.wire.intake import MAX_SCORES
from tests.support.gateways.fake_engine import ByteAssets, FakeEngine
from tests.support.gateways.server import Served, serving

NUM_TOKENS = 3000
TOKENS = [97 + place % 26 for place in range(NUM_TOKENS)]
USER = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "an echo": ("/v1/completions", {"prompt": TOKENS, "echo": True, "logprobs": 20, "n": 4, "max_tokens": 1}),
    "scores": ("/v1/completions", {"prompt": "hi", "logprobs": 20, "max_tokens": NUM_TOKENS}),
    "a chat": ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 20}),
    "Ollama's chat": ("/api/chat", {"model": "tiny", "messages": USER, "top_logprobs": 20}),
    "Ollama's prompt": ("/api/generate", {"model": "tiny", "prompt": "hi", "top_logprobs": 20}),
    "texts of tokens": ("/tokenize", {"prompt": "x" * (8 * NUM_TOKENS), "return_token_strs": True}),
    "a text of tokens": ("/detokenize", {"tokens": TOKENS * 4}),
}
MOST_CALLS = 8192  # conversions of tokens in one turn of the loop: some 8 ms


class CountingAssets(ByteAssets):
    """Counts how many tokens are converted in each turn of the event loop."""

    def __init__(self) -> None:
        self.calls = 0
        self.most_calls = 0

    async def count(self) -> None:
        """Run in the background."""
        while True:
            self.calls = 0
            await asyncio.sleep(0)
            self.most_calls = max(self.most_calls, self.calls)

    def token_text(self, token: int) -> str:
        self.calls += 1
        return super().token_text(token)

    def new_decoder(self) -> Any:
        decoder, own = super().new_decoder(), self

        class _Counting:
            def add(self, token: int) -> str:
                own.calls += 1
                return decoder.add(token)

            def finish(self) -> str:
                return decoder.finish()

        return _Counting()


async def _answer(served: Served, path: str, body: dict[str, Any], *, leaves_after: int | None = None) -> list[bytes]:
    """The parts of the body, as the application sends them to a client that leaves after some of them."""
    parts: list[bytes] = []
    left = asyncio.Event()
    unread = [json.dumps(body).encode()]

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        parts.append(message.get("body", b""))
        if len(parts) == leaves_after:
            left.set()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"headers": headers, "query_string": b"", "client": ("127.0.0.1", 1), "http_version": "1.1"}
    scope["state"] = {"connection": SimpleNamespace(half_closed=asyncio.Event())}
    async with asyncio.timeout(60):
        await served.gateway.app(scope, receive, send)
    return parts


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", REQUESTS)
async def test_while_a_large_answer_is_made_others_get_their_turns(kind: str, stream: bool) -> None:
    path, body = REQUESTS[kind]
    if stream and "token" in path:
        pytest.skip("never streamed")
    assets = CountingAssets()
    answer = b"x" * NUM_TOKENS
    async with serving(FakeEngine(answer=answer, group=NUM_TOKENS), load=lambda path: assets) as served:
        await served.complete(max_tokens=1)  # the assets are loaded
        counting = asyncio.create_task(assets.count())
        parts = await _answer(served, path, body | {"stream": stream} if "token" not in path else body)
        counting.cancel()
    whole = b"".join(parts)
    assert len(whole) > PIECE_CHARS / 8
    assert max(map(len, parts)) <= 5 * PIECE_CHARS
    assert assets.most_calls <= MOST_CALLS
    if not stream:
        json.loads(whole)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_ends_the_making_of_its_answer(stream: bool) -> None:
    assets = CountingAssets()
    path, body = REQUESTS["an echo"]
    async with serving(FakeEngine(), load=lambda path: assets) as served:
        await served.complete(max_tokens=1)
        parts = await _answer(served, path, body | {"stream": stream}, leaves_after=4)
    assert len(parts) <= 6
    assert assets.calls <= 4 * MOST_CALLS, "of 252,000 for the whole answer"


async def test_a_streamed_echo_is_the_unstreamed_one_in_parts() -> None:
    prompt = [*TOKENS[:500], 256, 0xC3, 0xA9, *TOKENS[:77]]
    request = {"echo": True, "logprobs": 2, "max_tokens": 3, "n": 2}
    async with serving(FakeEngine()) as served:
        whole = (await served.complete([prompt], **request)).json()["choices"]
        events = (await served.complete([prompt], stream=True, **request)).text.split("\n\n")
    for index, choice in enumerate(whole):
        found = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
        found = [part for part in found if part["index"] == index]
        assert "".join(part["text"] for part in found) == choice["text"]
        for name, values in choice["logprobs"].items():
            joined = [value for part in found if part["logprobs"] for value in part["logprobs"][name]]
            assert joined == values, name


def test_an_echo_for_several_choices_counts_once_for_each() -> None:
    sampling = SamplingParams(prompt_logprobs=True, logprobs=True, top_logprobs=20)
    prompts = [[1] * 8000] * 6
    assert _scored_limit(prompts, sampling, num_choices=1) > 0
    with pytest.raises(HttpProblem) as refused:
        _scored_limit(prompts, sampling, num_choices=4)
    assert refused.value.param == "logprobs"
    for number in ("48000 tokens", "4 choices (n)", str(4 * 48000 * 21), str(MAX_SCORES)):
        assert number in refused.value.message
    assert _scored_limit([[1] * 1000], sampling, num_choices=8) * 8 * 21 + 8 * 1000 * 21 <= MAX_SCORES


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(VALUES)
def test_the_pieces_of_a_value_are_its_json(value: object) -> None:
    assert (
        "".join(piece.data.decode(errors="surrogatepass") for piece in json_pieces(value))
        == compact(value).encode(errors="backslashreplace").decode()
    )


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ("é\n" * 100_000, None),
        (list(range(100_000)), None),
        (["x" * 70, *range(600)] * 300, None),
        ([{"a": [{}]}] * 10_000, None),
        ({"a": TextParts(["ab\n"] * 100_000)}, {"a": "ab\n" * 100_000}),
        (ArrayParts([[], [1], [], [{"a": 2}, 3]] * 1000), [1, {"a": 2}, 3] * 1000),
        (ArrayParts([[]] * 10), []),
    ],
    ids=["text", "numbers", "mixed", "objects", "parts of a text", "parts of an array", "nothing"],
)
def test_no_piece_is_large(value: object, plain: object) -> None:
    pieces = list(json_pieces(value))
    assert json.loads(b"".join(piece.data for piece in pieces)) == (value if plain is None else plain)
    assert all(len(piece.data) <= 3 * PIECE_CHARS for piece in pieces)
    assert [piece.more for piece in pieces] == [True] * (len(pieces) - 1) + [False]


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.sampled_from([-1, 0, 1]))
def test_a_long_delta_is_cut_and_loses_nothing(text: int, reasoning: int, arguments: int, more: int) -> None:
    sizes = [max(0, MAX_PART_CHARS * times + more) for times in (text, reasoning, arguments)]
    delta = Delta(
        choice=1,
        text="a" * sizes[0],
        reasoning="b" * sizes[1],
        ids=(1, 2),
        finish_reason="stop",
        calls=(CallDelta(index=0, call_id="c", name="f", arguments="x" * sizes[2]), CallDelta(index=1, name="g")),
    )
    parts = list(parts_of(delta))
    assert "".join(part.text for part in parts) == delta.text
    assert "".join(part.reasoning for part in parts) == delta.reasoning
    calls = [call for part in parts for call in part.calls]
    assert "".join(call.arguments for call in calls if call.index == 0) == "x" * sizes[2]
    assert [call.name for call in calls if call.name] == ["f", "g"]
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert parts[-1].ids == (1, 2)
    assert all(max(len(part.text), len(part.reasoning)) <= MAX_PART_CHARS for part in parts)
