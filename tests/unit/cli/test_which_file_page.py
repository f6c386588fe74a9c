"""The tables of ``docs/which-file.md`` are what the planner calculates."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.weights.mixes import mix_weights, named_model
from edgepipe.weights.resident import resident_sizes

PAGE = Path(__file__).parents[3] / "docs" / "which-file.md"
MODELS = ("llama-3.1-8b", "qwen2.5-14b", "qwen3-32b", "llama-3.3-70b")
KINDS = ("torch-cuda", "torch-cpu", "mlx-blocks", "mlx")
LARGEST = 120


def table(heading: str) -> dict[str, list[float]]:
    """Rows of numbers of the table below a heading, by their first cell."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0]: [float(cell) for cell in row[1:]] for row in rows[2:]}


def file_gb(name: str) -> float:
    config, _ = named_model(name)
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    return sum(weight.num_bytes for weight in mix_weights(config, name.partition(":")[2], whole)) / 1e9


def memory_gb(name: str, kind: str) -> float:
    config, weights = named_model(name)
    return resident_sizes(config, weights, kind=kind, dtype="bfloat16").matrices / 1e9


@pytest.mark.parametrize("kind", table("Size of the file"))
def test_sizes_of_files(kind: str) -> None:
    *shown, largest = table("Size of the file")[kind]
    sizes = [file_gb(f"{model}:{kind.lower()}") for model in MODELS]
    assert shown == pytest.approx(sizes, abs=0.06)
    bits = sizes[-1] / file_gb(f"{MODELS[-1]}:bf16") * 16
    assert largest == pytest.approx(LARGEST * bits / 8, abs=0.6)


@pytest.mark.parametrize("kind", table("Memory"))
def test_memory_of_each_backend(kind: str) -> None:
    file, *shown = table("Memory")[kind]
    name = f"llama-3.3-70b:{kind.lower()}"
    assert file == pytest.approx(file_gb(name), abs=0.06)
    assert shown == pytest.approx([memory_gb(name, backend) for backend in KINDS], rel=0.01)
