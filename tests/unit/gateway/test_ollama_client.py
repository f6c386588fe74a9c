"""Ollama's own client in Python, pointed at a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import ollama
import pytest
import pytest_asyncio

from edgepipe.gateway.access import AccessRules
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = [{"role": "user", "content": "hi"}]
TEXT = "The capital of France is Paris."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[ollama.AsyncClient]:
    async with serving(FakeEngine(group=4)) as served, _client(served) as value:
        yield value


def _client(served: Served) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=f"http://127.0.0.1:{served.port}")


async def test_chats_and_prompts_whole_and_streamed(client: ollama.AsyncClient) -> None:
    assert (await client.chat("tiny", messages=USER)).message.content == TEXT
    assert (await client.generate("tiny", "hi", think=False, keep_alive="-1s")).response == TEXT
    parts = [part async for part in await client.chat("tiny:latest", messages=USER, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == TEXT
    assert parts[-1].done_reason == "stop"
    cut = await client.chat("tiny", messages=USER, options={"num_predict": 4, "num_ctx": 2048})
    assert (cut.message.content, cut.done_reason) == ("The ", "length")


async def test_lists_are_read_and_stay_the_same(client: ollama.AsyncClient) -> None:
    first = await client.list()
    assert [model.model for model in first.models] == ["tiny"]
    assert await client.list() == first
    (loaded,) = (await client.ps()).models
    assert loaded.expires_at is not None
    assert loaded.expires_at.year == 2200
    assert (await client.show("tiny")).capabilities == ["completion", "tools"]


async def test_errors_are_one_line(client: ollama.AsyncClient) -> None:
    with pytest.raises(ollama.ResponseError, match="nothing") as caught:
        await client.chat("nothing", messages=USER)
    assert caught.value.status_code == 404
    async with serving(FakeEngine(), rules=AccessRules.of(keys=("ep-a-key",), key_on_loopback=True)) as served:
        async with _client(served) as keyless:
            with pytest.raises(ollama.ResponseError) as refused:
                await keyless.list()
    assert refused.value.error.startswith("the request needs a key")
