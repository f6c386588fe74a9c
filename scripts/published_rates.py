"""Decode rates of one chat on one machine that others measured, beside what ``plan --emulate`` says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from figures import Row, at_most

from edgepipe.planner.cluster import known_cluster
from edgepipe.planner.demand import Demand
from edgepipe.planner.plan import plan
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model

_LINK = "1gbit,0.5ms"
_MOST = (
    1.3  # times the rate that others measured: the constants are arithmetic and promise too little rather than too much
)


class Measured(NamedTuple):
    """A published rate; MLX's 4 bits in groups of 64 are as large as q4_0."""

    device: str
    model: str
    tokens_per_s: float
    read_tokens: int  # context, on average
    source: str


_XIONGJIE = "github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference, tg 512"
_MLX = "github.com/ml-explore/mlx-lm, BENCHMARKS.md, -p 2048 -g 128"
_SPEED = "llm-speed.com/blog/gemma-3-speed-rtx-4090, Q4, short prompts"
_GEMMA = "gemma4.wiki/requirements/Gemma-4-31B-GPU"
_GUIDES = "runaihome.com/blog"
_NEXVERIDIAN = "github.com/NexVeridian/llm-inference-benchmarks, MLX 4"
ATTENTION = (
    Measured("rtx4090", "llama-3.1-8b:q4_k_m", 130.58, 256, _XIONGJIE),
    Measured("rtx4090", "llama-3.1-8b", 54.84, 256, _XIONGJIE),
    Measured("rtx4090", "gemma-3-4b:q4_k_m", 195, 256, _SPEED),
    Measured("rtx4090", "gemma-3-12b:q4_k_m", 93, 256, _SPEED),
    Measured("rtx4090", "gemma-3-27b:q4_k_m", 47, 256, _SPEED),
    Measured("rtx4090", "gemma-4-31b:q4_k_m", 42.3, 256, _GEMMA),
    Measured("rtx3090", "gemma-4-31b:q4_k_m", 35.7, 256, _GEMMA),
    Measured("m4max", "qwen3-4b", 52.47, 2112, _MLX),
    Measured("m4max", "qwen3-4b:q4_0", 134.52, 2112, _MLX),
    Measured("m4max", "qwen2.5-7b:q4_0", 91, 256, _NEXVERIDIAN),
    Measured("m4max", "qwen2.5-14b:q4_0", 52, 256, _NEXVERIDIAN),
    Measured("m4max", "qwen2.5-32b:q4_0", 23, 256, _NEXVERIDIAN),
    Measured("m4max", "qwen3-30b-a3b:q4_0", 113.33, 2112, _MLX),
    Measured("m4max", "qwen3-30b-a3b:q8_0", 83.16, 2112, _MLX),
    Measured("m4max", "qwen3-30b-a3b:q4_0", 93, 256, _NEXVERIDIAN),
    Measured("rtx4090", "qwen3-30b-a3b:q4_k_m", 196, 256, f"{_GUIDES}/qwen3-30b-a3b-local-ai-guide-2026"),
    Measured("rtx4090", "gpt-oss-20b:mxfp4_moe", 225, 256, f"{_GUIDES}/gpt-oss-20b-local-ai-hardware-guide-2026"),
)
_QWEN36 = f"{_GUIDES}/qwen36-35b-a3b-local-ai-guide-2026"
_OLLAMA = "github.com/ollama/ollama, pull request 16031"
_RAPID = "github.com/raullenchai/Rapid-MLX, pull request"
HYBRIDS = (
    Measured("rtx4090", "qwen3.6-35b-a3b:q4_k_m", 120, 256, _QWEN36),
    Measured("m4max", "qwen3.6-35b-a3b:q4_0", 108, 3000, "github.com/lmstudio-ai/mlx-engine, issue 285, mlx_vlm"),
    Measured("rtx3090", "qwen3.6-35b-a3b:q4_k_m", 135.7, 256, f"{_QWEN36}, llama.cpp, tuned"),
    Measured("rtx3090", "qwen3.6-35b-a3b:q4_k_m", 107, 256, f"{_QWEN36}, Ollama"),
    Measured("rtx5090", "qwen3.6-35b-a3b:q4_k_m", 226.3, 256, f"{_OLLAMA}, Ollama 0.30"),
    Measured("rtx5090", "qwen3.6-35b-a3b:q4_k_m", 149.8, 256, f"{_OLLAMA}, Ollama 0.24"),
    Measured("m3max", "qwen3.6-35b-a3b:q4_0", 106, 256, "github.com/osaurus-ai/osaurus, issue 2211"),
    Measured("m2max", "qwen3.6-35b-a3b:q4_0", 79.75, 256, f"{_RAPID} 1065"),
    Measured("m3ultra", "qwen3.6-35b-a3b:q4_0", 92, 256, f"{_RAPID} 159"),
    Measured("m3ultra", "qwen3.6-27b:q4_0", 36.5, 256, f"{_RAPID} 159"),
)
"""Models with recurrent layers."""


def published_rows(rates: Iterable[Measured]) -> list[Row]:
    """Compare the rate that the planner says of one machine with published ones."""
    rows: list[Row] = []
    for one in rates:
        config, weights = named_model(one.model)
        there = known_cluster([one.device], config, link=parse_link(_LINK), weights=weights)
        demand = Demand(config=config, weights=weights, read_tokens=one.read_tokens)
        said = plan(demand, there.machines, there.links, explain=False).tokens_per_s
        rows.append(at_most(f"{one.model} on {one.device}", said, "tok/s", one.tokens_per_s, one.source, _MOST))
    return rows
