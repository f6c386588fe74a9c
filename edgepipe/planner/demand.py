"""Demand on a ring, and the resulting work of a step. PURE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from edgepipe.backend.cost import StepWork
from edgepipe.planner.profiles import Speed, StepParts
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.memory_classes import LEAST_SLOTS, state_slots
from edgepipe.weights.weight_table import FLOATS, WeightTable

_SLOTS_PER_SEQUENCE = 4  # its state, two snapshots of its prompt, and one of its answer
_LEAST_KV_TOKENS = 512  # enough for one ordinary question


class Objective(Enum):
    """Figure to optimise."""

    LATENCY = "latency"  # tokens per second of one chat
    THROUGHPUT = "throughput"  # tokens per second of all chats together


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Expected use of the model."""

    config: ModelConfig
    weights: WeightTable = FLOATS
    objective: Objective = Objective.LATENCY
    concurrency: int = 16  # sequences side by side, for throughput
    context_tokens: int = 4096  # tokens kept per sequence
    must_keep_tokens: int = 0  # required KV; 0: enough for an ordinary question
    read_tokens: int = 1024  # context tokens that a token attends to, on average
    prompt_share: float = 0.0  # prompt tokens computed per output token
    row_bytes: int = 0  # one token's activations on a link; 0: as bf16

    @property
    def least_kv_tokens(self) -> int:
        """Minimum KV of a feasible placement, in tokens."""
        return self.must_keep_tokens or min(_LEAST_KV_TOKENS, self.context_tokens)

    @property
    def hop_bytes(self) -> int:
        """Bytes of one token's activations on a link."""
        return self.row_bytes or 2 * self.config.hidden_size

    def kv_levels(self, rest_tokens: int = 0) -> list[int]:
        """Return the KV sizes to try, in tokens: enough for all conversations, then halves, down to the minimum.

        rest_tokens  see ``chats``
        """
        wanted = self.kv_of(self.concurrency if self.objective is Objective.THROUGHPUT else 1, rest_tokens)
        levels: list[int] = []
        while wanted > self.least_kv_tokens:
            levels.append(wanted)
            wanted //= 2
        return [*levels, self.least_kv_tokens]

    def slot_choices(self) -> list[int]:
        """Return the bounds on slots of states to try, most first; only 0 (no bound) for a model without states.

        Each conversation has a slot and snapshots of its own. If no placement keeps so many beside the KV, snapshots
        are given up: they only save reading a prompt again.
        """
        if not self.config.state_bytes():
            return [0]
        choices = [max(LEAST_SLOTS, _SLOTS_PER_SEQUENCE * self.concurrency)]
        while choices[-1] > LEAST_SLOTS:
            choices.append(max(LEAST_SLOTS, choices[-1] // 2))
        return choices

    def kv_of(self, chats: int, rest_tokens: int) -> int:
        """Return the tokens of one conversation that needs as much KV as so many. ``rest_tokens``: see ``chats``."""
        return chats * (self.context_tokens + rest_tokens) - rest_tokens

    def chats(self, kv_tokens: int, rest_tokens: int) -> int:
        """Return how many conversations fit into KV that keeps one of ``kv_tokens``.

        rest_tokens  slots that each needs behind its last token's, see ``kv_forms``
        """
        return (kv_tokens + rest_tokens) // (self.context_tokens + rest_tokens)

    def sequences(self, kv_tokens: int, *, most_slots: int = 0, rest_tokens: int = 0) -> int:
        """Return how many conversations fit into the KV and the slots of states, at most ``concurrency``."""
        most = self.chats(kv_tokens, rest_tokens)
        if (slots := state_slots(self.config, kv_tokens, most_slots=most_slots)) is not None:
            most = min(most, slots.num_slots)
        return max(1, min(self.concurrency, most))


def decode_work(rows: int, *, read_tokens: int, prompt_share: float = 0.0) -> StepWork:
    """Return the work of a micro-batch of ``rows`` decodes, each with a share of a prompt."""
    prompt = round(rows * prompt_share)
    pairs = float(rows * read_tokens) + prompt * read_tokens / 2
    return StepWork(
        tokens=rows + prompt,
        rows=rows + (1 if prompt else 0),
        kv_tokens=rows * read_tokens + (read_tokens if prompt else 0),
        attention_pairs=pairs,
        logit_rows=rows,
    )


def batch_parts(speed: Speed, demand: Demand, rows: float) -> StepParts:
    """Interpolate a decode step's times for a fractional number of rows, since micro-batches differ by one row."""
    low = max(1, int(rows))
    share = max(0.0, rows - low)
    below = _decode_parts(speed, demand, low)
    if not share:
        return below
    above = _decode_parts(speed, demand, low + 1)
    return StepParts(
        base_s=below.base_s + share * (above.base_s - below.base_s),
        layer_s=below.layer_s + share * (above.layer_s - below.layer_s),
        head_s=below.head_s + share * (above.head_s - below.head_s),
    )


def _decode_parts(speed: Speed, demand: Demand, rows: int) -> StepParts:
    """Return a decode step's times.

    A layer that predicts one token more takes none, except of prompts: it runs behind a step, where drafts are wanted.
    """
    work = decode_work(rows, read_tokens=demand.read_tokens, prompt_share=demand.prompt_share)
    parts = speed.parts(work)
    if demand.config.has_mtp and work.tokens == rows:
        return replace(parts, layer_s=np.append(parts.layer_s[:-1], 0.0))
    return parts
