"""Faults that come back as soon as they are healed: nothing is given up for ever, and nothing is tried for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults.chaos import stubborn_faults

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


async def test_a_new_chat_is_answered_when_the_gateway_was_killed_in_mid_stream(tmp_path: Path) -> None:
    async with stubborn_faults.home(tmp_path) as clients:
        await stubborn_faults.killed_gateway(clients)


async def test_a_model_comes_back_by_itself_when_its_engine_was_killed_four_times(tmp_path: Path) -> None:
    async with stubborn_faults.home(tmp_path) as clients:
        await stubborn_faults.dying_engine(clients)


async def test_a_free_machine_takes_over_for_one_whose_stages_die_when_idle(tmp_path: Path) -> None:
    async with stubborn_faults.home(tmp_path) as clients:
        await stubborn_faults.idle_death(clients)


async def test_another_machine_serves_on_when_the_engines_machine_is_lost(tmp_path: Path) -> None:
    async with stubborn_faults.guests(tmp_path) as clients:
        await stubborn_faults.lost_engine_node(clients)


async def test_a_free_machine_takes_over_for_one_whose_stages_hang(tmp_path: Path) -> None:
    async with stubborn_faults.guests(tmp_path) as clients:
        await stubborn_faults.late_stage(clients)


async def test_a_long_prompt_whose_stage_dies_each_time_is_answered_or_refused(tmp_path: Path) -> None:
    async with stubborn_faults.slow_prompts(tmp_path) as clients:
        await stubborn_faults.dying_prompt(clients)
