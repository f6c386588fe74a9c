"""What people read of the remedies that were tried."""

from __future__ import annotations

from edgepipe.engine.charges import Charges
from edgepipe.engine.progress import EpochProgress
from edgepipe.engine.quarantine import Quarantine
from edgepipe.engine.recovery_types import EpochEnded
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.errors import StageLost
from edgepipe.ids import EngineId, Epoch, NodeId
from edgepipe.testing.clock import START_S


def test_remedies_are_told_until_a_request_gets_further() -> None:
    charges = Charges(Quarantine(), name=str, limits=EngineLimits(), timeouts=EngineTimeouts())
    lost = EpochEnded(epoch=Epoch(1, EngineId("e")), error=StageLost("it died"))
    for second in range(3):
        charges.ended(lost, NodeId("b"), served_s=1.0, now_s=START_S + second)
    fact = charges.broken("m", lost.error, 1.0).fact
    assert fact == "3 attempts in a row ended without a token: it died; tried: a placement without b"
    charges.progressed(EpochProgress(further=True))
    assert charges.broken("m", lost.error, 1.0).fact == "it died"
