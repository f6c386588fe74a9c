"""One hop of a pipeline, as its two ends see it: over gRPC between processes, in memory for tests.

A link is FIFO in step order within each of two classes: *bulk* steps have prompt tokens, *express* steps have none and
pass them. Everything here is called on the event loop; nothing blocks, so compute never waits for the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import Activations, TokenIds
from edgepipe.ids import StepId
from edgepipe.wire.pipelines import OpenRing
from edgepipe.wire.reports import LinkSample

StepBytes = npt.NDArray[np.uint8]
"""One step's activations as they travelled: ``[T * H * bytes per value]``, writable."""

OnStep = Callable[[StepId, StepBytes, bool], None]
"""Takes a step, its bytes, and whether it is bulk."""

OnSample = Callable[[LinkSample], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTarget:
    """The slice that a link feeds, and the constants of that link."""

    address: str  # HOST:PORT of the stage with that slice
    opening: OpenRing
    max_queued: int  # steps of a class given to send() and not yet acknowledged; more is a bug of the caller
    reach_s: float  # deadline of the first connection
    connect_s: float  # deadline of the other side to open its end of a connection
    deadline_s: float  # deadline to be reconnected, and for the oldest step to be acknowledged
    certificate: bytes = b""  # PEM, of that stage's process; empty where nothing is encrypted


@dataclass(slots=True)
class SendStats:
    """Counters of a sender."""

    steps: int = 0  # written whole
    redials: int = 0
    queue_us: int = 0  # newest step's time from send() to its first byte
    upload_us: int = 0  # the same step's time from its first byte to the acceptance of its last
    upload_bytes: int = 0  # size of the same step


class Outgoing(Protocol):
    """The sending end."""

    @property
    def stats(self) -> SendStats:
        """Counters so far."""
        ...

    async def run(self) -> None:
        """Keep the link up until cancelled; redial a broken stream and send unacknowledged steps again.

        Raises LinkError when the other side stays away or takes nothing for as long as the target allows. Raises
        StaleEpoch when it obeys a newer epoch, StageLost when the epoch has ended there, and RemoteProtocolError when
        the ends do not agree.
        """
        ...

    async def connected(self) -> None:
        """Wait until the other side takes frames. ``run`` raises any failure."""
        ...

    def send(self, step: StepId, activations: Activations | TokenIds, *, bulk: bool) -> None:
        """Queue a step and return at once. The array must not change afterwards. Raises LocalProtocolError if too
        many of its class are queued."""
        ...
