"""PURE: how the pipelines of a served model become those of another layout, one step after the other.

A pipeline whose machines are a group of the new layout stays as it is. A pipeline that shares machines with a group
moves there; it serves meanwhile. The others end, and new ones start for the groups that are left. Steps come in an
order in which

- no machine is in two pipelines at a time,
- a pipeline ends only if its machines are needed, or after all else,
- the first pipeline never ends: its record says which others count (``serve_rules.lead``). So one pipeline always
  answers.

If pipelines wait for each other's machines, one of them ends and starts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgepipe.ids import PipelineId

Nodes = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPipeline:
    """A pipeline of the model. The model's first one has the lowest place."""

    pipeline_id: PipelineId
    place: int  # number of its record, from 1 on
    nodes: Nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPipeline:
    """End a pipeline; its requests go on at the others."""

    pipeline_id: PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePipeline:
    """Move a pipeline's stages to the machines of a group of the new layout."""

    pipeline_id: PipelineId
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPipeline:
    """Start a pipeline on the machines of a group of the new layout."""

    place: int  # number of its record
    group: int


Step = EndPipeline | MovePipeline | StartPipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaChange:
    """A change of a model's pipelines."""

    kept: dict[PipelineId, int]  # pipelines that stay as they are, with their group
    steps: tuple[Step, ...]  # each begins after the one before

    @property
    def groups(self) -> dict[PipelineId, int]:
        """The group of each pipeline that goes on."""
        return {**self.kept, **{step.pipeline_id: step.group for step in self.steps if isinstance(step, MovePipeline)}}


def change_to(running: Sequence[RunningPipeline], groups: Sequence[Nodes]) -> ReplicaChange:
    """Return the steps from the running pipelines to one pipeline on each group. Groups share no machine."""
    pending = _Pending(running, groups)
    while pending.left:
        pending.advance()
    return ReplicaChange(kept=pending.kept, steps=tuple(pending.steps))


class _Pending:
    """What is still to do, and which machines are in use meanwhile."""

    def __init__(self, running: Sequence[RunningPipeline], groups: Sequence[Nodes]) -> None:
        ordered = sorted(running, key=lambda each: each.place)
        self._first = ordered[0].pipeline_id if ordered else None
        self._groups = groups
        self._used = {each.pipeline_id: each.nodes for each in ordered}
        self._places = {each.place for each in ordered}
        matched = _matched(ordered, groups)
        self.kept = {key: group for key, group in matched.items() if self._used[key] == groups[group]}
        self._moves = {key: group for key, group in matched.items() if key not in self.kept}
        self._ends = [each.pipeline_id for each in ordered if each.pipeline_id not in matched]
        self._starts = [group for group in range(len(groups)) if group not in matched.values()]
        self.steps: list[Step] = []

    @property
    def left(self) -> bool:
        """Whether steps are missing."""
        return bool(self._moves or self._starts or self._ends)

    def advance(self) -> None:
        """Add one step."""
        if (key := next((key for key, group in self._moves.items() if self._free(group, but=key)), None)) is not None:
            self._move(key)
        elif (group := next((group for group in self._starts if self._free(group)), None)) is not None:
            self._start(group)
        elif self._ends:
            wanted = frozenset[str]().union(*(self._groups[group] for group in (*self._moves.values(), *self._starts)))
            self._end(next((key for key in self._ends if self._used[key] & wanted), self._ends[0]))
        else:  # the moves wait for each other
            key = next(key for key in self._moves if key != self._first)
            self._starts.append(self._moves.pop(key))
            self._ends.append(key)

    def _free(self, group: int, *, but: PipelineId | None = None) -> bool:
        return not any(nodes & self._groups[group] for key, nodes in self._used.items() if key != but)

    def _move(self, key: PipelineId) -> None:
        group = self._moves.pop(key)
        self._used[key] = self._groups[group]
        self.steps.append(MovePipeline(pipeline_id=key, group=group))

    def _start(self, group: int) -> None:
        self._starts.remove(group)
        place = next(place for place in range(1, 2 + len(self._places)) if place not in self._places)
        self._places.add(place)
        self._used[PipelineId(f"new {place}")] = self._groups[group]
        self.steps.append(StartPipeline(place=place, group=group))

    def _end(self, key: PipelineId) -> None:
        self._ends.remove(key)
        del self._used[key]
        self.steps.append(EndPipeline(pipeline_id=key))


def _matched(running: Sequence[RunningPipeline], groups: Sequence[Nodes]) -> dict[PipelineId, int]:
    """Return the group of each pipeline that goes on: the one with the most machines in common.

    ``running``: the first pipeline first. It goes on in any case.
    """
    matched: dict[PipelineId, int] = {}

    def match(each: RunningPipeline, *, least: int) -> None:
        left = [group for group in range(len(groups)) if group not in matched.values()]
        best = max(left, key=lambda group: _likeness(each.nodes, groups[group]), default=None)
        if best is not None and _likeness(each.nodes, groups[best])[1] >= least:
            matched[each.pipeline_id] = best

    for each in running:
        if each.nodes in groups:
            match(each, least=1)
    for index, each in enumerate(running):
        if each.pipeline_id in matched:
            continue
        if index == 0 and len(matched) == len(groups):  # all groups are others' own: the first one takes the last
            del matched[next(reversed(matched))]
        match(each, least=0 if index == 0 else 1)
    return matched


def _likeness(nodes: Nodes, group: Nodes) -> tuple[bool, int]:
    return nodes == group, len(nodes & group)
