"""Mixes of requests for ``scripts/bench prompts rivals``: chats, agents and summaries on three clusters. PURE."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from prompt_cases import Asked, Case

from edgepipe.simulation.workload import FixedLengths, LengthDistribution, LognormalLengths, named_lengths

_CLUSTERS = (
    ("2x rtx4090", "qwen2.5-32b:q4_k_m", "1gbit,0.3ms"),
    ("2x rtx4090", "qwen2.5-32b:q4_k_m", "300mbit,5ms"),
    ("4x rtx4090", "qwen2.5-32b:bf16", "1gbit,0.3ms"),
)
_PREFIXES = 3  # repositories that agents read
_LOAD = 0.7  # share of the requests per second at which 32 users saturate the cluster


class Mix(NamedTuple):
    """Requests of one kind on one cluster."""

    name: str
    case: Case
    long: bool  # whether its prompts are long


class _Kind(NamedTuple):
    name: str
    prompt: LengthDistribution
    output: LengthDistribution
    prefix_tokens: int
    long: bool
    saturated_per_s: tuple[float, ...]  # requests per second of 32 users, by cluster, as the tree before serves them


_KINDS = (
    _Kind("ShareGPT-like chats", *named_lengths("sharegpt"), 0, False, (3.0, 3.0, 1.6)),
    _Kind("Azure-like chats", *named_lengths("azure"), 0, False, (0.81, 0.96, 0.85)),
    _Kind(
        "agents, 18k of 20k shared",
        FixedLengths(tokens=2_000),
        LognormalLengths(median_tokens=200),
        18_000,
        True,
        (0.38, 0.40, 0.22),
    ),
    _Kind("summaries, 8k + 200", FixedLengths(tokens=8_000), FixedLengths(tokens=200), 0, True, (0.11, 0.15, 0.31)),
)


def make_mixes(*, seed: int, requests: int) -> list[Mix]:
    """Draw every mix: Poisson arrivals at a constant share of saturation."""
    return [
        Mix(
            name=f"{kind.name}, {devices}, {link}",
            case=_case(kind, cluster, rate_per_s=_LOAD * rate_per_s, seed=seed, requests=requests),
            long=kind.long,
        )
        for kind in _KINDS
        for cluster, rate_per_s in zip(_CLUSTERS, kind.saturated_per_s, strict=True)
        for devices, _, link in (cluster,)
    ]


def _case(kind: _Kind, cluster: tuple[str, str, str], *, rate_per_s: float, seed: int, requests: int) -> Case:
    generator = np.random.default_rng((seed, 5))
    arrivals = np.cumsum(generator.exponential(1 / rate_per_s, requests)).tolist()
    prompts, outputs = kind.prompt.draw(generator, requests), kind.output.draw(generator, requests)
    asked = [
        Asked(arrival_s, kind.prefix_tokens + prompt, output, index % _PREFIXES if kind.prefix_tokens else None)
        for index, (arrival_s, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
    ]
    devices, model, link = cluster
    return Case(
        devices=devices,
        model=model,
        link=link,
        asked=tuple(asked),
        prefix_tokens=kind.prefix_tokens,
        jitter="0.05",
        seed=seed,
    )
