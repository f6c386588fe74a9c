"""Libraries that people use instead of OpenAI's own client, pointed at a gateway.

They are no part of the ``dev`` extra, since they pin other versions of what is there. Where one is installed beside it,
its test runs.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.support.gateways.fake_engine import CONTEXT, FakeEngine
from tests.support.gateways.server import Served, serving

pytestmark = pytest.mark.filterwarnings("ignore")  # their warnings are not ours
USER: list[Any] = [{"role": "user", "content": "where?"}]
PLACE = {"city": "Paris"}
GROUPS = (1, 7, 200)


class Place(BaseModel):
    """A place."""

    city: str


def _library(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched
    return pytest.importorskip(name, reason=f"{name} is not installed: it pins other versions than the dev extra")


def _call(name: str = "Place") -> bytes:
    return b"<tool_call>\n" + json.dumps({"name": name, "arguments": PLACE}).encode() + b"\n</tool_call>"


def _url(served: Served) -> str:
    return f"http://127.0.0.1:{served.port}/v1"


def _is_closed(served: Served) -> bool:
    return '"additionalProperties": false' in served.engine.submits[-1].sampling.grammar


@pytest.mark.parametrize("group", GROUPS)
async def test_instructor_s_partial_tools(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    instructor = _library("instructor", monkeypatch)
    openai = _library("openai", monkeypatch)
    async with serving(FakeEngine(answer=_call(), group=group)) as served:
        async with openai.AsyncOpenAI(base_url=_url(served), api_key="x", max_retries=0) as client:
            parts = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create_partial(
                model="tiny", response_model=Place, messages=USER
            )
            assert [part async for part in parts][-1].city == "Paris"
        assert _is_closed(served)


@pytest.mark.parametrize("group", GROUPS)
async def test_langchain_s_streamed_tools_and_structured_output(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    langchain = _library("langchain_openai", monkeypatch)
    async with serving(FakeEngine(answer=_call(), group=group)) as served:
        chat = langchain.ChatOpenAI(base_url=_url(served), api_key="x", model="tiny", max_retries=0)
        whole: Any = None
        async for part in chat.bind_tools([Place], tool_choice="required").astream("where?"):
            whole = part if whole is None else whole + part
        assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("Place", PLACE)]
        assert _is_closed(served)
        bound = chat.with_structured_output(Place, method="function_calling")
        assert await bound.ainvoke("where?") == Place(city="Paris")


@pytest.mark.parametrize("group", GROUPS)
async def test_llama_index_s_streamed_tools(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    like = _library("llama_index.llms.openai_like", monkeypatch)
    tools = _library("llama_index.core.tools", monkeypatch)
    tool = tools.FunctionTool.from_defaults(lambda city: city, name="look", description="look", fn_schema=Place)
    async with (
        serving(FakeEngine(answer=_call("look"), group=group)) as served,
        httpx.AsyncClient(verify=False) as http,
    ):
        model = like.OpenAILike(
            model="tiny",
            api_base=_url(served),
            api_key="x",
            is_chat_model=True,
            is_function_calling_model=True,
            max_retries=0,
            async_http_client=http,
        )
        stream = await model.astream_chat_with_tools([tool], user_msg="where?")
        last = [part async for part in stream][-1]
        assert [call.tool_kwargs for call in model.get_tool_calls_from_response(last)] == [PLACE]


async def test_litellm_speaks_ollama_s_api_and_knows_a_prompt_that_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    litellm = _library("litellm", monkeypatch)
    async with serving(FakeEngine()) as served:
        base = f"http://127.0.0.1:{served.port}"
        ask = partial(asyncio.to_thread, litellm.completion)  # it waits for some answers without its loop
        answer = await ask(model="ollama_chat/tiny", api_base=base, messages=USER)
        assert answer.choices[0].message.content == FakeEngine().answer.decode()
        long = [{"role": "user", "content": "x" * CONTEXT}]
        with pytest.raises(litellm.ContextWindowExceededError):
            await ask(model="openai/tiny", api_base=_url(served), api_key="x", messages=long, max_retries=0)
