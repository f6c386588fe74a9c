"""A stage process in virtual time, and the oracle: which token a pipeline of such stages must give.

Where steps name slots of states, the token before counts by the state that the row reads, else by its KV slot. Both are
the same number, so the oracle needs no case for either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgepipe.ids import Epoch, SequenceId
from edgepipe.scheduler import ScheduledStep

VOCAB = 97
BLOCK = 4  # positions of a KV block
_PRIME = (1 << 61) - 1


def mix(stage: int, chain: int, position: int, value: int, looked_at: int) -> int:
    """What a stage makes of one token, from the token before it and one further back."""
    return (chain * 31 + value * (2 * stage + 3) + looked_at + position) % _PRIME


def look_back(position: int) -> int:
    """Which earlier position a token also depends on: any of them, so that every slot counts in the end."""
    return position * 7 % (position + 1)


def next_token(tokens: Sequence[int], num_stages: int) -> int:
    """The oracle: the token after ``tokens``."""
    values = [token + 1 for token in tokens]
    for stage in range(num_stages):
        chain, made = 0, list[int]()
        for position, value in enumerate(values):
            looked_at = values[look_back(position)]
            chain = mix(stage, chain, position, value, looked_at)
            made.append(chain)
        values = made
    return values[-1] % VOCAB


@dataclass(slots=True)
class SimulatedStage:
    """One stage process: KV slots hold (chain, value) and are kept until the process dies."""

    index: int
    epoch: Epoch
    kv_since: Epoch  # as its ``Opened`` says
    slots: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    states: dict[int, int] = field(default_factory=dict[int, int])  # keys are slots, kept like the KV
    tables: dict[SequenceId, list[int]] = field(default_factory=dict[SequenceId, list[int]])
    plans: deque[ScheduledStep] = field(default_factory=deque[ScheduledStep])
    inputs: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # keys are steps
    dead: bool = False

    def ready(self) -> bool:
        """Whether the next planned step can be computed; those that end before this stage are noted only."""
        while self.plans and self.plans[0].last_slice is not None and self.plans[0].last_slice < self.index:
            passed = self.plans.popleft()
            assert not passed.copies, "copies are made by all stages"
            self._prepare(passed)
        return not self.dead and bool(self.plans) and self.plans[0].step in self.inputs

    def compute(self) -> tuple[ScheduledStep, list[int]]:
        """The next planned step and what the stage makes of its tokens."""
        step = self.plans.popleft()
        values = self.inputs.pop(step.step)
        self._prepare(step)
        made: list[int] = []
        kept: dict[int, int] = {}
        for row, sequence in enumerate(step.sequences):
            table, first = self.tables[sequence], step.positions[row]
            state = step.states[row] if step.states else None
            chain = None if state is None else 0 if state.read is None else self.states.get(state.read, -1)
            begin = len(made)
            for position in range(first, first + step.num_tokens[row]):
                made.append(self._one(table, position, values[len(made)], chain))
                chain = None if state is None else made[-1]
            kept |= {write.slot: made[begin + write.after - 1] for write in state.writes} if state else {}
        self.states |= kept
        return step, made

    def _prepare(self, step: ScheduledStep) -> None:
        for sequence in step.frees:
            self.tables.pop(sequence, None)
        for sequence in step.registers:
            self.tables[sequence] = []
        for row, start, count in zip(step.block_rows, step.block_starts, step.block_counts, strict=True):
            self.tables[step.sequences[row]] += range(start, start + count)
        for copy in step.copies:
            for offset in range(BLOCK):
                self.slots[copy.target * BLOCK + offset] = self.slots.get(copy.source * BLOCK + offset, (-1, -1))

    def _one(self, table: list[int], position: int, value: int, state: int | None) -> int:
        before = self.slots.get(_slot(table, position - 1), (-1, -1))[0] if position else 0
        chain = before if state is None else state
        self.slots[_slot(table, position)] = (0, value)
        looked_at = self.slots.get(_slot(table, look_back(position)), (-1, -1))[1]
        made = mix(self.index, chain, position, value, looked_at)
        self.slots[_slot(table, position)] = (made, value)
        return made


def _slot(table: list[int], position: int) -> int:
    return table[position // BLOCK] * BLOCK + position % BLOCK
