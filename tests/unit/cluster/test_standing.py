"""Which statements count when a signer makes more than its limits allow, or no longer belongs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from edgepipe.cluster.standing import MAX_OWNERS, MAX_PER_SIGNER, stand
from edgepipe.ids import NodeId
from edgepipe.security.trust_view import Role
from tests.support.cluster.trust_world import FOUNDING, HONEST, TURNED, made

FOUNDER, OTHER, *_ = HONEST
GUEST, ROGUE, _ = TURNED


def test_at_a_signer_s_limit_its_removals_count_before_its_adds() -> None:
    adds = [
        made(FOUNDER, NodeId(f"n{number}"), role=Role.MEMBER, number=number) for number in range(2, MAX_PER_SIGNER + 2)
    ]
    full = stand(FOUNDING, adds)
    assert len(full.counting) == MAX_PER_SIGNER
    removal = made(FOUNDER, NodeId("n2"), number=1000)
    standing = stand(FOUNDING, [*adds, removal])
    assert removal in standing.counting
    assert standing.removed == {"n2"}
    assert full.peers.keys() - standing.peers.keys() == {"n2", adds[-1].about}, "the newest add had no room"


@pytest.mark.parametrize(("num_bytes", "count"), [(1000, MAX_PER_SIGNER), (3000, 32)])
def test_a_signer_s_statements_count_up_to_96_kib(num_bytes: int, count: int) -> None:
    adds = [
        replace(made(FOUNDER, NodeId(f"n{number}"), role=Role.MEMBER, number=number), body=bytes(num_bytes))
        for number in range(2, MAX_PER_SIGNER + 2)
    ]
    assert stand(FOUNDING, adds).counting == tuple(adds[:count])


def test_of_the_owners_the_eldest_are_heard() -> None:
    """Each makes the next one an owner."""
    names = [FOUNDER, *(NodeId(f"o{number:02}") for number in range(MAX_OWNERS + 3))]
    chain = [made(signer, following, role=Role.OWNER, number=1) for signer, following in pairwise(names)]
    standing = stand(FOUNDING, chain)
    assert list(standing.ranks) == names[:MAX_OWNERS]
    assert [standing.peers[name].role for name in names[: MAX_OWNERS + 1]] == [Role.OWNER] * MAX_OWNERS + [Role.MEMBER]
    assert names[MAX_OWNERS + 1] not in standing.peers


def test_of_a_removed_owner_s_statements_those_count_that_its_removal_lists() -> None:
    promotion = made(FOUNDER, ROGUE, role=Role.OWNER, number=2)
    before, after = (made(ROGUE, about, role=Role.MEMBER, number=number) for about, number in ((OTHER, 1), (GUEST, 2)))
    removal = made(FOUNDER, ROGUE, number=3, kept=[before.key])
    standing = stand(FOUNDING, [promotion, before, after, removal])
    assert standing.peers.keys() == {FOUNDER, OTHER}
    assert standing.removed == {ROGUE}
