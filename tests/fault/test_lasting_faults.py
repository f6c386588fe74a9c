"""Faults that once lasted until a cluster was restarted by hand: after each a new client gets 20 tokens within 30 s."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.faults.chaos import hang_ups, large_messages, lasting_faults
from tests.support.faults.chaos.clients import Clients
from tests.support.network.lan import lan_available

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    async with lasting_faults.home(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.mark.long
async def test_chats_go_on_elsewhere_when_a_device_breaks_for_good(clients: Clients) -> None:
    await lasting_faults.broken_for_good(clients)


async def test_a_repaired_device_is_used_again_when_the_next_one_breaks(clients: Clients) -> None:
    await lasting_faults.broken_for_good(clients)


@pytest.mark.long
async def test_chats_are_answered_again_when_broken_devices_are_repaired(clients: Clients) -> None:
    await lasting_faults.broken_for_a_while(clients)


async def test_a_machine_that_slept_while_others_took_over_is_used_again(clients: Clients) -> None:
    await lasting_faults.slept_too_long(clients)


async def test_a_drain_that_was_refused_is_done_once_there_is_room(clients: Clients) -> None:
    await lasting_faults.refused_move(clients)


@pytest.mark.long
async def test_a_chat_does_not_notice_that_a_machine_leaves_which_refused_a_stage(clients: Clients) -> None:
    await lasting_faults.refused_move_then_lost(clients)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def contiguous(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    async with hang_ups.contiguous(tmp_path_factory.mktemp("contiguous")) as made:
        yield made


async def test_clients_that_hang_up_at_any_moment_leave_no_memory_taken(contiguous: Clients) -> None:
    await hang_ups.hang_ups(contiguous)


async def test_a_new_chat_is_answered_beside_a_request_whose_steps_failed(contiguous: Clients) -> None:
    await hang_ups.suspected_request(contiguous)


@pytest.mark.long
async def test_answers_with_large_grammars_go_on_when_a_step_has_failed(tmp_path: Path) -> None:
    async with large_messages.wide(tmp_path) as clients:
        await large_messages.large_grammars(clients)


@pytest.mark.long
async def test_answers_with_long_prompts_and_penalties_go_on_when_a_step_has_failed(tmp_path: Path) -> None:
    async with large_messages.wide(tmp_path) as clients:
        await large_messages.long_penalties(clients)


@pytest.mark.long
async def test_long_prompts_are_accepted_again_when_a_small_machine_has_left(tmp_path: Path) -> None:
    async with lasting_faults.growing(tmp_path) as clients:
        await lasting_faults.small_node(clients)


@pytest.mark.long
@pytest.mark.lan
@pytest.mark.skipif(not lan_available(), reason=lan_available().reason)
async def test_a_machine_that_woke_before_its_network_is_used_again(tmp_path: Path) -> None:
    async with lasting_faults.pair(tmp_path) as clients:
        await lasting_faults.woke_without_network(clients)


@pytest.mark.long
@pytest.mark.lan
@pytest.mark.skipif(not lan_available(), reason=lan_available().reason)
async def test_chats_go_on_when_the_way_to_the_engine_breaks_beside_a_long_echo(tmp_path: Path) -> None:
    async with large_messages.apart(tmp_path) as clients:
        await large_messages.long_echo(clients)
