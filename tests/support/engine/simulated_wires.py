"""What is under way between simulated processes, in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from edgepipe.ids import Epoch

_STALE_CHANCE = 0.2  # chance that a message of a replaced epoch is kept, to arrive late


@dataclass(frozen=True, slots=True)
class Message:
    """Activations on their way, or a StepDone (``stage`` behind the last)."""

    epoch: Epoch
    sender: int
    stage: int
    step: int
    values: tuple[int, ...]


class SimulatedWires:
    """Links are first in, first out; messages of replaced epochs are lost, or haunt."""

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._under_way: list[Message] = []
        self._ghosts: list[Message] = []

    def __bool__(self) -> bool:
        """Whether a message of the newest epoch is under way."""
        return bool(self._under_way)

    @property
    def haunted(self) -> bool:
        """Whether a message of a replaced epoch may still arrive."""
        return bool(self._ghosts)

    def send(self, message: Message) -> None:
        """Behind whatever else is on its link."""
        self._under_way.append(message)

    def deliverable(self) -> list[int]:
        """Places, for ``take``, of the oldest message of each link."""
        first: dict[tuple[Epoch, int, int], int] = {}
        for place, message in enumerate(self._under_way):
            first.setdefault((message.epoch, message.sender, message.stage), place)
        return list(first.values())

    def take(self, place: int) -> Message:
        """A message arrives."""
        return self._under_way.pop(place)

    def take_ghost(self) -> Message:
        """A random message of a replaced epoch arrives."""
        return self._ghosts.pop(self._random.randrange(len(self._ghosts)))

    def replace_epoch(self) -> None:
        """What is under way is of a replaced epoch from now on; most of it is lost."""
        self._ghosts += [message for message in self._under_way if self._random.random() < _STALE_CHANCE]
        self._under_way = []
