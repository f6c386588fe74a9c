"""PURE: charge the end of an epoch to the node that ended it, and to the requests that it held up.

Both are charged, because nothing tells them apart at first. A node that ends several epochs is left out, so that
another node is tried. A request that also stalls there is refused alone. See ``Stalls`` for what counts as progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edgepipe.engine.blame import Blame, Crash
from edgepipe.engine.pauses import Pauses
from edgepipe.engine.progress import EpochProgress, Stalls
from edgepipe.engine.quarantine import Quarantine
from edgepipe.engine.recovery_types import Accuse, Acquit, Command, EpochEnded, RefuseOne, Suspect
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.errors import EdgepipeError, PipelineBroken, StepFailed
from edgepipe.ids import NodeId, RequestKey


class Charges:
    """Judges the faults of one engine's epochs. Times are monotonic seconds."""

    def __init__(
        self,
        quarantine: Quarantine,
        *,
        name: Callable[[NodeId], str],
        limits: EngineLimits,
        timeouts: EngineTimeouts,
    ) -> None:
        """``name``: returns a node's name for people."""
        self.fresh: frozenset[NodeId] = frozenset()  # nodes whose next stage needs a new process
        self.pauses = Pauses(timeouts)
        self._quarantine = quarantine
        self._name = name
        self._limits = limits
        self._timeouts = timeouts
        self._blame = Blame()
        self._stalls = Stalls()
        self._suspects: frozenset[RequestKey] = frozenset()  # suspects that the request table knows
        self._barren = 0  # epochs in a row that a fault ended before any sequence got further
        self._ended: tuple[EpochEnded, NodeId | None] | None = None  # stalls of this epoch are not counted yet
        self._tried: dict[str, None] = {}  # remedies tried since a sequence last got further, for people

    def ended(self, event: EpochEnded, node_id: NodeId | None, *, served_s: float, now_s: float) -> list[Command]:
        """Charge a fault that ended an epoch after ``served_s``. ``node_id``: the node that ended it, where known."""
        self.progressed(event.progress)
        if not event.progress.further:
            self._barren = 1 if served_s >= self._timeouts.forgiven_s else self._barren + 1
        self.pauses.ended(node_id, now_s, further=event.progress.further, served_s=served_s)
        if event.crash is not None:
            self._ended = None
            return self._crashed((event.crash,), now_s)
        if node_id is not None and self._quarantine.lost(node_id, _lost(event.error), now_s):
            self._tried[f"a placement without {self._name(node_id)}"] = None
        self._ended = event, node_id
        return []

    def progressed(self, progress: EpochProgress) -> None:
        """Take note of an ended epoch's progress, which clears earlier charges."""
        self._stalls.keep_only(progress.stalled | progress.waiting)
        if progress.further:
            self._barren = 0
            self._blame.worked()
            self._tried.clear()
            self.pauses.worked()

    def prepared(self, node_ids: frozenset[NodeId], crashes: Iterable[Crash], now_s: float) -> list[Command]:
        """Charge the last epoch's end now that its stages are prepared again and have reported crashed steps."""
        self.fresh -= node_ids
        (event, node_id), self._ended = self._ended or (None, None), None
        told = tuple(crashes)
        if event is not None and not told:
            return self._count_stalls(event, node_id)
        if event is not None:
            in_steps = frozenset[RequestKey]().union(*(crash.requests for crash in told))
            self._stalls.note(event.progress.stalled & in_steps or event.progress.stalled, node_id)
        return self._crashed(told, now_s)

    def _crashed(self, crashes: Iterable[Crash], now_s: float) -> list[Command]:
        """Charge crashed steps, which say more than where their epoch ended."""
        return [command for crash in crashes for command in self._judge(crash, now_s)]

    def refuses_all(self, pause_s: float) -> bool:
        """Return whether all requests are refused before a pause: it is long, or no request is to blame for it.

        While one request was in all epochs without progress, it may be to blame alone. So the others wait for its
        verdict.
        """
        stalled = self._ended[0].progress.stalled if self._ended is not None else frozenset[RequestKey]()
        suspected = self._stalls.in_all_of(self._barren - 1, stalled)
        return pause_s > self._timeouts.patience_s or (self._barren >= self._limits.max_barren_epochs and not suspected)

    def refused_all(self) -> None:
        """All requests have ended."""
        self._stalls.keep_only(())
        self._ended = None

    def broken(self, model: str, error: EdgepipeError, pause_s: float) -> PipelineBroken:
        """Return the reason for which all requests are refused during a pause."""
        count = f"{self._barren} attempts in a row ended without a token: " if self._barren > 1 else ""
        tried = f"; tried: {', '.join(self._tried)}" if self._tried else ""
        return PipelineBroken(
            f"'{model}' cannot be computed at present",
            fact=f"{count}{clause(error)}{tried}",
            next_step=f"see 'edgepipe doctor'; the next attempt is in {pause_s:.0f} s, or when a machine joins",
            node=error.node,
            stage=error.stage,
        )

    def _count_stalls(self, event: EpochEnded, node_id: NodeId | None) -> list[Command]:
        verdict = self._stalls.count(event.progress.stalled, node_id)
        commands: list[Command] = []
        if verdict.suspects or self._suspects:
            commands.append(Suspect(requests=verdict.suspects))
        self._suspects = verdict.suspects
        if verdict.refused is not None:
            self._forgive(verdict.nodes)
            commands.append(RefuseOne(request=verdict.refused, error=self._stalled(verdict.nodes, event.error)))
        return commands

    def _stalled(self, nodes: tuple[NodeId | None, ...], error: EdgepipeError) -> StepFailed:
        names = ", ".join(dict.fromkeys(self._name(node_id) for node_id in nodes if node_id is not None))
        return StepFailed(
            f"the request was refused: {len(nodes)} attempts in a row ended before any more of it was computed",
            fact=clause(error) + (f"; the attempts ended on {names}" if names else ""),
            next_step="send a shorter prompt, or see 'edgepipe logs' there",
            node=error.node,
            stage=error.stage,
        )

    def _judge(self, crash: Crash, now_s: float) -> list[Command]:
        verdict, name = self._blame.judge(crash, now_s), self._name(crash.node_id)
        if verdict.replace:
            self.fresh |= {crash.node_id}
            self._tried[f"a new stage process on {name}"] = None
        if verdict.leave_out:
            self._quarantine.failed(crash.node_id, clause(crash.error), now_s)
            self._tried[f"a placement without {name}"] = None
        if not verdict.accused:
            self._stalls.forget(verdict.acquitted)
            return [Acquit(requests=verdict.acquitted)]
        if crash.guilty:
            self._forgive([crash.node_id] * self._barren)
        return [Accuse(sequences=crash.sequences, error=crash.error)]

    def _forgive(self, nodes: Iterable[NodeId | None]) -> None:
        """Take back epochs of these nodes: the request that ended them is refused now."""
        self._barren = 0
        self.pauses.forgive(nodes)


def clause(error: EdgepipeError) -> str:
    """Return the error in one clause."""
    return error.what + (f" ({error.fact})" if error.fact else "")


def _lost(error: EdgepipeError) -> str:
    return f"it keeps ending the pipeline: {clause(error)}"
