"""Which of two claims to an engine yields."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.daemon.serving.engine_ownership import YIELD_S, Ownership, RivalSeen, Sight, WaitEnded, Yield
from edgepipe.daemon.serving.takeover import Vacancies
from edgepipe.ids import PipelineId
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import ServeBody

NOW_S = 1_000_000.0
HELD = ServeBody(pipeline_id=PipelineId("p"), spec=ServeSpec(model="m"), version=5, engine_node="a", signer="a")
RIVAL = replace(HELD, version=4, engine_node="b", signer="b")
SIGHT = Sight(
    own_id="a",
    leaves=False,
    records={"p": HELD},
    unconfirmed=frozenset("p"),
    staying=frozenset("ab"),
    gone=frozenset(),
    present=frozenset("ab"),
    engines=frozenset("p"),
    own_engines=frozenset("p"),
)


@pytest.mark.parametrize(
    ("rival", "later", "yields"),
    [
        (RIVAL, SIGHT, True),
        (replace(RIVAL, version=6), SIGHT, False),  # the rival's claim is the newer one
        (RIVAL, replace(SIGHT, unconfirmed=frozenset()), False),  # an owner has decided meanwhile
        (RIVAL, replace(SIGHT, staying=frozenset("a")), False),  # the rival is lost or drained again
        (RIVAL, replace(SIGHT, records={"p": replace(HELD, stopped=True)}), False),
    ],
)
def test_the_newer_claim_yields_after_a_while_if_no_owner_decides(rival: ServeBody, later: Sight, yields: bool) -> None:
    ownership = Ownership(Vacancies(), gather_until_s=NOW_S, rest_s=1.0)
    assert ownership.handle(RivalSeen(record=rival), SIGHT, NOW_S) == []
    assert ownership.handle(WaitEnded(), later, NOW_S + YIELD_S - 0.1) == []
    expected = [Yield(rival=rival)] if yields else []
    assert ownership.handle(WaitEnded(), later, NOW_S + YIELD_S) == expected
    assert ownership.wake_at_s is None
