"""Windows of drafts through real stages: every token is the one that it is without them."""

from __future__ import annotations

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.sampling import SamplingParams
from edgepipe.sampling.grammar import choice_grammar
from edgepipe.spec.facts import ModelConfig
from tests.support.engine.lab import CONFIG, EngineLab, FakeGateway, engine_lab, oracle_tokens, submission
from tests.support.engine.load import run_load

WINDOWS = emulated_model_config(num_layers=6, context_length=512, windows=(16, 24, None))
STATES = emulated_model_config(num_layers=6, context_length=512, attention_every=3)
PROMPT = [7, 3, 9, 1, 4, 4, 8, 2]
LINK = "1gbit,2ms"  # a turn takes longer than the drafts of a window


@pytest.fixture
def rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is worth a try, also beside other chats."""
    monkeypatch.setattr(MicroBatches, "period_s", lambda self, rows: 1.0)
    monkeypatch.setattr(MicroBatches, "slowest_s", lambda self, rows: 1.0)
    monkeypatch.setattr(MicroBatches, "draft_s", 0.0)


@pytest.fixture
def windows_fly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's rows cost as much as a turn, and a stage is free soon: windows in flight promise more."""
    monkeypatch.setattr(MicroBatches, "period_s", lambda self, rows: 1.0 + 0.4 * rows)
    monkeypatch.setattr(MicroBatches, "slowest_s", lambda self, rows: 0.3)
    monkeypatch.setattr(MicroBatches, "draft_s", 0.0)


async def may_fly(lab: EngineLab, gateway: FakeGateway) -> None:
    """Wait until the stages can plan ahead, which begins with the first answer."""
    gateway.send(submission("first", PROMPT, 3))
    await gateway.ended("first")
    run = lab.engine._run  # pyright: ignore[reportPrivateUsage]
    assert run is not None
    await lab.until(lambda: run.pump._scheduler._plans_ahead)  # pyright: ignore[reportPrivateUsage]


def ahead_in(lab: EngineLab) -> int:
    drafts = lab.engine.state().drafts
    assert drafts is not None
    return drafts.ahead


def drafts_of(lab: EngineLab) -> tuple[int, int, int]:
    drafts = lab.engine.state().drafts
    assert drafts is not None
    return drafts.windows, drafts.drafted, drafts.accepted


@pytest.mark.usefixtures("rows_cost_nothing")
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("acceptance", ["1", "0.5", "0"])
async def test_a_lone_chat_gets_its_tokens_in_fewer_turns(num_stages: int, acceptance: str) -> None:
    async with engine_lab(num_stages=num_stages, acceptance=acceptance) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 120))
        assert (await gateway.ended("a")).ids == oracle_tokens(PROMPT, 120)
        windows, drafted, accepted = drafts_of(lab)
        assert windows > 0
        assert accepted == (drafted if acceptance == "1" else 0) or 0 < accepted < drafted
        assert (windows < 20) == (acceptance == "1")


@pytest.mark.usefixtures("rows_cost_nothing")
async def test_a_stop_id_and_a_cancel_within_a_window_end_the_answer_there() -> None:
    tokens = oracle_tokens(PROMPT, 60)
    stop = next(token for place, token in enumerate(tokens) if place > 20 and token not in tokens[:place])
    async with engine_lab(acceptance="1") as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 60, stop_token_ids=frozenset({stop})))
        assert (await gateway.ended("a")).ids == tokens[: tokens.index(stop) + 1]
        gateway.send(submission("b", PROMPT, 60))
        await gateway.has("b", 3)
        gateway.cancel("b", at_position=41)
        assert (await gateway.ended("b")).ids == tokens[: len(gateway.answer("b").ids)]


@pytest.mark.usefixtures("rows_cost_nothing")
async def test_penalties_draws_and_log_probabilities_are_those_of_single_rows() -> None:
    sampling = SamplingParams(temperature=0.7, seed=5, frequency_penalty=0.4, logprobs=True, top_logprobs=2)
    answers = []
    for draft in ("off", "auto"):
        async with engine_lab(acceptance="0.9", constraints={"draft": draft}) as lab:
            gateway = await lab.gateway()
            gateway.send(submission("a", PROMPT, 80, sampling=sampling))
            answers.append(await gateway.ended("a"))
            assert (drafts_of(lab)[2] > 0) == (draft == "auto")
    assert answers[0].ids == answers[1].ids
    assert answers[0].logprobs == answers[1].logprobs


@pytest.mark.usefixtures("rows_cost_nothing")
async def test_a_grammar_s_tokens_are_drafted_by_it() -> None:
    sampling = SamplingParams(temperature=0.0, grammar=choice_grammar(["a very long answer that is the only one"]))
    async with engine_lab(constraints={"draft": "lookup"}) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 60, sampling=sampling, ignore_eos=False))
        answer = await gateway.ended("a")
        assert bytes(answer.ids[:-1]) == b"a very long answer that is the only one"
        windows, drafted, accepted = drafts_of(lab)
        assert drafted == accepted > 20
        assert windows < 10


@pytest.mark.usefixtures("rows_cost_nothing")
async def test_a_prompt_that_the_answer_repeats_is_looked_up() -> None:
    tokens = oracle_tokens(PROMPT, 90)
    async with engine_lab(constraints={"draft": "lookup"}) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 90))
        assert (await gateway.ended("a")).ids == tokens
        assert drafts_of(lab)[1] >= 0


