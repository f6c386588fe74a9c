"""The README's table of machines and speeds says what ``edgepipe plan --emulate`` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.planner.test_usage_table import found_plan

README = Path(__file__).parents[3] / "README.md"
TABLE = README.read_text(encoding="utf-8").partition("## What to expect")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("| ")]
MACHINES = {
    "RTX 3060 (12 GB)": "rtx3060",
    "2 RTX 3060, each in its own PC": "2x rtx3060",
    "RTX 3060 and Mac mini M4 (32 GB)": "rtx3060, m4 32GB",
    "RTX 4090": "rtx4090",
    "2 RTX 4090, each in its own PC": "2x rtx4090",
    "RTX 4090 and Mac M4 Max": "rtx4090, m4max",
    "RTX 4090 and Mac M4 Max (128 GB)": "rtx4090, m4max 128GB",
}
MODELS = {
    "Qwen3 8B, 4 bits": "qwen3-8b:q4_k_m",
    "Qwen2.5 32B, 4 bits": "qwen2.5-32b:q4_k_m",
    "Qwen3 30B-A3B, 4 bits": "qwen3-30b-a3b:q4_k_m",
    "Qwen3 32B, 4 bits": "qwen3-32b:q4_k_m",
    "Llama 3.3 70B, 4 bits": "llama-3.3-70b:q4_k_m",
    "gpt-oss 120B": "gpt-oss-120b",
}


@pytest.mark.parametrize("row", ROWS[1:], ids=[row[0] for row in ROWS[1:]])
def test_memory_and_speed_are_those_of_the_planner(row: list[str]) -> None:
    machines, model, memory, speed = row
    found = found_plan(MODELS[model], MACHINES[machines])
    assert f"{sum(stage.weight_bytes for stage in found.stages) / 1e9:.0f} GB" == memory
    assert f"{found.tokens_per_s:.0f}" == speed
