"""Models served by real daemons: placed, loaded, answered for at every node, stopped, and broken on purpose."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from edgepipe_emulated.oracle import next_token

from edgepipe import PROTOCOL_VERSION
from edgepipe.backend.types import StageSettings
from edgepipe.errors import (
    ConfigInvalid,
    EdgepipeError,
    ModelUnknown,
    NoFeasiblePlacement,
    PlanInvalid,
    VersionMismatch,
)
from edgepipe.gateway.unloading import GRACE_S
from edgepipe.link.channels import make_channel, translated
from edgepipe.security.mutual_tls import MutualTls
from edgepipe.store.store import ModelStore
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import ClusterStatus
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import node_pb2_grpc
from tests.support.models.for_nodes import CONFIG, pull_emulated, pull_with_weights
from tests.support.processes.nodes import Node, Nodes, idle

PROMPT = [104, 101, 108, 108, 111]
PLAN = "a:0-2,b:3-5"
STREAM = {"model": "tiny", "prompt": [104, 105], "stream": True, "ignore_eos": True, "temperature": 0}
MAX_RSS_BYTES = 250 << 20


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    made = Nodes(folder=tmp_path, cluster=f"test-{tmp_path.name}-{id(tmp_path)}")
    yield made
    await made.end()


async def two_nodes(nodes: Nodes, **flags: Any) -> tuple[Node, Node]:
    """Nodes a and b, ready to compute, known to each other."""
    a, b = await asyncio.gather(nodes.start("a", **flags), nodes.start("b", **flags))
    await asyncio.gather(*(node.until(lambda status: idle(status, 2)) for node in (a, b)))
    return a, b


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Node, Node]]:
    """Nodes a and b; a has the model until the last test of this file that takes them removes it."""
    made = Nodes(folder=tmp_path_factory.mktemp("pair"), cluster=f"pair-{secrets.token_hex(4)}")
    pull_emulated(made.folder / "a" / "models", made.folder / "tiny")
    try:
        yield await two_nodes(made)
    finally:
        await made.end()


async def complete(node: Node, *, max_tokens: int = 8) -> httpx.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    async with httpx.AsyncClient(timeout=30, verify=False) as client:
        return await client.post(f"http://127.0.0.1:{node.http_port}/v1/completions", json=body)


def expected(num_tokens: int = 8) -> list[int]:
    """What the emulated model answers."""
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, CONFIG))
    return tokens[len(PROMPT) :]


def child(status: ClusterStatus, kind: str) -> psutil.Process:
    return psutil.Process(next(child.pid for child in status.children if child.kind == kind))


def reserved(status: ClusterStatus) -> int:
    return sum(device.reserved_bytes for member in status.members for device in member.node.devices)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_is_served_over_two_nodes_and_stopped(pair: tuple[Node, Node]) -> None:
    a, b = pair
    engine = await b.serve("tiny", plan=PLAN)  # b has nothing of the model on its disk
    assert engine.state == "ready"
    assert [stage.node_name for stage in engine.stages] == ["a", "b"]
    for node in (a, b):  # every node's gateway answers
        await node.until(lambda status: [engine.state for engine in status.engines] == ["ready"])
        answer = await answered(node)
        assert answer["choices"][0]["token_ids"] == expected()
    status = await a.status()
    small = [psutil.Process(a.process.pid), child(status, "gateway"), child(status, "engine")]
    assert {
        process.pid: process.memory_info().rss for process in small if process.memory_info().rss > MAX_RSS_BYTES
    } == {}
    assert reserved(status) > 0
    assert await a.stop_model("tiny") == ["tiny"]
    status = await a.until(lambda status: idle(status, 2) and not status.engines)
    assert reserved(status) == 0


async def answered(node: Node) -> dict[str, Any]:
    """A completion, once the node's gateway has heard of the model."""
    async with asyncio.timeout(10):
        while (response := await complete(node)).status_code in (404, 503):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_frees_the_kv_cache_of_all_stages(pair: tuple[Node, Node]) -> None:
    a, _ = pair
    await a.serve("tiny", plan=PLAN)
    for tokens_read in (0, 1, 40):
        await _leave_after(a, tokens_read)
        async with asyncio.timeout(10):
            await a.until(_nothing_held)


