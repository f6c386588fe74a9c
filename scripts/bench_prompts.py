"""Long prompts in a pipeline: alone, beside chats, against the schedulers before. ``scripts/bench prompts [PART ...]``

``lone-simulated``  one prompt in an idle ring, against the bound (``prompt_bound.py``) and one chunk in flight
``lone-runtime``    the same on real nodes whose devices are emulated, against the bound
``agreement``       the simulator against these nodes, alone and beside chats
``scaling``         four machines against one
``real``            SmolLM2 over two CPU stages of one thread each, against one stage
``beside``          a prompt of 24,000 tokens beside chats, at several ITL goals
``curve``           the same for more goals; draws docs/images/itl-goal.svg
``rivals``          mixes of requests against ``throttled`` and ``sarathi`` before, each at its best budget; this tree
                    at the default ITL goal, and at the goal that suits best against each
``saturated``       tokens per second of many users, against the tree before
``cost``            processor time of the scheduler in each step, against the tree before
``exactness``       tokens under load with long prompts, cancels, preemption, lost stages: each checked

"Before" is the tree at the commit in ``prompt_trees.py``, unpacked and run in the same minutes. Without ``--full``,
seeds and requests are fewer.

Predictions, before the first runs: a lone prompt takes 1.10x of the bound with chunks of equal time, and 1.15x where
many experts are read; on the runtime 1.15x. The simulator is right within 5 % once it has the pump's rule. Four
machines are 3.4x as fast as one, two CPU stages 1.7x. Beside three chats a goal of 100 ms costs the prompt 1.2x, one of
50 ms 1.35x. Rivals lose on long prompts by 1.5x, in p95 TTFT or in p99 ITL, and tie on chats. Saturated throughput and
the scheduler's time stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from math import inf, isfinite
from statistics import mean
from typing import NamedTuple, TypeVar

from bench_foundation import stored_demo
from figures import ROOT, Row, at_least, at_most, below
from parts import Part, run_parts
from prompt_bound import Bound, beside_bound, lone_bound
from prompt_cases import Asked, Case, Served, beside, lone, without_prompt
from prompt_curve import Line, draw
from prompt_mixes import Mix, make_mixes
from prompt_real import real_rows
from prompt_runs import measure
from prompt_trees import serve_before, serve_here
from prompt_worker import cluster_of
from truth import LONG_MODELS, lossy_rows

Item = TypeVar("Item")
_LAN, _WIFI = "1gbit,0.3ms", "300mbit,5ms"
_FOUR, _TWO = "4x rtx4090", "2x rtx4090"
DENSE = lone(_TWO, "qwen2.5-32b:q4_k_m", _LAN, 24_000)
LONE = (
    lone(_FOUR, "qwen3-8b:q4_k_m", _LAN, 32_768),
    lone(_FOUR, "qwen2.5-32b", _LAN, 16_384),
    DENSE,
    lone("2x m4max", "qwen3-30b-a3b:q4_k_m", _LAN, 16_384),
    lone("rtx4090, m4max", "gpt-oss-120b", _LAN, 16_384),
)
# Emulated nodes reserve the KV of windowed layers whole, so the m4max has room for fewer tokens.
ON_NODES = (*LONE[:4], replace(lone("rtx4090, m4max", "gpt-oss-120b", _LAN, 12_000), kv_tokens=12_288))
SIMULATED_ONLY = (
    lone(_FOUR, "qwen3-8b:q4_k_m", _LAN, 8_192),
    replace(lone(_FOUR, "qwen3-8b:q4_k_m", _LAN, 65_536), context=66_000),
)
_SIMULATED_TARGET, _RUNTIME_TARGET = 1.15, 1.22  # multiples of the bound
_AGREEMENT = 8.0  # percent
_NOISE = 1.05  # ratio of the same code's times in two processes
_GOALS_S = (0.05, 0.1, 0.3)
_SEEDS = (1, 2, 3)
_CHAT_CONTEXT = 400  # tokens of a chat beside the prompt, in the mean
_SAME = 1.01  # ratio of two times that jitter alone explains
_RIVAL_GOALS_S = (0.025, 0.05, 0.1, inf)  # what a user may set, as a rival has its budget; infinite: off
_DEFAULT_GOAL_S = 0.1
_MIXED_REQUESTS = 40
_BUDGETS = (256, 512, 1024, 2048, 4096)  # tokens of a rival's step


def lone_simulated_rows(full: bool) -> list[Row]:
    """One prompt in the simulator."""
    cases = (*LONE, *SIMULATED_ONLY)
    before = serve_before([*cases, *[_one_in_flight(case) for case in cases]])
    rows: list[Row] = []
    for case, now, old, one in zip(cases, serve_here(cases), before[: len(cases)], before[len(cases) :], strict=True):
        bound, name = _bound(case), _name(case)
        ttft_s, old_s, one_s = (each.ttfts_s[0] for each in (now, old, one))
        rows += [
            at_most(f"{name}, simulated", ttft_s, "s", bound.seconds, _bound_name(bound), _SIMULATED_TARGET),
            at_most("  of one chunk in flight, before", ttft_s, "s", one_s, "one chunk in flight", 1.0),
            _row("  of the slowest server's work in one piece", ttft_s, bound.alone_s, bound.server),
            _row("  before", old_s, bound.seconds, "the bound"),
        ]
    return rows


def lone_runtime_rows(full: bool) -> list[Row]:
    """One prompt at a time on the emulated runtime."""
    rows: list[Row] = []
    for case in ON_NODES:
        bound, real = _bound(case), _measured(case)
        name = f"{_name(case)}, runtime, stages {real.idle:.0%} idle"
        rows.append(at_most(name, real.ttfts_s[0], "s", bound.seconds, _bound_name(bound), _RUNTIME_TARGET))
    return rows


def agreement_rows(full: bool) -> list[Row]:
    """The simulator's times to the first token against the runtime's."""
    cases = [*ON_NODES, beside(DENSE, chats=3), beside(DENSE, chats=12)]
    rows: list[Row] = []
    for case, simulated in zip(cases, serve_here(cases), strict=True):
        real_s, simulated_s = _measured(case).ttfts_s[-1], simulated.ttfts_s[-1]
        name = f"{_name(case)}: simulated {simulated_s:.2f} s, runtime {real_s:.2f} s, difference"
        rows.append(below(name, 100 * abs(simulated_s / real_s - 1), "%", _AGREEMENT))
    return rows


def scaling_rows(full: bool) -> list[Row]:
    """Four machines against one: with equal parts, and with the planner's, which makes the head's part smaller."""
    one, planned = (lone(devices, "qwen3-8b:q4_k_m", "10gbit,0.1ms", 32_768) for devices in ("rtx4090", _FOUR))
    equal = replace(planned, plan="a:0-8,b:9-17,c:18-26,d:27-35")
    one_s, planned_s, equal_s = (served.ttfts_s[0] for served in serve_here([one, planned, equal]))
    name = "32,768 tokens on one rtx4090, qwen3-8b:q4_k_m, simulated"
    rows = [at_least(name, one_s, "s", equal_s, "four, 9 layers each", 3.4)]
    for case, ttft_s, parts in ((equal, equal_s, "9 layers each"), (planned, planned_s, "10, 10, 10 and 6 layers")):
        rows += [
            _row(f"  {parts}", one_s, ttft_s, f"four, {parts}"),
            _row(f"  {parts}, possible", one_s, _bound(case).seconds, "the bound of four"),
        ]
    if full:
        real_s, four_s = (_measured(case).ttfts_s[0] for case in (one, equal))
        rows.append(at_least("  on the runtime", real_s, "s", four_s, "four, 9 layers each", 3.4))
    return rows


def beside_rows(full: bool) -> list[Row]:
    """A long prompt beside chats, in the simulator; two chats' counts, two rings, two links, three goals."""
    rows: list[Row] = []
    for chats, devices, link in product((3, 12), (_TWO, _FOUR), (_LAN, _WIFI)):
        alone = replace(DENSE, devices=devices, link=link)
        name = f"beside {chats} chats, {devices}, {link}"
        rows += _beside_rows(name, alone, chats, _SEEDS if full else _SEEDS[:1])
    return rows


