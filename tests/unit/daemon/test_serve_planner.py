"""A plan that was just shown is the plan that is served, or a sentence says why not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.backend.types import DEFAULT_SETTINGS, DeviceProfile, StageSettings
from edgepipe.daemon.serving.recent_surveys import RecentSurveys, change_note
from edgepipe.daemon.serving.serve_planner import ServePlanner
from edgepipe.ids import NodeId
from edgepipe.planner.profiles import LayerProfile, Point
from edgepipe.spec.config_json import config_to_json
from edgepipe.testing.clock import START_S
from edgepipe.weights.weight_table import FLOATS
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import LinkProfile, ServeRequest, SurveyedMachine, SurveyReply

CONFIG = emulated_model_config(num_layers=30)
MODEL = cast("Any", type("Model", (), {"name": "m", "config": CONFIG, "weights": FLOATS, "manifest_hash": "h"})())
DEVICE = DeviceProfile(
    backend="torch",
    device="cpu",
    name="CPU",
    compute_dtype="float32",
    memory_total_bytes=8 << 30,
    memory_free_bytes=8 << 30,
    bandwidth_bytes_per_s=1e10,
    flops=1e12,
)
REQUEST = ServeRequest(options=ServeSpec(model="m"))


def machine(name: str, layer_s: float, *, free_bytes: int = 1 << 30) -> SurveyedMachine:
    layer = LayerProfile(
        base_s=1e-4,
        decode=(Point(1, layer_s), Point(16, 2 * layer_s)),
        prefill=(Point(32, 4 * layer_s),),
        head=(Point(1, layer_s),),
        kv_token_s=0.0,
        decode_context=64,
    )
    return SurveyedMachine(
        node_id=NodeId(name), name=name, device=DEVICE, free_bytes=free_bytes, value_bytes=4, layer=layer
    )


def survey(gamer_s: float, attic_s: float) -> SurveyReply:
    links = tuple(
        LinkProfile(sender=sender, receiver=other, one_way_s=0.0002, bytes_per_s=1e8)
        for sender, other in (("gamer", "attic"), ("attic", "gamer"))
    )
    return SurveyReply(
        model="m",
        model_config=json.dumps(config_to_json(CONFIG)),
        machines=(machine("gamer", gamer_s), machine("attic", attic_s)),
        links=links,
    )


@dataclass
class Answers:
    """In place of the surveyor: one answer after the other."""

    surveys: list[SurveyReply]
    fresh: list[bool] = field(default_factory=list[bool])
    to_serve: list[bool] = field(default_factory=list[bool])

    async def survey(
        self, _model: Any, _settings: StageSettings, *, fresh: bool = False, to_serve: bool = False
    ) -> SurveyReply:
        self.to_serve.append(to_serve)
        self.fresh.append(fresh)
        return self.surveys.pop(0)


QUIET, NOISY = survey(0.003, 0.02), survey(0.09, 0.02)


async def served(answers: Answers, *, planned_before: bool = True) -> tuple[list[str], list[str]]:
    """The nodes of the plan that is served, and what is told; a person has asked for the plan before."""
    planner, changes = ServePlanner(cast("Any", answers)), list[str]()
    if planned_before:
        await planner.survey(MODEL, DEFAULT_SETTINGS)
    found = await planner.plan(REQUEST, MODEL, 1024, {}, changes)
    return [stage.machine.name for stage in found.stages], changes


async def test_a_worse_plan_by_noise_is_measured_again() -> None:
    answers = Answers([QUIET, NOISY, QUIET])
    assert await served(answers) == (["gamer"], [])
    assert answers.fresh == [False, False, True]
    assert answers.to_serve == [False, True, False], "serving settles what a busy machine measured, a plan does not"


async def test_a_worse_plan_that_lasts_comes_with_the_reason() -> None:
    nodes, (note,) = await served(Answers([QUIET, NOISY, NOISY]))
    assert "gamer" not in nodes or len(nodes) > 1
    assert note.startswith("the plan of 1 s ago (layers 0-29 on gamer, ")
    assert note.endswith("tok/s) no longer holds: a layer takes 30.0 times as long on gamer")


def test_a_note_names_the_first_three_reasons() -> None:
    links = tuple(replace(link, bytes_per_s=link.bytes_per_s / 4) for link in NOISY.links)
    machines = tuple(replace(each, free_bytes=each.free_bytes // 4) for each in NOISY.machines)
    earlier = cast("Any", SimpleNamespace(stages=(), tokens_per_s=1.0))
    note = change_note(earlier, age_s=1.0, before=QUIET, now=replace(NOISY, links=links, machines=machines))
    reasons = note.partition("no longer holds: ")[2].split("; ")
    assert [reason.split()[0] for reason in reasons] == ["gamer", "a", "attic"]


@pytest.mark.parametrize("answers", [[QUIET, QUIET], [NOISY, QUIET]])
async def test_the_same_or_a_better_plan_is_taken_at_once(answers: list[SurveyReply]) -> None:
    given = Answers(list(answers))
    assert await served(given) == (["gamer"], [])
    assert given.fresh == [False, False]


async def test_without_an_earlier_plan_the_first_figures_count() -> None:
    given = Answers([NOISY])
    assert (await served(given, planned_before=False))[1] == []
    assert given.fresh == [False]


def test_figures_are_kept_for_ten_minutes_and_few_models() -> None:
    recent = RecentSurveys()
    for index in range(9):
        recent.keep((str(index), DEFAULT_SETTINGS), QUIET, now_s=START_S)
    assert recent.get(("0", DEFAULT_SETTINGS), now_s=START_S + 1.0) is None
    assert recent.get(("8", DEFAULT_SETTINGS), now_s=START_S + 600.0) == (600.0, QUIET)
    assert recent.get(("8", DEFAULT_SETTINGS), now_s=START_S + 601.0) is None
