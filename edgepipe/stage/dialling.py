"""Connections from a stage to the next one."""

from __future__ import annotations

from edgepipe.clock import Clock
from edgepipe.link.protocol import OnSample, Outgoing, RingTarget
from edgepipe.link.sender import RingSender
from edgepipe.link.shaped import Network
from edgepipe.security.mutual_tls import Security
from edgepipe.stage.tools import MakeLink
from edgepipe.wire.common import Hello


def grpc_dial(*, hello: Hello, security: Security, clock: Clock, network: Network | None = None) -> MakeLink:
    """Return a dialler over gRPC with one channel per link; over the emulated ``network`` if given."""

    def dial(target: RingTarget, *, on_sample: OnSample) -> Outgoing:
        return RingSender(target, hello=hello, security=security, clock=clock, on_sample=on_sample, network=network)

    return dial
