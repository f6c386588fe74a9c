"""SmolLM2 on real torch stages: what a pipeline of two one-core stages gives, and what the prefix cache saves."""

from __future__ import annotations

import statistics

from figures import Row, at_least, at_most
from local_nodes import Answer, Node, complete, decode_rate, running_nodes

from edgepipe.model.store import StoredModel

_ROUNDS = 2
_HALVES = "n0:0-14,n1:15-29"
_PREFIX_TOKENS = 1000
_USERS = 16
_PROMPTS = [[(7 * i + 13 * j) % 40_000 + 100 for j in range(24)] for i in range(_USERS)]


def real_model_rows(model: StoredModel) -> list[Row]:
    """Sixteen at a time over two stages, against their own step times and against one stage with both cores."""
    models_dir = model.path.parent
    with running_nodes(2, models_dir=models_dir, threads=1) as nodes:
        _serve(nodes[0], "--plan", _HALVES, "--micro-batches", "1")
        step_ms = _step_ms(nodes[0])
        first_s, again_s = _prefix_ttfts_s(nodes[0])
        nodes[0].edgepipe("stop", "demo")
        _serve(nodes[0], "--plan", _HALVES, "--micro-batches", "2")
        two = _rate(nodes[0])
    with running_nodes(1, models_dir=models_dir, threads=2) as nodes:
        _serve(nodes[0])
        one = _rate(nodes[0])
    allowed = _USERS / 2 / (max(step_ms) / 1e3)
    times = " and ".join(f"{ms:.1f}" for ms in step_ms)
    return [
        at_least("SmolLM2, 16 users, two one-core stages, M=2", two, "tok/s", allowed, f"8 rows in {times} ms", 0.85),
        at_least("  of one stage", two, "tok/s", one, "one stage, both cores", 1.0),
        at_most(
            f"second TTFT, same {_PREFIX_TOKENS} tokens", again_s * 1e3, "ms", first_s * 1e3, "the first TTFT", 0.25
        ),
    ]


def _serve(node: Node, *flags: str) -> None:
    node.edgepipe("serve", "demo", "--context", "2048", *flags)
    complete(node, _PROMPTS, max_tokens=8)  # code paths and caches are cold once


def _rate(node: Node) -> float:
    return statistics.median(decode_rate(complete(node, _PROMPTS, max_tokens=32)) for _ in range(_ROUNDS))


def _step_ms(node: Node) -> list[float]:
    """Each stage's own time for half of the users, with nothing beside it."""
    found: list[list[float]] = []
    for _ in range(_ROUNDS):
        complete(node, _PROMPTS[: _USERS // 2], max_tokens=16)
        (engine,) = node.status()["engines"]
        found.append([float(stage["step_ms"]) for stage in engine["stages"]])
    return [statistics.median(times) for times in zip(*found, strict=True)]


def _prefix_ttfts_s(node: Node) -> tuple[float, float]:
    """Medians for prompts never seen before, and for others that begin like them."""
    first: list[float] = []
    again: list[float] = []
    for number in range(_ROUNDS):
        prefix = [(31 * index + 977 * number) % 40_000 + 100 for index in range(_PREFIX_TOKENS)]
        for times, own in ((first, 5), (again, 6)):
            (answer,) = complete(node, [[*prefix, own]], max_tokens=2)
            times.append(_ttft_s(answer))
    return statistics.median(first), statistics.median(again)


def _ttft_s(answer: Answer) -> float:
    return answer.token_times_s[0] - answer.started_s
