"""The request log: what a request was given, token by token. Everything a client sees is a function of it."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.errors import RemoteProtocolError
from edgepipe.sampling import LogprobLog, TokenLogprobs


class RequestLog:
    """``(choice, position) -> token id, logprobs asked for``, append-only, in memory. Append first, then send.

    A position is written once: what a resumed engine sends again is dropped, and the first writer wins.
    """

    def __init__(self, *, num_choices: int, max_tokens: int, with_logprobs: bool = False) -> None:
        self._ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._logprobs = [LogprobLog() for _ in range(num_choices)]
        self._with_logprobs = with_logprobs
        self._max_tokens = max_tokens
        self.prompt_logprobs = LogprobLog()  # of the prompt from its second token on; choices share them

    @property
    def num_choices(self) -> int:
        """How many choices the request asked for."""
        return len(self._ids)

    def append(self, *, choice: int, position: int, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Add tokens from output position ``position`` on. Raises RemoteProtocolError for a gap or too many: the engine
        is at fault, and the request cannot go on."""
        if choice >= len(self._ids):
            raise RemoteProtocolError("the engine sent a token for a choice that was not asked for")
        have = self._ids[choice]
        if position > len(have):
            raise RemoteProtocolError(
                "the engine left out a token", fact=f"position {position} came, {len(have)} was next"
            )
        if position + len(ids) > self._max_tokens:
            raise RemoteProtocolError(
                "the engine sent more tokens than were asked for", fact=f"{self._max_tokens} were asked for"
            )
        if self._with_logprobs:
            if len(logprobs) != len(ids):
                raise RemoteProtocolError("the engine left out a token's log-probability")
            self._logprobs[choice].extend(logprobs[len(have) - position :])
        have.extend(ids[len(have) - position :])

    def add_prompt_logprobs(self, *, position: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Those of the prompt's tokens from the absolute ``position`` on. Raises RemoteProtocolError for a gap."""
        have = len(self.prompt_logprobs) + 1  # the first token has none
        if position > have:
            raise RemoteProtocolError("the engine left out log-probabilities of the prompt")
        self.prompt_logprobs.extend(logprobs[have - position :])

    def tokens(self, choice: int, *, start: int = 0) -> Sequence[int]:
        """Token ids of a choice from output position ``start`` on."""
        return self._ids[choice][start:]

    def logprobs(self, choice: int, *, start: int, count: int) -> Sequence[TokenLogprobs]:
        """Of ``count`` tokens of a choice; empty if the request did not ask for them."""
        return self._logprobs[choice][start : start + count]

    def have(self) -> list[int]:
        """Number of tokens per choice: what ``Resume`` tells the engine."""
        return [len(ids) for ids in self._ids]
