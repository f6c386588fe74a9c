"""One user's hostile but valid requests, beside another user: the short form of the table *one user's worst* in
``scripts/bench faults``. Nothing is timed: no epoch ends, every answer to the bystander is right, and each request of
the hostile user gets an answer that says what is wrong with it, or a right one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.faults.hostile.cases import HOSTILE_CASES, HostileCase
from tests.support.faults.hostile.cluster import HOSTILE_KEY, SharedCluster, shared_cluster
from tests.support.faults.hostile.user import User

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

ENDS_S = 40.0  # until a case is over, and until the bystander has been answered since


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedCluster]:
    async with (
        shared_cluster(tmp_path_factory.mktemp("hostile"), link="1gbit,1ms") as shared,
        shared.bystander.asking(),
    ):
        yield shared


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in HOSTILE_CASES])
async def test_one_users_requests_leave_another_users_chats_right_and_are_each_answered(
    cluster: SharedCluster, case: HostileCase
) -> None:
    epoch, user = await cluster.epoch(), User(port=cluster.nodes.http_port, key=HOSTILE_KEY)
    with cluster.bystander.span() as seen:
        async with asyncio.timeout(ENDS_S):
            await case.strike(user, True)
            await cluster.bystander.answered()
    assert await cluster.epoch() == epoch
    assert user.summary()["complaints"] == []
    assert user.answers or user.num_left == user.num_asked > 0
    assert seen.wrong == []
    assert not seen.refused
