"""Compiles the grammars of sequences while their prompts are computed, beside the sampler's threads.

A sampler thread never waits for a grammar: a sequence that is not ready at its first sampling is given back to the
engine (GrammarNotReady), which begins it again a little later. It then finds what was prepared meanwhile: it would
otherwise come too early each time on a fast ring. Every grammar is compiled once per text.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from edgepipe.children.forked_job import JobCost
from edgepipe.children.user_turns import UserTurns
from edgepipe.errors import EdgepipeError, GrammarNotReady, RequestInvalid, StepFailed
from edgepipe.plain_words import plain
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import BuiltGrammar, GrammarState, GrammarTokenizer
from edgepipe.sampling.grammar_trial import GrammarTooHard
from edgepipe.stage.built_grammars import BuiltGrammars

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEADLINE_S = 30.0  # longest time until a sequence's grammar is ready, with its wait for those before it
_NUM_THREADS = 2  # one user's grammar may compile while another user's does, or an output is replayed
_MAX_WAITING = 1024  # grammars of one user that wait: more than an engine computes at a time
_KEPT_S = 10.0  # how long a grammar that came too late is kept: the engine begins again within half a second
_MAX_LATE = 256  # grammars that came too late
_LEAST_BYTES = 64 << 10  # assumed least size of a compiled grammar: small ones are below the page-wise measure


class Trial(Protocol):
    """Tells whether a grammar can be compiled, and what that takes."""

    async def check(self, grammar: GrammarSpec) -> JobCost:
        """See ``StageTrial.check``."""
        ...

    async def close(self) -> None:
        """End its processes."""
        ...


class PendingGrammar:
    """A sequence's grammar, from its registration on. The loop settles it, sampler threads read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._missed = False  # it was asked for before it was settled
        self._first: tuple[tuple[int, ...], GrammarState] | None = None  # output so far and its state, used once
        self._built: BuiltGrammar | None = None
        self._error: EdgepipeError | None = None

    def state(self, tokens: Sequence[int]) -> GrammarState:
        """See ``StartGrammar``."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._built is None:
                self._missed = True
                raise GrammarNotReady()
            first, self._first = self._first, None
        return first[1] if first is not None and first[0] == tuple(tokens) else self._built.state(tokens)

    def ready(self, built: BuiltGrammar, tokens: tuple[int, ...], state: GrammarState) -> None:
        """Settle it with the state after the output so far."""
        with self._lock:
            self._first, self._built = (tokens, state), built

    def fail(self, error: EdgepipeError) -> None:
        """Settle it with the reason why the sequence cannot go on."""
        with self._lock:
            self._error = error

    @property
    def came_late(self) -> bool:
        """Whether it was asked for before it was settled. Its sequence was then given back."""
        with self._lock:
            return self._missed


class GrammarBuilds:
    """Prepares one grammar of a user at a time, and keeps them. Outlives epochs; used on the stage's loop."""

    def __init__(self, open_vocabulary: Callable[[], GrammarTokenizer], trial: Trial) -> None:
        """``open_vocabulary``: returns the model's vocabulary; the first call may take a second."""
        self._open_vocabulary = open_vocabulary
        self._trial = trial
        self._threads = ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="grammars")
        self._turns = UserTurns(max_running=_NUM_THREADS, max_of_owner=1, max_waiting=_MAX_WAITING)
        self._building_bytes = 0  # size of the grammars that are compiled now
        self._vocabulary: GrammarTokenizer | None = None  # vocabulary of the known grammars
        self._known = BuiltGrammars()
        # Grammars whose sequences were given back, and begin again. The key is the grammar and the output so far.
        self._late: OrderedDict[tuple[GrammarSpec, tuple[int, ...]], PendingGrammar] = OrderedDict()

    def settled(self, spec: GrammarSpec, tokens: tuple[int, ...]) -> PendingGrammar | None:
        """Return what an earlier attempt of a sequence with these output tokens did not wait for."""
        return self._late.get((spec, tokens))

    async def prepare(self, spec: GrammarSpec, tokens: tuple[int, ...], pending: PendingGrammar) -> None:
        """Settle ``pending`` with the state after these output tokens, or with the reason against it."""
        await self._settle(spec, tokens, pending)
        if pending.came_late:
            self._keep((spec, tokens), pending)

    def _keep(self, key: tuple[GrammarSpec, tuple[int, ...]], pending: PendingGrammar) -> None:
        self._late[key] = pending
        self._late.move_to_end(key)
        if len(self._late) > _MAX_LATE:
            self._late.popitem(last=False)
        asyncio.get_running_loop().call_later(_KEPT_S, self._drop, key, pending)

    def _drop(self, key: tuple[GrammarSpec, tuple[int, ...]], pending: PendingGrammar) -> None:
        if self._late.get(key) is pending:
            del self._late[key]

    async def _settle(self, spec: GrammarSpec, tokens: tuple[int, ...], pending: PendingGrammar) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S), self._turns.turn(spec.user):
                built, state = await self._begin(spec, tokens)
        except TimeoutError:
            pending.fail(
                StepFailed(
                    "the answer's grammar was not compiled in time",
                    fact=f"waited {DEADLINE_S:g} s",
                    next_step="send the request again in some seconds, or with a simpler schema",
                )
            )
        except EdgepipeError as exc:
            pending.fail(exc)
        except Exception as exc:
            logger.exception("a grammar could not be compiled")
            pending.fail(StepFailed("the answer's grammar could not be compiled", fact=plain(exc)))
        else:
            pending.ready(built, tokens, state)

    async def close(self) -> None:
        """End the threads and the trial's process."""
        await self._trial.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def _begin(self, spec: GrammarSpec, tokens: tuple[int, ...]) -> tuple[BuiltGrammar, GrammarState]:
        """Return the state after the output so far. Raises EdgepipeError."""
        built = await self._find(spec)
        try:
            return built, await self._run(partial(_replay, built, tokens))
        except GrammarNotReady:  # other outputs have used it up
            built = await self._find(spec)
            return built, await self._run(partial(_replay, built, tokens))

    async def _find(self, spec: GrammarSpec) -> BuiltGrammar:
        """Return a known grammar that is not spent, or compile it. Raises EdgepipeError."""
        vocabulary = await self._run(self._open_vocabulary)
        if vocabulary is not self._vocabulary:
            self._vocabulary, self._known = vocabulary, BuiltGrammars()
        return self._known.find(spec.text) or await self._compile(spec, vocabulary)

    async def _compile(self, spec: GrammarSpec, vocabulary: GrammarTokenizer) -> BuiltGrammar:
        known = self._known
        try:
            cost = await self._trial.check(spec)
            num_bytes = max(_LEAST_BYTES, cost.peak_bytes, 2 * len(spec.text))
            known.make_room(self._building_bytes + num_bytes)
            self._building_bytes += num_bytes
            try:
                built = await self._run(partial(BuiltGrammar, vocabulary, spec, num_bytes=num_bytes))
            finally:
                self._building_bytes -= num_bytes
        except (RequestInvalid, GrammarTooHard) as exc:
            raise known.refuse(spec.text, exc.fact) from None
        known.add(spec.text, built)
        return built

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _replay(built: BuiltGrammar, tokens: tuple[int, ...]) -> GrammarState:
    """Replay the output so far and compute the next mask."""
    state = built.state(tokens)
    state.mask()
    return state