@pytest.mark.usefixtures("windows_fly")
@pytest.mark.parametrize(("num_stages", "acceptance"), [(2, "0.6"), (3, "1")])
async def test_windows_in_flight_give_the_tokens_of_single_rows(num_stages: int, acceptance: str) -> None:
    async with engine_lab(num_stages=num_stages, acceptance=acceptance, link=LINK) as lab:
        gateway = await lab.gateway()
        await may_fly(lab, gateway)
        gateway.send(submission("a", PROMPT, 200))
        assert (await gateway.ended("a")).ids == oracle_tokens(PROMPT, 200)
        assert ahead_in(lab) > 3
        _, drafted, accepted = drafts_of(lab)
        assert accepted == drafted if acceptance == "1" else 0 < accepted < drafted


@pytest.mark.usefixtures("windows_fly")
async def test_draws_and_log_probabilities_in_flight_are_those_of_single_rows() -> None:
    sampling = SamplingParams(temperature=0.3, seed=5, logprobs=True, top_logprobs=2)
    answers = []
    for draft in ("off", "auto"):
        async with engine_lab(num_stages=2, acceptance="0.95", link=LINK, constraints={"draft": draft}) as lab:
            gateway = await lab.gateway()
            await may_fly(lab, gateway)
            gateway.send(submission("a", PROMPT, 150, sampling=sampling))
            answers.append(await gateway.ended("a"))
            assert (ahead_in(lab) > 0) == (draft == "auto")
    assert answers[0].ids == answers[1].ids
    assert answers[0].logprobs == answers[1].logprobs


@pytest.mark.usefixtures("windows_fly")
@pytest.mark.parametrize(
    ("config", "penalty"), [(CONFIG, 0.4), (STATES, 0.0)], ids=["penalties need earlier tokens", "states need slots"]
)
async def test_some_windows_wait_for_one_another(config: ModelConfig, penalty: float) -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=penalty)
    async with engine_lab(num_stages=2, acceptance="0.9", link=LINK, config=config) as lab:
        gateway = await lab.gateway()
        await may_fly(lab, gateway)
        gateway.send(submission("a", PROMPT, 80, sampling=sampling))
        await gateway.ended("a")
        assert drafts_of(lab)[0] > 0
        assert not ahead_in(lab)


@pytest.mark.usefixtures("windows_fly")
async def test_a_stop_id_and_a_cancel_end_an_answer_whose_windows_are_in_flight() -> None:
    tokens = oracle_tokens(PROMPT, 120)
    stop = next(token for place, token in enumerate(tokens) if place > 60 and token not in tokens[:place])
    async with engine_lab(num_stages=2, acceptance="1", link=LINK) as lab:
        gateway = await lab.gateway()
        await may_fly(lab, gateway)
        gateway.send(submission("a", PROMPT, 120, stop_token_ids=frozenset({stop})))
        assert (await gateway.ended("a")).ids == tokens[: tokens.index(stop) + 1]
        assert ahead_in(lab) > 0
        gateway.send(submission("b", PROMPT, 120))
        await gateway.has("b", 50)
        gateway.cancel("b", at_position=71)
        assert (await gateway.ended("b")).ids == tokens[: len(gateway.answer("b").ids)]


KINDS = pytest.mark.parametrize(
    ("config", "contiguous_kv", "max_blocks", "kv"),
    [
        (CONFIG, False, 40, ""),
        pytest.param(CONFIG, True, 40, "", marks=pytest.mark.long),
        (WINDOWS, False, 160, ""),
        (STATES, False, 40, ""),
        (CONFIG, False, 56, "4bit"),
        pytest.param(WINDOWS, False, 160, "4bit", marks=pytest.mark.long),
    ],
    ids=["shared", "copied", "windows", "states", "4 bits", "windows in 4 bits"],
)


@pytest.mark.usefixtures("rows_cost_nothing")
@KINDS
async def test_every_token_is_right_though_stages_are_lost(
    config: ModelConfig, contiguous_kv: bool, max_blocks: int, kv: str
) -> None:
    load = await run_load(
        seed=11,
        tokens=300,
        contiguous_kv=contiguous_kv,
        num_gateways=2,
        max_blocks=max_blocks,
        longest=70,
        config=config,
        losses=2,
        acceptance="0.7",
        kv=kv,
    )
    assert load.drafts is not None
    assert 0 < load.drafts.accepted < load.drafts.drafted


@pytest.mark.usefixtures("windows_fly")
@pytest.mark.parametrize("config", [CONFIG, WINDOWS], ids=["all", "windows"])
async def test_every_token_in_flight_is_right_though_stages_are_lost(config: ModelConfig) -> None:
    load = await run_load(
        seed=14,
        tokens=1200,
        contiguous_kv=False,
        num_gateways=1,
        clients=1,
        micro_batches=1,
        max_blocks=160,
        longest=150,
        config=config,
        losses=2,
        acceptance="0.8",
        link=LINK,
    )
    assert load.drafts is not None
    assert load.drafts.ahead > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("rows_cost_nothing")
@KINDS
async def test_a_third_of_a_million_tokens_are_right(
    config: ModelConfig, contiguous_kv: bool, max_blocks: int, kv: str
) -> None:
    await run_load(
        seed=12,
        tokens=340_000,
        contiguous_kv=contiguous_kv,
        num_gateways=8,
        max_blocks=7 * max_blocks,
        config=config,
        losses=20,
        acceptance="0.7",
        kv=kv,
    )
