"""The table of twelve models in docs/usage.md says what ``edgepipe plan --emulate`` says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgepipe.backend.devices import parse_devices
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.planner.cluster import known_cluster
from edgepipe.planner.demand import Demand
from edgepipe.planner.plan import Plan, plan
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.store.typed_names import understand
from edgepipe.units import parse_link
from edgepipe.weights.mixes import mix_weights, named_model, split_mix

USAGE = Path(__file__).parents[3] / "docs" / "usage.md"
TABLE = USAGE.read_text(encoding="utf-8").partition("### Twelve models")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("| `")]


def found_plan(model: str, devices: str) -> Plan:
    config, weights = named_model(model)
    there = known_cluster(parse_devices(devices), config, link=parse_link("1gbit,0.3ms"), model=model, weights=weights)
    demand = Demand(config=config, weights=weights)
    return plan(demand, there.machines, there.links, explain=False)


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip("`") for row in ROWS])
def test_sizes_machines_and_speeds_are_those_of_the_planner(row: list[str]) -> None:
    name, *sizes, cards, card_speed, macs, mac_speed, repository = (cell.strip("`") for cell in row)
    assert (understand(name).planned.partition(":")[0], understand(name).repository) == (
        name.partition(":")[0],
        repository,
    )
    model, own = split_mix(name)
    config = named_shape(model)
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    for mix, size in zip(("q4_k_m", "q8_0", own), sizes, strict=True):
        if size:
            num_bytes = sum(info.num_bytes for info in mix_weights(config, mix, whole))
            assert f"{num_bytes / 1e9:.1f}" == size
    assert f"{found_plan(name, f'{cards}x rtx4090').tokens_per_s:.0f}" == card_speed
    count, mac = re.fullmatch(r"(\d*) *`?(\w+)`?(?:, \d+ GB)?", macs).groups()  # type: ignore[union-attr]
    assert f"{found_plan(name, f'{count or 1}x {mac}').tokens_per_s:.0f}" == mac_speed
    for device, number in (("rtx4090", int(cards)), (mac, int(count or 1))):
        if number > 1:
            with pytest.raises(NoFeasiblePlacement):
                found_plan(name, f"{number - 1}x {device}")


def test_there_are_twelve_models() -> None:
    assert len(ROWS) == 12


def test_room_for_kv_is_that_of_the_planner() -> None:
    text = " ".join(TABLE.split())
    for count, model in ((2, "llama-3.3-70b:q4_k_m"), (1, "gemma-4-31b:q4_k_m")):
        tokens = found_plan(model, f"{count}x rtx4090").kv_tokens
        assert f"{tokens // 100 * 100:,}" in text
