"""Request log: a request's tokens. All output to the client is a function of the log."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.errors import RemoteProtocolError
from edgepipe.sampling import LogprobLog, TokenLogprobs


class RequestLog:
    """Append-only map in memory: ``(choice, position) -> token id, requested logprobs``. Append first, then send.

    Each position is written once: the first writer wins, and repeated tokens of a resumed engine are dropped.
    """

    def __init__(self, *, num_choices: int, max_tokens: int, with_logprobs: bool = False) -> None:
        self._ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._logprobs = [LogprobLog() for _ in range(num_choices)]
        self._with_logprobs = with_logprobs
        self._max_tokens = max_tokens
        self.prompt_logprobs = LogprobLog()  # from the prompt's second token on; all choices share them

    @property
    def num_choices(self) -> int:
        """Number of choices that the request asked for."""
        return len(self._ids)

    def append(self, *, choice: int, position: int, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Add tokens from output position ``position`` on.

        Raises RemoteProtocolError for a gap or too many tokens: a fault of the engine, and the request cannot continue.
        """
        if choice >= len(self._ids):
            raise RemoteProtocolError("the engine sent a token for a choice that the request does not have")
        have = self._ids[choice]
        if position > len(have):
            raise RemoteProtocolError(
                "the engine left out a token", fact=f"it sent position {position} instead of {len(have)}"
            )
        if position + len(ids) > self._max_tokens:
            raise RemoteProtocolError("the engine sent too many tokens", fact=f"the limit is {self._max_tokens}")
        if self._with_logprobs:
            if len(logprobs) != len(ids):
                raise RemoteProtocolError("the engine left out a token's log-probability")
            self._logprobs[choice].extend(logprobs[len(have) - position :])
        have.extend(ids[len(have) - position :])

    def add_prompt_logprobs(self, *, position: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add logprobs of prompt tokens from absolute ``position`` on. Raises RemoteProtocolError for a gap."""
        have = len(self.prompt_logprobs) + 1  # the first token has none
        if position > have:
            raise RemoteProtocolError("the engine left out log-probabilities of the prompt")
        self.prompt_logprobs.extend(logprobs[have - position :])

    def tokens(self, choice: int, *, start: int = 0, end: int | None = None) -> Sequence[int]:
        """Return the token ids of a choice from output position ``start`` on, before position ``end`` if given."""
        return self._ids[choice][start:end]

    def num_tokens(self, choice: int) -> int:
        """Return the number of tokens of a choice."""
        return len(self._ids[choice])

    def logprobs(self, choice: int, *, start: int, count: int) -> Sequence[TokenLogprobs]:
        """Return log-probabilities of ``count`` tokens of a choice; empty if the request did not ask for them."""
        return self._logprobs[choice][start : start + count]

    def have(self) -> list[int]:
        """Return the number of tokens per choice, for the ``Resume`` message."""
        return [len(ids) for ids in self._ids]
