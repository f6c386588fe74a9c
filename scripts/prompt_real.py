"""SmolLM2 on real torch stages: a prompt of 2,048 tokens over two one-thread stages against one."""

from __future__ import annotations

import statistics

from figures import Row
from local_nodes import Node, complete, running_nodes

from edgepipe.store.store import StoredModel

_TOKENS = 2048
_HALVES = "n0:0-14,n1:15-29"
_ROUNDS, _FULL_ROUNDS = 3, 9
_TARGET = 1.6


def real_rows(model: StoredModel, *, full: bool) -> list[Row]:
    """Send new prompts to one stage and to two in turns; the median of the rounds' ratios counts."""
    models_dir = model.path.parent
    with (
        running_nodes(1, models_dir=models_dir, threads=1) as one,
        running_nodes(2, models_dir=models_dir, threads=1) as two,
    ):
        one[0].edgepipe("serve", "demo", "--context", "4096")
        two[0].edgepipe("serve", "demo", "--context", "4096", "--plan", _HALVES)
        for node in (one[0], two[0]):
            _ttft_s(node, 0)  # code paths and caches are cold once
        numbers = range(1, 1 + (_FULL_ROUNDS if full else _ROUNDS))
        rounds = [(_ttft_s(one[0], number), _ttft_s(two[0], number)) for number in numbers]
    one_s, two_s = (statistics.median(side) for side in zip(*rounds, strict=True))
    gained = statistics.median(alone_s / halves_s for alone_s, halves_s in rounds)
    name = f"SmolLM2, {_TOKENS:,} tokens on one stage of one thread"
    return [Row(name, one_s, "s", two_s, "two such stages", gained, f">= {_TARGET:.2f}x", gained >= _TARGET)]


def _ttft_s(node: Node, number: int) -> float:
    """Return the time to the first token of a prompt that no other begins like."""
    prompt = [(31 * index + 977 * number) % 40_000 + 100 for index in range(_TOKENS)]
    (answer,) = complete(node, [prompt], max_tokens=1)
    return answer.token_times_s[0] - answer.started_s