def _beside_rows(name: str, alone: Case, chats: int, seeds: Sequence[int]) -> list[Row]:
    """Judge each goal by the worst seed."""
    both = [replace(beside(alone, chats=chats), seed=seed) for seed in seeds]
    with_goals = [replace(case, goal_s=goal_s) for goal_s in _GOALS_S for case in both]
    lone_served, *served = serve_here([replace(alone, jitter=both[0].jitter), *map(without_prompt, both), *with_goals])
    lone_s = lone_served.ttfts_s[0]
    turns_s = [each.gap_s(50) for each in served[: len(seeds)]]
    cluster = cluster_of(both[0])
    rows: list[Row] = []
    ttfts_s: list[float] = []
    for goal_s, of_goal in zip(_GOALS_S, _batched(served[len(seeds) :], len(seeds)), strict=True):
        ttfts_s.append(max(each.ttfts_s[-1] for each in of_goal))
        late_s, turn_s = max((each.gap_s(99) - turn_s, turn_s) for each, turn_s in zip(of_goal, turns_s, strict=True))
        of = f"{name}, goal {1e3 * goal_s:.0f} ms"
        over = f"  ITL p99 over the turn of {1e3 * turn_s:.0f} ms without the prompt"
        least_s = beside_bound(
            cluster, alone.prompt_tokens, chats=chats, context=_CHAT_CONTEXT, most_turn_s=max(turns_s) + goal_s
        )
        rows += [
            at_most(f"{of}: TTFT", ttfts_s[-1], "s", lone_s, "the lone prompt's", max(1.35, 1.02 * least_s / lone_s)),
            _row("  the least that keeps the goal", least_s, lone_s, "the lone prompt's"),
            below(over, 1e3 * late_s, "ms", 1e3 * goal_s),
        ]
    falls = all(high_s <= _SAME * low_s for low_s, high_s in pairwise(ttfts_s))
    ratio = ttfts_s[-1] / ttfts_s[0]
    rows.append(
        Row("  TTFT falls as the goal rises", ttfts_s[-1], "s", ttfts_s[0], "the first goal", ratio, "falls", falls)
    )
    return rows + _before_rows(both, lone_s)


