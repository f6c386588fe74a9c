"""Tokens, versions, metrics, and the API's own document."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from edgepipe.backend.expert_reads import ExpertShare
from edgepipe.ids import NodeId
from edgepipe.wire.engines import EngineState, StageState
from edgepipe.wire.nodes import DeviceState, MemberState, NodeState
from tests.support.gateways.fake_engine import CONTEXT, FakeEngine, view_of
from tests.support.gateways.server import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Served) -> AsyncIterator[Served]:
    yield shared


async def _post(served: Served, path: str, body: dict[str, Any]) -> Any:
    return (await served.http.post(path, json=body)).json()


async def test_text_goes_to_tokens_and_back(served: Served) -> None:
    answer = await _post(served, "/tokenize", {"model": "tiny", "prompt": "abc", "return_token_strs": True})
    assert answer == {"count": 3, "max_model_len": CONTEXT, "tokens": [97, 98, 99], "token_strs": ["a", "b", "c"]}
    answer = await _post(served, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert bytes(answer["tokens"]) == b"user: x\nassistant:"
    assert await _post(served, "/detokenize", {"tokens": [97, 98]}) == {"prompt": "ab"}
    info = (await served.http.get("/tokenizer_info", params={"model": "tiny"})).json()
    assert (info["model"], info["eos_token"]) == ("tiny", "<end>")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, 400),
        ("/tokenize", {"prompt": 3}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/detokenize", {"tokens": [257]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
    ],
)
async def test_bad_tokens_are_refused(served: Served, path: str, body: dict[str, Any], status: int) -> None:
    response = await served.http.post(path, json=body)
    assert response.status_code == status
    assert set(response.json()["error"]) >= {"message", "type", "param", "code"}


async def test_a_version_is_told(served: Served) -> None:
    assert set((await served.http.get("/version")).json()) == {"version", "protocol"}


async def _samples(served: Served) -> dict[str, float]:
    """Values by name and labels."""
    text = (await served.http.get("/metrics")).text
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_tell_of_requests_engines_stages_and_links() -> None:
    engine = FakeEngine(group=1)
    async with serving(engine) as served:
        await served.chat(max_tokens=5, n=2)
        await served.chat(model="tiny")
        view = view_of(served.address)
        mine = NodeState(
            name="a",
            node_id=NodeId("id-a"),
            devices=(DeviceState(reserved_bytes=1000, free_bytes=500, fenced_messages=6),),
        )
        other = NodeState(name="b", node_id=NodeId("id-b"))
        view = replace(
            view,
            served=(replace(view.served[0], engine=_busy(view.served[0].engine)),),
            members=(
                MemberState(node=mine, state="alive", self=True),
                MemberState(node=other, state="alive", rtt_ms=2, gap_ms=260),
            ),
        )
        served.gateway.update(view)
        found = await _samples(served)
    model = ",model=tiny"
    assert found["edgepipe_generation_tokens_total" + model] == 10 + len(engine.answer) + 1
    assert found["edgepipe_prompt_tokens_total" + model] == 2 * len("user: hi\nassistant:")
    assert found[f"edgepipe_request_success_total,finished_reason=length{model}"] == 2
    assert found["edgepipe_time_to_first_token_seconds_count" + model] == 2
    assert found["edgepipe_inter_token_latency_seconds_count" + model] > 0
    assert found["edgepipe_e2e_request_latency_seconds_count" + model] == 2
    assert found[f"edgepipe_kv_cache_usage_ratio{model},node=a"] == 0.75
    assert found[f"edgepipe_kv_cache_usage_ratio{model},node=b"] == 0.75
    assert found["edgepipe_micro_batches" + model] == 3
    assert found["edgepipe_num_requests_waiting" + model] == 7
    assert found["edgepipe_num_preemptions_total" + model] == 2
    assert found["edgepipe_state_snapshots_missed_total" + model] == 4
    assert found["edgepipe_prefix_cache_hits_tokens_total" + model] == 40
    assert found["edgepipe_recoveries_total" + model] == 1
    assert found[f"edgepipe_stage_busy_ratio{model},node=b,stage=1"] == 0.5
    assert found[f"edgepipe_stage_busy_seconds_total{model},node=a,stage=0"] == 12.5
    assert found[f"edgepipe_stage_bubble_seconds_total{model},node=a,stage=0"] == 0.5
    hop = f",dst=b{model},src=a"
    assert found[f"edgepipe_hop_upload_seconds{hop}"] == 0.004
    assert found[f"edgepipe_hop_bytes_total{hop}"] == 4096
    assert found[f"edgepipe_hop_latency_seconds_count{hop}"] == 5
    assert found[f"edgepipe_hop_latency_seconds_sum{hop}"] == 0.25
    bucket = f"edgepipe_hop_latency_seconds_bucket,dst=b,le={{}}{model},src=a"
    assert [found[bucket.format(bound)] for bound in ("0.0002", "0.0005", "0.2", "+Inf")] == [0, 3, 3, 5]
    kinds = {
        kind: found[f"edgepipe_node_memory_bytes,kind={kind},node=a"] for kind in ("weights", "kv", "other", "free")
    }
    assert kinds == {"weights": 700, "kv": 200, "other": 100, "free": 500}
    assert found["edgepipe_fenced_messages_total,node=a"] == 6
    assert found["edgepipe_recovery_stall_seconds_total" + model] == 1.5
    assert found["edgepipe_link_rtt_seconds,dst=b,src=a"] == 0.002
    assert found["edgepipe_heartbeat_gap_p99_seconds,dst=b,src=a"] == 0.26
    assert found["edgepipe_node_up,node=b"] == 1


async def test_a_mixture_tells_the_share_of_experts_by_size_of_steps() -> None:
    async with serving(FakeEngine()) as served:
        name = "edgepipe_step_expert_ratio,model=tiny,tokens="
        assert not any(each.startswith(name) for each in await _samples(served))
        view = view_of(served.address)
        shares = (ExpertShare(2.0, 0.125), ExpertShare(3.4, 0.25), ExpertShare(16.0, 0.5), ExpertShare(16.5, 0.75))
        engine = replace(view.served[0].engine, expert_shares=shares)
        served.gateway.update(replace(view, served=(replace(view.served[0], engine=engine),)))
        found = await _samples(served)
    assert {key.removeprefix(name): value for key, value in found.items() if key.startswith(name)} == {
        "2": 0.125,
        "4": 0.25,
        "16": 0.5,
        "32": 0.75,
    }


def _busy(engine: EngineState) -> EngineState:
    return replace(
        engine,
        micro_batches=3,
        waiting=7,
        num_blocks=100,
        free_blocks=25,
        preemptions=2,
        missed_snapshots=4,
        cached_tokens=40,
        recoveries=1,
        stall_ms=1500,
        stages=(
            StageState(
                node_name="a",
                node_id=NodeId("id-a"),
                busy=0.25,
                upload_ms=4,
                weight_bytes=700,
                kv_bytes=200,
                computed_s=12.5,
                bubble_s=0.5,
                hop_bytes=4096,
                hop_latency_s=0.25,
                hop_latency_counts=(0, 0, 3, *[0] * 8, 2),
            ),
            StageState(node_name="b", node_id=NodeId("id-b"), busy=0.5),
        ),
    )


async def test_the_document_knows_every_endpoint_and_refers_to_nothing_that_is_not_there(served: Served) -> None:
    document = (await served.http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    assert {"/v1/chat/completions", "/v1/models/{id}", "/api/chat", "/metrics", "/health"} <= set(document["paths"])
    chat = document["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"]
    assert {"max_completion_tokens", "logit_bias", "tools", "min_p", "return_token_ids"} <= set(chat["properties"])
    text = (await served.http.get("/openapi.json")).text
    for name in set(re.findall(r'"#/components/schemas/(\w+)"', text)):
        assert name in document["components"]["schemas"]


async def test_the_page_loads_nothing_from_anywhere(served: Served) -> None:
    response = await served.http.get("/docs")
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in response.text
    assert re.findall(r"""(?:src|href)=["']?([^"'> ]+)""", response.text)
    for target in re.findall(r"""(?:src|href)=["']?([^"'> ]+)""", response.text):
        assert target.startswith(("#", "/")), target
    assert "@import" not in response.text
    assert "url(" not in response.text
