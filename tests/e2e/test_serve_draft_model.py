"""``serve --draft MODEL`` on real nodes: found, compared, counted, fetched, run beside the head, killed, ended."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator

import httpx
import psutil
import pytest
import pytest_asyncio
from edgepipe_emulated import emulated_model_config

from edgepipe.errors import ConfigInvalid, PlanInvalid
from edgepipe.spec.facts import ModelConfig
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.wire.engines import DraftState, ServeSpec
from tests.support.engine.lab import oracle_tokens
from tests.support.models.for_nodes import CONFIG, pull_emulated, write_with_weights
from tests.support.processes.nodes import READY_S, Node, Nodes, children_of, idle

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

PLAN = "a:0-2,b:3-5"
PROMPT = [104, 101, 108, 108, 111]
LINK = "1gbit,10ms"  # a turn takes so long that drafts pay


def pull(nodes: Nodes, name: str, config: ModelConfig, *, swapped: bool = False) -> None:
    """A model without weights on node a's disk. ``swapped``: two tokens have one another's id."""
    source = nodes.folder / name
    write_model_folder(source, config)
    if swapped:
        values = json.loads((source / "tokenizer.json").read_text())
        vocabulary = values["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (source / "tokenizer.json").write_text(json.dumps(values))
    ModelStore(nodes.folder / "a" / "models").pull(str(source))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Node, Node]]:
    """Nodes a and b; a alone has the models."""
    made = Nodes(folder=tmp_path_factory.mktemp("pair"), cluster=f"draft-{secrets.token_hex(4)}")
    store = made.folder / "a" / "models"
    pull_emulated(store, made.folder / "tiny")
    write_with_weights(made.folder / "twin")  # the same model, so its drafts are right; b must fetch it
    ModelStore(store).pull(str(made.folder / "twin"))
    pull(made, "odd", emulated_model_config(num_layers=2, vocab_size=400), swapped=True)
    pull(made, "recurrent", emulated_model_config(num_layers=2, attention_every=2))
    pull(made, "huge", emulated_model_config(num_layers=200, hidden_size=16_384))
    try:
        a, b = await asyncio.gather(*(made.start(name, link=LINK) for name in "ab"))
        await asyncio.gather(*(node.until(lambda status: idle(status, 2)) for node in (a, b)))
        yield a, b
    finally:
        await made.end()


async def answer(node: Node, *, max_tokens: int) -> list[int]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:
        url = f"http://127.0.0.1:{node.http_port}/v1/completions"
        response = await client.post(url, json=body | {"return_token_ids": True})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


async def drafts_of(node: Node) -> DraftState:
    drafts = (await node.status()).engines[0].drafts
    assert drafts is not None
    return drafts


def draft_processes(node: Node) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in children_of(node.process.pid):
        try:
            if any("draft_child" in word for word in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def reserved(status: object, node_id: str) -> int:
    members = status.members  # type: ignore[attr-defined]  # a ClusterStatus
    return sum(d.reserved_bytes for m in members if m.node.node_id == node_id for d in m.node.devices)


async def test_what_cannot_draft_is_refused_before_anything_is_loaded(pair: tuple[Node, Node]) -> None:
    a, _ = pair
    with pytest.raises(ConfigInvalid, match="--draft cannot be 'eagle'") as unknown:
        await a.serve("tiny", options=ServeSpec(model="tiny", draft="eagle"))
    assert unknown.value.fact.startswith(
        "it is auto, lookup, mtp, off, or a model; no model 'eagle' is in the cluster (on its nodes: huge, "
    )
    assert unknown.value.next_step.startswith("edgepipe models pull ")
    with pytest.raises(ConfigInvalid, match="odd cannot draft for tiny: its vocabulary is another one") as refused:
        await a.serve("tiny", options=ServeSpec(model="tiny", draft="odd"))
    sizes = rf"tiny has {CONFIG.vocab_size} tokens, odd has 400; token \d+ is '[ab]' in one and '[ab]' in the other"
    assert re.fullmatch(sizes, refused.value.fact)
    with pytest.raises(ConfigInvalid, match="recurrent cannot be a draft model"):
        await a.serve("tiny", options=ServeSpec(model="tiny", draft="recurrent"))
    assert not (await a.status()).engines


async def test_a_draft_model_that_does_not_fit_is_left_out_and_that_is_said(pair: tuple[Node, Node]) -> None:
    a, _ = pair
    events = await a.serve_events("tiny", options=ServeSpec(model="tiny", draft="huge"), plan=PLAN)
    notes = [event.note for event in events if "huge" in event.note]
    assert len(notes) == 1
    assert re.search(r"the draft model huge does not fit beside the head: .* lacks .*GB", notes[0])
    assert notes[0].endswith("Drafts come from a lookup")
    assert await answer(a, max_tokens=8) == oracle_tokens(PROMPT, 8, config=CONFIG)
    assert (await drafts_of(a)).source == "lookup"
    await a.stop_model("tiny")
    await a.until(lambda status: idle(status, 2))


async def test_it_drafts_beside_the_head_dies_comes_back_and_ends_with_its_stage(pair: tuple[Node, Node]) -> None:
    a, b = pair
    wanted = ServeSpec(model="tiny", draft="twin")
    await a.serve("tiny", options=wanted, plan=PLAN)
    await a.serve("tiny", options=wanted, plan=PLAN)  # it is served as asked
    with pytest.raises(PlanInvalid) as other:
        await a.serve("tiny", options=ServeSpec(model="tiny", draft="mtp"))
    assert other.value.fact == "it is served with --draft twin"
    assert not draft_processes(a)
    (process,) = draft_processes(b)
    expected = oracle_tokens(PROMPT, 400, config=CONFIG)
    drafts = DraftState()
    async with asyncio.timeout(READY_S):
        while drafts.accepted < 50:  # it loads while the model answers
            assert await answer(a, max_tokens=60) == expected[:60]
            drafts = await drafts_of(a)
    assert drafts.source == "model"
    assert drafts.factor > 1.5
    status = await a.status()
    assert reserved(status, b.node_id) > reserved(status, a.node_id) + (1 << 20), "its KV counts, too"
    going = asyncio.create_task(answer(a, max_tokens=400))
    await asyncio.sleep(0.3)
    process.kill()
    assert await going == expected
    async with asyncio.timeout(READY_S):
        while not draft_processes(b) or draft_processes(b)[0].pid == process.pid:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await a.stop_model("tiny")
    await a.until(lambda status: idle(status, 2))
    assert not draft_processes(b)