def _before_rows(cases: Sequence[Case], lone_s: float) -> list[Row]:
    """Show both policies before, beside the same chats."""
    policies = ("throttled", "sarathi")
    served = serve_before([case.of_rival(policy, 2048) for policy in policies for case in cases])
    rows: list[Row] = []
    for policy, of_policy in zip(policies, _batched(served, len(cases)), strict=True):
        name = f"  before, {policy}: ITL p99 {1e3 * max(each.gap_s(99) for each in of_policy):.0f} ms, TTFT"
        rows.append(_row(name, max(each.ttfts_s[-1] for each in of_policy), lone_s, "the lone prompt's"))
    return rows


def rival_rows(full: bool) -> list[Row]:
    """Mixes of requests, against the two policies before: each at its best budget, and this tree at its best goal.

    The first rows of a mix are stricter: the default goal against the best of each figure, whichever rival has it. One
    rival has the least TTFT since it makes chats wait for seconds, the other the least ITL since prompts starve.
    """
    seeds, budgets = (_SEEDS, _BUDGETS) if full else (_SEEDS[:1], _BUDGETS[1::2])
    drawn = [make_mixes(seed=seed, requests=_MIXED_REQUESTS) for seed in seeds]
    rows: list[Row] = []
    for mixes in zip(*drawn, strict=True):
        cases = [mix.case for mix in mixes]
        setups = list(product(("throttled", "sarathi"), budgets))
        with ThreadPoolExecutor() as pool:
            rivals = [case.of_rival(policy, budget) for policy, budget in setups for case in cases]
            before = pool.submit(serve_before, rivals)
            here = serve_here([replace(case, goal_s=goal_s) for goal_s in _RIVAL_GOALS_S for case in cases])
        scores = [_Scores.of(same) for same in _batched(before.result(), len(cases))]
        ours = [_Scores.of(same) for same in _batched(here, len(cases))]
        best = [
            min(zip(of_policy, names, strict=True))
            for of_policy, names in zip(_batched(scores, len(budgets)), _batched(setups, len(budgets)), strict=True)
        ]
        rows += _default_goal_rows(mixes[0], ours[_RIVAL_GOALS_S.index(_DEFAULT_GOAL_S)], [score for score, _ in best])
        for score, (policy, budget) in best:
            rows += _best_goal_rows(mixes[0], ours, score, f"{policy}, {budget} tokens")
    return rows