async def _leave_after(node: Node, tokens: int) -> None:
    """Begin a long answer, take a part of it, and go. The engine has the request before the client leaves."""
    async with httpx.AsyncClient(timeout=20, trust_env=False, verify=False) as client:
        url = f"http://127.0.0.1:{node.http_port}/v1/completions"
        async with client.stream("POST", url, json=STREAM | {"max_tokens": 4000}) as answer:
            assert answer.status_code == 200
            seen = 0
            async for line in answer.aiter_lines():
                if seen >= tokens:
                    return
                if line.startswith("data: {"):
                    seen += len(json.loads(line[6:])["choices"][0]["text"]) > 0


def _nothing_held(status: ClusterStatus) -> bool:
    return all(
        engine.running == engine.waiting == engine.in_flight == 0 and engine.free_blocks == engine.num_blocks
        for engine in status.engines
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_that_is_served_is_not_removed_unasked(pair: tuple[Node, Node]) -> None:
    a, b = pair
    await a.serve("tiny", plan=PLAN)
    code, _, err = await edgepipe(a, "models", "rm", "tiny")
    assert code == 2
    assert "tiny is served by a, b" in err
    assert "edgepipe models rm tiny --yes" in err
    code, out, _ = await edgepipe(b, "models", "list", "--json")
    (row,) = json.loads(out)
    assert (row["model"], row["nodes"]) == ("tiny", [{"node": "b", "whole": False}, {"node": "a", "whole": True}])
    code, out, _ = await edgepipe(a, "models", "rm", "tiny", "--yes")
    assert code == 0
    assert out.splitlines()[-1] == "it is still on b"
    status = await b.until(lambda status: not status.engines)
    (own,) = (member.node for member in status.members if member.self)
    assert [model.model for model in own.models] == ["tiny"]
    await a.until(lambda status: not any(member.node.models for member in status.members if member.self))
    await b.until(lambda status: not any(member.node.models for member in status.members if not member.self))


async def edgepipe(node: Node, *args: str) -> tuple[int | None, str, str]:
    """Exit status, output and errors of a command at that node, without a terminal."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "edgepipe.cli", *args, "--data-dir", str(node.data_dir)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_tensors_come_from_a_peer_and_only_those_needed(nodes: Nodes) -> None:
    stored = pull_with_weights(nodes.folder / "a" / "models", nodes.folder / "tiny")
    a, b = await two_nodes(nodes, copies=1)  # no copies in the background
    assert (await a.serve("tiny", plan=PLAN)).state == "ready"
    assert (await answered(b))["choices"][0]["token_ids"] == expected()
    part = ModelStore(nodes.folder / "b" / "models").resolve("tiny")
    held = set(part.held_tensors())
    assert part.manifest_hash == stored.manifest_hash
    assert {"model.layers.3.mlp.up_proj.weight", "lm_head.weight"} <= held
    assert not [name for name in held if "layers.2." in name or "embed_tokens" in name]
    await a.stop_model()
    name = sorted(held)[0]
    whole = part.path / "tensors" / f"{name}.bin"
    whole.with_name(f"{name}.bin.part").write_bytes(whole.read_bytes()[:100])  # a transfer that broke
    whole.unlink()
    await a.until(lambda status: idle(status, 2))
    assert (await b.serve("tiny", plan=PLAN)).state == "ready"
    assert set(part.held_tensors()) == held
    assert bytes(part.read_tensor(name)) == bytes(stored.read_tensor(name))
    assert await asyncio.gather(a.stop(), b.stop()) == [0, 0]
    logs = [line for node in (a, b) for line in (node.data_dir / "node.log").read_text().splitlines()]
    alarms = [line for line in logs if re.search(r"WARNING|ERROR|Traceback", line)]
    assert not alarms, "what is asked for is no fault"


async def test_what_cannot_be_served_is_refused(nodes: Nodes) -> None:
    pull_emulated(nodes.folder / "a" / "models", nodes.folder / "tiny")
    a = await nodes.start("a", discovery=False, load_on_request=False)
    await a.until(lambda status: idle(status, 1))
    assert (await complete(a)).status_code == 404, "a request loads nothing here"
    refused: list[tuple[dict[str, Any], type[EdgepipeError]]] = [
        ({"model": "nothing"}, ModelUnknown),
        ({"plan": "a:0-2"}, PlanInvalid),
        ({"plan": "a:0-2,z:3-5"}, PlanInvalid),
        ({"options": ServeSpec(model="tiny", num_nodes=2)}, NoFeasiblePlacement),
        ({"options": ServeSpec(model="tiny", settings=StageSettings(context_length=999_999))}, ConfigInvalid),
        ({"options": ServeSpec(model="tiny", exclude=("nobody",))}, PlanInvalid),
        ({"options": ServeSpec(model="tiny", first="nobody")}, PlanInvalid),
    ]
    for fields, error in refused:
        with pytest.raises(error):
            await a.serve(**{"model": "tiny", **fields})
    with pytest.raises(NoFeasiblePlacement, match="do not fit") as caught:
        await a.serve("tiny", options=ServeSpec(model="tiny", kv_tokens=4_000_000_000))
    assert re.fullmatch(r"give --kv-tokens \d+ or less, or leave it out", caught.value.next_step)
    with pytest.raises(ModelUnknown):
        await a.stop_model("tiny")
    assert not (await a.status()).engines
    first = (await a.serve("tiny")).pipeline_id
    assert (await a.serve("tiny")).pipeline_id == first  # one that runs is found, not doubled
    others: list[tuple[dict[str, Any], type[EdgepipeError], str]] = [
        (
            {"options": ServeSpec(model="tiny", settings=StageSettings(context_length=128))},
            PlanInvalid,
            "it is served with --context ",
        ),
        ({"options": ServeSpec(model="tiny", kv_tokens=640)}, PlanInvalid, "it is served with --kv-tokens "),
        (
            {"options": ServeSpec(model="tiny", settings=StageSettings(dtype="bfloat16"))},
            PlanInvalid,
            "it is served with --dtype auto",
        ),
        (
            {"options": ServeSpec(model="tiny", settings=StageSettings(context_length=999_999))},
            ConfigInvalid,
            "it supports ",
        ),
        ({"options": ServeSpec(model="tiny", exclude=("nobody",))}, PlanInvalid, "nodes: a"),
        ({"options": ServeSpec(model="tiny", exclude=("a",))}, PlanInvalid, "it is served as a:0-5"),
    ]
    for fields, error, fact in others:
        with pytest.raises(error) as other:
            await a.serve("tiny", **fields)
        assert other.value.fact.startswith(fact)


async def test_a_request_loads_what_is_only_pulled_and_may_unload_it_but_nothing_else(nodes: Nodes) -> None:
    pull_emulated(nodes.folder / "a" / "models", nodes.folder / "tiny")
    a, b = await two_nodes(nodes)
    body = {"model": "tiny", "prompt": "hi", "raw": True, "stream": False, "options": {"num_predict": 2}}
    async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as http:

        async def ask(node: Node, **fields: Any) -> None:
            response = await http.post(f"http://127.0.0.1:{node.http_port}/api/generate", json=body | fields)
            assert response.status_code == 200, response.text

        assert (await complete(b)).status_code == 200
        await ask(b, keep_alive="1h")
        await ask(a, keep_alive=0)  # another node's gateway
        await a.until(lambda status: not status.engines)
        while (await http.get(f"http://127.0.0.1:{a.http_port}/v1/models")).json()["data"]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
        await ask(a)
        await a.serve("tiny")
        await ask(a, keep_alive=0)
        await asyncio.sleep(GRACE_S + 1)
        assert [engine.state for engine in (await a.status()).engines] == ["ready"], "a person wants it"


async def test_another_protocol_version_is_refused_by_name(nodes: Nodes) -> None:
    node = await nodes.start("a", backend="none", discovery=False)
    cluster = (await node.status()).cluster_id
    other = nodes.member()
    hello = Hello(
        protocol_version=PROTOCOL_VERSION + 1,
        edgepipe_version="9.0",
        node_id=other.node_id,
        node_name="future",
        cluster_id=cluster,
        role="node",
    )
    with pytest.raises(VersionMismatch, match="future"):
        await say_hello(node, hello, other)
    status = await node.status()
    assert [refused.error.code for refused in status.refused] == ["version_mismatch"]
    assert "future" in status.refused[0].peer


async def say_hello(node: Node, hello: Hello, security: MutualTls) -> None:
    """Open a heartbeat stream as another node would."""
    async with make_channel(node.address, security.to_node(node.node_id)) as channel:
        with translated("a"):
            call = node_pb2_grpc.NodeStub(channel).Heartbeat(iter([pb.Beat(hello=hello_to_wire(hello), sequence=1)]))
            async for _ in call:
                pass
