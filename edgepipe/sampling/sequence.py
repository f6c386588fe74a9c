"""What the sampler keeps of one sequence while an epoch lasts: a function of its tokens, never of the batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from edgepipe.errors import EdgepipeError, StepFailed
from edgepipe.sampling.draws import draw
from edgepipe.sampling.edits import TokenEdits
from edgepipe.sampling.grammar import Bitmask, GrammarState, GrammarTokenizer
from edgepipe.sampling.params import SamplingParams

_NOBODY = np.zeros(0, np.int64)

OpenGrammars = Callable[[], GrammarTokenizer]
"""The model's vocabulary as grammars see it; made by the first call, which may take a second. Raises EdgepipeError."""


class SequenceSampler:
    """Used by one thread at a time, which holds ``lock``; made on any."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        choice: int = 0,
        prompt: Sequence[int] = (),
        generated: Sequence[int] = (),
        end_ids: Sequence[int] = (),
        open_grammars: OpenGrammars | None = None,
        fault: EdgepipeError | None = None,
    ) -> None:
        """
        choice         0-based among the request's choices
        prompt         its tokens in any order, if ``params.penalises_prompt``; each once is enough
        generated      output tokens so far, if ``params.needs_output``
        end_ids        banned before ``params.min_tokens``
        open_grammars  needed for a grammar
        fault          why no token can be chosen: ``begin`` raises it
        """
        self.params = params
        self.lock = threading.Lock()
        self._choice = choice
        self._prompt = prompt
        self._end_ids = np.array(end_ids, np.int64)
        self._open_grammars = open_grammars
        self._fault = fault
        self._generated = list(generated) if params.needs_output else []
        self._edits: TokenEdits | None = None  # made by the first sampling: long prompts take a while
        self._grammar: GrammarState | None = None
        self._mask: tuple[int, Bitmask | None] | None = None  # computed ahead for that output position

    @property
    def edits(self) -> TokenEdits:
        """Penalties and bias at the position begun last."""
        assert self._edits is not None, "begin comes first"
        return self._edits

    def uniform(self, position: int) -> float:
        """The draw for an output position."""
        return draw(self.params.seed, self._choice, position)

    def begin(self, position: int) -> None:
        """Stand before output position ``position``; a lower one than before truncates. Raises EdgepipeError."""
        if self._fault is not None:
            raise self._fault
        if self.params.needs_output and len(self._generated) != position:
            if len(self._generated) < position:
                raise StepFailed(
                    "the sampler does not know the tokens before the one it is to choose",
                    fact=f"it knows {len(self._generated)} of {position} output tokens",
                )
            del self._generated[position:]
            self._edits = self._grammar = self._mask = None
        if self._edits is None:
            self._edits = TokenEdits(self.params, self._prompt)
            for token in self._generated:
                self._edits.took(token)
        if self.params.grammar is not None and self._grammar is None:
            assert self._open_grammars is not None, "a grammar needs the model's vocabulary"
            self._grammar = GrammarState(self._open_grammars(), self.params.grammar, self._generated)

    def allowed(self, position: int) -> tuple[Bitmask | None, npt.NDArray[np.int64]]:
        """What may come at the position begun: a mask (None: anything) and tokens that are banned beside it.

        Raises StepFailed.
        """
        mask = self._grammar_mask(position)
        if position >= self.params.min_tokens or not len(self._end_ids):
            return mask, _NOBODY
        if mask is None:
            return None, self._end_ids
        longer = mask.copy()
        np.bitwise_and.at(longer, self._end_ids >> 5, ~(np.int32(1) << (self._end_ids & 31).astype(np.int32)))
        return (longer if longer.any() else mask), _NOBODY  # where only the end is left, it comes early

    def took(self, token: int) -> None:
        """``token`` was sampled at the position begun. Raises StepFailed if the grammar forbids it."""
        if self.params.needs_output:
            self._generated.append(token)
            self.edits.took(token)
            if self._grammar is not None:
                self._grammar.take(token)

    def look_ahead(self) -> None:
        """Compute the grammar's next mask now, while the sequence's next step is on its way round the pipeline."""
        if self._grammar is not None:
            self._grammar_mask(len(self._generated))

    def warm(self) -> None:
        """Do before the first sampling what takes long. Raises EdgepipeError."""
        self.begin(len(self._generated))
        self.look_ahead()

    def _grammar_mask(self, position: int) -> Bitmask | None:
        if self._grammar is None:
            return None
        if self._mask is None or self._mask[0] != position:
            self._mask = (position, self._grammar.mask())
        return self._mask[1]