class _Scores(NamedTuple):
    """Means over seeds; the least ``late_s`` is the best budget."""

    late_s: float  # geometric mean of both latencies
    ttft_p95_s: float
    itl_p99_s: float
    tokens_per_s: float
    longest_gap_s: float  # of all seeds

    @classmethod
    def of(cls, served: Sequence[Served]) -> _Scores:
        ttft_s = mean(each.ttft_p95_s for each in served)
        itl_s = mean(each.gap_s(99) for each in served)
        longest_s = max(each.gap_s(100) for each in served)
        return cls((ttft_s * itl_s) ** 0.5, ttft_s, itl_s, mean(each.tokens_per_s for each in served), longest_s)

    def worst_ratio(self, rival: _Scores) -> float:
        """Return the larger one of both latencies, over the rival's."""
        return max(self.ttft_p95_s / rival.ttft_p95_s, self.itl_p99_s / rival.itl_p99_s)


def _default_goal_rows(mix: Mix, ours: _Scores, rivals: Sequence[_Scores]) -> list[Row]:
    target = _latency_target(mix)
    per_s = max(each.tokens_per_s for each in rivals)
    ttft_s = min(each.ttft_p95_s for each in rivals)
    itl_s = min(each.itl_p99_s for each in rivals)
    of = "the better one's"
    return [
        at_least(f"{mix.name}: throughput", ours.tokens_per_s, "tok/s", per_s, of, 0.99),
        at_most("  TTFT p95", ours.ttft_p95_s, "s", ttft_s, of, target),
        at_most("  ITL p99", 1e3 * ours.itl_p99_s, "ms", 1e3 * itl_s, of, target),
    ]


def _best_goal_rows(mix: Mix, ours: Sequence[_Scores], rival: _Scores, rival_name: str) -> list[Row]:
    """Judge both latencies of the goal whose worse one is best against this rival."""
    goal_s, score = min(
        zip(_RIVAL_GOALS_S, ours, strict=True), key=lambda goal_and_score: goal_and_score[1].worst_ratio(rival)
    )
    goal = f"{1e3 * goal_s:.0f} ms" if isfinite(goal_s) else "off"
    target = _latency_target(mix)
    longest_s = score.longest_gap_s
    return [
        at_most(f"  goal {goal}: TTFT p95", score.ttft_p95_s, "s", rival.ttft_p95_s, rival_name, target),
        at_most(f"  goal {goal}: ITL p99", 1e3 * score.itl_p99_s, "ms", 1e3 * rival.itl_p99_s, rival_name, target),
        _row(f"  goal {goal}: longest gap", longest_s, rival.longest_gap_s, rival_name),
    ]


def _latency_target(mix: Mix) -> float:
    return 0.9 if mix.long else 1.05


def saturated_rows(full: bool) -> list[Row]:
    """Many users of 256 + 256 tokens."""
    ring = Case(devices=_FOUR, model="qwen2.5-32b:bf16", link=_LAN, asked=(), jitter="0.05")
    asked = (Asked(None, 256, 256),) * (4 if full else 2)
    cases = [replace(ring, asked=asked * users, users=users) for users in (64, 128, 256)]
    return [
        at_least(
            f"saturated by {case.users} users, 256 + 256 tokens",
            now.tokens_per_s,
            "tok/s",
            before.tokens_per_s,
            "before",
            1.0,
        )
        for case, now, before in zip(cases, serve_here(cases), serve_before(cases), strict=True)
    ]


