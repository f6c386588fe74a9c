"""Request log: a request's tokens. All output to the client is a function of the log."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.errors import RemoteProtocolError
from edgepipe.sampling import LogprobLog, SamplingParams, TokenLogprobs

_PLAIN = SamplingParams()
_UNASKED = "the engine sent log-probabilities that the request did not ask for"


class RequestLog:
    """Append-only map in memory: ``(choice, position) -> token id, requested logprobs``. Append first, then send.

    Each position is written once: the first writer wins, and repeated tokens of a resumed engine are dropped.
    """

    def __init__(
        self, *, num_choices: int, max_tokens: int, prompt_tokens: int = 0, sampling: SamplingParams = _PLAIN
    ) -> None:
        """``prompt_tokens`` and ``sampling``: bounds of the reported log-probabilities and of cached tokens."""
        self._ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._logprobs = [LogprobLog() for _ in range(num_choices)]
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._prompt_tokens = prompt_tokens
        self.prompt_logprobs = LogprobLog()  # scores of the prompt from its second token on; all choices share them

    @property
    def num_choices(self) -> int:
        """Number of choices that the request asked for."""
        return len(self._ids)

    def append(self, *, choice: int, position: int, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Add tokens from output position ``position`` on.

        Raises RemoteProtocolError for a gap, too many tokens, or other log-probabilities than the request asked for: a
        fault of the engine, and the request cannot continue.
        """
        have = self._of(choice)
        if position > len(have):
            raise RemoteProtocolError(
                "the engine left out a token", fact=f"it sent position {position} instead of {len(have)}"
            )
        if position + len(ids) > self._max_tokens:
            raise RemoteProtocolError("the engine sent too many tokens", fact=f"the limit is {self._max_tokens}")
        if self._sampling.logprobs:
            if len(logprobs) != len(ids):
                raise RemoteProtocolError("the engine left out a token's log-probability")
            self._check_alternatives(logprobs)
            self._logprobs[choice].extend(logprobs[len(have) - position :])
        elif logprobs:
            raise RemoteProtocolError(_UNASKED, fact=f"{len(logprobs)} came with a token")
        have.extend(ids[len(have) - position :])

    def add_prompt_logprobs(self, *, position: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add logprobs of prompt tokens from absolute ``position`` on.

        Raises RemoteProtocolError for a gap, and for more than the request asked for.
        """
        if not self._sampling.prompt_logprobs:
            raise RemoteProtocolError(_UNASKED, fact=f"{len(logprobs)} came of the prompt")
        have = len(self.prompt_logprobs) + 1  # the first token has none
        if not 1 <= position <= have:
            raise RemoteProtocolError("the engine left out log-probabilities of the prompt")
        if position + len(logprobs) > self._prompt_tokens:
            raise RemoteProtocolError(
                "the engine sent too many log-probabilities of the prompt",
                fact=f"position {position + len(logprobs) - 1} came, the prompt has {self._prompt_tokens} tokens",
            )
        self._check_alternatives(logprobs)
        self.prompt_logprobs.extend(logprobs[have - position :])

    def check_ending(self, choice: int, *, num_tokens: int, cached_prompt_tokens: int) -> None:
        """Check what an engine says of a choice that is complete. Raises RemoteProtocolError."""
        have = len(self._of(choice))
        if num_tokens != have:
            raise RemoteProtocolError(
                "the engine ended a choice at another token", fact=f"it counts {num_tokens} tokens, {have} came"
            )
        if cached_prompt_tokens > self._prompt_tokens:
            raise RemoteProtocolError(
                "the engine found too many tokens in its cache",
                fact=f"it counts {cached_prompt_tokens}, the prompt has {self._prompt_tokens}",
            )

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

    def _of(self, choice: int) -> list[int]:
        """Return a choice's tokens. Raises RemoteProtocolError."""
        if choice >= len(self._ids):
            raise RemoteProtocolError(
                "the engine reported a choice that the request does not have",
                fact=f"choice {choice} came, the request has {len(self._ids)}",
            )
        return self._ids[choice]

    def _check_alternatives(self, logprobs: Sequence[TokenLogprobs]) -> None:
        most = self._sampling.top_logprobs
        if (longest := max((len(each.top) for each in logprobs), default=0)) > most:
            raise RemoteProtocolError(_UNASKED, fact=f"a token has {longest} alternatives, {most} were asked for")
