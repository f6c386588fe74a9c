"""Generation for one prompt: its request, its log, its endings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from edgepipe.errors import EdgepipeError, RemoteProtocolError, StageLost
from edgepipe.gateway.log import RequestLog
from edgepipe.ids import PipelineId
from edgepipe.wire.requests import ChoiceEnded, EngineReport, PromptRead, PromptScored, Submission, TokensArrived

logger = logging.getLogger(__name__)


class Generation:
    """One prompt's generation, written by an engine link and read by ``run_completion``.

    Its log is the buffer between them. The request's token limit bounds the log, so a slow client delays no other.
    """

    def __init__(
        self,
        request: Submission,
        *,
        changed: asyncio.Event,
        send_cancel: Callable[[Generation, int, int], None],
    ) -> None:
        self.request = request
        self.log = RequestLog(
            num_choices=request.num_choices,
            max_tokens=request.max_tokens,
            prompt_tokens=len(request.prompt),
            sampling=request.sampling,
        )
        self.pipelines: list[PipelineId] = []  # pipelines that computed it, the present one last
        self.num_read = 0  # computed tokens of the prompt, as the engine reported
        self.failure: EdgepipeError | None = None
        self.cancelled: dict[int, int] = {}  # choice -> number of wanted tokens; sent again on resuming
        self._changed = changed
        self._send_cancel = send_cancel
        self._endings: dict[int, ChoiceEnded] = {}

    def apply(self, event: EngineReport) -> None:
        """Append the engine's report, then wake the reader. A violation of the protocol fails the request.

        Reports on older attempts, and on a request that has failed, are dropped.
        """
        if event.attempt != self.request.attempt or self.failure is not None:
            return
        try:
            if isinstance(event, PromptRead):
                self.num_read = min(event.num_tokens, len(self.request.prompt))
            elif event.choice in self._endings:
                return
            elif isinstance(event, ChoiceEnded):
                self._end(event)
            else:
                self._append(event)
        except RemoteProtocolError as exc:
            logger.warning("request=%s failed, its engine breaks the protocol: %s", self.request.request_id, exc)
            self.fail(exc)
        self._changed.set()

    def next_attempt(self) -> Submission:
        """Return the request for an engine that does not know it; it includes the generated tokens, so that the engine
        does not sample them again."""
        self.request = replace(
            self.request,
            attempt=self.request.attempt + 1,
            generated=tuple(tuple(self.log.tokens(choice)) for choice in range(self.log.num_choices)),
        )
        return self.request

    def ending(self, choice: int) -> ChoiceEnded | None:
        """Return the end of a choice, None while it runs."""
        return self._endings.get(choice)

    def cancel(self, choice: int, *, at_position: int) -> None:
        """Stop a choice; its first ``at_position`` tokens are enough."""
        if choice not in self._endings:
            self._endings[choice] = ChoiceEnded(
                request_id=self.request.request_id,
                attempt=self.request.attempt,
                choice=choice,
                reason="cancelled",
                num_tokens=at_position,
            )
            self.cancelled[choice] = at_position
            self._send_cancel(self, choice, at_position)

    def abandon(self) -> None:
        """Stop every running choice: the reader has gone."""
        for choice, have in enumerate(self.log.have()):
            self.cancel(choice, at_position=have)

    def fail(self, error: EdgepipeError) -> None:
        """Fail the request. The first failure counts."""
        self.failure = self.failure or error
        self._changed.set()

    def _append(self, event: TokensArrived | PromptScored) -> None:
        if isinstance(event, PromptScored):
            self.log.add_prompt_logprobs(position=event.position, logprobs=event.logprobs)
        else:
            self.log.append(choice=event.choice, position=event.position, ids=event.ids, logprobs=event.logprobs)

    def _end(self, event: ChoiceEnded) -> None:
        if event.reason in ("stop", "length"):
            self.log.check_ending(
                event.choice, num_tokens=event.num_tokens, cached_prompt_tokens=event.cached_prompt_tokens
            )
            self._endings[event.choice] = event
        else:
            self.fail(
                event.error
                or StageLost(
                    "the engine abandoned the request",
                    fact="it was cancelled" if event.reason == "cancelled" else "it gave no reason",
                    next_step="send the request again",
                )
            )
