"""A draft model takes memory on the device with the head: weights, KV and its process; it takes no time of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.backend.cost import CostModel
from edgepipe.backend.devices import named_device
from edgepipe.ids import NodeId
from edgepipe.planner.placement import Need, NodeRoom, stage_bytes
from edgepipe.spec.drafting import draft_kv_tokens
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.weights.mixes import named_model
from edgepipe.weights.weight_table import FLOATS, DraftModelNeed, WeightTable, table_from_json

MODEL, TABLE = named_model("llama-3.3-70b:q4_k_m")
DRAFT, DRAFT_TABLE = named_model("llama-3.2-3b:q4_k_m")


def with_draft(table: WeightTable) -> WeightTable:
    need = DraftModelNeed(config=DRAFT, weights=DRAFT_TABLE, kv_tokens=draft_kv_tokens(DRAFT))
    return replace(table, draft=need)


def part(config: ModelConfig, *, first: bool, last: bool) -> Slice:
    layers = LayerRange(0 if first else config.num_layers - 4, config.num_layers if last else 4)
    return Slice(index=0 if first else 1, layers=layers, embedding=first, head=last)


@pytest.mark.parametrize(("packing", "process"), [("torch-cuda", 600 << 20), ("emulated", 0)])
def test_it_counts_beside_the_head_and_nowhere_else(packing: str, process: int) -> None:
    room = NodeRoom(node_id=NodeId("a"), name="a", free_bytes=1 << 40, bytes_per_weight=2, packing=packing)
    plain, drafted = (Need(config=MODEL, kv_tokens=512, weights=table) for table in (TABLE, with_draft(TABLE)))
    first, last = part(MODEL, first=True, last=False), part(MODEL, first=False, last=True)
    assert stage_bytes(drafted, room, first) == stage_bytes(plain, room, first)
    more = stage_bytes(drafted, room, last) - stage_bytes(plain, room, last)
    own = Need(config=DRAFT, kv_tokens=16_384, weights=DRAFT_TABLE)
    assert more == stage_bytes(own, room, part(DRAFT, first=True, last=True)) + process
    assert 3.7e9 < more < 4.9e9, "2 GB of weights, 1.9 GB of keys and values"


def test_steps_take_no_longer_by_it() -> None:
    last = part(MODEL, first=False, last=True)
    costs = [
        CostModel(MODEL, named_device("rtx4090"), weights=table, kind="emulated", dtype="bfloat16").slice_cost(last)
        for table in (TABLE, with_draft(TABLE))
    ]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("table", [TABLE, FLOATS])
def test_other_processes_get_the_table_without_it(table: WeightTable) -> None:
    assert with_draft(table).to_json() == table.to_json()
    assert table_from_json(with_draft(table).to_json(), MODEL) == table


def test_its_kv_holds_two_conversations_of_usual_length() -> None:
    assert draft_kv_tokens(replace(DRAFT, context_length=2048)) == 4096
    assert draft_kv_tokens(DRAFT) == 16_384
