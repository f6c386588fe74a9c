"""Cases of ``scripts/bench prompts``: a modelled cluster with its requests, and what serving them gave.

Plain values that cross to ``prompt_worker.py`` as JSON, which serves them with this tree or an older one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np

LONG_TOKENS = 4096  # a prompt of so many is long: chats' gaps count without it


class Asked(NamedTuple):
    """One request."""

    arrival_s: float | None  # None: when a user of the closed loop is free
    prompt_tokens: int  # with its shared prefix
    output_tokens: int
    prefix: int | None = None  # index of the shared prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulated run."""

    devices: str
    model: str
    link: str
    asked: tuple[Asked, ...]
    users: int = 0  # users of a closed loop; 0: requests come at their times
    prefix_tokens: int = 0
    policy: str = "throttled"
    max_tokens: int = 2048  # budget of the policy
    micro_batches: int = 0  # 0: adapted
    plan: str = ""  # "a:0-8,b:9-17"; empty: the planner's
    context: int = 0  # tokens; 0: the model's
    kv_tokens: int = 0  # 0: as many as fit
    jitter: str = "0"
    seed: int = 0
    goal_s: float | None = None  # ITL goal; infinite: off; None: the tree's default
    device_settings: tuple[tuple[str, str], ...] = ()  # settings of every device: they override the tree's constants
    timed: bool = False  # measure the scheduler's processor time: no step is skipped

    def to_json(self) -> str:
        """Write one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Case:
        """Read what ``to_json`` wrote."""
        value = json.loads(line)
        asked = tuple(Asked(*each) for each in value["asked"])
        settings = tuple((name, text) for name, text in value["device_settings"])
        return cls(**{**value, "asked": asked, "device_settings": settings})

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the last request's prompt."""
        return max(self.asked, key=lambda each: each.arrival_s or 0.0).prompt_tokens

    def of_rival(self, policy: str, max_tokens: int) -> Case:
        """Return the case under another policy and budget, without a goal."""
        return replace(self, policy=policy, max_tokens=max_tokens, goal_s=None)

    @property
    def packed(self) -> bool:
        """Whether the model's weights are packed."""
        return not self.model.endswith(":bf16")


class Served(NamedTuple):
    """What a case gave; times in seconds."""

    tokens_per_s: float
    ttfts_s: list[float]  # one entry for each request
    gaps_s: list[float]  # between tokens of one request, without those of long prompts
    num_steps: int
    idle: float  # share of the span in which a device waited, mean over stages
    scheduler_s: float  # processor time of the scheduler in each step, mean; 0: not measured

    @property
    def ttft_p95_s(self) -> float:
        """95th percentile of the times to the first token."""
        return float(np.percentile(self.ttfts_s, 95))

    def gap_s(self, percentile: float) -> float:
        """Return a percentile of the gaps."""
        return float(np.percentile(self.gaps_s, percentile))


def lone(devices: str, model: str, link: str, prompt_tokens: int) -> Case:
    """One prompt in an idle ring."""
    return Case(devices=devices, model=model, link=link, asked=(Asked(0.0, prompt_tokens, 4),))


def beside(lone_case: Case, *, chats: int, at_s: float = 4.0) -> Case:
    """The same prompt some seconds after chats of 200 + 600 tokens began. It is the last request."""
    (prompt,) = lone_case.asked
    asked = (*[Asked(0.0, 200, 600)] * chats, prompt._replace(arrival_s=at_s))
    return replace(lone_case, asked=asked, jitter="0.05")


def without_prompt(case: Case) -> Case:
    """Return the case ``beside`` with its chats alone."""
    return replace(case, asked=case.asked[:-1])
