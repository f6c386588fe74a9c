"""This stage's ends of the ring's links in one epoch."""

from __future__ import annotations

from collections.abc import Callable

from edgepipe.clock import Clock
from edgepipe.link.channels import ATTEMPT_S
from edgepipe.link.protocol import OnStep, RingTarget
from edgepipe.link.receiver import RingReceiver
from edgepipe.wire.pipelines import OpenRing, PipelineSpec

_REACH_S = 2 * ATTEMPT_S + 1.0  # stages listen before they learn of each other; a block fails both attempts
_LEAST_WINDOW = 32  # steps


class RingEnds:
    """Makes receivers, and describes the next stage to senders."""

    def __init__(self, spec: PipelineSpec, clock: Clock, *, connect_s: float) -> None:
        """``connect_s``: time for the next stage to open its end of the link."""
        self._spec = spec
        self._clock = clock
        self._connect_s = connect_s

    def receiver(self, on_step: OnStep, *, on_held: Callable[[], None] = lambda: None) -> RingReceiver:
        """Return a receiver of one slice's inputs, or of tokens on their way home."""
        return RingReceiver(
            epoch=self._spec.epoch,
            window=_window(self._spec),
            clock=self._clock,
            on_step=on_step,
            on_held=on_held,
        )

    def target(self, slice_index: int) -> RingTarget:
        """Return the next stage, as the receiver of a slice's inputs."""
        spec = self._spec
        return RingTarget(
            address=spec.next_address,
            opening=OpenRing(
                pipeline_id=spec.pipeline_id,
                epoch=spec.epoch,
                slice=slice_index,
                hidden_size=spec.hidden_size,
                activation_type=spec.activation_type,
            ),
            # A step may retire before its credit returns, so the engine's next step may find it still queued.
            max_queued=2 * _window(spec) + 2,
            reach_s=_REACH_S,
            connect_s=self._connect_s,
            deadline_s=spec.step_deadline_ms / 1e3,
            certificate=spec.next.certificate if spec.next is not None else b"",
        )


def _window(spec: PipelineSpec) -> int:
    """Return the credit window in steps. Its minimum avoids one credit message per step when few are in flight."""
    return max(spec.max_in_flight, _LEAST_WINDOW)