def cost_rows(full: bool) -> list[Row]:
    """Processor time of the scheduler in each step, here and before in turns; the least of the rounds counts."""
    chats = (Asked(None, 64, 128),) * 48
    books = (Asked(None, 8_000, 40),) * 12
    rows: list[Row] = []
    for name, asked, users in (("48 chats decode", chats, 48), ("prompts of 8,000 tokens wait", books, 6)):
        case = Case(devices=_FOUR, model="qwen2.5-32b:bf16", link=_LAN, asked=asked, users=users, timed=True)
        rounds = [(serve_here([case])[0], serve_before([case])[0]) for _ in range(8 if full else 4)]
        now_s, before_s = (min(each.scheduler_s for each in side) for side in zip(*rounds, strict=True))
        rows.append(at_most(f"scheduler, {name}, in each step", 1e6 * now_s, "us", 1e6 * before_s, "before", _NOISE))
    return rows


def curve_rows(full: bool) -> list[Row]:
    """The same prompt beside 3 and 12 chats for more goals; draws ``docs/images/itl-goal.svg``."""
    goals_s = (0.02, 0.03, 0.05, 0.1, 0.2, 0.3)
    case_of = {chats: replace(beside(DENSE, chats=chats), seed=1) for chats in (3, 12)}
    cases = [replace(case, goal_s=goal_s) for case in case_of.values() for goal_s in goals_s]
    lone_served, *served = serve_here([DENSE, *cases])
    lone_s = lone_served.ttfts_s[0]
    rows: list[Row] = []
    lines: list[Line] = []
    for chats, of_chats in zip(case_of, _batched(served, len(goals_s)), strict=True):
        lines.append(Line(f"beside {chats} chats", [each.ttfts_s[-1] for each in of_chats]))
        for goal_s, each in zip(goals_s, of_chats, strict=True):
            name = f"goal {1e3 * goal_s:.0f} ms, {chats} chats: ITL p99 {1e3 * each.gap_s(99):.0f} ms, TTFT"
            rows.append(_row(name, each.ttfts_s[-1], lone_s, "the lone prompt's"))
    draw(ROOT / "docs" / "images" / "itl-goal.svg", [1e3 * goal_s for goal_s in goals_s], lines, lone_s=lone_s)
    return rows


def real_model_rows(full: bool) -> list[Row]:
    """SmolLM2 on CPU stages."""
    return real_rows(stored_demo(), full=full)


def exactness_rows(full: bool) -> list[Row]:
    """Tokens of an emulated model, each checked, while prompts are cut into many chunks and stages are lost."""
    tokens = 500_000 if full else 24_000
    return [
        row._replace(name=f"{model}: {row.name}")
        for model in LONG_MODELS
        for row in lossy_rows(model, tokens // len(LONG_MODELS), long_prompts=True)
    ]


def _batched(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Split items into runs of ``size``."""
    return [items[start : start + size] for start in range(0, len(items), size)]


@cache
def _measured(case: Case) -> Served:
    """Serve a case on the emulated runtime, once for all parts."""
    return measure([case])[0]


@cache
def _bound(case: Case) -> Bound:
    return lone_bound(cluster_of(case), case.prompt_tokens)


def _one_in_flight(case: Case) -> Case:
    """Return the case with one chunk at a time, as before: its largest chunks."""
    return replace(case, micro_batches=1, goal_s=None)


def _name(case: Case) -> str:
    chats = f" beside {len(case.asked) - 1} chats" if len(case.asked) > 1 else ""
    return f"{case.prompt_tokens:,} tokens, {case.model}, {case.devices}{chats}"


def _bound_name(bound: Bound) -> str:
    return f"the bound, {bound.server}"


def _row(name: str, value_s: float, baseline_s: float, baseline_name: str) -> Row:
    return Row(name, value_s, "s", baseline_s, baseline_name, value_s / baseline_s)


PARTS: dict[str, Part] = {
    "lone-simulated": lone_simulated_rows,
    "lone-runtime": lone_runtime_rows,
    "agreement": agreement_rows,
    "scaling": scaling_rows,
    "beside": beside_rows,
    "rivals": rival_rows,
    "saturated": saturated_rows,
    "cost": cost_rows,
    "curve": curve_rows,
    "real": real_model_rows,
    "exactness": exactness_rows,
}


if __name__ == "__main__":
    run_parts("prompts", PARTS)
