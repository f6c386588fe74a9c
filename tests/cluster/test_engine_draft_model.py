"""A draft model in its own process beside real stages: every token is the one that it is without drafts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.engine.placing import EpochPlacement, Nodes
from edgepipe.ids import NodeId
from edgepipe.sampling import SamplingParams
from edgepipe.spec.facts import ModelConfig
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.wire.engines import DraftState, ServeSpec
from tests.support.engine.lab import CONFIG, EngineLab, break_stage, engine_lab, oracle_tokens, submission

PROMPT = [7, 3, 9, 1, 4, 4, 8, 2]
OTHER = emulated_model_config(num_layers=2, context_length=512)  # other tokens than CONFIG's
SMALL_CONTEXT = emulated_model_config(num_layers=6, context_length=64)
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is worth a try, also beside other chats."""
    monkeypatch.setattr(MicroBatches, "period_s", lambda self, rows: 1.0)
    monkeypatch.setattr(MicroBatches, "slowest_s", lambda self, rows: 1.0)
    monkeypatch.setattr(MicroBatches, "draft_s", 0.0)


def folder(place: Path, config: ModelConfig = CONFIG) -> Path:
    write_model_folder(place / "small", config)
    return place / "small"


async def loaded(lab: EngineLab, *, not_pid: int | None = None) -> int:
    """The process of the draft model, once it answers."""
    async with asyncio.timeout(PATIENCE_S):
        while (pid := lab.draft_model.pid) in (None, not_pid):  # noqa: ASYNC110 - nothing tells of another process
            await asyncio.sleep(0.01)
    assert pid is not None
    return pid


def drafts_of(lab: EngineLab) -> DraftState:
    drafts = lab.engine.state().drafts
    assert drafts is not None
    return drafts


async def test_a_good_draft_model_saves_turns_and_second_turns_go_on(tmp_path: Path) -> None:
    async with engine_lab(draft_folder=folder(tmp_path)) as lab:
        await loaded(lab)
        gateway = await lab.gateway()
        turn = list(PROMPT)
        for name in ("first", "second", "third"):
            gateway.send(submission(name, turn, 100))
            ids = (await gateway.ended(name)).ids
            assert ids == oracle_tokens(turn, 100)
            turn += [*ids[: 60 if name == "first" else 100], 5, 6]
        drafts = drafts_of(lab)
        assert drafts.source == "model"
        assert drafts.accepted == drafts.drafted > 240
        assert drafts.windows < 60


async def test_a_draft_model_goes_on_behind_its_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MicroBatches, "period_s", lambda self, rows: 1.0 + 0.4 * rows)
    monkeypatch.setattr(MicroBatches, "slowest_s", lambda self, rows: 0.3)
    async with engine_lab(num_stages=2, draft_folder=folder(tmp_path), link="1gbit,2ms") as lab:
        await loaded(lab)
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 200))
        assert (await gateway.ended("a")).ids == oracle_tokens(PROMPT, 200)
        drafts = drafts_of(lab)
        assert drafts.ahead > 3
        assert drafts.accepted == drafts.drafted


@pytest.mark.parametrize("draft", [OTHER, pytest.param(SMALL_CONTEXT, marks=pytest.mark.long)], ids=["wrong", "short"])
async def test_a_draft_model_that_is_wrong_or_short_changes_no_token(tmp_path: Path, draft: ModelConfig) -> None:
    sampling = SamplingParams(temperature=0.8, seed=3)
    answers: list[list[int]] = []
    for own in (folder(tmp_path, draft), None):
        async with engine_lab(draft_folder=own) as lab:
            if own is not None:
                await loaded(lab)
            gateway = await lab.gateway()
            gateway.send(submission("greedy", PROMPT, 90))
            gateway.send(submission("drawn", PROMPT, 90, sampling=sampling))
            assert (await gateway.ended("greedy")).ids == oracle_tokens(PROMPT, 90)
            answers.append((await gateway.ended("drawn")).ids)
            assert drafts_of(lab).drafted > 0 or own is None
    assert answers[0] == answers[1]


async def test_answers_go_on_while_the_process_dies_and_it_comes_back(tmp_path: Path) -> None:
    async with engine_lab(draft_folder=folder(tmp_path)) as lab:
        first = await loaded(lab)
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 300))
        await gateway.has("a", 20)
        os.kill(first, signal.SIGKILL)
        assert (await gateway.ended("a")).ids == oracle_tokens(PROMPT, 300)
        await loaded(lab, not_pid=first)
        before = drafts_of(lab)
        gateway.send(submission("b", PROMPT[::-1], 100))
        assert (await gateway.ended("b")).ids == oracle_tokens(PROMPT[::-1], 100)
        assert drafts_of(lab).accepted > before.accepted + 60


async def test_cancels_and_chats_beside_one_another_get_their_own_tokens(tmp_path: Path) -> None:
    prompts = {name: [*PROMPT[shift:], *PROMPT[:shift]] for shift, name in enumerate("abcd")}
    async with engine_lab(draft_folder=folder(tmp_path), num_stages=1) as lab:
        await loaded(lab)
        gateway = await lab.gateway()
        gateway.send(*(submission(name, prompt, 80) for name, prompt in prompts.items()))
        await gateway.has("a", 10)
        gateway.cancel("a", at_position=len(gateway.answer("a").ids))
        for name in "bcd":
            assert (await gateway.ended(name)).ids == oracle_tokens(prompts[name], 80)
        ids = (await gateway.ended("a")).ids
        assert ids == oracle_tokens(prompts["a"], len(ids))
        assert drafts_of(lab).accepted > 0


class WithoutDraftModel:
    """A planner that finds no room for the draft model."""

    async def plan(
        self, spec: ServeSpec, *, quarantined: Collection[NodeId], quarantined_links: Collection[tuple[NodeId, NodeId]]
    ) -> EpochPlacement:
        """See Planner."""
        bare = replace(spec, settings=spec.settings.without_draft_model())
        return EpochPlacement(spec=bare, nodes=Nodes(addresses={}, names={}))


async def test_a_draft_model_that_a_recovery_leaves_out_is_no_longer_named(tmp_path: Path) -> None:
    async with engine_lab(draft_folder=folder(tmp_path), planner=WithoutDraftModel()) as lab:
        assert drafts_of(lab).source == "model"
        break_stage(lab, 0)
        await lab.until(lambda: lab.engine.state().recoveries == 1)
        assert drafts_of(lab).source == "lookup"
