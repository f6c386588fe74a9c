"""Chooses the node that starts an engine which its recorded node does not run. Every silence has a limit.

While an engine's node is not heard, the other members are asked. A member that hears the node passes on a proof that
the node itself has signed for this question (``alive_proof``). Such a veto holds while at least half of the members
have a proof, else for ``LIMIT_S``. A veto without proof holds for
``VETO_S`` after the node was lost, as other nodes may notice the loss some seconds later. Then the members take their
turns in the order of their ids: the first at once, each further one ``DUTY_S`` later. So a member that lies or does
nothing costs time, and never the model.

An engine's node that is heard but reports no engine has ``IDLE_S`` to start one. Then the same turns follow; after
``LIMIT_S`` without an engine they follow in any case.

PURE: callers pass the time, in seconds on a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VETO_S = 10.0  # more than the longest dead limit (6 s), a beat, and the answer of a member (2-5 s)
DUTY_S = 8.0  # time for a member to ask the others (2-5 s), look again (1 s) and spread its record
PROVEN_S = 5.0  # pause between two proofs, which cost the node a signature each
IDLE_S = 30.0  # a node that comes back gathers its pipeline's nodes (10 s) and reads the model's metadata
LIMIT_S = 60.0  # longest time without an engine, however often its node comes and goes, and whatever a minority proves
BELIEVED_S = 15.0  # nodes believe a successor earlier than they would act: they noticed at different times
_MOST_TURNS = 8  # a whole home; still more members do not delay it further


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """A member's word about an engine's node."""

    hears: bool = False
    proven: bool = False  # the engine's node itself has signed for this question that it runs the engine
    draining: bool = False  # the member is being drained, and starts no engine


@dataclass(slots=True, kw_only=True)
class _Vacancy:
    """A pipeline without its engine, as this node sees it."""

    head: str  # the recorded engine's node
    idle_s: float  # time since which no reachable node has the engine
    gone: bool  # whether the head is not heard, or hands its engines over
    since_s: float  # time of the last change of ``gone``
    vetoed_s: float  # time of the last veto that counted
    ask_s: float  # earliest time of the next question

    def latest_s(self) -> float:
        """Return when the turns begin at the latest, as for a head that comes and goes."""
        return self.idle_s + LIMIT_S


class Vacancies:
    """All pipelines that lack their engine now."""

    def __init__(self) -> None:
        self._vacancies: dict[str, _Vacancy] = {}  # vacancy of each pipeline: at most one per serve record

    def look(self, pipeline_id: str, head: str, *, has_engine: bool, gone: bool, now_s: float) -> None:
        """Note what this node sees: whether a reachable node has the engine, and whether the head is gone."""
        known = self._vacancies.get(pipeline_id)
        if has_engine:
            self._vacancies.pop(pipeline_id, None)
        elif known is None or known.head != head:
            self._vacancies[pipeline_id] = _Vacancy(
                head=head, idle_s=now_s, gone=gone, since_s=now_s, vetoed_s=now_s, ask_s=now_s
            )
        elif known.gone != gone:
            known.gone, known.since_s, known.vetoed_s, known.ask_s = gone, now_s, now_s, now_s

    def keep(self, pipelines: frozenset[str]) -> None:
        """Forget all other pipelines: they are not served."""
        for pipeline_id in self._vacancies.keys() - pipelines:
            del self._vacancies[pipeline_id]

    def has_long_lacked(self, pipeline_id: str, head: str, *, now_s: float) -> bool:
        """Return whether the head has been without the pipeline's engine for so long that a successor is believed."""
        vacancy = self._vacancies.get(pipeline_id)
        return vacancy is not None and vacancy.head == head and now_s - vacancy.idle_s >= BELIEVED_S

    def must_ask(self, pipeline_id: str, *, now_s: float) -> bool:
        """Return whether the other members' answers can make it this node's turn."""
        vacancy = self._vacancies.get(pipeline_id)
        if vacancy is None:
            return False
        from_s = vacancy.ask_s if vacancy.gone else min(vacancy.since_s + IDLE_S, vacancy.latest_s())
        return now_s >= from_s

    def is_turn(self, pipeline_id: str, own_id: str, answers: Mapping[str, MemberReport], *, now_s: float) -> bool:
        """Return whether this node starts the engine now, after the members' answers."""
        vacancy = self._vacancies.get(pipeline_id)
        if vacancy is None:
            return False
        free_s = vacancy.since_s + IDLE_S
        if vacancy.gone:
            if any(answer.hears and answer.proven for answer in answers.values()):
                vacancy.since_s = vacancy.vetoed_s = now_s
                vacancy.ask_s = now_s + PROVEN_S
                if not _most_miss_it(answers):
                    vacancy.idle_s = now_s  # only the link from here is broken
                if now_s < vacancy.latest_s():
                    return False
            elif any(answer.hears for answer in answers.values()):
                vacancy.vetoed_s = min(now_s, vacancy.since_s + VETO_S)
                if now_s < min(vacancy.since_s + VETO_S, vacancy.latest_s()):
                    return False
            free_s = vacancy.vetoed_s
        turn = min(_turn(own_id, vacancy, answers), _MOST_TURNS)
        return now_s >= min(free_s, vacancy.latest_s()) + DUTY_S * turn


def _most_miss_it(answers: Mapping[str, MemberReport]) -> bool:
    """Return whether more members lack the engine's node, this one included, than can prove that it is up."""
    proven = sum(answer.hears and answer.proven for answer in answers.values())
    return 1 + len(answers) - proven > proven


def _turn(own_id: str, vacancy: _Vacancy, answers: Mapping[str, MemberReport]) -> int:
    """Return how many members come before this node."""
    others = (node_id for node_id, answer in answers.items() if _may_act(answer, gone=vacancy.gone))
    return sum(node_id < own_id and node_id != vacancy.head for node_id in others)


def _may_act(answer: MemberReport, *, gone: bool) -> bool:
    """Return whether a member with this answer starts the engine when it is its turn."""
    return not answer.draining and not (gone and answer.hears)
