"""The sampler's state of one sequence during an epoch: a function of its tokens, never of the batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from edgepipe.errors import EdgepipeError, GrammarNotReady, StepFailed
from edgepipe.sampling.draws import draw
from edgepipe.sampling.edits import TokenEdits
from edgepipe.sampling.grammar import Bitmask, GrammarState
from edgepipe.sampling.params import SamplingParams

_NOBODY = np.zeros(0, np.int64)

StartGrammar = Callable[[Sequence[int]], GrammarState]
"""Returns the state of a sequence's grammar after these output tokens. Never waits for the grammar to be compiled.

Raises GrammarNotReady, or the reason why the grammar cannot be used.
"""


class SequenceSampler:
    """Sampler of one sequence. The using thread holds ``lock``; any thread may create it."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        choice: int = 0,
        prompt: Sequence[int] = (),
        generated: Sequence[int] = (),
        end_ids: Sequence[int] = (),
        start_grammar: StartGrammar | None = None,
        fault: EdgepipeError | None = None,
    ) -> None:
        """
        choice         0-based among the request's choices
        prompt         prompt tokens in any order, if ``params.penalises_prompt``; duplicates are not needed
        generated      output tokens so far, if ``params.needs_output``
        end_ids        banned before ``params.min_tokens``
        start_grammar  needed for a grammar
        fault          reason why the sequence cannot be sampled; ``begin`` raises it
        """
        self.params = params
        self.lock = threading.Lock()
        self._choice = choice
        self._prompt = prompt
        self._end_ids = np.array(end_ids, np.int64)
        self._start_grammar = start_grammar
        self._fault = fault
        self._generated = list(generated) if params.needs_output else []
        self._edits: TokenEdits | None = None  # created at the first sampling, since long prompts take time
        self._grammar: GrammarState | None = None
        self._position = 0  # output position of the next token
        self._newest: tuple[int, int] | None = None  # output position and id of the newest token that it took

    @property
    def edits(self) -> TokenEdits:
        """Penalties and bias at the current position."""
        assert self._edits is not None, "begin comes first"
        return self._edits

    def uniform(self, position: int) -> float:
        """Return the draw for an output position."""
        return draw(self.params.seed, self._choice, position)

    def begin(self, position: int) -> None:
        """Move to output position ``position``. A lower position than before truncates. Raises EdgepipeError."""
        if self._fault is not None:
            raise self._fault
        self._position = position
        if self.params.needs_output and len(self._generated) != position:
            if len(self._generated) < position:
                raise StepFailed(
                    "the sampler lacks earlier output tokens",
                    fact=f"it has {len(self._generated)} of {position}",
                )
            del self._generated[position:]
            self._edits = self._grammar = None
        if self._edits is None:
            self._edits = TokenEdits(self.params, self._prompt)
            for token in self._generated:
                self._edits.took(token)
        if self.params.grammar is not None and self._grammar is None:
            self._grammar = self._open_grammar()

    def fork(self) -> SequenceSampler:
        """Return a copy that goes on with other tokens, after ``begin``. It shares the lock, which the caller holds."""
        other = copy(self)
        other._generated = list(self._generated)
        other._edits = self.edits.fork()
        other._grammar = self._grammar.fork() if self._grammar is not None else None
        return other

    def allowed(self, position: int) -> tuple[Bitmask | None, npt.NDArray[np.int64]]:
        """Return the allowed tokens at the current position: a mask (None: all), and additionally banned tokens.

        Raises StepFailed.
        """
        mask = self._grammar.mask() if self._grammar is not None else None
        if position >= self.params.min_tokens or not len(self._end_ids):
            return mask, _NOBODY
        if mask is None:
            return None, self._end_ids
        longer = mask.copy()
        np.bitwise_and.at(longer, self._end_ids >> 5, ~(np.int32(1) << (self._end_ids & 31).astype(np.int32)))
        return (longer if longer.any() else mask), _NOBODY  # only end tokens left: allow them early

    def took(self, token: int) -> None:
        """Record the token sampled at the current position. Raises StepFailed if the grammar forbids it."""
        self._newest, self._position = (self._position, token), self._position + 1
        if self.params.needs_output:
            self._generated.append(token)
            self.edits.took(token)
            if self._grammar is not None:
                self._grammar.take(token)

    def ends_with(self, token: int, *, position: int) -> bool:
        """Return whether the newest token that it took is this one, at this output position."""
        return self._newest == (position, token)

    def forced(self) -> Sequence[int]:
        """Return the next tokens as far as the grammar leaves no choice, in the model's usual tokens."""
        return self._grammar.forced() if self._grammar is not None else ()

    def look_ahead(self) -> None:
        """Compute the grammar's next mask now, while the sequence's next step passes through the pipeline."""
        if self._grammar is not None:
            self._grammar.mask()

    def _open_grammar(self) -> GrammarState:
        """Return the grammar's state after the output. Raises EdgepipeError.

        A sequence whose grammar was not ready once is never sampled: a device may have computed its candidates
        without a mask. The engine begins it again as another sequence.
        """
        assert self._start_grammar is not None, "a grammar needs the model's vocabulary"
        try:
            return self._start_grammar(self._generated)
        except GrammarNotReady as exc:
            self._fault = exc
            raise
