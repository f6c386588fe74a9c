"""Recurrent models: memory for states' snapshots beside the context that was promised."""

from __future__ import annotations

import re

import pytest

from edgepipe.backend.devices import parse_devices
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.planner.cluster import known_cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand
from edgepipe.planner.plan import Plan, plan
from edgepipe.planner.preview import disk_kv_tokens, host_kv_tokens, plan_as_dict
from edgepipe.planner.shortage import shortage_of
from edgepipe.spec.memory_classes import LEAST_SLOTS, kv_bytes, state_slots
from edgepipe.units import LinkShape
from edgepipe.weights.mixes import named_model

HYBRID = "qwen3.6-27b:q4_k_m"


def planned(*, context: int = 0, concurrency: int = 16, kv: str = "8bit", layers: str = "") -> Plan:
    config, weights = named_model(HYBRID)
    devices, link = parse_devices("rtx4090"), LinkShape(bytes_per_s=1e8)
    cluster = known_cluster(devices, config, link=link, model=HYBRID, weights=weights, kv=kv)
    demand = Demand(
        config=config,
        weights=weights,
        concurrency=concurrency,
        context_tokens=context or 4096,
        must_keep_tokens=context,
    )
    return plan(demand, cluster.machines, cluster.links, Constraints(layers=layers))


def slots(found: Plan) -> int:
    states = state_slots(found.demand.config, found.kv_tokens, most_slots=found.most_slots)
    assert states is not None
    return states.num_slots


def test_a_context_of_131072_tokens_fits_on_a_card_of_24_gb() -> None:
    found = planned(context=131_072)
    assert found.kv_tokens >= 131_072
    assert slots(found) >= 4, "a running chat, and at least two snapshots"


def test_no_snapshot_is_given_up_that_the_promise_leaves_room_for() -> None:
    few, many = planned(context=131_072), planned(context=32_768)
    assert slots(few) < slots(many)
    assert many.most_slots == planned().most_slots


def test_one_chat_leaves_more_room_for_its_context_than_sixteen() -> None:
    one, many = planned(concurrency=1), planned()
    assert one.kv_tokens > 1.5 * many.kv_tokens
    assert slots(one) < slots(many)


def test_a_promise_that_no_number_of_snapshots_allows_is_refused_with_the_largest_context() -> None:
    with pytest.raises(NoFeasiblePlacement, match=r"give --context 1\d{5} or less"):
        planned(context=262_144)


def test_a_refused_promise_names_the_largest_context_of_each_form_of_kv() -> None:
    with pytest.raises(NoFeasiblePlacement) as caught:
        planned(context=262_144, kv="")
    found = re.match(
        r"give --context (\d+) or less, --context (\d+) or less with --kv 8bit, "
        r"--context (\d+) or less with --kv 4bit; or ",
        caught.value.next_step,
    )
    assert found is not None
    wide, eight, four = (int(each) for each in found.groups())
    assert wide < eight < four
    for kv, most in (("", wide), ("8bit", eight), ("4bit", four)):
        assert planned(context=most, kv=kv).kv_tokens >= most
    with pytest.raises(NoFeasiblePlacement):
        planned(context=eight + eight // 20, kv="8bit")


def test_200_000_tokens_fit_on_a_card_of_24_gb_in_4_bits() -> None:
    found = planned(context=200_000, kv="4bit")
    assert found.kv_tokens >= 200_000
    assert slots(found) >= 4


def test_a_placement_by_hand_keeps_the_promise_too() -> None:
    assert planned(context=131_072, layers="a:0-63").kv_tokens >= 131_072


def test_only_the_last_number_of_slots_searches_for_the_largest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("edgepipe.planner.plan._most_context", lambda *_, **__: asked.append(1) or 1024)
    with pytest.raises(NoFeasiblePlacement, match="give --context 1024 or less"):
        planned(context=262_144)
    assert len(asked) == 2, "once for each form of KV that the machines could have"


def test_a_plan_says_how_many_tokens_of_idle_chats_host_memory_holds() -> None:
    wide, packed = host_kv_tokens(planned(kv="")), host_kv_tokens(planned())
    assert 0 < wide < packed


def test_what_is_missing_is_counted_with_the_fewest_snapshots() -> None:
    config, weights = named_model(HYBRID)
    cluster = known_cluster(parse_devices("rtx4090"), config, link=LinkShape(bytes_per_s=1e8), model=HYBRID, kv="8bit")
    demand = Demand(config=config, weights=weights, concurrency=1, context_tokens=262_144, must_keep_tokens=262_144)
    short = shortage_of(demand, cluster.machines)
    per_token = config.kv_bytes_per_token(form="8bit")
    states = state_slots(config, 262_144, most_slots=LEAST_SLOTS)
    assert states is not None
    assert short.kv_bytes == 262_144 * per_token + states.kept_slots * config.state_bytes()


def test_a_plan_says_how_many_tokens_of_idle_chats_a_disk_holds() -> None:
    small, large = (disk_kv_tokens(planned(), num_bytes=size) for size in (10**10, 10**11))
    assert 9 * small < large < 11 * small
    assert disk_kv_tokens(planned(kv=""), num_bytes=10**11) < large
    assert plan_as_dict(planned())["disk_kv_tokens"] == large
    config, _ = named_model(HYBRID)
    assert 0.99e11 < sum(kv_bytes(config, large, form="8bit")) <= 1e11, "idle chats have as many states as pay"
