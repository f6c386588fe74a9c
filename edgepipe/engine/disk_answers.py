"""PURE: the answers of an epoch's stages to copies between host memory and disk."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgepipe.scheduler import DiskWork
from edgepipe.wire.tiers import DiskCopied

_MOST_TEXT = 200  # characters of a problem


@dataclass(slots=True)
class DiskAnswer:
    """What all stages that have answered say about a work. See ``Scheduler.disk_done``."""

    num_moves: int
    failed: set[int] = field(default_factory=set[int])
    seconds: float = 0.0
    problem: str = ""
    stages: set[int] = field(default_factory=set[int])  # the stages whose answer has come


class DiskAnswers:
    """Collects answers until all stages have given theirs."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._open: dict[int, DiskAnswer] = {}

    def sent(self, work: DiskWork) -> None:
        """Expect answers to a work."""
        self._open[work.number] = DiskAnswer(len(work.moves))

    def note(self, stage: int, node_name: str, copied: DiskCopied) -> DiskAnswer | None:
        """Add a stage's answer. Return the answer of all stages if this was the last one.

        Raises ValueError for an answer that the stage does not owe.
        """
        answer = self._open.get(copied.number)
        if answer is None or stage in answer.stages:
            raise ValueError(f"it answers copies {copied.number}, which it was not asked for")
        if max(copied.failed, default=0) >= answer.num_moves:
            raise ValueError(f"copies {copied.number} are {answer.num_moves}, it names number {max(copied.failed)}")
        answer.stages.add(stage)
        answer.failed.update(copied.failed)
        answer.seconds = max(answer.seconds, 1e-6 * copied.took_us)
        if copied.problem and not answer.problem:
            answer.problem = f"{node_name}: {copied.problem[:_MOST_TEXT]}"
        if len(answer.stages) < self._num_stages:
            return None
        del self._open[copied.number]
        return answer
