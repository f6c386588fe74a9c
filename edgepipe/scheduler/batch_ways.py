"""Ways to fill steps while only batch sequences are in the ring. PURE.

Beside chats, the engine's policy fills the steps. A batch alone has no first token to wait for and no pauses to avoid,
so that another policy may give more tokens per second.
"""

from __future__ import annotations

from typing import NamedTuple

from edgepipe.scheduler.lengths import AnswerLengths
from edgepipe.scheduler.pacing import Pacer
from edgepipe.scheduler.phases import Phases
from edgepipe.scheduler.policy import Policy, make_policy

THROTTLED, TEMPORAL, AUTO = "throttled", "temporal", "auto"
WAYS = (THROTTLED, "sarathi-64", "sarathi-128", "sarathi-256", TEMPORAL)
"""Names of the ways that ``auto`` compares: policies."""


class BatchWay(NamedTuple):
    """A way to fill steps of batch sequences alone."""

    name: str
    policy: Policy
    phases: Phases | None = None


def make_way(name: str, pacer: Pacer, lengths: AnswerLengths, *, kv_tokens: int, knows_limits: bool = True) -> BatchWay:
    """Return the way of that name: of a policy. See ``Phases`` for the other arguments."""
    phases = None
    if name == TEMPORAL:
        phases = Phases(pacer, lengths, kv_tokens=kv_tokens, knows_limits=knows_limits)
    return BatchWay(name, make_policy(name), phases)
