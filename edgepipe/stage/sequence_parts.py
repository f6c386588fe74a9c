"""Samplers and drafters of an epoch's sequences."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from functools import partial

import numpy as np

from edgepipe.backend.protocol import DraftingBackend
from edgepipe.backend.types import DraftRow, DraftStep, TokenIds
from edgepipe.errors import EdgepipeError
from edgepipe.sampling import SequenceSampler
from edgepipe.sampling.lookup import LookupDrafter
from edgepipe.stage.compute import ComputeThread
from edgepipe.stage.draft_process import Guesser
from edgepipe.stage.drafting import LookupFirst, ModelDrafter, SequenceDrafter
from edgepipe.stage.grammar_builds import GrammarBuilds, PendingGrammar
from edgepipe.stage.mtp_drafter import MtpDrafter
from edgepipe.wire.registrations import Registration


class SequenceParts:
    """Makes what a stage with a head needs for each sequence."""

    def __init__(
        self,
        compute: ComputeThread,
        grammars: GrammarBuilds,
        tasks: asyncio.TaskGroup,
        *,
        block_size: int,
        rest_tokens: int,
        mtp_slice: int | None,
        draft_model: Guesser | None,
    ) -> None:
        """See ``StageEpoch``. ``tasks``: of the epoch; grammars are built there."""
        self._compute = compute
        self._grammars = grammars
        self._tasks = tasks
        self._block_size = block_size
        self._rest_tokens = rest_tokens
        self._mtp_slice = mtp_slice
        self._draft_model = draft_model
        self._closed = False

    def close(self) -> None:
        """Draft no more with the model's own layer: another epoch may use its blocks."""
        self._closed = True

    def new_sampler(self, registration: Registration, fault: EdgepipeError | None) -> SequenceSampler:
        """Return the sampler of a sequence, whose grammar may come later. ``fault``: why it cannot be sampled."""
        grammar, grammars = registration.sampling.grammar, self._grammars
        pending = PendingGrammar()
        if grammar is not None and fault is None:
            if (settled := grammars.settled(grammar, registration.generated)) is not None:
                pending = settled
            else:
                prepared = grammars.prepare(grammar, registration.generated, pending)
                self._tasks.create_task(prepared, name=f"grammar:{registration.sequence}")
        return SequenceSampler(
            registration.sampling,
            choice=registration.choice,
            prompt=registration.seen,
            generated=registration.generated,
            end_ids=registration.end_ids,
            start_grammar=pending.state,
            fault=fault,
        )

    def new_drafter(self, registration: Registration, sampler: SequenceSampler) -> SequenceDrafter:
        """Return the drafter of a sequence: of the kind that its registration names, if the stage has one."""
        tokens = array("i", registration.prompt)  # a tenth of a tuple's memory
        tokens.extend(registration.generated)
        known = len(tokens)
        if registration.draft == "mtp" and self._mtp_slice is not None:
            run = partial(self._guess, self._mtp_slice)
            own = MtpDrafter(
                registration.sequence,
                tokens,
                run,
                block_size=self._block_size,
                rest_tokens=self._rest_tokens,
            )
            return SequenceDrafter(lambda: LookupFirst(tokens, own), sampler, known=known, follows=own)
        if registration.draft == "model" and (guesser := self._draft_model) is not None:
            return SequenceDrafter(lambda: LookupFirst(tokens, ModelDrafter(tokens, guesser)), sampler, known=known)
        model = self._compute.backend.draft_model if registration.draft == "auto" else None
        make = model.drafter if model is not None else LookupDrafter
        return SequenceDrafter(partial(make, tokens), sampler, known=known)

    def _guess(self, slice_index: int, row: Callable[[], DraftRow]) -> TokenIds:
        """See ``RunDraft``; runs on a sampler thread."""
        backend = self._compute.backend
        assert isinstance(backend, DraftingBackend)

        def run() -> TokenIds:
            if self._closed:  # another epoch may use the blocks by now
                return np.zeros(0, np.int32)
            (found,) = backend.draft(DraftStep(slice_index=slice_index, rows=(row(),)))
            return found

        return self._compute.wait_for(run)
