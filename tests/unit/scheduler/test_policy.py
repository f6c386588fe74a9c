"""How much goes into a step, by each policy's rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import ConfigInvalid
from edgepipe.scheduler import POLICIES, Load, SarathiPolicy, StepBudget, ThrottledPolicy, make_policy
from tests.support.worlds.scheduler import World, limits, spec

BUSY = Load(
    micro_batches=4,
    sampling_rows_in_flight=(8, 8, 8),
    running_decodes=32,
    ready_decodes=8,
    waiting_prefill_tokens=8000,
    num_blocks=1000,
    free_blocks=1000,
    block_size=16,
)


def prefill(load: Load, policy: ThrottledPolicy | None = None) -> int:
    return (policy or ThrottledPolicy()).budget(load).prefill_tokens


@pytest.mark.parametrize(
    ("waiting", "tokens"), [(8000, 1000), (100_000, 2048), (100, 32), (801, 101)], ids=["T", "MaxP", "MinP", "up"]
)
def test_waiting_prompts_are_spread_over_the_next_steps(waiting: int, tokens: int) -> None:
    assert prefill(BUSY._replace(waiting_prefill_tokens=waiting)) == tokens


@pytest.mark.parametrize(("free_blocks", "tokens"), [(1000, 1000), (525, 1000), (240, 409), (60, 21), (50, 0), (10, 0)])
def test_prefill_fades_as_the_kv_cache_fills_and_stops_below_the_threshold(free_blocks: int, tokens: int) -> None:
    assert prefill(BUSY._replace(free_blocks=free_blocks)) == tokens


def test_blocks_taken_at_admission_count_as_free_until_their_tokens_are_scheduled() -> None:
    admitted = BUSY._replace(free_blocks=40, reserved_tokens=200 * 16)
    assert prefill(admitted) == prefill(BUSY._replace(free_blocks=240))


def test_prefill_goes_on_below_the_threshold_where_nobody_decodes() -> None:
    full = BUSY._replace(running_decodes=0, ready_decodes=0, sampling_rows_in_flight=(), free_blocks=0)
    assert prefill(full._replace(reserved_tokens=100)) == 32
    assert prefill(full._replace(reserved_tokens=5)) == 5


def test_where_nobody_decodes_a_prompt_is_spread_over_the_micro_batches_only() -> None:
    alone = BUSY._replace(running_decodes=0, ready_decodes=0, sampling_rows_in_flight=(), waiting_prefill_tokens=1000)
    assert prefill(alone) == 250
    assert prefill(alone._replace(micro_batches=1)) == 1000


def test_steps_with_prompt_tokens_have_the_planned_size() -> None:
    assert prefill(BUSY._replace(step_tokens=300)) == 292
    assert prefill(BUSY._replace(step_tokens=5)) == 1, "it always goes on"
    alone = BUSY._replace(running_decodes=0, ready_decodes=0, sampling_rows_in_flight=())
    assert prefill(alone._replace(step_tokens=300)) == 300
    assert prefill(alone._replace(step_tokens=9000)) == 2048


def test_planned_chunks_of_admitted_prompts_do_not_fade_for_they_hold_their_blocks() -> None:
    full = BUSY._replace(step_tokens=300, free_blocks=60)
    assert prefill(full) == 21
    assert prefill(full._replace(free_blocks=0, reserved_tokens=60 * 16)) == 292


def test_sarathi_keeps_to_the_time_allowed_too() -> None:
    assert SarathiPolicy().budget(BUSY._replace(most_prefill_tokens=300)).prefill_tokens == 292
    assert SarathiPolicy().budget(BUSY._replace(most_prefill_tokens=5)).prefill_tokens == 32


@given(running=st.integers(0, 200), micro_batches=st.integers(1, 12))
def test_decodes_are_spread_so_that_a_turn_takes_all_of_them(running: int, micro_batches: int) -> None:
    sizes: list[int] = []
    for _ in range(micro_batches):
        load = BUSY._replace(
            micro_batches=micro_batches,
            running_decodes=running,
            ready_decodes=running - sum(sizes),
            sampling_rows_in_flight=tuple(sizes),
        )
        sizes.append(ThrottledPolicy().budget(load).decode_rows)
    assert sum(sizes) == running
    assert max(sizes) - min(sizes) <= 1


def test_sarathi_takes_all_decodes_and_fills_up_with_prefill() -> None:
    assert SarathiPolicy(max_tokens=512).budget(BUSY) == StepBudget(decode_rows=8, prefill_tokens=504)
    assert SarathiPolicy(max_tokens=5).budget(BUSY) == StepBudget(decode_rows=5, prefill_tokens=0)


def test_policies_are_chosen_by_name() -> None:
    assert isinstance(make_policy(POLICIES[0]), ThrottledPolicy)
    assert isinstance(make_policy("sarathi"), SarathiPolicy)
    with pytest.raises(ConfigInvalid, match="greedy") as caught:
        make_policy("greedy")
    assert "throttled, sarathi" in caught.value.fact


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="token"):
        ThrottledPolicy(max_prefill_tokens=0)
    with pytest.raises(ValueError, match="token"):
        SarathiPolicy(max_tokens=0)


def test_steps_of_the_throttled_policy_vary_less_than_sarathis() -> None:
    deviations: dict[str, float] = {}
    for name in ("throttled", "sarathi"):
        world = World(limits(num_blocks=4096, micro_batches=4, context_length=2000), make_policy(name, max_tokens=512))
        for index in range(1, 61):
            world.submit(spec(index, 100, max_tokens=40))
            for _ in range(3):
                world.fill()
                world.retire()
        totals = [sum(step.num_tokens) for step in world.steps[40:]]
        mean = sum(totals) / len(totals)
        deviations[name] = (sum((total - mean) ** 2 for total in totals) / len(totals)) ** 0.5
        world.run()
        world.check_outputs()
    assert deviations["throttled"] < 0.5 * deviations["sarathi"]
