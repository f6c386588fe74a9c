"""Many requests through real stages: exactly the oracle's tokens, and nothing left behind."""

from __future__ import annotations

import pytest

from edgepipe.engine import EngineLimits
from edgepipe.sampling import SamplingParams
from edgepipe.scheduler import ScheduledStep, Scheduler
from tests.support.engine.lab import CONFIG, engine_lab, oracle_tokens, submission


def prompt_of(index: int, length: int) -> list[int]:
    return [(index * 37 + i * 11) % 250 for i in range(length)]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
async def test_one_request_gets_the_oracles_tokens(num_stages: int) -> None:
    async with engine_lab(num_stages=num_stages) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", prompt_of(1, 20), 24))
        answer = await gateway.ended("a")
        assert answer.ids == oracle_tokens(prompt_of(1, 20), 24)
        assert answer.ended is not None
        assert (answer.ended.reason, answer.ended.num_tokens) == ("length", 24)


async def test_many_requests_at_once_are_exact_and_overlap_on_the_stages() -> None:
    async with engine_lab(num_stages=3, time_factor="1", device="m4") as lab:
        gateway = await lab.gateway()
        for index in range(24):
            gateway.send(submission(f"r{index}", prompt_of(index, 5 + index), 12 + index % 5))
        for index in range(24):
            answer = await gateway.ended(f"r{index}")
            assert answer.ids == oracle_tokens(prompt_of(index, 5 + index), 12 + index % 5)
        first, second = (stage.trace() for stage in lab.stages.stages[:2])
        spans = {int(entry.step): entry for entry in second}
        assert any(
            entry.submitted_s < spans[entry.step - 1].collected_s
            and spans[entry.step - 1].submitted_s < entry.collected_s
            for entry in first
            if entry.step - 1 in spans
        ), "stage 0 never computed a step while stage 1 computed the one before"


async def test_a_tiny_kv_pool_makes_sequences_wait_and_start_again_but_no_token_wrong() -> None:
    async with engine_lab(max_blocks=12) as lab:
        gateway = await lab.gateway()
        for index in range(8):
            gateway.send(submission(f"r{index}", prompt_of(index, 20), 60))
        for index in range(8):
            assert (await gateway.ended(f"r{index}")).ids == oracle_tokens(prompt_of(index, 20), 60)


async def test_chunked_prompts_are_exact() -> None:
    async with engine_lab(num_stages=2, micro_batches=4, limits=EngineLimits(max_prefill_tokens=16)) as lab:
        gateway = await lab.gateway()
        for index, length in enumerate((100, 33, 16, 250)):
            gateway.send(submission(f"r{index}", prompt_of(index, length), 10))
        for index, length in enumerate((100, 33, 16, 250)):
            assert (await gateway.ended(f"r{index}")).ids == oracle_tokens(prompt_of(index, length), 10)


async def test_eos_ends_a_choice() -> None:
    prompt = next(p for p in (prompt_of(i, 7) for i in range(500)) if len(oracle_tokens(p, 60, ignore_eos=False)) < 60)
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", prompt, 60, ignore_eos=False))
        answer = await gateway.ended("a")
        assert answer.ids == oracle_tokens(prompt, 60, ignore_eos=False)
        assert answer.ids[-1] in CONFIG.eos_token_ids
        assert answer.ended is not None
        assert answer.ended.reason == "stop"


async def test_a_stop_id_ends_a_choice() -> None:
    tokens = oracle_tokens(prompt_of(3, 9), 20)
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", prompt_of(3, 9), 20, stop_token_ids=frozenset({tokens[5]})))
        answer = await gateway.ended("a")
        assert answer.ids == tokens[: tokens.index(tokens[5]) + 1]


async def test_without_max_tokens_the_context_is_the_limit() -> None:
    async with engine_lab(max_blocks=4) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", prompt_of(3, 9), 0))
        answer = await gateway.ended("a")
        assert answer.ids == oracle_tokens(prompt_of(3, 9), 55)
        assert lab.engine.state().context_length == 64


async def test_what_earlier_attempts_gave_is_not_sampled_again() -> None:
    prompt, tokens = prompt_of(5, 12), oracle_tokens(prompt_of(5, 12), 16)
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", prompt, 16, attempt=2, generated=(tuple(tokens[:9]),)))
        answer = gateway.answer("a", attempt=2)
        answer.ids = tokens[:9]
        await gateway.ended("a", attempt=2)
        assert answer.ids == tokens


async def test_choices_share_a_prompt_and_draw_apart() -> None:
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        hot = SamplingParams(temperature=50.0, seed=7)
        gateway.send(submission("a", prompt_of(5, 12), 12, num_choices=3, sampling=hot))
        gateway.send(submission("b", prompt_of(5, 12), 12, num_choices=3, sampling=hot))
        answers = {name: [(await gateway.ended(name, choice=choice)).ids for choice in range(3)] for name in "ab"}
        assert answers["a"] == answers["b"]
        assert len({tuple(ids) for ids in answers["a"]}) == 3


async def test_several_gateways_are_kept_apart() -> None:
    async with engine_lab() as lab:
        gateways = [await lab.gateway(node_id=f"node{index}") for index in range(3)]
        for index, gateway in enumerate(gateways):
            gateway.send(submission("same-id", prompt_of(index, 10), 10))
        for index, gateway in enumerate(gateways):
            assert (await gateway.ended("same-id")).ids == oracle_tokens(prompt_of(index, 10), 10)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
async def test_a_chats_steps_are_planned_before_their_tokens_are_known(
    num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[ScheduledStep] = []
    plan = Scheduler.next_step

    def next_step(scheduler: Scheduler) -> ScheduledStep | None:
        step = plan(scheduler)
        steps.extend([step] if step is not None else [])
        return step

    monkeypatch.setattr(Scheduler, "next_step", next_step)
    async with engine_lab(num_stages=num_stages) as lab:
        gateway = await lab.gateway()
        for name in "ab":  # the first one opens the tokens' way home
            gateway.send(submission(name, prompt_of(3, 20), 100))
            answer = await gateway.ended(name)
            assert answer.ids == oracle_tokens(prompt_of(3, 20), 100)
    assert sum(step.after is not None for step in steps) >= 90
