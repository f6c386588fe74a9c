"""Requests whose messages between processes come near every limit, in the middle of a fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from edgepipe_emulated import emulated_model_config  # pyright: ignore[reportMissingTypeStubs] - typed, but no room

from edgepipe.wire.engines import ServeSpec
from tests.support.faults.chaos.clients import Clients
from tests.support.faults.chaos.cluster import MODEL, chaos_cluster
from tests.support.network.lan import LanLab

_CHOICES = 8
_SCHEMA_CHARS = 62 << 10  # a schema may have 64 KiB
_PROMPT_TOKENS = 18_000
_ECHOED_TOKENS = 36_000
_ECHO_S = 100.0  # until it is computed, on a busy machine
_COMMENTS_BYTES = 16 << 10
_CUT_S = 6.0  # a stream counts as broken after 4 s
_LONG = 20_000
_CONTEXT = 40_960
_OPTIONS = ServeSpec(model=MODEL, kv_tokens=4 * _CONTEXT)


@asynccontextmanager
async def wide(folder: Path) -> AsyncGenerator[Clients]:
    """Two stages, each of which could hold all, and a long context."""
    config = emulated_model_config(num_layers=6, context_length=_CONTEXT)
    async with chaos_cluster(folder, names=("a", "b"), plan="a:0-2,b:3-5", config=config, options=_OPTIONS) as cluster:
        yield await Clients.first(cluster)


@asynccontextmanager
async def apart(folder: Path) -> AsyncGenerator[Clients]:
    """The clients' gateway on one host of a LAN, engine and stages on two others."""
    config = emulated_model_config(num_layers=6, context_length=_CONTEXT)
    async with LanLab(hosts=3) as lab:
        lab.shape(delay_s=0.0005, bytes_per_s=125e6)
        async with chaos_cluster(folder, config=config, options=_OPTIONS, lab=lab) as cluster:
            yield await Clients.first(cluster)


async def large_grammars(clients: Clients) -> float:
    """A step fails while 72 answers are bound to schemas of 62 KiB. See ``lasting_faults`` for what is returned."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 500, "description": "x" * _SCHEMA_CHARS}
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "prompt": None,
        "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}},
        "n": _CHOICES,
        "max_tokens": 400,
        "ignore_eos": None,
    }
    return await _fail_a_step_beside(clients, count=9, fields=fields)


async def long_penalties(clients: Clients) -> float:
    """A step fails while 128 answers carry their prompts of 18,000 tokens for a repetition penalty."""
    prompt = [128 + index % 128 for index in range(_PROMPT_TOKENS)]
    fields = {"prompt": prompt, "repetition_penalty": 1.5, "n": _CHOICES, "max_tokens": 400, "temperature": 0.5}
    return await _fail_a_step_beside(clients, count=16, fields=fields)


async def long_echo(clients: Clients) -> float:
    """The stream between gateway and engine breaks beside a prompt whose 36,000 log-probabilities were asked for."""
    cluster = clients.cluster
    lab, gateway = cluster.lab, cluster.names[0]
    assert lab is not None, "faults of links need the LAN lab"
    async with clients.streams(1, max_tokens=_LONG) as streams:
        await clients.go_on(*streams)
        async with _echo_under_way(clients):
            ((engine, _),) = await cluster.children("engine")
            clients.strike(f"no cable between {gateway} and {engine}")
            lab.cut(gateway, engine)
            await asyncio.sleep(_CUT_S)
            since_s = clients.strike("the cable is back")
            lab.heal(gateway, engine)
            healed_s = await clients.until_served(since_s=since_s)
            await clients.go_on(*streams)
    return healed_s


@asynccontextmanager
async def _echo_under_way(clients: Clients) -> AsyncGenerator[None]:
    """A long prompt is told back with its log-probabilities; the block begins with its first bytes.

    They are not parsed: the LAN's switch runs in this process, too, and 20 MB of JSON would hold it up.
    """
    body = {
        "model": clients.cluster.model,
        "prompt": [index % 251 for index in range(_ECHOED_TOKENS)],
        "echo": True,
        "logprobs": 20,
        "max_tokens": _CONTEXT - _ECHOED_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"http://127.0.0.1:{clients.cluster.http_port}/v1/completions"
    client = httpx.AsyncClient(timeout=_ECHO_S, trust_env=False, verify=False)
    async with client, client.stream("POST", url, json=body) as response:
        assert response.status_code == 200, await response.aread()
        parts = response.aiter_raw()
        await _large_part(parts)
        reading = asyncio.create_task(_read_on(parts), name="echo")
        try:
            yield
        finally:
            reading.cancel()
            await asyncio.wait((reading,))


async def _large_part(parts: AsyncIterator[bytes]) -> None:
    """Read until more has come than comment lines have."""
    size = 0
    while size < _COMMENTS_BYTES:
        size += len(await anext(parts))


async def _read_on(parts: AsyncIterator[bytes]) -> None:
    async for _ in parts:
        pass


async def _fail_a_step_beside(clients: Clients, *, count: int, fields: dict[str, Any]) -> float:
    """Seconds from a step's failure to a new client's 20th token; ``count`` requests with ``fields`` must go on.

    All stages keep their KV, so the next epoch computes little and can begin with all sequences at once.
    """
    async with clients.streams(count, **fields) as streams:
        for stream in streams:
            await clients.reached(stream, _CHOICES)
        name = (await clients.cluster.stage_nodes())[-1]
        since_s = clients.strike(f"a step fails on {name}")
        clients.cluster.break_device(name, num_steps=1)
        healed_s = await clients.until_served(since_s=since_s)
        await clients.go_on(*streams)
    return healed_s
