"""SmolLM2 on real torch stages: what a pipeline of two one-core stages gives, and what the prefix cache saves."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from figures import Row, at_most
from local_nodes import Answer, Node, complete, decode_rate, running_nodes, steps_of

from edgepipe.store.store import StoredModel

_ROUNDS = 4
_HALVES = "n0:0-15,n1:16-29"  # the head costs as much as two layers
_PREFIX_TOKENS = 1000
_USERS = 16
_PROMPTS = [[(7 * i + 13 * j) % 40_000 + 100 for j in range(24)] for i in range(_USERS)]


def real_model_rows(model: StoredModel) -> list[Row]:
    """Sixteen at a time over two stages, against their own step times and against one stage with both cores.

    What step times allow is taken from the very rounds that are measured, with both stages at work: the mean of every
    step that only decodes for half of the users. How long they take with the other core idle is printed beside it. The
    two ways to serve take turns, as a core's speed changes.
    """
    models_dir = model.path.parent
    with (
        running_nodes(2, models_dir=models_dir, threads=1) as halves,
        running_nodes(1, models_dir=models_dir, threads=2) as whole,
    ):
        _serve(halves[0], "--plan", _HALVES, "--micro-batches", "1")
        alone_ms = _round(halves[0], users=_USERS // 2).step_ms  # one stage at a time: nothing beside it
        first_s, again_s = _prefix_ttfts_s(halves[0])
        halves[0].edgepipe("stop", "demo")
        _serve(halves[0], "--plan", _HALVES, "--micro-batches", "2")
        _serve(whole[0])
        rounds = [(_round(halves[0]), _round(whole[0], rows=_USERS)) for _ in range(_ROUNDS)]
    two, one = (statistics.median(times) for times in zip(*((a.per_s, b.per_s) for a, b in rounds), strict=True))
    reached = statistics.median(a.per_s / _allowed(a.step_ms) for a, _ in rounds)
    gained = statistics.median(a.per_s / b.per_s for a, b in rounds)
    busy = " and ".join(f"{statistics.median(ms):.1f}" for ms in zip(*(a.step_ms for a, _ in rounds), strict=True))
    alone = " and ".join(f"{ms:.1f}" for ms in alone_ms)
    name = "SmolLM2, 16 users, two one-core stages, M=2"
    return [
        _at_least(name, two, two / reached, f"8 rows in {busy} ms", reached, 0.85),
        Row("  of stages that have the machine alone", two, "tok/s", _allowed(alone_ms), f"8 rows in {alone} ms"),
        _at_least("  of one stage", two, one, "one stage, both cores", gained, 1.0),
        at_most(
            f"second TTFT, same {_PREFIX_TOKENS} tokens", again_s * 1e3, "ms", first_s * 1e3, "the first TTFT", 0.25
        ),
    ]


class _Round(NamedTuple):
    per_s: float
    step_ms: list[float]  # step time of each stage, meanwhile


def _round(node: Node, *, users: int = _USERS, rows: int = _USERS // 2) -> _Round:
    known = steps_of(node)
    per_s = decode_rate(complete(node, _PROMPTS[:users], max_tokens=48))
    steps = steps_of(node, after=known[-1].step if known else 0)
    spans = [step.spans for step in steps if (step.decode_rows, step.prefill_tokens) == (rows, 0)]
    step_ms = [statistics.mean(one.end_us - one.begin_us for one in of) / 1e3 for of in zip(*spans, strict=True)]
    return _Round(per_s, step_ms)


def _allowed(step_ms: list[float]) -> float:
    """Tokens per second if the slower stage never waited."""
    return _USERS / 2 / (max(step_ms) / 1e3)


def _at_least(name: str, value: float, baseline: float, of: str, ratio: float, target: float) -> Row:
    """Return a row whose ratio is the median of the rounds' own ratios."""
    return Row(name, value, "tok/s", baseline, of, ratio, f">= {target:.2f}x", ratio >= target)


def _serve(node: Node, *flags: str) -> None:
    node.edgepipe("serve", "demo", "--context", "2048", "--draft", "off", *flags)  # stages, not drafts, are measured
    complete(node, _PROMPTS, max_tokens=8)  # code paths and caches are cold once


def _prefix_ttfts_s(node: Node) -> tuple[float, float]:
    """Medians for prompts never seen before, and for others that begin like them."""
    first: list[float] = []
    again: list[float] = []
    for number in range(2):
        prefix = [(31 * index + 977 * number) % 40_000 + 100 for index in range(_PREFIX_TOKENS)]
        for times, own in ((first, 5), (again, 6)):
            (answer,) = complete(node, [[*prefix, own]], max_tokens=2)
            times.append(_ttft_s(answer))
    return statistics.median(first), statistics.median(again)


def _ttft_s(answer: Answer) -> float:
    return answer.token_times_s[0] - answer.started_s
