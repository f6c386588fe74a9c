"""Runs one line of a batch as a request of this gateway, behind interactive ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgepipe.errors import EdgepipeError
from edgepipe.gateway.batches.line_bodies import LINE_KINDS
from edgepipe.gateway.batches.lines import (
    MAX_LINE_BYTES,
    Outcome,
    RawLine,
    answer_entry,
    custom_id_of,
    error_entry,
)
from edgepipe.gateway.batches.records import Batch, TokenUsage
from edgepipe.gateway.completion_service import PreparedCompletion
from edgepipe.gateway.json_pieces import JsonPiece, compact, encoded
from edgepipe.gateway.problems import HttpProblem, from_error
from edgepipe.gateway.protocols.answering import Answering, gather
from edgepipe.gateway.protocols.openai.handlers import OpenAIHandlers

_BUSY = (429, 503)


class LineRefused(Exception):
    """The gateway is too busy to take the line now. The caller tries again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRunner:
    """Runs lines. They count as those of a user of their own, so that the batch's user still gets quick answers."""

    answering: Answering

    async def run(self, batch: Batch, line: RawLine) -> Outcome:
        """Return the line's result. Raises EdgepipeError if the cluster does not answer it, LineRefused."""
        if line.data is None:
            text = f"it is longer than {MAX_LINE_BYTES >> 20} MiB"
            return self.not_run(batch, line, code="line_too_long", message=text)
        owner = f"batch:{batch.owner}"
        try:
            wanted = await self.answering.bodies.checked(line.data, LINE_KINDS[batch.endpoint], owner)
        except HttpProblem as problem:
            if problem.status in _BUSY:
                raise LineRefused from problem
            return self.not_run(batch, line, code=problem.code, message=problem.message)
        if (wanted.body.model or "") != batch.model:
            text = f"its model '{wanted.body.model or ''}' is not that of the batch, '{batch.model}'"
            return self.not_run(batch, line, code="other_model", message=text)
        changes = {"service_tier": "batch", "stream": None, "stream_options": None}
        handlers = OpenAIHandlers(answering=self.answering)
        service = self.answering.service
        request_id = service.ids.new("req")
        try:
            with service.admission.memory.holding(owner) as memory:
                prepared, shape = await handlers.prepared(
                    wanted.body.model_copy(update=changes), owner=owner, memory=memory
                )
                with prepared.ticket:
                    prepared.completion = prepared.completion.in_groups()
                    choices = await gather(service.run(prepared), prepared.completion.num_choices)
                    body = await self._written(shape.whole(choices))
        except HttpProblem as problem:
            if problem.status in _BUSY:
                raise LineRefused from problem
            return self._problem(batch, line, wanted.custom_id, problem, request_id)
        return Outcome(
            number=line.number,
            entry=answer_entry(
                entry_id=_entry_id(batch, line),
                custom_id=wanted.custom_id,
                status=200,
                request_id=request_id,
                body=body,
            ),
            succeeded=True,
            usage=_usage(prepared),
        )

    def failed(self, batch: Batch, line: RawLine, error: EdgepipeError) -> Outcome:
        """Return the result of a line that the cluster cannot answer."""
        request_id = self.answering.service.ids.new("req")
        return self._problem(batch, line, custom_id_of(line.data), from_error(error), request_id)

    def not_run(self, batch: Batch, line: RawLine, *, code: str, message: str) -> Outcome:
        """Return the result of a line that was not run."""
        entry = error_entry(
            entry_id=_entry_id(batch, line),
            custom_id=custom_id_of(line.data),
            number=line.number,
            code=code,
            message=message,
        )
        return Outcome(number=line.number, entry=entry, succeeded=False)

    def _problem(
        self, batch: Batch, line: RawLine, custom_id: str | None, problem: HttpProblem, request_id: str
    ) -> Outcome:
        entry = answer_entry(
            entry_id=_entry_id(batch, line),
            custom_id=custom_id,
            status=problem.status,
            request_id=request_id,
            body=encoded(compact(problem.body())),
            number=line.number,
        )
        return Outcome(number=line.number, entry=entry, succeeded=False)

    async def _written(self, pieces: Iterator[JsonPiece]) -> bytes:
        """Join the pieces of an answer, with a turn of the event loop in between."""
        parts: list[bytes] = []
        for piece in pieces:
            parts.append(piece.data)
            if piece.more:
                await self.answering.answers.turns.take()
        return b"".join(parts)


def _entry_id(batch: Batch, line: RawLine) -> str:
    return f"batch_req_{batch.batch_id.removeprefix('batch_')}_{line.number}"


def _usage(prepared: PreparedCompletion) -> TokenUsage:
    counts = prepared.counts
    return TokenUsage(
        prompt=prepared.completion.num_prompt_tokens,
        cached=counts.cached_prompt_tokens,
        completion=counts.completion_tokens,
        reasoning=counts.reasoning_tokens,
    )
